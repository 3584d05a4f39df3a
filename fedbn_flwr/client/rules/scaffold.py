"""SCAFFOLD's client rule (Karimireddy et al. 2020, https://arxiv.org/abs/1910.06378, Algorithm 1, lines 7 to 14)."""

from __future__ import annotations

import torch

from fedbn_flwr.client.model_tensors import copied, tensor_like
from fedbn_flwr.client.rule import ClientRule, Key, Update
from fedbn_flwr.messages.aggregate import Arrays

CONTROL = "fedbn.control"
CONTROL_RECORD = "control"  # the server sends c and receives c_i+ - c_i


class Scaffold(ClientRule):
    """Steps along g_i(y) + c - c_i; then c_i+ is the mean of the g_i (strategies/scaffold.py explains why)."""

    keys = {CONTROL: Key("true", "correct gradients by control variates, received and sent in the record `control`")}
    order = -1  # before the other rules: g_i is the unchanged gradient

    def begin(self) -> None:
        c, own = self.local.records.get(CONTROL_RECORD, {}), self._own()
        parameters = self.local.parameters.items()
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

    def finish(self, update: Update) -> None:
        before = self._own()
        new = copied({name: self.sums[p] / max(self.steps, 1) for name, p in self.local.parameters.items()})
        self.local.state.save("control", {**before, **new})  # parameters that are frozen now keep their c_i
        update.extras[CONTROL_RECORD] = {
            name: value - before[name] if name in before else value for name, value in new.items()
        }

    def _own(self) -> Arrays:
        """c_i; zero in the first round, in which the server has no c: a stored c_i belongs to an earlier run then."""
        return self.local.state.load("control") if CONTROL_RECORD in self.local.records else {}
