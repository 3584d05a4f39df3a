"""Maintained global momentum (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Clients that reset momentum to zero in every round lose much of its effect, especially if rounds are short. Here clients
send the momentum buffers of SGD with the model; the server averages both with the same weights, and the next round
begins with the mean. With one full-batch step per round and equal clients the result is centralised SGD with momentum.
Messages grow by the size of the parameters: replies from the first round on, messages to clients from the second.

The paper's other variant, maintained local momentum, is an option of the client: `train.keep_momentum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.rules.globalmomentum import MOMENTUM, MOMENTUM_RECORD
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean
from fedbn_flwr.messages.gate import Reply

from ._rule import Round, refuse_bounds
from ._wrapper import Wrapper


class GlobalMomentum(Wrapper):
    """Clients send their momentum with the model, and begin each round with its mean.

    The weights are those of the wrapped strategy, which must be a rule of this project.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        momentum: Arrays = field(default_factory=dict)  # empty before the first round

    memory: Memory

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        momentum = "momentum, as large as the parameters: up in each round, down from round 2 on"
        of_base = self.traits.traffic
        traffic = f"{of_base}; {momentum}" if of_base else momentum
        self.traits = replace(self.traits, traffic=traffic, averages="momentum", averages_momentum=True)
        if self.shares is None:
            raise SettingsError(
                f"GlobalMomentum averages with the weights of its base, and {type(strategy).__name__} does not report "
                "them; wrap one of fedbn_flwr.strategies, for instance GlobalMomentum(FedAvg())"
            )
        refuse_bounds(self)

    def instructions(self, round: Round) -> dict[str, Any]:
        return {MOMENTUM: True}

    def records(self, round: Round) -> dict[str, Arrays]:
        return {MOMENTUM_RECORD: self.memory.momentum}

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        self.memory.momentum = weighted_mean((reply.records[MOMENTUM_RECORD] for reply in replies), weights)
