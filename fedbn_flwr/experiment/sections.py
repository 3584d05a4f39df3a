"""The base of all sections of an experiment, and those of evaluation and of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.protocol import METRICS


def refuse(faults: Mapping[str, bool], error: type[Exception] = SettingsError) -> None:
    """Raise the first fault that is found."""
    for fault, is_found in faults.items():
        if is_found:
            raise error(fault)


class Section(BaseModel):
    # Strict: the text "3" is not the number 3. Frozen: settings can be keys of a cache.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def faults(self) -> dict[str, bool]:
        """What may be wrong with the values together, and whether it is."""
        return {}

    @model_validator(mode="after")
    def _has_no_fault(self) -> Self:
        refuse(self.faults(), ValueError)
        return self


Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Few = Annotated[int, Field(ge=1, le=1_000)]  # of threads
Names = Annotated[tuple[str, ...], Field(strict=False)]


class Evaluate(Section):
    every: Positive = 1  # rounds between evaluations of the global model; the last round is always evaluated
    # Clients evaluate their models too; None: if the strategy personalises, or if the server does not evaluate.
    clients: bool | None = None
    server: bool = True  # false: the server has no data
    statistics: Literal["model", "reestimated"] = "model"  # of the global model's batch norms, on the test images
    batch_size: Positive = 100  # the server has as many batches in memory as there are workers
    dynamics: bool = False  # record how batch norm's statistics change, in every evaluated round
    metrics: Names = ()  # beside loss and accuracy: names, or module:function
    validation: float = Field(default=0.0, ge=0, le=0.5)  # share of the training images, to choose the best round by
    patience: Positive | None = None  # evaluations without a better validation accuracy, after which the run ends
    min_delta: float = Field(default=0.0, ge=0)  # what counts as better for `patience`
    unseen: int = Field(default=0, ge=0, le=1_000_000)  # the last partitions, whose clients never train
    finetune_steps: int = Field(default=10, ge=0, le=1_000_000)  # by which unseen clients adapt the global model
    finetune_lr: float | None = Field(default=None, gt=0)  # None: train.lr
    matrix: bool = False  # evaluate every personal model on every client

    def faults(self) -> dict[str, bool]:
        unknown = next((name for name in self.metrics if name not in METRICS and ":" not in name), None)
        return {
            f"metrics has {unknown!r}; {did_you_mean(str(unknown), METRICS)}, or module:function": unknown is not None,
            f"patience is {self.patience}, but validation is 0: a run ends by its validation accuracy, never by the "
            "test images; set validation, for instance to 0.1": self.patience is not None and not self.validation,
            f"min_delta ({self.min_delta:g}) has no effect without patience; set patience too": self.min_delta > 0
            and self.patience is None,
            "finetune_lr has no effect without unseen clients and finetune_steps; set unseen too": self.finetune_lr
            is not None
            and not (self.unseen and self.finetune_steps),
            f"finetune_steps ({self.finetune_steps}) has no effect without unseen clients; set unseen": not self.unseen
            and self.finetune_steps != 10,
            "server and clients are both false; one of them must evaluate": not self.server and self.clients is False,
            "statistics is 'reestimated', which needs the server's test images, but server is false": not self.server
            and self.statistics == "reestimated",
        }


class Engine(Section):
    name: Literal["local", "ray"] = "local"
    workers: int | Literal["auto"] = "auto"  # processes of the local engine, 0: none; actors of Ray
    address: str | None = None  # of a Ray cluster; None: $RAY_ADDRESS, else a cluster of this machine
    cpus_per_client: float | None = Field(default=None, ge=0.01)  # that Ray reserves; None: `threads`
    gpus_per_client: float | None = Field(default=None, ge=0)  # likewise; None: one if the cluster has GPUs
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: Few = 1  # of the local engine; every GPU has at least one worker if there are several
    threads: Few = 1  # PyTorch threads per client; engines agree bit for bit at 1
    timeout: float = Field(default=3600, gt=0, le=1_000_000)  # seconds a round may take
    node_timeout: float = Field(default=120, gt=0, le=1_000_000)  # seconds to wait for all nodes before the first round
    state_memory: float = Field(default=4, gt=0)  # GiB for clients' state on the local engine; the rest is in files
    checkpoint_every: Positive | None = None  # rounds; None: a twentieth of all rounds

    def faults(self) -> dict[str, bool]:
        is_ray, workers, threads, gpus = self.name == "ray", self.workers, self.threads, self.gpus
        only_ray = ("address", "cpus_per_client", "gpus_per_client")
        given = next((key for key in only_ray if getattr(self, key) is not None), "") if not is_ray else ""
        return {
            f"workers is {workers}; give 0, a number of processes, or 'auto'": workers != "auto" and workers < 0,
            "workers is 0, but on Ray clients run in actors; give a number of them, or 'auto'": is_ray and workers == 0,
            f"threads={threads} needs workers=0, found {workers}: a worker has one thread": not is_ray
            and threads > 1
            and workers not in (0, "auto"),
            f"gpus={gpus} needs workers, but threads={threads} excludes them; use threads=1": gpus > 1 and threads > 1,
            f"gpus={gpus} needs a worker for each GPU, found workers={workers}; or use auto": gpus > 1
            and workers != "auto"
            and workers < gpus,
            f"{given} is {getattr(self, given, None)!r}, which is for name ray, but name is {self.name!r}": bool(given),
            f"gpus is {gpus}, which is for name local; on Ray give gpus_per_client": is_ray and gpus > 1,
            "device is 'cuda', but gpus_per_client is 0; give a number, such as 1 or 0.25, or 'cpu'": self.device
            == "cuda"
            and self.gpus_per_client == 0,
            f"device is 'cpu', but gpus_per_client is {self.gpus_per_client}; leave it out": self.device == "cpu"
            and bool(self.gpus_per_client),
        }
