"""The server's half of a session of secure aggregation; masking.py has the arithmetic.

A client is named as faulty only if that is certain while more than half of the clients follow the protocol. Where a
share does not open, its sender or its receiver is at fault: a client is if at least half of all clients contradict it,
or if it contradicts itself. Shares that open and do not give the secret of the sender's public key are the sender's.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.exchange.codec import KIND
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import gate, one_line, partition_of, refused

from . import protocol as secure
from .masking import (
    KEY_BYTES,
    OWN,
    PAIR,
    SEALED_BYTES,
    TOTALS,
    Fixed,
    FixedPoint,
    NotOpened,
    add_masks,
    form_of,
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


@dataclass(frozen=True)
class SecureSettings:
    """The arguments of `Secure`."""

    threshold: float
    ranges: tuple[float, float, float]  # the largest update, statistic and weight
    timeout: float


@dataclass(frozen=True)
class Sums:
    """What the server learns of a part."""

    replies: list[Message]  # those in the sums, in the order of nodes; their readable records are equal
    sums: Mapping[str, Mapping[str, Fixed]]  # by record and key
    refused: list[Message]  # errors, for the replies that are not


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


class Session:
    """A session with those of `nodes` that answer; the others are in `failed`.

    `parts` is the number of sums that it can unmask. `faulty` are nodes that take no part, with the reasons, to which
    the session adds those that it finds. RunFailed if fewer clients remain than the threshold.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Sequence[int],
        parts: int,
        config: Mapping[str, Any],
        settings: SecureSettings,
        faulty: dict[int, str],
    ) -> None:
        self.token = secrets.token_hex(16)  # not a function of the seed: a resumed round has another session
        self.parts = parts
        self._grid = grid
        self._config = protocol.run_keys(config) | {protocol.ROUND: config[protocol.ROUND], secure.SESSION: self.token}
        self._timeout = settings.timeout
        self._what = f"round {config[protocol.ROUND]}"
        self._faulty = faulty
        self._names: dict[int, str] = {}  # of the nodes that answer
        self._disputes: set[frozenset[int]] = set()  # sender and receiver of each share that did not open
        self._peers: dict[int, list[int]] = {}  # by part: the nodes that were asked for masks
        self.failed = [_error(node, faulty[node]) for node in nodes if node in faulty]
        nodes = [node for node in nodes if node not in faulty]
        self.threshold = max(2, int(settings.threshold * len(nodes) + 1e-9) + 1)
        if len(nodes) < self.threshold:
            raise RunFailed(f"{self._what}: {len(nodes)} clients train, and a sum must have at least {self.threshold}")
        self._keys = self._ask("keys", nodes, {secure.PARTS: parts}, {}, (KEY_BYTES * (1 + 2 * parts),))
        self.roster = sorted(self._keys)  # positions follow the node ids
        keys = np.stack([self._keys[node] for node in self.roster])
        of_all = {"nodes": np.array(self.roster, np.uint64), "keys": keys}
        self.fixed = FixedPoint(len(self.roster), *settings.ranges)
        form = (len(self.roster), parts, 2, SEALED_BYTES)
        self._shares = self._ask("shares", self.roster, {secure.THRESHOLD: self.threshold}, of_all, form)
        self.nodes = sorted(self._shares)

    def instructions(self, part: int, nodes: Sequence[int]) -> dict[str, Any]:
        """The config keys by which these nodes mask their replies."""
        self._peers[part] = sorted(nodes)
        if len(nodes) < self.threshold:
            raise RunFailed(f"{self._what}: {len(nodes)} clients are left for a sum of at least {self.threshold}")
        peers = np.array(self._peers[part], "<u8").tobytes()
        return {secure.SESSION: self.token, secure.PART: part, secure.PEERS: peers}

    def open(self, part: int, replies: Iterable[Message], needs: set[str], model: Arrays | None) -> Sums:
        """The sums over the usable replies, after the survivors have revealed what removes the masks.

        A reply must have the metrics in `needs`, and arrays of the model's shapes; None: of any shapes, as in an
        exchange.
        """
        found: dict[int, tuple[Message, Mapping[str, Arrays]]] = {}
        failed: list[Message] = []
        for reply in sorted(gate(replies), key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in self._peers[part]:
                failed.append(reply)
                continue
            try:
                found[node] = reply, _masked_records(reply.content, needs, model)
            except MessageError as error:
                failed.append(refused(reply, str(error)))
        forms = {node: (form_of(records), _readable(reply.content)) for node, (reply, records) in found.items()}
        counts = Counter(forms.values())
        most, count = counts.most_common(1)[0] if counts else (((), ""), 0)
        if 2 * count <= len(forms) and len(counts) > 1:
            raise NotOpened(
                "the replies have different arrays or are of different exchanges, and most have no common form"
            )
        for node in [node for node, form in forms.items() if form != most]:
            failed.append(refused(found.pop(node)[0], "its arrays or its exchange differ from those of most clients"))
        survivors = list(found)
        if len(survivors) < self.threshold:
            reasons = [f"node {r.metadata.src_node_id}: {r.error.reason}" for r in failed if r.has_error()]
            raise self._too_few("masked replies", len(survivors), len(self._peers[part]), reasons)
        total: Fixed = np.zeros(1, np.uint64)
        for _, records in found.values():
            total = total + to_vector(records)
        self._remove_masks(total, part, survivors)
        return Sums([reply for reply, _ in found.values()], from_vector(total, most[0]), failed)

    def _remove_masks(self, total: Fixed, part: int, survivors: Sequence[int]) -> None:
        dropped = [node for node in self._peers[part] if node not in survivors]
        found = self._secrets(part, survivors, dropped)
        add_masks(total, [(stream_key(found[node]), -1) for node in survivors])
        for lost in dropped:
            mine, keys = private_key(found[lost]), {node: self._public(node, part, PAIR) for node in survivors}
            # The survivors' masks with the lost client are left in the sum, with these signs.
            add_masks(total, [(pair_key(mine, keys[node]), -1 if lost > node else 1) for node in survivors])

    def _secrets(self, part: int, survivors: Sequence[int], dropped: Sequence[int]) -> dict[int, int]:
        """The own secret of each survivor and the mask key's of each client that dropped out, from their shares."""
        about = {"survivors": np.array(survivors, np.uint64), "dropped": np.array(dropped, np.uint64)}
        wanted = [(node, OWN) for node in survivors] + [(node, PAIR) for node in dropped]
        given = self._ask("unmask", survivors, {secure.PART: part}, about, (len(wanted), KEY_BYTES))
        # Positions of shares begin with 1: the value at 0 is the secret.
        shares: dict[int, dict[int, int]] = {node: {} for node, _ in wanted}
        disputes = set()
        for receiver, keys in given.items():
            place = self.roster.index(receiver)
            for key, (sender, which) in zip(keys, wanted, strict=True):
                share = unseal(key.tobytes(), self._shares[sender][place, part, which].tobytes())
                if share is None:
                    disputes.add(frozenset({sender, receiver}))
                else:
                    shares[sender][1 + place] = int.from_bytes(share, "little")
        if not disputes <= self._disputes:
            self._settle(disputes)
        found = {}
        for node, which in wanted:
            if len(shares[node]) >= self.threshold:
                secret = join(dict(list(shares[node].items())[: self.threshold]))
                if public_key(secret) == self._public(node, part, which):
                    found[node] = secret
                else:
                    self._blame(node, "the shares that it sent give another secret than that of its public key")
        if missing := len(wanted) - len(found):
            raise NotOpened(f"the shares of the secrets of {missing} of {len(wanted)} clients do not give the secret")
        return found

    def _settle(self, disputes: set[frozenset[int]]) -> None:
        self._disputes |= disputes
        for node, reason in certainly_faulty(self._disputes, len(self.roster)).items():
            self._blame(node, reason)
        if unsettled := sum(pair.isdisjoint(self._faulty) for pair in self._disputes):
            log(
                WARNING,
                "%s, secure aggregation: shares between two clients do not open, for %d pairs; one client of each "
                "pair is at fault, and it cannot be known which one",
                self._what, unsettled,
            )  # fmt: skip

    def _blame(self, node: int, reason: str) -> None:
        if node not in self._faulty:
            self._faulty[node] = f"left out since {self._what}: {reason}"
            why = f"{self._names[node]} takes no part in the rounds that follow: {reason}"
            log(WARNING, "%s, secure aggregation: %s", self._what, why)

    def _public(self, node: int, part: int, which: int) -> bytes:
        """The public key of a client's secret."""
        return bytes(self._keys[node][key_of(part, which)])

    def _ask(
        self, stage: str, nodes: Sequence[int], more: Mapping[str, Any], arrays: Arrays, shape: tuple[int, ...]
    ) -> dict[int, Any]:
        """The bytes of this shape in each node's answer; RunFailed below the threshold.

        Nodes that do not answer before the session begins take no part in it.
        """
        config = ConfigRecord({**self._config, secure.STAGE: stage, **more})
        sent = RecordDict({"config": config, "secure": pack(arrays)})
        messages = [Message(RecordDict({**sent}), node, secure.QUERY) for node in nodes]
        replies = gate(self._grid.send_and_receive(messages, timeout=self._timeout))
        found: dict[int, Any] = {}
        errors: dict[int, Message] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if reply.has_error():
                errors[node] = reply
                continue
            partition = partition_of(reply.content)
            self._names[node] = f"node {node}" if partition is None else f"client {partition} (node {node})"
            key = "shares" if stage == "shares" else "keys"
            value = next((unpack(record).get(key) for record in arrays_in(reply.content).values()), None)
            if value is None or value.shape != shape or value.dtype != np.uint8:
                errors[node] = refused(reply, f"its answer to the stage {stage} has no bytes {key!r} of shape {shape}")
            else:
                found[node] = value
        for node, reason in _bad_keys(found).items() if stage == "keys" else ():
            self._blame(node, reason)
            errors[node] = _error(node, reason)
            del found[node]
        reasons = [f"node {node}: {e.error.reason or f'error code {e.error.code}'}" for node, e in errors.items()]
        silent = [node for node in nodes if node not in found and node not in errors]
        reasons += [f"node {node} did not answer in {self._timeout:g} s" for node in silent]
        if len(found) < self.threshold:
            raise self._too_few(f"stage {stage}", len(found), len(nodes), reasons)
        for reason in reasons:
            log(WARNING, "%s, secure aggregation, stage %s: without %s", self._what, stage, one_line(reason))
        self.failed += errors.values() if stage != "unmask" else ()
        return found

    def _too_few(self, stage: str, found: int, asked: int, reasons: Sequence[str]) -> RunFailed:
        listed = "".join(f"\n  - {one_line(reason)}" for reason in reasons)
        if stage == "stage keys":
            listed += "\nonly clients that fedbn_flwr.client_app serves can take part"
        return RunFailed(
            f"{self._what}, secure aggregation, {stage}: {found} of {asked} clients answered, {self.threshold} are "
            f"needed to open a sum:{listed or ' no reply'}"
        )


def _error(node: int, reason: str) -> Message:
    """An error as if it were the node's."""
    asked = Message(RecordDict(), node, secure.QUERY)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=asked)


def _bad_keys(found: Mapping[int, Any]) -> dict[int, str]:
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


def _masked_records(content: RecordDict, needs: set[str], model: Arrays | None) -> dict[str, Arrays]:
    """The masked arrays of a reply; MessageError if they cannot be added to those of other clients."""
    records = {name: unpack(record) for name, record in arrays_in(content).items()}
    if TOTALS not in records:
        raise MessageError("the reply is not masked; serve the client with fedbn_flwr.client_app")
    for name, key, found in form_of(records):
        value = records[name][key]
        if value.dtype != np.uint64:
            raise MessageError(f"{key!r} in the record {name!r} is {value.dtype}, expected masked values, uint64")
        like = value if model is None else model.get(key)
        shape = () if name == TOTALS else None if like is None else like.shape
        if found != shape:
            raise MessageError(f"{key!r} in the record {name!r} has shape {found}, expected {shape}")
    if missing := sorted(needs - records[TOTALS].keys()):
        raise MessageError(f"the reply lacks the metric {missing[0]!r}")
    return records


def _readable(content: RecordDict) -> str:
    """What replies to one exchange have in common besides their arrays."""
    kinds = [record[KIND] for record in configs_in(content).values() if KIND in record]
    return repr((kinds, [record.get(protocol.EXCHANGES_LEFT) for record in metrics_in(content).values()]))
