"""The sections of evaluation and of the engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.schema import Few, Names, Positive, Section, expects
from fedbn_flwr.tasks import METRICS


class Evaluate(Section):
    every: Positive = Field(
        default=1,
        description=(
            "rounds between evaluations of the global model on the test examples; the last round is always evaluated"
        ),
    )
    clients: bool | None = Field(
        default=None,
        description=(
            "clients evaluate their models too; on by default for `FedBN`, `SiloBN` and "
            "`Standalone`, which personalise, and if the server does not evaluate"
        ),
    )
    server: bool = Field(
        default=True,
        description=(
            "`false`: the server has no data and reports the clients' means on their test examples; needs "
            "`data.classes`, `data.channels` and `data.size` ([Deployment](deployment.md#data-at-each-site))"
        ),
    )
    statistics: Literal["model", "reestimated"] = Field(
        default="model",
        description=(
            "statistics used to evaluate the global model: its own, or `reestimated`: mean and variance of "
            "each batch norm's inputs over all test examples, see below"
        ),
    )
    batch_size: Positive = Field(
        default=100,
        description=(
            "examples per batch; on a CPU the server evaluates in `engine.workers` threads, each with a batch in memory"
        ),
    )
    dynamics: bool = Field(
        default=False,
        description=(
            "record in every evaluated round how batch norm's statistics change, by layer and client, in "
            "`norms.jsonl` ([Watching](watching.md#dynamics-of-batch-norm))"
        ),
    )
    metrics: Names = Field(
        default=(),
        description=(
            "what evaluations report beside the loss and the figures of the task: any of `balanced_accuracy`, "
            "`macro_f1`, `auc`, `dice`, `mean_iou`, as they suit the task, and `module:function` "
            "([Training](training.md#metrics))"
        ),
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description=(
            "share of each client's training examples that is held out, to choose the best round: "
            "`model-best.safetensors`, `best_round`; see [Clients](clients.md#best-round-and-early-stopping)"
        ),
    )
    patience: Positive | None = Field(
        default=None, description="end the run after this many evaluations without a better validation figure"
    )
    unseen: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description=(
            "number of clients that never train, those of the last partitions; the global model is evaluated "
            "on their own test examples after the last round, see "
            "[Clients](clients.md#clients-that-never-trained)"
        ),
    )
    finetune_steps: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="steps by which unseen clients then adapt the global model, for a second evaluation; 0: none",
    )
    finetune_lr: float | None = Field(default=None, gt=0, description="learning rate of these steps")

    def faults(self) -> dict[str, bool]:
        unknown = next((name for name in self.metrics if name not in METRICS and ":" not in name), None)
        return {
            f"metrics has {unknown!r}; {did_you_mean(str(unknown), METRICS)}, or module:function": unknown is not None,
            f"patience is {self.patience}, but validation is 0: a run ends by its validation figure, never by the "
            "test examples; set validation, for instance to 0.1": self.patience is not None and not self.validation,
            "finetune_lr has no effect without unseen clients and finetune_steps; set unseen too": self.finetune_lr
            is not None
            and not (self.unseen and self.finetune_steps),
            f"finetune_steps ({self.finetune_steps}) has no effect without unseen clients; set unseen": not self.unseen
            and self.finetune_steps != 10,
            "server and clients are both false; one of them must evaluate": not self.server and self.clients is False,
            "statistics is 'reestimated', which needs the server's test examples, but server is false": not self.server
            and self.statistics == "reestimated",
        }


class Engine(Section):
    name: Literal["local", "ray"] = Field(
        default="local", description="`local`, or `ray` for a [cluster](cluster.md); also `--engine`"
    )
    workers: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"], expects("0, a number of processes, or 'auto'")
    ] = Field(
        default="auto",
        description=(
            "processes of the local engine; 0: everything in one process; `auto`: one per core, with a GPU 0. On Ray: "
            "the actors, `auto`: as many as fit"
        ),
    )
    address: str | None = Field(
        default=None,
        description=(
            "of a running Ray cluster, for instance `10.0.0.1:6379`; by default `$RAY_ADDRESS`, else Ray is "
            "started on this machine"
        ),
    )
    cpus_per_client: float | None = Field(
        default=None, ge=0.01, description="cores that Ray reserves for each actor; by default `engine.threads`"
    )
    gpus_per_client: float | None = Field(
        default=None,
        ge=0,
        description=(
            "GPUs that Ray reserves for each actor, also a fraction; by default one if the cluster has GPUs "
            "and `engine.device` is not `cpu`"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`cpu`, `cuda`, or `auto` for a GPU if available; also `--device`"
    )
    threads: Few = Field(default=1, description="PyTorch threads per client; the engines agree bit for bit at 1")
    timeout: float = Field(
        default=3600,
        gt=0,
        le=1_000_000,
        description=(
            "seconds a round may take; with `engine.workers: 0`, and with several runs side by side "
            "(`--jobs`), clients train in the process that would wait, and each is waited for"
        ),
    )
    node_timeout: float = Field(
        default=120,
        gt=0,
        le=1_000_000,
        description=(
            "seconds to wait for all nodes before the first round, and for `min_train_nodes` (2) before every"
            " other; on Ray, for an actor to start"
        ),
    )
    checkpoint_every: Positive | None = Field(
        default=None, description="rounds between checkpoints, see [Resuming](run-folder.md#resuming)"
    )

    def faults(self) -> dict[str, bool]:
        is_ray, workers, threads = self.name == "ray", self.workers, self.threads
        only_ray = ("address", "cpus_per_client", "gpus_per_client")
        given = next((key for key in only_ray if getattr(self, key) is not None), "") if not is_ray else ""
        return {
            "workers is 0, but on Ray clients run in actors; give a number of them, or 'auto'": is_ray and workers == 0,
            f"threads={threads} needs workers=0, found {workers}: a worker has one thread": not is_ray
            and threads > 1
            and workers not in (0, "auto"),
            f"{given} is {getattr(self, given, None)!r}, which is for name ray, but name is {self.name!r}": bool(given),
            "device is 'cuda', but gpus_per_client is 0; give a number, such as 1 or 0.25, or 'cpu'": self.device
            == "cuda"
            and self.gpus_per_client == 0,
            f"device is 'cpu', but gpus_per_client is {self.gpus_per_client}; leave it out": self.device == "cpu"
            and bool(self.gpus_per_client),
        }
