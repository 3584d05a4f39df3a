"""The settings of evaluation, and the base of all sections of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.messages.protocol import METRICS


class Section(BaseModel):
    # Strict: the text "3" is not the number 3. Frozen: settings can be keys of a cache.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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

    @model_validator(mode="after")
    def _metrics_are_known(self) -> Evaluate:
        for name in self.metrics:
            if name not in METRICS and ":" not in name:
                raise ValueError(f"metrics has {name!r}; {did_you_mean(name, METRICS)}, or module:function")
        return self

    @model_validator(mode="after")
    def _choices_have_their_data(self) -> Evaluate:
        if self.patience is not None and not self.validation:
            raise ValueError(
                f"patience is {self.patience}, but validation is 0: a run ends by its validation accuracy, never by "
                "the test images; set validation, for instance to 0.1"
            )
        if self.min_delta and self.patience is None:
            raise ValueError(f"min_delta ({self.min_delta:g}) has no effect without patience; set patience too")
        if self.finetune_lr is not None and not (self.unseen and self.finetune_steps):
            raise ValueError("finetune_lr has no effect without unseen clients and finetune_steps; set unseen too")
        if self.finetune_steps != 10 and not self.unseen:
            raise ValueError(f"finetune_steps ({self.finetune_steps}) has no effect without unseen clients; set unseen")
        return self

    @model_validator(mode="after")
    def _one_of_them_does(self) -> Evaluate:
        if not self.server and self.clients is False:
            raise ValueError("server and clients are both false; one of them must evaluate")
        if not self.server and self.statistics == "reestimated":
            raise ValueError("statistics is 'reestimated', which needs the server's test images, but server is false")
        return self
