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
from typing import Any

import numpy as np
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
from fedbn_flwr.messages.gate import MOST_EXAMPLES, arrays_of, read_reply, with_content
from fedbn_flwr.messages.masking import TOTALS, FixedPoint, NotOpened, kind_of_array, kind_of_exchange, kind_of_metric
from fedbn_flwr.norms.roles import Role, roles

from ._rule import Round, Rule, use_of_single_replies
from ._session import SecureSettings, Session, Sums
from ._wrapper import Wrapper

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

    def __init__(
        self,
        strategy: Strategy,
        *,
        threshold: float = 0.5,
        update_range: float = 1024,
        statistics_range: float = 65536,
        max_examples: int = 2**20,
        timeout: float = 600,
    ) -> None:
        if isinstance(strategy, Rule) and strategy.traits.private:
            raise SettingsError(
                f"Secure and {type(strategy).__name__} do not combine: {type(strategy).__name__} limits what single "
                "replies reveal, which Secure hides; use one of them"
            )
        super().__init__(strategy)
        self.shares = None  # unknown: the server knows the sum of the weights only
        if not 0.5 <= threshold < 1:
            raise SettingsError(f"threshold is {threshold!r}; expected a share of the clients from 0.5 to below 1")
        ranges = {"update_range": update_range, "statistics_range": statistics_range, "max_examples": max_examples}
        for name, value in ranges.items():
            if not 1 <= value <= 2**31:
                raise SettingsError(f"{name} is {value!r}; expected a number from 1 to 2**31")
            if name != "max_examples" and value * max_examples > 2**44:
                raise SettingsError(
                    f"{name} is {value!r} and max_examples is {max_examples!r}; expected a product of at most 2**44, "
                    "since 64 bits must hold the sum"
                )
        if not timeout > 0:
            raise SettingsError(f"timeout is {timeout!r}; expected a number of seconds above zero")
        self.settings = SecureSettings(threshold, update_range, statistics_range, max_examples, timeout)
        of_base = self.traits.traffic
        masked = "replies of 8 bytes per value, keys and shares for each pair of clients"
        self.traits = replace(self.traits, traffic=f"{of_base}; {masked}" if of_base else masked, masked=True)
        self._chain = _chain(strategy)
        self._innermost = self._chain[-1]
        for inside in reversed(self._chain):
            if (why := _needs_more(inside)) is not None:
                raise SettingsError(
                    f"{type(inside).__name__} {why}, and with Secure the server learns only the mean of all replies; "
                    "use it without Secure, or another strategy inside Secure, for instance FedAvg"
                )
        self._masked: _MaskedRound | None = None
        self._known_faulty = 0  # at the beginning of the round

    # --- before training ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if service_of(getattr(self._innermost, "direct", False)) is not None:
            raise SettingsError(
                "this ServerApp has an exchange service, whose streams Secure does not mask; set strategy.direct of "
                f"{type(self._innermost).__name__} to false"
            )

    def notes(self) -> dict[str, Any]:
        found = {"secure_skipped": self.memory.skipped, "secure_left_out": sorted(self.memory.faulty)}
        return {
            **super().notes(),
            "secure_threshold": self.settings.threshold,
            **{key: value for key, value in found.items() if value},
        }

    # --- a round ---

    def instructions(self, round: Round) -> dict[str, Any]:
        settings = self.settings
        ranges = [float(settings.update_range), float(settings.statistics_range), float(settings.max_examples)]
        asked: dict[str, Any] = {protocol.SECURE_RANGES: ranges, protocol.SECURE_WEIGHT: self._weight}
        return asked | ({protocol.SECURE_EQUAL: ",".join(equal)} if (equal := sorted(self.traits.equal)) else {})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._known_faulty = len(self.memory.faulty)
        self._masked = _MaskedRound(grid, self._weight, self.traits.equal, self.settings, self.memory.faulty)
        try:
            messages = super().configure_train(server_round, arrays, config, self._masked)
            return self._masked.train_messages(list(messages))
        except NotOpened as error:  # an exchange of FedTAN
            self._skip(server_round, error)
            return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        masked, round, self._masked, self.used = self._masked, self.round, None, ()
        is_skipped = server_round in self.memory.skipped  # in an exchange of FedTAN
        if masked is None or round is None or (masked.session is None and not is_skipped):
            return self.rule.aggregate_train(server_round, replies)
        try:
            if not is_skipped:
                means, errors = masked.means(replies, unpack(round.arrays))
                self._check(round, means[0])
                self.memory.unexplained = 0
                result = self.rule.aggregate_train(server_round, [*means, *errors])
                self.used = self.rule.used
                return result
        except NotOpened as error:
            self._skip(server_round, error)
        return round.arrays, MetricRecord({"skipped": 1})

    def _check(self, round: Round, mean: Message) -> None:
        """NotOpened if the mean has values that honest replies do not have, which a rule would refuse in all copies."""
        arrays = read_reply(mean).arrays
        problem = fault(arrays, unpack(round.arrays), arrays)
        for rule in self._chain:
            if problem is None and isinstance(rule, Rule):
                problem = rule.problem(round, read_reply(mean, records=list(rule.records(round))))
        if problem is not None:
            raise NotOpened(f"the mean of the replies: {problem}")

    def _skip(self, server_round: int, error: NotOpened) -> None:
        memory = self.memory
        memory.skipped.append(server_round)
        named = len(memory.faulty) > self._known_faulty
        memory.unexplained = 0 if named else memory.unexplained + 1
        why = "" if named else "; the masks hide which client is at fault"
        log(WARNING, "round %d is skipped, the model stays as it is: %s%s", server_round, error, why)
        if memory.unexplained == _MOST_SKIPPED:
            rounds = ", ".join(map(str, memory.skipped[-_MOST_SKIPPED:]))
            raise RunFailed(
                f"rounds {rounds} were skipped; the last one: {error}{why}. To find it, train some rounds without "
                "Secure, or with some of the clients"
            )

    @property
    def _weight(self) -> str:
        return str(getattr(self._innermost, "weighted_by_key", protocol.NUM_EXAMPLES))


class _MaskedRound(GridAround):
    """The masked messages of a round, and the grid for a wrapped FedTAN, where each client replies with the mean."""

    def __init__(
        self,
        inner: Grid,
        weight: str,
        equal: frozenset[str],
        settings: SecureSettings,
        faulty: dict[int, str],
    ) -> None:
        super().__init__(inner)
        self.weight = weight  # the metric by which values are weighted
        self.equal = equal  # the records in which all clients count equally
        self.settings = settings
        self.faulty = faulty
        self.session: Session | None = None
        self.sent: Arrays = {}  # the arrays that the clients received at the beginning of the round
        self.part = 0

    def train_messages(self, messages: list[Message]) -> list[Message]:
        return _masking(self.session or self._begin(messages), messages, 0) if messages else messages

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
            self.sent = unpack(arrays_of(content)) if arrays_in(content) else {}
        parts = 1 + (_exchanges(self.sent, config) if protocol.COHORT_STEP in config else 0)
        self.session = Session(self.inner, nodes, parts, config, self.settings, self.faulty)
        return self.session

    def _mean_reply(self, fixed: FixedPoint, opened: Sums, whole: Arrays) -> RecordDict:
        """The mean of the replies in the sum; counts too are means, so that they add up to the total."""
        count, totals = len(opened.replies), opened.sums[TOTALS]
        weight = fixed.count(self.weight, totals[self.weight], count)
        content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {"arrays": ArrayRecord()}
        for name, sums in opened.sums.items():
            if name == TOTALS:
                continue
            by = count if name in self.equal else weight
            mean = {}
            for key, total in sums.items():
                like = whole[key]
                kind = kind_of_array(key, like.dtype)
                change = fixed.mean(key, total, kind, by)
                before = self.sent.get(key) if name == "arrays" else None
                if before is not None:  # what did not change keeps its bits, also those of -0.0
                    change = np.where(change == 0, before, before.astype(np.float64) + change)
                if name == "arrays" and key.endswith("running_var"):
                    change = _not_negative(change, fixed.resolution(kind) / (by or 1))
                mean[key] = cast(change, like.dtype)
            content[name] = pack({key: mean[key] for key in whole if key in mean})
        metrics = MetricRecord()
        for key, total in totals.items():
            if kind_of_metric(key, self.weight) == "count":
                metrics[key] = fixed.count(key, total, count) / count
            else:
                metrics[key] = float(fixed.mean(key, total, "statistics", weight))
        return RecordDict({**content, "metrics": metrics})


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
    totals, count = opened.sums[TOTALS], len(opened.replies)
    weight = fixed.count(weight_key, totals[weight_key], count)
    images = fixed.count(protocol.BATCH_EXAMPLES, totals[protocol.BATCH_EXAMPLES], count, least=1)
    kinds = [str(record[KIND]) for record in configs_in(opened.replies[0].content).values() if KIND in record]
    kind = kinds[0] if kinds else ""
    of_values = kind_of_exchange(kind)
    sums = opened.sums.get("arrays", {})
    tensors = {key: fixed.mean(key, total, of_values, weight) for key, total in sums.items()}
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
        share = images // count + (place < images % count)  # they add up to the images of all
        mean = Contribution(
            kind,
            tensors,
            images=share,
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


def _chain(strategy: Strategy) -> list[Strategy]:
    """The strategy, the one that it wraps, and so on."""
    chain = [strategy]
    while isinstance(inside := getattr(chain[-1], "strategy", None), Strategy):
        chain.append(inside)
    return chain


def _needs_more(strategy: Strategy) -> str | None:
    """What a strategy does with the replies of single clients, or None if their mean is enough."""
    if getattr(strategy, "robust", None) is not None:
        return "compares the replies of single clients (robust, max_share, clip_norm, clip_factor, plausible)"
    if isinstance(strategy, Rule):
        return use_of_single_replies(strategy)
    if type(strategy).aggregate_train in [mean.aggregate_train for mean in _MEANS]:
        return None
    return "is not known to compute with nothing but the mean of the replies"
