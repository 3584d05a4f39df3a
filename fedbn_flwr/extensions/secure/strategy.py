"""Secure aggregation (Bonawitz et al. 2017, https://doi.org/10.1145/3133956.3133982) for strategies that need a mean.

The server learns the weighted sum of the clients' replies, but no single reply: each client adds masks that cancel in
the sum. This protects against a server that follows the protocol, and against a reader of its memory, even if fewer
clients than the threshold help them. It does not protect against a server that deviates from the protocol, for instance
by inventing clients: the paper's consistency check needs an infrastructure of signed keys.

The wrapped strategy receives the same reply for every client in the sum: the mean model, the means of other records and
metrics, and the mean number of examples. So a strategy that uses only the mean gives the same result as without Secure.

If the strategy pools statistics, clients send second moments about the running mean that they received, which are
linear: v_i + (mu_i - m)^2. The server subtracts (mu - m)^2 from their mean, which leaves the pooled variance.

If a sum cannot be opened, or cannot come from honest replies, it is discarded and the round is skipped. The round is
not repeated with fewer clients, since the difference of two sums would reveal the updates of the clients in only one of
them. The masks hide which client is at fault.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import LOG, RoundSkipped, RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, cast, squared_distance
from fedbn_flwr.messages.arrays import config_of, configs_in, pack, unpack, variance_keys
from fedbn_flwr.messages.gate import form_problems, gate
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.reply import Reply, read_reply, reason_of, refusal, sent_model, with_config, with_content
from fedbn_flwr.server.poll import Poll
from fedbn_flwr.strategies import Round, Wrapper
from fedbn_flwr.trees import Tree

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
_MOST_SKIPPED = 3  # rounds in a row


# The guarantees that the strategy inside must give (`server/wrapper.py`).
_NEEDS = {
    "inside": "{outer} hides the single replies; use one of them",
    **dict.fromkeys(
        ("mean", "known"),
        "with Secure the server learns only the mean of all replies; use it without Secure, or another strategy "
        "inside Secure, for instance FedAvg",
    ),
}


class Secure(Wrapper):
    """Hide each client's reply from the server, around any strategy that needs only the mean of the replies.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`; this wrapper must be the outermost one.
    threshold : float (default: 0.5)
        More than this share of a round's clients must remain to its end, or the sum stays hidden; the others may drop
        out at any time.
    update_range : float (default: 1024)
        The largest change of a parameter in a round; a client that exceeds it drops out, with an error that names the
        key.
    statistics_range : float (default: 65536)
        The largest change of a running mean or variance in a round, and the largest metric. With pooled statistics
        the square of a running mean's change adds to the change of the variance.
    max_examples : int (default: 1048576)
        The largest number of examples of a client.
    timeout : float (default: 600)
        The time limit in seconds for each message that agrees on keys or opens a sum.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        skipped: list[int] = field(default_factory=list)  # rounds

    memory: Memory
    breaks = {"inside": "hides the replies of single clients"}

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
        super().__init__(strategy, _NEEDS)
        if self.traits.min_batch:
            raise SettingsError(
                f"{self.base} exchanges statistics of batches, which Secure does not mask; use it without Secure"
            )
        for name, value in {"update_range": update_range, "statistics_range": statistics_range}.items():
            if value * max_examples > 2**44:
                raise SettingsError(
                    f"{name} is {value!r} and max_examples is {max_examples!r}; expected a product of at most 2**44, "
                    "since 64 bits must hold the sum"
                )
        self.threshold, self.timeout = threshold, timeout
        self.ranges = float(update_range), float(statistics_range), float(max_examples)
        # Records that are averaged with equal weights.
        self.equal = frozenset(name for name, kind in self.traits.records.items() if kind == "equal")
        self._masked: MaskedRound | None = None

    def notes(self) -> Tree:
        skipped = {"secure_skipped": self.memory.skipped} if self.memory.skipped else {}
        return {**super().notes(), "secure_threshold": self.threshold, **skipped}

    # --- a round ---

    def outgoing(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        self._masked = MaskedRound(round.grid, self, messages) if messages else None
        return self._masked.masking(messages) if self._masked else messages

    def incoming(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The mean reply, once for every client in the sum."""
        assert self._masked is not None
        try:
            means = gate(self._masked.means(messages, unpack(round.arrays)))
            self._check(round, means[0])
        except NotOpened as error:
            self._skip(round.number, f"{error}; the masks hide which client is at fault")
        return means

    def _check(self, round: Round, mean: Message) -> None:
        """Raise NotOpened if the mean has values that no honest reply has: a strategy would reject every copy of it."""
        reply = read_reply(mean, records=self.traits.records)
        problem = arrays_problem(reply.arrays, unpack(round.arrays), reply.arrays)
        for rule in self.chain:
            problem = problem or rule.problem(round, reply)
        if problem is not None:
            raise NotOpened(f"the mean of the replies: {problem}")

    def _skip(self, server_round: int, why: str) -> NoReturn:
        LOG.warning("round %d is skipped, the model stays as it is: %s", server_round, why)
        self.memory.skipped.append(server_round)
        last = self.memory.skipped[-_MOST_SKIPPED:]
        if last == list(range(server_round + 1 - _MOST_SKIPPED, server_round + 1)):
            raise RunFailed(
                f"rounds {', '.join(map(str, last))} were skipped; the last one: {why}. To find the client, train some "
                "rounds without Secure, or with some of the clients"
            )
        raise RoundSkipped(why)


class MaskedRound:
    """Ask for masked replies in a round's messages. Nodes that do not agree on keys take no part."""

    def __init__(self, grid: Grid, rule: Secure, messages: Sequence[Message]) -> None:
        """Begin a session with the messages' nodes that answer; RunFailed if they are too few for the threshold."""
        self.grid, self.rule = grid, rule
        content, nodes = messages[0].content, [message.metadata.dst_node_id for message in messages]
        self.sent = unpack(sent_model(content))  # the arrays that the clients received
        config = config_of(content)
        session = {client.SESSION: secrets.token_hex(16)}  # random, since a resumed round needs another one
        self._config = protocol.run_keys(config) | {protocol.ROUND: config[protocol.ROUND], **session}
        self._what = f"round {config[protocol.ROUND]!r}"
        self._failed: list[Message] = []  # errors from nodes outside the session
        self.threshold = max(2, int(rule.threshold * len(nodes) + 1e-9) + 1)
        if len(nodes) < self.threshold:
            raise RunFailed(
                f"{self._what}, secure aggregation: a sum of one client is its model; let more clients train"
            )
        self._keys = self._ask("keys", nodes, {}, (1, 3 * KEY_BYTES))
        self.roster = sorted(self._keys)
        self._fixed = FixedPoint(len(self.roster), *rule.ranges, rule.base.weighted_by_key, rule.equal)
        keys = np.concatenate([self._keys[node] for node in self.roster])
        agreed = {"nodes": np.array(self.roster, np.uint64), "keys": keys, "threshold": np.array(self.threshold)}
        self._shares = self._ask("shares", self.roster, agreed, (len(self.roster), 2 * SEALED_BYTES))
        self._peers = sorted(self._shares)

    def masking(self, messages: Sequence[Message]) -> list[Message]:
        """The messages to the nodes of the session, which ask for replies under masks."""
        more = {
            client.SESSION: self._config[client.SESSION],
            client.PEERS: np.array(self._peers, "<u8").tobytes(),
            client.RANGES: [*self.rule.ranges],
            client.WEIGHT: self.rule.base.weighted_by_key,
            client.EQUAL: protocol.join(self.rule.equal),
            **({client.POOLED: True} if self.rule.traits.pooled else {}),
        }
        return [with_config(message, more) for message in messages if message.metadata.dst_node_id in self._shares]

    def means(self, replies: Iterable[Message], whole: Arrays) -> list[Message]:
        """The mean reply from each client in the sum, and errors from the others; `whole` is the global model."""
        usable, sums, errors = self._open(replies)
        like = {(name, key): whole.get(key, value) for (name, key), value in sums.items()}
        means = self._fixed.means(sums, self._fixed.kinds(like), len(usable))
        # Counts and weights are also means, so that they add up to the total.
        metrics = MetricRecord({key: float(mean) for (name, key), mean in means.items() if name == TOTALS})
        weight: Any = metrics[self.rule.base.weighted_by_key]
        error = self._fixed.resolution("statistics") / (weight * len(usable) or 1)
        content = RecordDict({"arrays": pack({}), "metrics": metrics})
        for name in sorted({name for name, _ in sums} - {TOTALS}):
            mean = {key: means[name, key] for key in whole if (name, key) in means}
            if name == "arrays":
                mean = self._model(mean, error)
            content[name] = pack({key: cast(value, whole[key].dtype) for key, value in mean.items()})
        return [
            *(with_content(message, RecordDict({**configs_in(message.content), **content})) for message in usable),
            *errors,
        ]

    def _model(self, changes: Arrays, error: float) -> dict[str, Array]:
        """The mean model; `error` is the largest rounding error of a change."""
        model = {key: self._changed(key, change) for key, change in changes.items()}
        shifts = squared_distance(model, self.sent) if self.rule.traits.pooled else {}
        for key in variance_keys(model):
            shift = shifts.get(key, np.zeros(1))
            value, least = model[key] - shift, -error * (1 + np.sqrt(shift)) ** 2
            model[key] = np.where((value < 0) & (value >= least), 0.0, value)  # rounding may leave zeros below zero
        return model

    def _changed(self, key: str, change: Array) -> Array:
        before = self.sent.get(key)
        if before is None:
            return change
        # What did not change keeps its bits, also those of -0.0.
        return np.where(change == 0, before, before.astype(np.float64) + change)

    def _open(self, replies: Iterable[Message]) -> tuple[list[Message], Values, list[Message]]:
        """The usable replies in the order of nodes, their sum, and errors for the other nodes."""
        arrived = sorted(gate(replies), key=_node_of)
        errors = self._failed + [reply for reply in arrived if reply.has_error()]
        usable = {
            _node_of(reply): reply for reply in arrived if not reply.has_error() and _node_of(reply) in self._peers
        }
        values = {node: client.values_in(reply.content) for node, reply in usable.items()}
        named = {node: {"/".join(place): value for place, value in each.items()} for node, each in values.items()}
        errors += [refusal(usable.pop(node), problem) for node, problem in form_problems(named, {}).items()]
        if len(usable) < self.threshold:
            name = self.rule.base.roster.name
            reasons = "".join(f"\n  - {name(_node_of(error))}: {reason_of(error)}" for error in errors)
            raise RunFailed(
                f"{self._what}, secure aggregation, masked replies: {len(usable)} of {len(self._peers)} clients sent a "
                f"usable reply, {self.threshold} are needed to open a sum:{reasons or ' no reply'}"
            )
        like = values[next(iter(usable))]
        total: Array = sum((to_vector(values[node]) for node in usable), np.zeros(1, np.uint64))
        self._unmask(total, list(usable))
        return list(usable.values()), from_vector(total, like), errors

    def _unmask(self, total: Array, survivors: Sequence[int]) -> None:
        """Remove all masks from the sum of the survivors, with secrets that they reveal."""
        for (node, which), secret in self._secrets(client.revealed(self._peers, survivors), survivors).items():
            if which == OWN:
                keys = [(stream_key(secret), -1)]
            else:  # the sum still contains the survivors' masks with clients that dropped out, with these signs
                mine = private_key(secret)
                pairs = {other: pair_key(mine, self._public(other, PAIR)) for other in survivors}
                keys = [(key, -1 if node > other else 1) for other, key in pairs.items()]
            add_masks(total, keys)

    def _secrets(self, wanted: Sequence[tuple[int, int]], survivors: Sequence[int]) -> dict[tuple[int, int], int]:
        """The wanted secrets, recovered from their shares. Each is a node and one of its two secrets."""
        given = self._ask("unmask", survivors, {"survivors": np.array(survivors, np.uint64)}, (len(wanted), KEY_BYTES))
        # Positions of shares begin with 1: the value at 0 is the secret.
        shares: dict[tuple[int, int], dict[int, int]] = {secret: {} for secret in wanted}
        for receiver, keys in given.items():
            place = self.roster.index(receiver)
            for key, (sender, which) in zip(keys, wanted, strict=True):
                sealed = self._shares[sender][place, SEALED_BYTES * which : SEALED_BYTES * (which + 1)]
                if (share := unseal(key.tobytes(), sealed.tobytes())) is not None:
                    shares[sender, which][1 + place] = int.from_bytes(share, "little")
        secrets = {}
        for (node, which), some in shares.items():
            secrets[node, which] = join(dict(list(some.items())[: self.threshold]))
            if len(some) < self.threshold or public_key(secrets[node, which]) != self._public(node, which):
                raise NotOpened("the shares of a client's secret do not give it")
        return secrets

    def _public(self, node: int, which: int) -> bytes:
        return bytes(self._keys[node][0, key_of(which)])

    def _ask(self, stage: str, nodes: Sequence[int], arrays: Arrays, shape: tuple[int, int]) -> dict[int, Array]:
        """The bytes of this shape in each node's answer; RunFailed below the threshold.

        Nodes that do not answer before the session begins take no part in it.
        """
        sent = RecordDict({"config": ConfigRecord({**self._config, client.STAGE: stage}), "secure": pack(arrays)})
        messages = [Message(RecordDict({**sent}), node, client.QUERY) for node in nodes]
        poll = Poll(self.rule.base.roster, nodes, self.threshold)
        what = f"{self._what}, secure aggregation, stage {stage}"

        def problem(reply: Reply) -> str | None:
            value = _bytes_in(reply)
            if value.dtype != np.uint8 or value.shape != shape:
                return f"its answer is {value.dtype} of shape {value.shape}; expected bytes of shape {shape}"
            keys = value.reshape(-1, KEY_BYTES) if stage == "keys" else ()
            is_right = all(is_usable(key.tobytes()) for key in keys)
            return None if is_right else "with one of its public keys no client can agree on a secret"

        replies = poll.ask(self.grid, what, messages, self.rule.timeout, problem, name="secure")
        if stage != "unmask":
            self._failed += poll.refused
        return {_node_of(reply.message): _bytes_in(reply) for reply in replies}


def _bytes_in(reply: Reply) -> Array:
    return next(iter(reply.arrays.values()), np.zeros(0))


def _node_of(reply: Message) -> int:
    return reply.metadata.src_node_id
