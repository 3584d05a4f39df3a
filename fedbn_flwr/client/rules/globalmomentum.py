"""Maintained momentum (Zhong, Chen, Chao): SGD continues with the momentum of the server, or with the node's own."""

from __future__ import annotations

import torch

from fedbn_flwr.client.model_tensors import copied, tensor_like
from fedbn_flwr.errors import MessageError

from . import ClientRule, Key, Update

MOMENTUM = "fedbn.momentum"
MOMENTUM_RECORD = "momentum"


class GlobalMomentum(ClientRule):
    """Begins with the momentum received and sends it back; without the key (`keep_momentum`) all of it stays here."""

    keys = {MOMENTUM: Key("true", "begin with the momentum in a record `momentum`, and send it back")}

    def begin(self) -> None:
        optimizer, buffers = self.local.optimizer, dict(self.local.state.load("momentum"))
        if self.local.config.get(MOMENTUM):
            if not optimizer.momentum:
                raise MessageError("the server maintains momentum, but this client trains without (momentum is 0)")
            buffers.update(self.local.records.get(MOMENTUM_RECORD, {}))
        for name, parameter in self.local.parameters.items():
            if name in buffers:
                optimizer.buffers[name] = tensor_like(buffers[name], parameter)

    def finish(self, update: Update) -> None:
        found, parameters = self.local.optimizer.buffers, self.local.parameters
        # Zero where a parameter had no gradient yet.
        new = copied({name: found[name] if name in found else torch.zeros_like(p) for name, p in parameters.items()})
        buffers = {**self.local.state.load("momentum"), **new}
        if self.local.config.get(MOMENTUM):  # that of parameters that do not travel stays here as they do
            back = [name for name in parameters if name in self.local.received]
            update.extras[MOMENTUM_RECORD] = {name: buffers.pop(name) for name in back}
        self.local.state.save("momentum", buffers)
