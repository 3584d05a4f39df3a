"""Secure aggregation (Bonawitz et al. 2017, https://doi.org/10.1145/3133956.3133982) around any rule that needs a mean.

The server learns the weighted sum of the clients' replies and none of the replies: each client adds masks that cancel
in the sum. It holds against a server, or a reader of its memory, that follows the protocol, also together with fewer
clients than the threshold. A server that deviates from the protocol, for instance by inventing clients, is not
withstood: the paper's consistency check needs an infrastructure of signed keys.

The wrapped strategy receives, for every client in the sum, the same reply: the mean model, the means of other records
and metrics, and the mean number of examples. So the result of any rule that computes with the mean only is unchanged.
FedTAN's exchanges are masked in the same way, each with secrets of its own.

A sum that cannot be opened, or that honest replies cannot have, is discarded: the round is skipped. It is not repeated
with fewer clients, since two sums of the same updates would reveal those of the clients that are in only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.exchange.carriers import service_of
from fedbn_flwr.messages.aggregate import fault
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import read_reply
from fedbn_flwr.strategies import Round, Wrapper

from .masking import NotOpened
from .session import MaskedRound

_Range = Annotated[float, Ge(1), Le(2**31), "a number from 1 to 2**31"]
_MOST_SKIPPED = 3  # rounds in a row without a client that could be named


class Secure(Wrapper):
    """Any rule that needs only the mean of the clients' replies; the server cannot read a single reply.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`; this wrapper must be the outermost one.
    threshold : float (default: 0.5)
        More than this share of a round's clients must remain to its end, and no fewer can reveal a sum. The others may
        drop out at any time.
    update_range : float (default: 1024)
        The largest change of a parameter in a round; a client that exceeds it drops out, with an error that names the
        key.
    statistics_range : float (default: 65536)
        The largest change of a running mean or variance in a round, the largest statistic of a batch in FedTAN's
        exchanges, and the largest metric.
    max_examples : int (default: 1048576)
        The largest number of examples of a client.
    timeout : float (default: 600)
        The time limit in seconds for each of the messages that agree on keys and open a sum.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        faulty: dict[int, str] = field(default_factory=dict)  # by node: why it takes no part any more
        skipped: list[int] = field(default_factory=list)  # rounds
        unexplained: int = 0  # how many of the last rounds were skipped without a client that could be named

    memory: Memory
    lacks = {"inside": "hides the replies of single clients"}
    needs = {
        "inside": "{outer} hides the single replies; use one of them",
        **dict.fromkeys(
            ("mean", "known"),
            "with Secure the server learns only the mean of all replies; use it without Secure, or another strategy "
            "inside Secure, for instance FedAvg",
        ),
    }

    def __init__(
        self,
        strategy: Strategy,
        *,
        threshold: Annotated[float, Ge(0.5), Lt(1), "a share of the clients from 0.5 to below 1"] = 0.5,
        update_range: _Range = 1024,
        statistics_range: _Range = 65536,
        max_examples: _Range = 2**20,
        timeout: Annotated[float, Gt(0), "a number of seconds above zero"] = 600,
    ) -> None:
        super().__init__(strategy)
        for name, value in {"update_range": update_range, "statistics_range": statistics_range}.items():
            if value * max_examples > 2**44:
                raise SettingsError(
                    f"{name} is {value!r} and max_examples is {max_examples!r}; expected a product of at most 2**44, "
                    "since 64 bits must hold the sum"
                )
        self.threshold, self.timeout = threshold, timeout
        self.ranges = float(update_range), float(statistics_range), float(max_examples)
        masked = "replies of 8 bytes per value, keys and shares for each pair of clients"
        traffic = "; ".join(filter(None, [self.traits.traffic, masked]))
        self.traits = replace(self.traits, traffic=traffic, hides="hides from the server")
        self._masked: MaskedRound | None = None

    # --- before training ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if service_of(getattr(self.leaf, "direct", False)) is not None:
            raise SettingsError(
                "this ServerApp has an exchange service, whose streams Secure does not mask; set strategy.direct of "
                f"{type(self.leaf).__name__} to false"
            )

    def notes(self) -> dict[str, Any]:
        found = {"secure_skipped": self.memory.skipped, "secure_left_out": sorted(self.memory.faulty)}
        shown = {key: value for key, value in found.items() if value}
        return {**super().notes(), "secure_threshold": self.threshold, **shown}

    # --- a round ---

    @property
    def equal(self) -> frozenset[str]:
        """The records in whose mean all clients count equally."""
        return frozenset(name for name, is_equal in self.traits.records.items() if is_equal)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._masked = MaskedRound(grid, self)
        try:
            messages = list(super().configure_train(server_round, arrays, config, self._masked))
            return self._masked.train_messages(messages) if messages else []
        except NotOpened as error:  # an exchange of FedTAN
            self._skip(server_round, error)
            return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if server_round not in self.memory.skipped:  # in an exchange of FedTAN
            try:
                return super().aggregate_train(server_round, replies)
            except NotOpened as error:
                self._skip(server_round, error)
        self.leaf.used = ()
        return None if self._round is None else self._round.arrays, MetricRecord({"skipped": 1})

    def received(self, round: Round, replies: Iterable[Message]) -> Iterable[Message]:
        """From every client in the sum the mean reply."""
        if self._masked is None or not self._masked.parts:
            return replies
        means = self._masked.means(replies, unpack(round.arrays))
        self._check(round, means[0])
        self.memory.unexplained = 0
        return means

    def _check(self, round: Round, mean: Message) -> None:
        """NotOpened if the mean has values that honest replies do not have, which a rule would refuse in all copies."""
        reply = read_reply(mean, records=self.traits.records)
        problem = fault(reply.arrays, unpack(round.arrays), reply.arrays)
        for rule in self.chain():
            problem = problem or rule.problem(round, reply)
        if problem is not None:
            raise NotOpened(f"the mean of the replies: {problem}")

    def _skip(self, server_round: int, error: NotOpened) -> None:
        memory = self.memory
        memory.skipped.append(server_round)
        named = self._masked is not None and self._masked.named
        memory.unexplained = 0 if named else memory.unexplained + 1
        why = "" if named else "; the masks hide which client is at fault"
        log(WARNING, "round %d is skipped, the model stays as it is: %s%s", server_round, error, why)
        if memory.unexplained == _MOST_SKIPPED:
            rounds = ", ".join(map(str, memory.skipped[-_MOST_SKIPPED:]))
            raise RunFailed(
                f"rounds {rounds} were skipped; the last one: {error}{why}. To find it, train some rounds without "
                "Secure, or with some of the clients"
            )
