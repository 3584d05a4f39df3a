"""SCAFFOLD (Karimireddy et al. 2020, "Stochastic Controlled Averaging", https://arxiv.org/abs/1910.06378, Algorithm 1).

Each client i keeps a control variate c_i, an estimate of its gradient, and the server keeps their mean c. Local steps
use g_i(y) + c - c_i, which corrects the drift of the clients. Clients send back the change of c_i with the model.

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

import torch

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.messages.aggregate import Array, Arrays, weighted_mean
from fedbn_flwr.messages.gate import Reply
from fedbn_flwr.models.tensors import copied, tensor_like

from ._rule import Round, Traits
from .fedavg import FedAvg

CONTROL = "fedbn.control"
CONTROL_RECORD = "control"  # the server sends c and receives c_i+ - c_i


class Scaffold(FedAvg):
    """FedAvg whose clients correct their gradients by control variates.

    The arguments are FedAvg's.
    """

    lacks = {}
    traits = Traits(client_memory="their control variates", records={CONTROL_RECORD: True})

    @dataclass
    class Memory(FedAvg.Memory):
        control: dict[str, Array] = field(default_factory=dict)  # sum of all c_i; empty before the first round: zero
        clients: list[int] = field(default_factory=list)  # by number, those whose c_i is in the sum

    memory: Memory

    def instructions(self, round: Round) -> dict[str, Any]:
        connected, number = list(round.grid.get_node_ids()), self.memory.partitions
        known = {number[node] for node in connected if node in number}
        # N: clients may join, be away, or have another node id since a restart.
        total = max(len(connected), len(known.union(self.memory.clients)), 1)
        return {CONTROL: True, CONTROL_RECORD: {key: each / total for key, each in self.memory.control.items()}}

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Line 17: N c <- N c + sum_i (c_i+ - c_i)"""
        mean = weighted_mean((reply.records[CONTROL_RECORD] for reply in replies), [1.0] * len(replies))
        nodes, number = (reply.message.metadata.src_node_id for reply in replies), self.memory.partitions
        self.memory.clients = sorted({*self.memory.clients, *(number.get(node, node) for node in nodes)})
        before, count = self.memory.control, len(replies)
        self.memory.control = before | {
            key: (before.get(key, 0.0) + count * change).astype(change.dtype) for key, change in mean.items()
        }


class ScaffoldClient(ClientRule):
    """Lines 7 to 14: steps along g_i(y) + c - c_i; then c_i+ is the mean of the g_i."""

    keys = {CONTROL: Key("true", "correct gradients by control variates, received and sent in the record `control`")}
    order = -1  # before the other rules: g_i is the unchanged gradient

    def begin(self) -> None:
        c, own = self.local.records.get(CONTROL_RECORD, {}), self._own()
        parameters = self.local.optimizer.parameters.items()
        self.corrections = {p: tensor_like(c.get(name), p) - tensor_like(own.get(name), p) for name, p in parameters}
        self.sums = {p: torch.zeros_like(p) for _, p in parameters}
        self.steps = 0

    def adjust(self) -> None:
        self.steps += 1
        gradients = {parameter: parameter.grad for parameter in self.sums if parameter.grad is not None}
        if gradients:
            found = list(gradients.values())
            torch._foreach_add_([self.sums[parameter] for parameter in gradients], found)
            torch._foreach_add_(found, [self.corrections[parameter] for parameter in gradients])

    def finish(self, metrics: dict[str, Any], records: dict[str, Arrays]) -> None:
        before = self._own()
        new = copied({name: self.sums[p] / max(self.steps, 1) for name, p in self.local.optimizer.parameters.items()})
        self.local.client.state.save(CONTROL, {**before, **new})  # parameters that are frozen now keep their c_i
        records[CONTROL_RECORD] = {
            name: value - before[name] if name in before else value for name, value in new.items()
        }

    def _own(self) -> Arrays:
        """c_i; zero in the first round, in which the server has no c: a stored c_i belongs to an earlier run then."""
        return self.local.client.state.load(CONTROL) if CONTROL_RECORD in self.local.records else {}
