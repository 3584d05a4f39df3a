"""Secure aggregation (Bonawitz et al. 2017, https://doi.org/10.1145/3133956.3133982) for strategies that need a mean.

The server learns the weighted sum of the clients' replies and none of the replies: each client adds masks that cancel
in the sum. It holds against a server, or a reader of its memory, that follows the protocol, also together with fewer
clients than the threshold. A server that deviates from the protocol, for instance by inventing clients, is not
withstood: the paper's consistency check needs an infrastructure of signed keys.

The wrapped strategy receives, for every client in the sum, the same reply: the mean model, the means of other records
and metrics, and the mean number of examples. So the result of any rule that computes with the mean only is unchanged.
FedTAN's exchanges are masked in the same way, each with secrets of its own.

A sum that cannot be opened, or that honest replies cannot have, is discarded: the round is skipped. It is not repeated
with fewer clients, since two sums of the same updates would reveal those of the clients that are in only one of them.

A client is named as faulty only if that is certain while more than half of the clients follow the protocol. Where a
share does not open, its sender or its receiver is at fault: a client is if at least half of all clients contradict it,
or if it contradicts itself. Shares that open and do not give the secret of the sender's public key are the sender's.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.exchange.carriers import service_of
from fedbn_flwr.exchange.codec import Agreement, Contribution, contribution_to_records
from fedbn_flwr.exchange.round import Answers
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, cast, fault
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import (
    MOST_EXAMPLES,
    gate,
    partition_of,
    read_reply,
    refused,
    sent_model,
    with_content,
)
from fedbn_flwr.messages.screening import reason_of
from fedbn_flwr.norms.roles import Role, is_variance, roles
from fedbn_flwr.strategies import Round, Wrapper

from . import client
from .masking import (
    KEY_BYTES,
    OWN,
    PAIR,
    SEALED_BYTES,
    TOTALS,
    FixedPoint,
    NotOpened,
    Place,
    add_masks,
    from_vector,
    is_usable,
    join,
    key_of,
    pair_key,
    private_key,
    public_key,
    stream_key,
    to_vector,
    unseal,
)

Values = dict[Place, Array]
_Range = Annotated[float, Ge(1), Le(2**31), "a number from 1 to 2**31"]
_MOST_SKIPPED = 3  # rounds in a row without a client that could be named


class Secure(Wrapper):
    """Any strategy that needs only the mean of the clients' replies; the server cannot read a single reply.

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


# --- a round ---


def certainly_faulty(disputes: Collection[frozenset[int]], clients: int) -> dict[int, str]:
    """The nodes that are at fault, with the reasons, if more than half of all clients follow the protocol.

    A dispute is the sender and the receiver of a share that does not open.
    """
    found = {}
    for node, pairs in Counter(itertools.chain.from_iterable(disputes)).items():
        if frozenset({node}) in disputes:
            found[node] = "a share does not open that it sent to itself"
        elif pairs > 1 and 2 * pairs >= clients:
            found[node] = f"shares between it and {pairs} of {clients} clients do not open"
    return found


class MaskedRound(GridAround):
    """The masked messages of a round, and the grid for a wrapped FedTAN, where each client replies with the mean.

    The first messages begin a session of their nodes, for the reply to the train message (part 0) and all exchanges.
    Nodes that do not agree on keys take no part, nor do those that earlier rounds found to be faulty.
    """

    def __init__(self, inner: Grid, rule: Secure) -> None:
        super().__init__(inner)
        self.rule, self.faulty = rule, rule.memory.faulty
        self.named = False  # whether a client was found to be faulty in this round
        self.sent: Arrays = {}  # the arrays that the clients received at the beginning of the round
        self.part = self.parts = 0  # 0 parts: no session has begun
        self._failed: list[Message] = []  # errors of nodes that are not in the session
        self._names: dict[int, str] = {}  # of the nodes that answer
        self._disputes: set[frozenset[int]] = set()  # sender and receiver of each share that did not open

    def train_messages(self, messages: list[Message]) -> list[Message]:
        if not self.parts:
            self._begin(messages)
        self.part = 0
        return self._masking(messages)

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        return None  # without messages the contributions would not be masked

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != protocol.COHORT_QUERY:
            return self.inner.send_and_receive(messages, timeout=timeout)
        self.part += 1
        if self.part >= self.parts:  # the first one, or one of a model that uses a layer twice
            self._begin(messages)
            self.part = 1
        replies, sums, errors = self._open(self.inner.send_and_receive(self._masking(messages), timeout=timeout))
        return [*self._mean_contributions(replies, sums), *errors]

    # --- means ---

    def means(self, replies: Iterable[Message], whole: Arrays) -> list[Message]:
        """The mean reply from each client in the sum, and errors from the others; `whole` is the global model."""
        found, sums, errors = self._open(replies, whole)
        like = {(name, key): whole.get(key, value) for (name, key), value in sums.items()}
        means = self._fixed.means(sums, self._fixed.kinds(like), len(found))
        # Counts and weights too are means, so that they add up to the total.
        metrics = MetricRecord({key: float(mean) for (name, key), mean in means.items() if name == TOTALS})
        error = self._fixed.resolution("statistics") / (metrics[self.rule.leaf.weighted_by_key] * len(found) or 1)  # type: ignore[operator]
        content = RecordDict({"arrays": pack({}), "metrics": metrics})
        for name in sorted({name for name, _ in sums} - {TOTALS}):
            mean = {key: means[name, key] for key in whole if (name, key) in means}
            if name == "arrays":
                mean = {key: self._changed(key, change, error) for key, change in mean.items()}
            content[name] = pack({key: cast(value, whole[key].dtype) for key, value in mean.items()})
        return [*(with_content(each, RecordDict({**content, **configs_in(each.content)})) for each in found), *errors]

    def _changed(self, key: str, change: Array, error: float) -> Array:
        before = self.sent.get(key)
        if before is not None:  # what did not change keeps its bits, also those of -0.0
            change = np.where(change == 0, before, before.astype(np.float64) + change)
        return _not_negative(change, error) if is_variance(key) else change

    def _mean_contributions(self, replies: Sequence[Message], sums: Values) -> list[Message]:
        count, kind = len(replies), client.kind_in(replies[0].content)
        means = self._fixed.means(sums, self._fixed.kinds(sums, kind), count)
        tensors = {key: mean for (name, key), mean in means.items() if name == "arrays"}
        batch = round(float(means[TOTALS, protocol.BATCH_EXAMPLES]) * count)
        weight = float(means[TOTALS, self.rule.leaf.weighted_by_key])
        error = self._fixed.resolution("statistics") / (weight * count or 1)
        # FedTAN refuses tensors of other names and shapes.
        if kind == "moments" and len({mean.shape for mean in tensors.values()}) == 1 and {"mean", "var"} <= {*tensors}:
            square = tensors["mean"] ** 2
            tensors["var"] = tensors["var"] - square
            error += float((2 * error * np.sqrt(square) + 1e-12 * square).max(initial=0.0))
        if kind != "gradients" and "var" in tensors:
            tensors["var"] = _not_negative(tensors["var"], error)
            if (tensors["var"] < 0).any():
                raise NotOpened(f"a variance is {tensors['var'].min():g}; those of honest clients have none below zero")
        found = []
        for place, reply in enumerate(replies):
            readable = next(iter(metrics_in(reply.content).values()), MetricRecord())
            share = batch // count + (place < batch % count)  # they add up to the examples of all
            mean = Contribution(
                kind,
                tensors,
                batch=share,
                values=share * int(readable.get(protocol.BATCH_VALUES, 0)),  # type: ignore[arg-type]
                remaining=int(readable.get(protocol.EXCHANGES_LEFT, -1)),  # type: ignore[arg-type]
                examples=min(batch, MOST_EXAMPLES),  # the same for all; a batch must not exceed it
                partition=partition_of(reply.content),
            )
            found.append(with_content(reply, contribution_to_records(mean)))
        return found

    # --- the session ---

    def _begin(self, messages: Sequence[Message]) -> None:
        """A session with those of the messages' nodes that answer. RunFailed if they are fewer than the threshold."""
        content, nodes = messages[0].content, [message.metadata.dst_node_id for message in messages]
        config = next(iter(configs_in(content).values()))
        if not config.get(protocol.COHORT_STEP):  # later messages of a layer-wise round have no model
            self.sent = unpack(sent_model(content)) if arrays_in(content) else {}
        self.parts = 1
        if protocol.COHORT_STEP in config:  # the exchanges of a round in which each batch norm is used once
            layers = [*roles(self.sent).values()].count(Role.STATISTICS) // 2
            each = (1 if config[protocol.COHORT] == "fused" else 2) + bool(config[protocol.COHORT_BACKWARD])
            self.parts += layers * each
        session = {client.SESSION: secrets.token_hex(16)}  # no function of the seed: a resumed round has another one
        self._config = protocol.run_keys(config) | {protocol.ROUND: config[protocol.ROUND], **session}
        self._what = f"round {config[protocol.ROUND]!r}"
        self._failed = [_error(node, self.faulty[node]) for node in nodes if node in self.faulty]
        nodes = [node for node in nodes if node not in self.faulty]
        self.threshold = max(2, int(self.rule.threshold * len(nodes) + 1e-9) + 1)
        shape = 1, KEY_BYTES * (1 + 2 * self.parts)
        self._keys = self._ask("keys", nodes, {"parts": np.array(self.parts)}, shape)
        self.roster = sorted(self._keys)
        self._fixed = FixedPoint(len(self.roster), *self.rule.ranges, self.rule.leaf.weighted_by_key, self.rule.equal)
        keys = np.concatenate([self._keys[node] for node in self.roster])
        agreed = {"nodes": np.array(self.roster, np.uint64), "keys": keys, "threshold": np.array(self.threshold)}
        self._shares = self._ask("shares", self.roster, agreed, (len(self.roster), self.parts * 2 * SEALED_BYTES))

    def _masking(self, messages: Sequence[Message]) -> list[Message]:
        """The messages to the nodes of the session, which ask for replies under the masks of this part."""
        asked = [message for message in messages if message.metadata.dst_node_id in self._shares]
        self._peers = sorted(message.metadata.dst_node_id for message in asked)
        self._check_threshold("training", len(asked), len(messages), {})
        more = {
            client.SESSION: self._config[client.SESSION],
            client.PART: self.part,
            client.PEERS: np.array(self._peers, "<u8").tobytes(),
            client.RANGES: [*self.rule.ranges],
            client.WEIGHT: self.rule.leaf.weighted_by_key,
            client.EQUAL: ",".join(sorted(self.rule.equal)),
        }
        masking = []
        for message in asked:
            name, config = next(iter(configs_in(message.content).items()))
            content = RecordDict({**message.content, name: ConfigRecord({**config, **more})})
            masking.append(with_content(message, content))
        return masking

    def _open(
        self, replies: Iterable[Message], model: Arrays | None = None
    ) -> tuple[list[Message], Values, list[Message]]:
        """The usable replies in the order of nodes, their sum, and errors for the other nodes.

        Arrays must have the shapes of the model's; None: any shapes, as in an exchange.
        """
        arrived = sorted(gate(replies), key=_node_of)
        errors, self._failed = self._failed + [reply for reply in arrived if reply.has_error()], []
        found = {
            _node_of(reply): reply for reply in arrived if not reply.has_error() and _node_of(reply) in self._peers
        }
        forms = {node: _form(reply.content) for node, reply in found.items()}
        (most, count), *others = Counter(forms.values()).most_common() or [(frozenset(), 0)]
        if others and 2 * count <= len(forms):
            raise NotOpened(
                "the replies have different arrays or are of different exchanges, and most have no common form"
            )
        for node in [node for node, form in forms.items() if form != most]:
            odd = min(most ^ forms[node], key=str)[0]
            errors.append(
                refused(found.pop(node), f"its {odd} differs from that of most clients (missing, form or dtype)")
            )
        reasons = {_node_of(error): reason_of(error) for error in errors}
        self._check_threshold("masked replies", len(found), len(self._peers), reasons)
        values = [client.values_in(reply.content) for reply in found.values()]
        self._check_masked(values[0], model)
        total: Array = sum(map(to_vector, values), np.zeros(1, np.uint64))
        self._unmask(total, list(found))
        return list(found.values()), from_vector(total, values[0]), errors

    def _check_masked(self, values: Values, model: Arrays | None) -> None:
        """NotOpened if the form of most replies, here the first one's, is not that of masked ones."""
        arrays = {place: (model or {}).get(place[1], value).shape for place, value in values.items()}
        metrics = {place for place in values if place[0] == TOTALS} | {(TOTALS, self.rule.leaf.weighted_by_key)}
        if model is None:
            metrics.add((TOTALS, protocol.BATCH_EXAMPLES))
        for place, shape in {**arrays, **dict.fromkeys(metrics, ())}.items():
            if place not in values or values[place].dtype != np.uint64 or values[place].shape != shape:
                raise NotOpened(f"most replies have no masked {place} of shape {shape}")

    def _unmask(self, total: Array, survivors: Sequence[int]) -> None:
        """Remove all masks from the sum of the survivors, who reveal what is necessary."""
        for (node, which), secret in self._secrets(client.revealed(self._peers, survivors), survivors).items():
            if which == OWN:
                keys = [(stream_key(secret), -1)]
            else:  # the survivors' masks with a client that dropped out are left in the sum, with these signs
                mine = private_key(secret)
                pairs = {other: pair_key(mine, self._public(other, PAIR)) for other in survivors}
                keys = [(key, -1 if node > other else 1) for other, key in pairs.items()]
            add_masks(total, keys)

    def _secrets(self, wanted: Sequence[tuple[int, int]], survivors: Sequence[int]) -> dict[tuple[int, int], int]:
        """The wanted secrets, each a node and which of its two, from their shares."""
        about = {"part": np.array(self.part), "survivors": np.array(survivors, np.uint64)}
        given = self._ask("unmask", survivors, about, (len(wanted), KEY_BYTES))
        # Positions of shares begin with 1: the value at 0 is the secret.
        shares: dict[tuple[int, int], dict[int, int]] = {each: {} for each in wanted}
        disputes = set()
        for receiver, keys in given.items():
            place = self.roster.index(receiver)
            for key, (sender, which) in zip(keys, wanted, strict=True):
                start = SEALED_BYTES * (2 * self.part + which)
                sealed = self._shares[sender][place, start : start + SEALED_BYTES]
                share = unseal(key.tobytes(), sealed.tobytes())
                if share is None:
                    disputes.add(frozenset({sender, receiver}))
                else:
                    shares[sender, which][1 + place] = int.from_bytes(share, "little")
        if not disputes <= self._disputes:
            self._settle(disputes)
        found = {}
        for (node, which), some in shares.items():
            if len(some) >= self.threshold:
                secret = join(dict(list(some.items())[: self.threshold]))
                if public_key(secret) == self._public(node, which):
                    found[node, which] = secret
                else:
                    self._blame(node, "the shares that it sent give another secret than that of its public key")
        if missing := len(wanted) - len(found):
            raise NotOpened(f"the shares of the secrets of {missing} of {len(wanted)} clients do not give the secret")
        return found

    def _public(self, node: int, which: int) -> bytes:
        """The public key of a client's secret of this part."""
        return bytes(self._keys[node][0, key_of(self.part, which)])

    # --- faulty clients ---

    def _settle(self, disputes: set[frozenset[int]]) -> None:
        self._disputes |= disputes
        for node, reason in certainly_faulty(self._disputes, len(self.roster)).items():
            self._blame(node, reason)
        if unsettled := sum(pair.isdisjoint(self.faulty) for pair in self._disputes):
            log(
                WARNING,
                "%s, secure aggregation: shares between two clients do not open, for %d pairs; one client of each "
                "pair is at fault, and it cannot be known which one",
                self._what, unsettled,
            )  # fmt: skip

    def _blame(self, node: int, reason: str) -> None:
        if node not in self.faulty:
            self.named = True
            self.faulty[node] = f"left out since {self._what}: {reason}"
            why = f"{self._names[node]} takes no part in the rounds that follow: {reason}"
            log(WARNING, "%s, secure aggregation: %s", self._what, why)

    def _ask(self, stage: str, nodes: Sequence[int], arrays: Arrays, shape: tuple[int, int]) -> dict[int, Array]:
        """The bytes of this shape in each node's answer; RunFailed below the threshold.

        Nodes that do not answer before the session begins take no part in it.
        """
        sent = RecordDict({"config": ConfigRecord({**self._config, client.STAGE: stage}), "secure": pack(arrays)})
        messages = [Message(RecordDict({**sent}), node, client.QUERY) for node in nodes]
        found: dict[int, Array] = {}
        without = dict.fromkeys(nodes, f"it did not answer in {self.rule.timeout:g} s")
        for reply in sorted(gate(self.inner.send_and_receive(messages, timeout=self.rule.timeout)), key=_node_of):
            node = _node_of(reply)
            if reply.has_error():
                without[node] = reason_of(reply)
                continue
            partition = partition_of(reply.content)
            self._names[node] = f"node {node}" if partition is None else f"client {partition} (node {node})"
            value = next(iter(client.values_in(reply.content).values()), np.zeros(0))
            if value.dtype == np.uint8 and value.shape == shape:
                found[node] = value
            else:
                without[node] = f"its answer is {value.dtype} of shape {value.shape}, expected bytes of shape {shape}"
        for node, reason in _bad_keys(found).items() if stage == "keys" else ():
            self._blame(node, reason)
            without[node] = reason
            del found[node]
        reasons = {node: reason for node, reason in without.items() if node not in found}
        self._check_threshold(f"stage {stage}", len(found), len(nodes), reasons)
        for node, reason in reasons.items():
            log(WARNING, "%s, secure aggregation, stage %s: without node %d: %s", self._what, stage, node, reason)
            if stage != "unmask":
                self._failed.append(_error(node, reason))
        return found

    def _check_threshold(self, stage: str, found: int, asked: int, reasons: Mapping[int, str]) -> None:
        if found >= self.threshold:
            return
        listed = "".join(f"\n  - node {node}: {reason}" for node, reason in reasons.items())
        if stage == "stage keys":
            listed += "\nonly clients that fedbn_flwr.client_app serves can take part"
        raise RunFailed(
            f"{self._what}, secure aggregation, {stage}: {found} of {asked} clients answered, {self.threshold} are "
            f"needed to open a sum:{listed or ' no reply'}"
        )


def _node_of(reply: Message) -> int:
    return reply.metadata.src_node_id


def _error(node: int, reason: str) -> Message:
    """An error as if it were the node's."""
    asked = Message(RecordDict(), node, client.QUERY)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=asked)


def _form(content: RecordDict) -> frozenset[tuple[object, ...]]:
    """What replies must have in common to be added."""
    exchange = (
        client.kind_in(content),
        *(
            record.get(k)
            for record in metrics_in(content).values()
            for k in (protocol.EXCHANGES_LEFT, protocol.BATCH_VALUES)
        ),
    )
    values = client.values_in(content)
    return frozenset({("exchange", str(exchange)), *((p, each.dtype.str, each.shape) for p, each in values.items())})


def _bad_keys(found: Mapping[int, Array]) -> dict[int, str]:
    """The nodes whose public keys cannot be used, with the reasons."""
    public = {node: [each.tobytes() for each in value.reshape(-1, KEY_BYTES)] for node, value in found.items()}
    times = Counter(itertools.chain.from_iterable(public.values()))
    bad = {}
    for node, keys in public.items():
        if not all(map(is_usable, keys)):
            bad[node] = "with one of its public keys no client can agree on a secret"
        elif max(times[each] for each in keys) > 1:  # an honest client's are random and unknown to others
            bad[node] = "one of its public keys is not the only one of its kind"
    return bad


def _not_negative(values: Array, error: float) -> Array:
    """Variances, of which rounding may leave zeros below zero."""
    return np.where((values < 0) & (values >= -error), 0.0, values)
