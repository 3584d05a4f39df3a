"""SCAFFOLD (Karimireddy et al. 2020, "Stochastic Controlled Averaging", https://arxiv.org/abs/1910.06378, Algorithm 1).

Each client i keeps a control variate c_i, an estimate of its gradient, and the server keeps their mean c. Local steps
use g_i(y) + c - c_i, which corrects the drift of the clients. The client rule (`fedbn_flwr/client/rules/scaffold.py`)
sends back the change of c_i with the model.

Choices that the paper leaves open:

- c_i becomes the mean of the round's gradients. Without momentum and weight decay this equals the paper's option II,
  c_i - c + (x - y_i) / (K lr); with them it is still a gradient.
- x is averaged by number of examples, as in FedAvg; the paper has equal weights and a server step size of 1.
- Only parameters have control variates. Statistics of batch norm have no gradient and are averaged like the rest of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbn_flwr.client.rules.scaffold import CONTROL, CONTROL_RECORD
from fedbn_flwr.messages.aggregate import Array, Arrays, weighted_mean
from fedbn_flwr.messages.gate import Reply

from ._rule import Round, Traits
from .fedavg import FedAvg


class Scaffold(FedAvg):
    """FedAvg whose clients correct their gradients by control variates.

    The arguments are FedAvg's.
    """

    traits = Traits(
        client_memory="their control variates",
        averages="control variates",
        equal=frozenset({CONTROL_RECORD}),
        traffic="control variates, as large as the parameters: up in each round, down from round 2 on",
    )

    @dataclass
    class Memory(FedAvg.Memory):
        control: dict[str, Array] = field(default_factory=dict)  # c; empty before the first round, which means zero

    memory: Memory

    def instructions(self, round: Round) -> dict[str, Any]:
        return {CONTROL: True}

    def records(self, round: Round) -> dict[str, Arrays]:
        return {CONTROL_RECORD: self.memory.control}  # the server sends c and receives c_i+ - c_i

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Line 17: c <- c + |S|/N * 1/|S| sum_i (c_i+ - c_i)"""
        # Nodes may have left since they answered.
        c, total = self.memory.control, max(len(list(round.grid.get_node_ids())), self.asked, len(replies))
        mean = weighted_mean((reply.records[CONTROL_RECORD] for reply in replies), [1.0] * len(replies))
        share = len(replies) / total
        self.memory.control = c | {
            key: (c.get(key, 0.0) + share * change).astype(change.dtype) for key, change in mean.items()
        }
