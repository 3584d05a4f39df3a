"""The settings of an engine: the processes that clients run in, and how long the server waits for them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .evaluation import Few, Positive, Section


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

    @model_validator(mode="after")
    def _workers(self) -> Engine:
        if isinstance(self.workers, int) and self.workers < 0:
            raise ValueError(f"workers is {self.workers}; give 0, a number of processes, or 'auto'")
        if self.name == "ray" and self.workers == 0:
            raise ValueError("workers is 0, but on Ray clients run in actors; give a number of them, or 'auto'")
        if self.name == "local" and self.threads > 1 and self.workers not in (0, "auto"):
            raise ValueError(f"threads={self.threads} needs workers=0, found {self.workers}: a worker has one thread")
        if self.gpus > 1 and self.threads > 1:
            raise ValueError(f"gpus={self.gpus} needs workers, but threads={self.threads} excludes them; use threads=1")
        if self.gpus > 1 and self.workers != "auto" and self.workers < self.gpus:
            raise ValueError(f"gpus={self.gpus} needs a worker for each GPU, found workers={self.workers}; or use auto")
        return self

    @model_validator(mode="after")
    def _of_ray(self) -> Engine:
        for key in ("address", "cpus_per_client", "gpus_per_client"):
            if self.name != "ray" and getattr(self, key) is not None:
                raise ValueError(f"{key} is {getattr(self, key)!r}, which is for name ray, but name is {self.name!r}")
        if self.name == "ray" and self.gpus > 1:
            raise ValueError(f"gpus is {self.gpus}, which is for name local; on Ray give gpus_per_client")
        if self.device == "cuda" and self.gpus_per_client == 0:
            raise ValueError("device is 'cuda', but gpus_per_client is 0; give a number, such as 1 or 0.25, or 'cpu'")
        if self.device == "cpu" and self.gpus_per_client:
            raise ValueError(f"device is 'cpu', but gpus_per_client is {self.gpus_per_client:g}; leave it out")
        return self
