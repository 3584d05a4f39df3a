"""SCAFFOLD (Karimireddy et al. 2020, "Stochastic Controlled Averaging", https://arxiv.org/abs/1910.06378, Algorithm 1).

Each client i keeps a control variate c_i, its guess at its own gradient, and the server keeps c, the mean of them
all. Local steps go along g_i(y) + c - c_i, which takes the clients' drift out. The client's part, asked for by
`fedbn.control`, is in `fedbn_flwr.client.client`; it sends back the change of c_i beside its model.

Where the paper leaves a choice:

- c_i becomes the mean of the round's gradients. Without momentum and weight decay that is the paper's option II,
  c_i - c + (x - y_i) / (K lr), and with them it still is a gradient.
- x is averaged as FedAvg does, by number of examples; the paper has equal clients and a server step of 1.
- Control variates are of parameters. Statistics of batch norm have no gradient, and are averaged as the rest of x.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, weighted_mean
from fedbn_flwr.messages.arrays import arrays_in, pack, unpack

from ._wrapper import take_record, with_record
from .fedavg import FedAvg


class Scaffold(FedAvg):
    """FedAvg whose clients correct their gradients by control variates; the arguments are FedAvg's."""

    kept_by_clients = "their control variates"
    _control: dict[str, Array] | None = None  # c; none before the first round, which is to say zero
    _clients = 0  # N

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        self._control = None

    def state(self) -> RecordDict:
        control = {} if self._control is None else {"control": pack(self._control)}
        return RecordDict({**super().state(), **control})

    def restore(self, records: RecordDict) -> None:
        super().restore(records)
        self._control = dict(unpack(arrays_in(records)["control"])) if "control" in records else None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config[protocol.CONTROL] = True
        messages = super().configure_train(server_round, arrays, config, grid)
        self._clients = len(list(grid.get_node_ids()))
        return (
            messages if self._control is None else with_record(messages, protocol.CONTROL_RECORD, pack(self._control))
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._global is not None, "configure_train comes first"
        replies, changes = take_record(replies, protocol.CONTROL_RECORD, self._global)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.shares:  # S
            # Line 17: c <- c + |S|/N * 1/|S| sum_i dc_i
            mean = weighted_mean((changes[node] for node in self.shares), [1.0] * len(self.shares))
            share = len(self.shares) / self._clients
            before = self._control or {}
            self._control = before | {
                key: (before.get(key, 0.0) + share * change).astype(change.dtype) for key, change in mean.items()
            }
        return arrays, metrics
