"""FedGKD (Yao et al. 2021, https://arxiv.org/abs/2107.00051): a term of the clients' loss, as a strategy of one's own.

Clients stay near what the mean of the last M global models answers: they add gamma/2 times the Kullback-Leibler
divergence of their answers from the teacher's. `python fedgkd.py` prints the table of a comparison with FedAvg.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr import run_all
from fedbn_flwr.client.rule import ClientRule, Key, LocalRound
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.strategies import FedAvg, Round, mean_is_enough

GAMMA = "fedbn.gkd"


class FedGKD(FedAvg):
    """FedAvg whose clients distil the mean of the last global models."""

    @dataclass
    class Memory(FedAvg.Memory):
        models: list[Arrays] = field(default_factory=list)  # the last ones before that of the round

    memory: Memory

    def __init__(self, *, gamma: float = 0.2, models: int = 5, **options: Any) -> None:
        super().__init__(**options)
        self.gamma, self.models = gamma, models

    def config(self, round: Round) -> dict[str, Any]:
        return {GAMMA: self.gamma}

    def records(self, round: Round) -> dict[str, Arrays]:
        models = [*self.memory.models, unpack(round.arrays)][-self.models :]
        return {"teacher": weighted_mean(models, [1.0] * len(models))}

    @mean_is_enough  # it uses no reply
    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        self.memory.models = [*self.memory.models, dict(unpack(round.arrays))][-self.models :]


class FedGKDClient(ClientRule):
    keys = {
        GAMMA: Key("float", "add gamma/2 times the divergence from the answers of the model in the record `teacher`")
    }

    def __init__(self, local: LocalRound) -> None:
        super().__init__(local)
        self.teacher = copy.deepcopy(local.model).eval()
        arrays = local.records["teacher"]
        self.teacher.load_state_dict({key: torch.tensor(value) for key, value in arrays.items()}, strict=False)

    def loss(self, inputs: Tensor, targets: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        with torch.no_grad():
            answers = self.teacher(inputs).log_softmax(1)
        divergence = F.kl_div(outputs.log_softmax(1), answers, reduction="batchmean", log_target=True)
        return loss + self.local.config[GAMMA] / 2 * divergence


EXPERIMENT = {
    "name": "fedgkd",
    "rounds": 10,
    "clients": 5,
    "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.1}},
    "model": {"name": "mlp", "norm": "bn"},
    "train": {"lr": 0.05, "epochs": 3},
    "runs": {"FedAvg": {}, "FedGKD": {"strategy": {"name": "fedgkd:FedGKD", "gamma": 1.0}}},
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, progress=False).table())
