"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with batch norm as usual up to round T*, then freeze the aggregated statistics: from then on every batch
norm normalises with the same global mean and variance in training as in evaluation, while gamma, beta and the
rest of the network keep training. That removes the mismatch between a client's batch statistics and the
global ones, at no cost in communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, metrics_in, pack, record_of, unpack
from fedbn_flwr.norms.roles import Role, roles, split

from ._memory import inside, numbers
from ._wrapper import Wrapper, check_some_left, refused


class FixBN(Wrapper):
    """Freeze batch norm from a round on, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        What trains and aggregates, for instance `FedAvg()`.
    freeze_round : int | float | "auto" (default: 0.5)
        T*, the last round with ordinary batch norm: a round as an int (0 freezes the statistics the model came with;
        the number of rounds never freezes), or a fraction of all rounds as a float. The paper's default is half.
        "auto" decides as in its Appendix B.6: see `window` and `threshold`.
    freeze : sequence of str (default: ["statistics"])
        What is frozen: "statistics", "affine" (gamma and beta), or both. The paper compares the three (Table H) and
        freezes the statistics alone.
    window : int (default: 10)
        W, with "auto": rounds over which the variance of the change is taken.
    threshold : float (default: 1e-4)
        tau, with "auto": freeze after the first round in which that variance is below tau for every client. The paper
        does not say how the change of a client's statistics from one round to the next is measured: here it is their
        distance relative to their length, |s_t - s_(t-1)| / |s_(t-1)|, so that tau does not depend on the model. The
        server takes them from the replies that it aggregates anyway.
    """

    argument = "freeze_round"  # what a user calls T*

    def __init__(
        self,
        strategy: Strategy,
        *,
        freeze_round: int | float | Literal["auto"] = 0.5,
        freeze: Sequence[str] = ("statistics",),
        window: int = 10,
        threshold: float = 1e-4,
    ) -> None:
        super().__init__(strategy)
        is_number = isinstance(freeze_round, int | float) and not isinstance(freeze_round, bool)
        if freeze_round != "auto" and not (is_number and freeze_round >= 0):
            raise SettingsError(
                f"{self.argument} is {freeze_round!r}; expected a round (0, 1, 2, ...), a fraction of the rounds "
                "(0.0 to 1.0) or 'auto'"
            )
        if isinstance(freeze_round, float) and freeze_round > 1:
            raise SettingsError(
                f"{self.argument} is {freeze_round!r}; as a fraction of the rounds it must be at most 1.0, and a round "
                f"is written without a point: {int(freeze_round)}"
            )
        names = [freeze] if isinstance(freeze, str) else list(freeze)
        if not names or not set(names) <= protocol.FREEZABLE:
            raise SettingsError(f"freeze is {freeze!r}; expected one or both of {sorted(map(str, protocol.FREEZABLE))}")
        if window < 2:
            raise SettingsError(f"window is {window}; a variance needs at least 2 rounds")
        if not threshold > 0:
            raise SettingsError(f"threshold is {threshold}; expected a number above zero")
        self.freeze_round = freeze_round
        self.freeze = frozenset(Role(name) for name in names)
        self.window = window
        self.threshold = threshold
        self._last_free: int | None = freeze_round if isinstance(freeze_round, int) else None
        self._frozen: ArrayRecord | None = None  # the model of a frozen round
        self._sent: set[str] = set()  # the keys of it that clients were sent
        self._drifts: dict[str, _Drift] = {}  # of each client, with "auto"

    def check(self, num_rounds: int) -> None:
        super().check(num_rounds)
        if isinstance(self.freeze_round, int) and self.freeze_round > num_rounds:
            raise SettingsError(
                f"{self.argument} is {self.freeze_round}, but there are {num_rounds} rounds; expected 0 to "
                f"{num_rounds}, or a fraction such as 0.5"
            )

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        if self.freeze_round == "auto":
            self._last_free = num_rounds  # until it is decided
            self._drifts.clear()
        elif isinstance(self.freeze_round, float):
            self._last_free = int(self.freeze_round * num_rounds + 1e-9)  # 0.29 * 100 is 28.999999999999996
        freezes = self.freeze_round == "auto" or (self._last_free is not None and self._last_free < num_rounds)
        if freezes and not self._keys(arrays):
            raise SettingsError(
                "FixBN freezes batch norm, and the model has none (no key ends in running_mean); use its base "
                "strategy, or a model with model.norm=bn"
            )

    def state(self) -> RecordDict:
        """With "auto", the round that it decided and each client's last rounds; else the arguments say it all."""
        records = super().state()
        if self.freeze_round == "auto" and self._last_free is not None:
            records["fixbn"] = ConfigRecord({"last-free": self._last_free})
            for who, drift in self._drifts.items():
                last = {} if drift.last is None else {"last": drift.last}
                records[f"drift/{who}"] = pack({"changes": np.array(drift.changes, np.float64), **last})
        return records

    def restore(self, records: RecordDict) -> None:
        super().restore(records)
        if self.freeze_round == "auto":
            self._last_free = numbers(records, "fixbn")["last-free"]
            for who, record in arrays_in(inside("drift", records)).items():
                arrays = unpack(record)
                self._drifts[who] = _Drift(deque(arrays["changes"].tolist(), self.window), arrays.get("last"))

    def notes(self) -> dict[str, Any]:
        return super().notes() | {"freeze_round": self._last_free, "frozen": sorted(self.freeze)}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._last_free is None:
            raise RuntimeError(
                f"freeze_round={self.freeze_round!r} depends on the number of rounds, which is not known: start the "
                "run by the outermost strategy's start(), or give a round"
            )
        self._frozen = arrays if server_round > self._last_free else None
        if self._frozen is not None:
            config[protocol.FREEZE] = ",".join(sorted(self.freeze))
        else:
            config.pop(protocol.FREEZE, None)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        # FedBN's clients freeze what they keep at home, each its own: the server's is not what they hold.
        self._sent = {key for message in messages[:1] for sent in arrays_in(message.content).values() for key in sent}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if self._frozen is None:
            if self.freeze_round == "auto" and self._is_steady(replies):
                self._last_free = server_round
            return super().aggregate_train(server_round, replies)
        keys = self._keys(self._frozen)
        sent = [key for key in keys if key in self._sent]
        replies = [self._checked(reply, sent) for reply in replies]
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            check_some_left(server_round, replies)
        else:
            # A mean of equal numbers may be a rounding error off; what is frozen does not move at all.
            arrays = record_of({**arrays, **{key: self._frozen[key] for key in keys if key in arrays}})
        return arrays, metrics

    def _is_steady(self, replies: Sequence[Message]) -> bool:
        """Whether every client that answered has statistics that change at a steady rate."""
        steady = []
        for reply in replies:
            if not reply.has_content():
                continue
            record = next(iter(arrays_in(reply.content).values()))
            statistics = split(record, roles(record), {Role.STATISTICS})[0]
            if not statistics:
                raise SettingsError("freeze_round is 'auto', but the clients send no statistics to decide by")
            vector = np.concatenate([array.numpy().ravel().astype(np.float64) for array in statistics.values()])
            drift = self._drifts.setdefault(_who(reply), _Drift(deque(maxlen=self.window)))
            drift.add(vector)
            steady.append(len(drift.changes) == self.window and float(np.var(drift.changes)) < self.threshold)
        return bool(steady) and all(steady)

    def _keys(self, arrays: ArrayRecord) -> list[str]:
        return list(split(arrays, roles(arrays), self.freeze)[0])

    def _checked(self, reply: Message, keys: Sequence[str]) -> Message:
        """A client that ignores the request trains something else: refuse it rather than average it."""
        assert self._frozen is not None
        if not reply.has_content():
            return reply
        for record in arrays_in(reply.content).values():
            for key in keys:
                if key not in record:
                    continue
                value = record[key].numpy()
                # Some of Flower's strategies send float64 to a model of float32.
                if value.tobytes() != self._frozen[key].numpy().astype(value.dtype).tobytes():
                    return refused(
                        reply,
                        f"it changed {key!r}, which is frozen. Its ClientApp does not honour the config key "
                        f"{protocol.FREEZE!r}: serve it by fedbn_flwr.client_app with a BNClient, or put its batch "
                        "norms in eval mode in such rounds",
                    )
        return reply


def _who(reply: Message) -> str:
    """A client's name, by its partition where it tells one: node ids are new when a run goes on elsewhere."""
    for metrics in metrics_in(reply.content).values():
        if isinstance(partition := metrics.get(protocol.PARTITION), int):
            return f"partition {partition}"
    return f"node {reply.metadata.src_node_id}"


@dataclass
class _Drift:
    """How far a client's statistics moved in each of its last rounds."""

    changes: deque[float]
    last: np.ndarray | None = None

    def add(self, statistics: np.ndarray) -> None:
        if self.last is not None:
            length = max(float(np.linalg.norm(self.last)), 1e-12)
            self.changes.append(float(np.linalg.norm(statistics - self.last)) / length)
        self.last = statistics
