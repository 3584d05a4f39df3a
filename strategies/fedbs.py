"""FedBS (Idrissi, Berrada, Noubir, "FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization").

Each client is weighted by its training loss, so that clients with a higher loss count more. Once the losses are close
together, training switches to FedProx with equal weights. The losses are close together when their standard deviation
over the clients has been at most epsilon for r consecutive rounds.

Choices that the paper leaves open:

- The loss is the mean training loss over the examples of a client's round, which every reply reports.
- One weight per client applies to all arrays that are sent, statistics of batch norm included.
- The paper gives no values of epsilon, r and mu. Epsilon and r are chosen here; the default of mu is `FedProx`'s.

This module implements the method as the paper describes it. The authors' public code averages with equal weights and
pools the statistics of all clients and all previous rounds; it uses neither the loss nor the switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.server.traits import Round
from fedbn_flwr.trees import Tree

from .fedavg import FedAvg
from .fedprox import PROXIMAL_MU


class FedBS(FedAvg):
    """Clients with a higher loss count more until the losses are alike; then all count equally, with FedProx's term.

    Accepts FedAvg's arguments too; `weighted_by_key` applies only to the mean of metrics.

    Parameters
    ----------
    epsilon : float (default: 0.1)
        The losses count as close together up to this (population) standard deviation.
    patience : int (default: 5)
        r, the number of consecutive rounds with such losses before the switch.
    proximal_mu : float (default: 0.01)
        mu of FedProx, after the switch.
    """

    breaks = {"mean": "weights the clients by the loss of each"}

    @dataclass
    class Memory(FedAvg.Memory):
        alike: int = 0  # consecutive rounds in which the losses were close together

    memory: Memory

    def __init__(
        self,
        *,
        epsilon: Annotated[float, Ge(0)] = 0.1,
        patience: Annotated[int, Ge(1)] = 5,
        proximal_mu: Annotated[float, Ge(0)] = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.epsilon, self.patience, self.proximal_mu = epsilon, patience, proximal_mu

    def notes(self) -> Tree:
        """`switch_round` is the first round of FedProx, or None."""
        return {**super().notes(), "switch_round": self.memory.switch_round}

    def config(self, round: Round) -> Config:
        return {} if self.memory.switch_round is None else {PROXIMAL_MU: float(self.proximal_mu)}

    def problem(self, round: Round, reply: Reply) -> str | None:
        return None if self.memory.switch_round is not None else number_problem(reply.metrics, protocol.TRAIN_LOSS)

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        if self.memory.switch_round is not None:
            return [1.0] * len(replies)
        losses = _losses(replies)
        # Equal losses, zeros included, give exactly equal weights.
        return [1.0] * len(losses) if len(set(losses)) == 1 else losses

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        if self.memory.switch_round is None and len(replies) > 1:
            spread = float(np.std(_losses(replies)))
            self.memory.alike = self.memory.alike + 1 if spread <= self.epsilon else 0
            if self.memory.alike >= self.patience:
                self.memory.switch_round = round.number + 1


def _losses(replies: Sequence[Reply]) -> list[float]:
    return [float(reply.metrics[protocol.TRAIN_LOSS]) for reply in replies]
