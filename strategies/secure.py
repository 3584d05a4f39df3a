"""Secure aggregation (Bonawitz et al. 2017, https://doi.org/10.1145/3133956.3133982) around any rule that needs a mean.

The server learns the weighted sum of the clients' replies and none of the replies: each client adds masks that cancel
in the sum. It holds against a server, or a reader of its memory, that follows the protocol, also together with fewer
clients than the threshold. A server that deviates from the protocol, for instance by inventing clients, is not
withstood: the paper's consistency check needs an infrastructure of signed keys.

The wrapped strategy receives, for every client in the sum, the same reply: the mean model, the means of other records
and metrics, and the mean number of examples. So the result of any rule that computes with the mean only is unchanged.
FedTAN's exchanges are masked in the same way, each with secrets of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.codec import KIND, Agreement, Contribution, contribution_to_records
from fedbn_flwr.exchange.config import ExchangeConfig
from fedbn_flwr.exchange.round import Answers
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, cast
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import arrays_of, with_content
from fedbn_flwr.messages.masking import TOTALS, FixedPoint, kind_of_array, kind_of_exchange, kind_of_metric

from ._rule import Round, Rule, use_of_single_replies
from ._session import Expected, SecureSettings, Session, Sums
from ._wrapper import Wrapper

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
        chain = _chain(strategy)
        self._innermost = chain[-1]
        for inside in reversed(chain):
            if (why := _needs_more(inside)) is not None:
                raise SettingsError(
                    f"{type(inside).__name__} {why}, and with Secure the server learns only the mean of all replies; "
                    "use it without Secure, or another strategy inside Secure, for instance FedAvg"
                )
        self._session: Session | None = None
        self._sent: Arrays = {}  # the arrays that the clients received at the beginning of the round

    # --- before training ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        direct = getattr(self._innermost, "direct", False)
        if isinstance(direct, ExchangeConfig) or (direct and ExchangeConfig.from_environment() is not None):
            raise SettingsError(
                "this ServerApp has an exchange service, whose streams Secure does not mask; set strategy.direct of "
                f"{type(self._innermost).__name__} to false"
            )

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "secure_threshold": self.settings.threshold}

    # --- a round ---

    def instructions(self, round: Round) -> dict[str, Any]:
        settings = self.settings
        ranges = [float(settings.update_range), float(settings.statistics_range), float(settings.max_examples)]
        asked: dict[str, Any] = {protocol.SECURE_RANGES: ranges, protocol.SECURE_WEIGHT: self._weight}
        return asked | ({protocol.SECURE_EQUAL: ",".join(equal)} if (equal := sorted(self.traits.equal)) else {})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._session, self._sent = None, {}
        exchanges = _MaskedExchanges(grid, self)
        messages = list(super().configure_train(server_round, arrays, config, exchanges))
        if not messages:
            return messages
        if self._session is None:
            self._sent = _model_of(messages[0].content)
            nodes = [message.metadata.dst_node_id for message in messages]
            self._session = self.session(grid, nodes, 1)
        session = self._session
        nodes = [node for m in messages if (node := m.metadata.dst_node_id) in session.nodes]
        return _with_config(messages, nodes, session.instructions(0, nodes))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        session, self._session = self._session, None
        if session is None or self.round is None:
            return self.rule.aggregate_train(server_round, replies)
        shapes = {key: value.shape for key, value in unpack(self.round.arrays).items()}
        opened = session.open(0, replies, Expected(frozenset({self._weight}), shapes))
        mean = self._mean_reply(session.fixed, opened)
        means = [_with_mean(reply, mean) for reply in opened.replies]
        result = self.rule.aggregate_train(server_round, [*means, *opened.refused, *session.failed])
        self.used = self.rule.used
        return result

    def session(self, grid: Grid, nodes: list[int], parts: int) -> Session:
        assert self.round is not None
        return Session(grid, nodes, parts, self.round.config, self.settings, f"round {self.round.number}")

    def _mean_reply(self, fixed: FixedPoint, opened: Sums) -> RecordDict:
        """The mean of the replies in the sum; counts too are means, so that they add up to the total."""
        assert self.round is not None
        count, totals = len(opened.replies), opened.sums[TOTALS]
        weight = float(fixed.decode(totals[self._weight], "count"))
        whole = unpack(self.round.arrays)
        content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {"arrays": ArrayRecord()}
        for name, sums in opened.sums.items():
            if name == TOTALS:
                continue
            by = float(count) if name in self.traits.equal else weight
            mean = {}
            for key, total in sums.items():
                like = whole[key]
                change = fixed.decode(total, kind_of_array(key, like.dtype)) / (by or 1.0)
                before = self._sent.get(key) if name == "arrays" else None
                if before is not None:  # what did not change keeps its bits, also those of -0.0
                    change = np.where(change == 0, before, before.astype(np.float64) + change)
                mean[key] = cast(change, like.dtype)
            content[name] = pack({key: mean[key] for key in whole if key in mean})
        metrics = MetricRecord()
        for key, total in totals.items():
            kind = kind_of_metric(key, self._weight)
            metrics[key] = float(fixed.decode(total, kind)) / (count if kind == "count" else weight or 1.0)
        return RecordDict({**content, "metrics": metrics})

    @property
    def _weight(self) -> str:
        return str(getattr(self._innermost, "weighted_by_key", protocol.NUM_EXAMPLES))


class _MaskedExchanges(GridAround):
    """The grid for a wrapped FedTAN: it masks the exchanges, and returns the mean contribution for each client."""

    def __init__(self, inner: Grid, secure: Secure) -> None:
        super().__init__(inner)
        self._secure = secure
        self._part = 0

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        return None  # without messages the contributions would not be masked

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != protocol.COHORT_QUERY:
            return self.inner.send_and_receive(messages, timeout=timeout)
        secure, content = self._secure, messages[0].content
        nodes = [message.metadata.dst_node_id for message in messages]
        config = next(iter(configs_in(content).values()))
        session = secure._session
        failed: list[Message] = []
        if config[protocol.COHORT_STEP] == 0:
            secure._sent = _model_of(content)
        self._part += 1
        if session is None or self._part >= session.parts:
            parts = 1 + _exchanges(secure._sent, config)
            session = secure._session = secure.session(self.inner, nodes, parts)
            self._part, failed = 1, session.failed
        nodes = [node for node in nodes if node in session.nodes]
        asked = _with_config(messages, nodes, session.instructions(self._part, nodes))
        expected = Expected(frozenset({secure._weight, protocol.BATCH_EXAMPLES}), None)
        opened = session.open(self._part, self.inner.send_and_receive(asked, timeout=timeout), expected)
        return [*_mean_contributions(session.fixed, opened, secure._weight), *opened.refused, *failed]


def _exchanges(model: Arrays, config: ConfigRecord) -> int:
    """The exchanges of a round in which each batch norm is used once; a model that reuses one has a second session."""
    layers = sum(key.endswith("running_mean") for key in model)
    return layers * ((1 if config[protocol.COHORT] == "fused" else 2) + bool(config[protocol.COHORT_BACKWARD]))


def _mean_contributions(fixed: FixedPoint, opened: Sums, weight_key: str) -> list[Message]:
    totals, count = opened.sums[TOTALS], len(opened.replies)
    weight = float(fixed.decode(totals[weight_key], "count")) or 1.0
    images = int(fixed.decode(totals[protocol.BATCH_EXAMPLES], "count"))
    kinds = [str(record[KIND]) for record in configs_in(opened.replies[0].content).values() if KIND in record]
    kind = kinds[0] if kinds else ""
    sums = opened.sums.get("arrays", {})
    tensors = {key: fixed.decode(total, kind_of_exchange(kind)) / weight for key, total in sums.items()}
    # FedTAN refuses tensors of other names and shapes.
    if kind == "moments" and len({tensors[key].shape for key in ("mean", "var") if key in tensors}) == 1 < len(tensors):
        tensors["var"] = tensors["var"] - tensors["mean"] ** 2
    if kind != "gradients" and "var" in tensors:
        tensors["var"] = np.maximum(tensors["var"], 0.0)  # the fixed point may leave a zero below zero
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
            examples=max(images, 1),  # the same for all; a batch must not exceed it
            partition=partition if isinstance(partition, int) else None,
        )
        means.append(with_content(reply, contribution_to_records(mean)))
    return means


def _with_mean(reply: Message, mean: RecordDict) -> Message:
    return with_content(reply, RecordDict({**mean, **configs_in(reply.content)}))


def _with_config(messages: Iterable[Message], nodes: list[int], more: Mapping[str, Any]) -> list[Message]:
    """The messages to these nodes, with further config keys."""
    changed = []
    for message in messages:
        if message.metadata.dst_node_id in nodes:
            name, config = next(iter(configs_in(message.content).items()))
            content = RecordDict({**message.content, name: ConfigRecord({**config, **more})})
            changed.append(with_content(message, content))
    return changed


def _model_of(content: RecordDict) -> Arrays:
    return unpack(arrays_of(content)) if arrays_in(content) else {}


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
