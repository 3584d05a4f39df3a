"""Maintained global momentum (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Clients that reset momentum to zero in every round lose much of its effect, especially if rounds are short. Here clients
send the momentum buffers of SGD with the model; the server averages both with the same weights, and the next round
begins with the mean. With one full-batch step per round and equal clients the result is centralised SGD with momentum.
Messages grow by the size of the parameters: replies from the first round on, messages to clients from the second.

The paper's other variant, maintained local momentum, is an option of the client: `train.keep_momentum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from flwr.serverapp.strategy import Strategy
from torch.optim import SGD

from fedbn_flwr.client.rule import KeepOptimizerState, Key, Memo, Tensors
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough
from fedbn_flwr.server.wrapper import Wrapper

MOMENTUM = "fedbn.globalmomentum"
MOMENTUM_RECORD = "momentum"
SLOT = "momentum_buffer/"  # prefix of a parameter's momentum in the state of torch.optim.SGD


class GlobalMomentum(Wrapper):
    """Clients send their momentum with the model, and begin each round with the mean momentum.

    The mean uses the weights of the wrapped strategy, which must be one of this project.

    Parameters
    ----------
    strategy : Strategy
        The strategy that averages the models, for instance `FedAvg()`.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        momentum: Arrays = field(default_factory=dict)  # empty before the first round

    memory: Memory
    traits = Traits(steps=frozenset({"momentum"}), records={MOMENTUM_RECORD: "weighted"})

    def __init__(self, strategy: Strategy) -> None:
        words = "averages with the weights of its base; wrap one of fedbn_flwr.strategies, for instance"
        super().__init__(strategy, {"weights": f"GlobalMomentum {words} GlobalMomentum(FedAvg())"})

    def config(self, round: Round) -> Config:
        return {MOMENTUM: True}

    def records(self, round: Round) -> dict[str, Arrays]:
        return {MOMENTUM_RECORD: self.memory.momentum}

    @mean_is_enough
    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        self.memory.momentum = weighted_mean((reply.records[MOMENTUM_RECORD] for reply in replies), weights)


class GlobalMomentumClient(KeepOptimizerState):
    """Begins with the received momentum, and sends it back."""

    keys = {MOMENTUM: Key("true", "begin with the momentum in the record `momentum`, and send it back")}

    def begin(self, w: Tensors) -> Memo:
        optimizer, self.received = self.local.optimizer, w
        is_sgd = isinstance(optimizer.torch, SGD)
        if not (is_sgd and any(group["momentum"] for group in optimizer.torch.param_groups)):
            how = "without momentum" if is_sgd else "with another optimizer"
            raise MessageError(
                f"the server averages the momentum of SGD ({MOMENTUM!r}), but this client trains {how}; expected "
                "optimizer sgd and a momentum above zero"
            )
        sent = self.local.records.get(MOMENTUM_RECORD, {})
        received = {f"{SLOT}{name}": value for name, value in sent.items()}
        optimizer.load_state({**self.local.state.load(self.stored), **received})
        return {}

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        super().finish(memo, steps, metrics, records)
        new = dict(self.local.state.load(self.stored))
        # The momentum of a parameter that stays on the client stays there too.
        # Zero if a parameter has had no gradient yet.
        zeros = copied({name: torch.zeros_like(p) for name, p in self.received.items() if f"{SLOT}{name}" not in new})
        records[MOMENTUM_RECORD] = {
            name: zeros[name] if name in zeros else new.pop(f"{SLOT}{name}") for name in self.received
        }
        self.local.state.save(self.stored, new)
