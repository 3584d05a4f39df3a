"""Maintained momentum (Zhong, Chen, Chao): SGD begins with the server's momentum or that of the client's last round."""

from __future__ import annotations

import torch

from fedbn_flwr.client.model_tensors import copied
from fedbn_flwr.client.rule import ClientRule, Key, Update
from fedbn_flwr.client.training import SGD
from fedbn_flwr.errors import MessageError

MOMENTUM = "fedbn.momentum"
MOMENTUM_RECORD = "momentum"


class GlobalMomentum(ClientRule):
    """Begins with the received momentum and sends it back; without the key (`keep_momentum`) the state of the
    optimiser stays on the client.
    """

    keys = {MOMENTUM: Key("true", "begin with the momentum in the record `momentum`, and send it back")}

    def begin(self) -> None:
        optimizer, state = self.local.optimizer, dict(self.local.state.load("momentum"))
        if self.local.config.get(MOMENTUM):
            if not isinstance(optimizer, SGD):
                raise MessageError(
                    f"the server averages the momentum of SGD ({MOMENTUM!r}), but this client trains by another "
                    "optimizer; expected optimizer sgd"
                )
            if not optimizer.momentum:
                raise MessageError(
                    f"the server maintains momentum ({MOMENTUM!r}), but this client trains without it (momentum is 0); "
                    "expected a momentum above zero"
                )
            state.update(self.local.records.get(MOMENTUM_RECORD, {}))
        optimizer.load_state(state)

    def finish(self, update: Update) -> None:
        new = {**self.local.state.load("momentum"), **copied(self.local.optimizer.state())}
        if self.local.config.get(MOMENTUM):  # the momentum of a parameter that stays on the client stays there too
            sent = {name: p for name, p in self.local.parameters.items() if name in self.local.received}
            # Zero if a parameter has had no gradient yet.
            zeros = copied({name: torch.zeros_like(p) for name, p in sent.items() if name not in new})
            update.extras[MOMENTUM_RECORD] = {name: new.pop(name) if name in new else zeros[name] for name in sent}
        self.local.state.save("momentum", new)
