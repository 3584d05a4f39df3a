"""Maintained momentum (Zhong, Chen, Chao): SGD begins with the server's momentum or that of the client's last round."""

from __future__ import annotations

import torch

from fedbn_flwr.client.model_tensors import copied, tensor_like
from fedbn_flwr.errors import MessageError

from . import ClientRule, Key, Update

MOMENTUM = "fedbn.momentum"
MOMENTUM_RECORD = "momentum"


class GlobalMomentum(ClientRule):
    """Begins with the received momentum and sends it back; without the key (`keep_momentum`) it stays on the client."""

    keys = {MOMENTUM: Key("true", "begin with the momentum in the record `momentum`, and send it back")}

    def begin(self) -> None:
        optimizer, buffers = self.local.optimizer, dict(self.local.state.load("momentum"))
        if self.local.config.get(MOMENTUM):
            if not optimizer.momentum:
                raise MessageError(
                    f"the server maintains momentum ({MOMENTUM!r}), but this client trains without it (momentum is 0); "
                    "expected a momentum above zero"
                )
            buffers.update(self.local.records.get(MOMENTUM_RECORD, {}))
        for name, parameter in self.local.parameters.items():
            if name in buffers:
                optimizer.buffers[name] = tensor_like(buffers[name], parameter)

    def finish(self, update: Update) -> None:
        own, parameters = self.local.optimizer.buffers, self.local.parameters
        # Zero if a parameter has had no gradient yet.
        new = copied({name: own[name] if name in own else torch.zeros_like(p) for name, p in parameters.items()})
        buffers = {**self.local.state.load("momentum"), **new}
        if self.local.config.get(MOMENTUM):  # the momentum of a parameter that stays on the client stays there too
            sent = [name for name in parameters if name in self.local.received]
            update.extras[MOMENTUM_RECORD] = {name: buffers.pop(name) for name in sent}
        self.local.state.save("momentum", buffers)
