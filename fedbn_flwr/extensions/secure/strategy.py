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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.exchange.carriers import service_of
from fedbn_flwr.exchange.codec import KIND, Agreement, Contribution, contribution_to_records
from fedbn_flwr.exchange.round import Answers
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, cast, fault
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import MOST_EXAMPLES, read_reply, sent_model, with_content
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import Round, Wrapper

from . import protocol as secure
from .masking import TOTALS, FixedPoint, NotOpened, kind_of_exchange, kind_of_metric, kinds_of
from .session import SecureSettings, Session, Sums

_Range = Annotated[float, Ge(1), Le(2**31), "a number from 1 to 2**31"]
_MOST_SKIPPED = 3  # rounds in a row without a client that could be named

# Strategies of Flower whose result depends on the mean of the replies only.
_MEANS = (flower.FedAvg, flower.FedAdam, flower.FedYogi, flower.FedAdagrad, flower.FedAvgM)


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
        self.settings = SecureSettings(
            threshold, (float(update_range), float(statistics_range), float(max_examples)), timeout
        )
        masked = "replies of 8 bytes per value, keys and shares for each pair of clients"
        traffic = "; ".join(filter(None, [self.traits.traffic, masked]))
        self.traits = replace(self.traits, traffic=traffic, hides="hides from the server")
        self._masked: _MaskedRound | None = None

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
        return {**super().notes(), "secure_threshold": self.settings.threshold, **shown}

    # --- a round ---

    def instructions(self, round: Round) -> dict[str, Any]:
        asked = {secure.RANGES: [*self.settings.ranges], secure.WEIGHT: self.leaf.weighted_by_key}
        return asked | ({secure.EQUAL: ",".join(equal)} if (equal := sorted(self._equal())) else {})

    def _equal(self) -> frozenset[str]:
        """The records in whose mean all clients count equally."""
        return frozenset(name for name, is_equal in self.traits.records.items() if is_equal)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._masked = masked = _MaskedRound(grid, self.leaf.weighted_by_key, self._equal(), self.settings, self.memory)
        try:
            messages = list(super().configure_train(server_round, arrays, config, masked))
            return masked.train_messages(messages) if messages else []
        except NotOpened as error:  # an exchange of FedTAN
            self._skip(server_round, error)
            return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        skipped = None if self._round is None else self._round.arrays, MetricRecord({"skipped": 1})
        if server_round in self.memory.skipped:  # in an exchange of FedTAN
            self.leaf.used = ()
            return skipped
        try:
            return super().aggregate_train(server_round, replies)
        except NotOpened as error:
            self.leaf.used = ()
            self._skip(server_round, error)
        return skipped

    def received(self, round: Round, replies: Iterable[Message]) -> Iterable[Message]:
        """From every client in the sum the mean reply."""
        masked = self._masked
        if masked is None or masked.session is None:
            return replies
        means, errors = masked.means(replies, unpack(round.arrays))
        self._check(round, means[0])
        self.memory.unexplained = 0
        return [*means, *errors]

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
        named = self._masked is not None and len(memory.faulty) > self._masked.known_faulty
        memory.unexplained = 0 if named else memory.unexplained + 1
        why = "" if named else "; the masks hide which client is at fault"
        log(WARNING, "round %d is skipped, the model stays as it is: %s%s", server_round, error, why)
        if memory.unexplained == _MOST_SKIPPED:
            rounds = ", ".join(map(str, memory.skipped[-_MOST_SKIPPED:]))
            raise RunFailed(
                f"rounds {rounds} were skipped; the last one: {error}{why}. To find it, train some rounds without "
                "Secure, or with some of the clients"
            )


class _MaskedRound(GridAround):
    """The masked messages of a round, and the grid for a wrapped FedTAN, where each client replies with the mean."""

    def __init__(
        self, inner: Grid, weight: str, equal: frozenset[str], settings: SecureSettings, memory: Secure.Memory
    ) -> None:
        super().__init__(inner)
        self.weight = weight  # the metric by which values are weighted
        self.equal = equal  # the records in which all clients count equally
        self.settings, self.faulty = settings, memory.faulty
        self.known_faulty = len(memory.faulty)
        self.session: Session | None = None
        self.sent: Arrays = {}  # the arrays that the clients received at the beginning of the round
        self.part = 0

    def train_messages(self, messages: list[Message]) -> list[Message]:
        return _masking(self.session or self._begin(messages), messages, 0)

    def means(self, replies: Iterable[Message], whole: Arrays) -> tuple[list[Message], list[Message]]:
        """The mean reply for each client in the sum, and errors for the others; `whole` is the global model."""
        assert self.session is not None
        opened = self.session.open(0, replies, {self.weight}, whole)
        mean = self._mean_reply(self.session.fixed, opened, whole)
        means = [with_content(each, RecordDict({**mean, **configs_in(each.content)})) for each in opened.replies]
        return means, [*opened.refused, *self.session.failed]

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        return None  # without messages the contributions would not be masked

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != protocol.COHORT_QUERY:
            return self.inner.send_and_receive(messages, timeout=timeout)
        session, failed = self.session, list[Message]()
        self.part += 1
        if session is None or self.part >= session.parts:
            session, self.part = self._begin(messages), 1
            failed = session.failed
        replies = self.inner.send_and_receive(_masking(session, messages, self.part), timeout=timeout)
        opened = session.open(self.part, replies, {self.weight, protocol.BATCH_EXAMPLES}, None)
        return [*_mean_contributions(session.fixed, opened, self.weight), *opened.refused, *failed]

    def _begin(self, messages: Sequence[Message]) -> Session:
        """A session of the nodes of these messages, for the reply to the train message and all exchanges."""
        content, nodes = messages[0].content, [message.metadata.dst_node_id for message in messages]
        config = next(iter(configs_in(content).values()))
        if not config.get(protocol.COHORT_STEP):  # later messages of a layer-wise round have no model
            self.sent = unpack(sent_model(content)) if arrays_in(content) else {}
        parts = 1 + (_exchanges(self.sent, config) if protocol.COHORT_STEP in config else 0)
        self.session = Session(self.inner, nodes, parts, config, self.settings, self.faulty)
        return self.session

    def _mean_reply(self, fixed: FixedPoint, opened: Sums, whole: Arrays) -> RecordDict:
        """The mean of the replies in the sum; counts and weights too are means, so that they add up to the total."""
        weight, metrics = _totals(fixed, opened, self.weight)
        content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {"arrays": ArrayRecord()}
        kinds = kinds_of(whole)
        for name in sorted(opened.sums.keys() - {TOTALS}):
            by = len(opened.replies) if name in self.equal else weight
            mean = {}
            for key, total in opened.sums[name].items():
                change = fixed.mean(key, total, kinds[key], by)
                before = self.sent.get(key) if name == "arrays" else None
                if before is not None:  # what did not change keeps its bits, also those of -0.0
                    change = np.where(change == 0, before, before.astype(np.float64) + change)
                if name == "arrays" and key.endswith("running_var"):
                    change = _not_negative(change, fixed.resolution("statistics") / (by or 1))
                mean[key] = cast(change, whole[key].dtype)
            content[name] = pack({key: mean[key] for key in whole if key in mean})
        return RecordDict({**content, "metrics": metrics})


def _totals(fixed: FixedPoint, opened: Sums, weight_key: str) -> tuple[float, MetricRecord]:
    """The sum of the weights, and the mean metrics."""
    totals, count = opened.sums[TOTALS], len(opened.replies)
    weight = fixed.added(weight_key, totals[weight_key], count, kind=kind_of_metric(weight_key, weight_key))
    metrics = MetricRecord()
    for key, total in totals.items():
        if (kind := kind_of_metric(key, weight_key)) == "statistics":
            metrics[key] = float(fixed.mean(key, total, kind, weight))
        else:
            metrics[key] = fixed.added(key, total, count, kind=kind) / count
    return weight, metrics


def _masking(session: Session, messages: Sequence[Message], part: int) -> list[Message]:
    """The messages to the nodes of the session, which ask for replies under the masks of this part."""
    asked = [message for message in messages if message.metadata.dst_node_id in session.nodes]
    more = session.instructions(part, [message.metadata.dst_node_id for message in asked])
    return [_with_config(message, more) for message in asked]


def _not_negative(values: Array, error: float) -> Array:
    """Variances, of which rounding may leave zeros below zero."""
    return np.where((values < 0) & (values >= -error), 0.0, values)


def _exchanges(model: Arrays, config: ConfigRecord) -> int:
    """The exchanges of a round in which each batch norm is used once; a model that reuses one has a second session."""
    layers = [*roles(model).values()].count(Role.STATISTICS) // 2
    return layers * ((1 if config[protocol.COHORT] == "fused" else 2) + bool(config[protocol.COHORT_BACKWARD]))


def _mean_contributions(fixed: FixedPoint, opened: Sums, weight_key: str) -> list[Message]:
    count = len(opened.replies)
    weight, _ = _totals(fixed, opened, weight_key)
    images = int(fixed.added(protocol.BATCH_EXAMPLES, opened.sums[TOTALS][protocol.BATCH_EXAMPLES], count, least=1))
    kind = next((str(each[KIND]) for each in configs_in(opened.replies[0].content).values() if KIND in each), "")
    of_values = kind_of_exchange(kind)
    tensors = {k: fixed.mean(k, total, of_values, weight) for k, total in opened.sums.get("arrays", {}).items()}
    error = fixed.resolution(of_values) / (weight or 1)
    # FedTAN refuses tensors of other names and shapes.
    if kind == "moments" and len({tensors[key].shape for key in ("mean", "var") if key in tensors}) == 1 < len(tensors):
        square = tensors["mean"] ** 2
        tensors["var"] = tensors["var"] - square
        error += float((2 * error * np.sqrt(square) + 1e-12 * square).max(initial=0.0))
    if kind != "gradients" and "var" in tensors:
        tensors["var"] = _not_negative(tensors["var"], error)
        if (tensors["var"] < 0).any():
            raise NotOpened(f"a variance is {tensors['var'].min():g}; those of honest clients have none below zero")
    means = []
    for place, reply in enumerate(opened.replies):
        readable = next(iter(metrics_in(reply.content).values()), MetricRecord())
        left, partition = readable.get(protocol.EXCHANGES_LEFT), readable.get(protocol.PARTITION)
        mean = Contribution(
            kind,
            tensors,
            images=images // count + (place < images % count),  # they add up to the images of all
            remaining=left if isinstance(left, int) else -1,
            examples=min(images, MOST_EXAMPLES),  # the same for all; a batch must not exceed it
            partition=partition if isinstance(partition, int) else None,
        )
        means.append(with_content(reply, contribution_to_records(mean)))
    return means


def _with_config(message: Message, more: Mapping[str, Any]) -> Message:
    """The message, with further config keys."""
    name, config = next(iter(configs_in(message.content).items()))
    return with_content(message, RecordDict({**message.content, name: ConfigRecord({**config, **more})}))
