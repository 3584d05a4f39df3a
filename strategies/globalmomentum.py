"""Maintained global momentum (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Clients that begin every round with a momentum of zero lose it, the more so the shorter a round. Here they send their
SGD's momentum along with the model; the server averages both alike, and the next round begins with the mean. With
one full-batch step a round and equal clients that is centralised SGD with momentum. Messages grow by the size of the
parameters: upwards from the first round on, downwards from the second.

The paper's other variant, maintained local momentum, is the client's alone: `train.keep_momentum`.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import weighted_mean
from fedbn_flwr.messages.arrays import arrays_in, pack

from ._wrapper import Wrapper, shares, take_record, with_record


class GlobalMomentum(Wrapper):
    """Average the clients' momentum as the model is, around any of our strategies."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        if shares(strategy) is None:
            raise SettingsError(
                f"GlobalMomentum averages as its base does, and {type(strategy).__name__} does not tell how; wrap one "
                "of fedbn_flwr.strategies, for instance GlobalMomentum(FedAvg())"
            )
        self._model = ArrayRecord()
        self._momentum: ArrayRecord | None = None  # none before the first round

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        self._momentum = None

    def state(self) -> RecordDict:
        return RecordDict({**super().state(), **({} if self._momentum is None else {"momentum": self._momentum})})

    def restore(self, records: RecordDict) -> None:
        super().restore(records)
        self._momentum = arrays_in(records).get("momentum")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config[protocol.MOMENTUM] = True
        self._model = arrays
        messages = super().configure_train(server_round, arrays, config, grid)
        # FedTAN has held its exchanges by now: these are its last messages, and the record rides on them alone.
        return messages if self._momentum is None else with_record(messages, protocol.MOMENTUM_RECORD, self._momentum)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies, momenta = take_record(replies, protocol.MOMENTUM_RECORD, self._model)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if weights := shares(self.strategy):
            mean = weighted_mean((momenta[node] for node in weights), list(weights.values()))
            self._momentum = pack(mean)
        return arrays, metrics
