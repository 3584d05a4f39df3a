"""The server's half of a session of secure aggregation; fedbn_flwr/messages/masking.py has the arithmetic."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.exchange.codec import KIND
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import gate, one_line, refused
from fedbn_flwr.messages.masking import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    TOTALS,
    Fixed,
    FixedPoint,
    Form,
    add_masks,
    form_of,
    from_bytes,
    from_vector,
    is_usable,
    join,
    mask_key,
    pair_key,
    stream_key,
    to_vector,
)


@dataclass(frozen=True)
class SecureSettings:
    """The arguments of `Secure`."""

    threshold: float
    update_range: float
    statistics_range: float
    max_examples: int
    timeout: float

    def needed(self, clients: int) -> int:
        """The clients that must remain to the end of a round."""
        return max(2, int(self.threshold * clients + 1e-9) + 1)


@dataclass(frozen=True)
class Sums:
    """What the server learns of a part."""

    replies: list[Message]  # those in the sums, in the order of nodes; their readable records are equal
    sums: Mapping[str, Mapping[str, Fixed]]  # by record and key
    refused: list[Message]  # errors, for the replies that are not


@dataclass(frozen=True)
class Expected:
    """What all masked replies to a message must have."""

    totals: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]] | None  # by key, of the model; None for an exchange


class Session:
    """A session with those of `nodes` that answer; the others are in `failed`.

    `parts` is the number of sums that it can unmask. RunFailed if fewer clients remain than the threshold.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Sequence[int],
        parts: int,
        config: Mapping[str, Any],
        settings: SecureSettings,
        what: str,
    ) -> None:
        self.token = secrets.token_hex(16)  # not a function of the seed: a resumed round has another session
        self.parts = parts
        self.failed: list[Message] = []
        self._grid = grid
        self._config = protocol.run_keys(config) | {protocol.SECURE: self.token}
        if protocol.ROUND in config:
            self._config[protocol.ROUND] = config[protocol.ROUND]
        self._settings = settings
        self._what = what
        self._peers: dict[int, list[int]] = {}  # by part: the nodes that were asked for masks
        self.threshold = settings.needed(len(nodes))
        if len(nodes) < self.threshold:
            raise RunFailed(f"{what}: {len(nodes)} clients train, and a sum must have at least {self.threshold}")
        keys = self._agree("keys", nodes, {protocol.SECURE_PARTS: parts}, {}, "keys", (KEY_BYTES * (1 + parts),))
        self.roster = sorted(keys)  # positions follow the node ids
        self._keys = np.stack([keys[node] for node in self.roster])
        of_all = {"nodes": np.array(self.roster, np.uint64), "keys": self._keys}
        self.fixed = FixedPoint(
            len(self.roster), settings.update_range, settings.statistics_range, settings.max_examples
        )
        form = (len(self.roster), parts, SEALED_BYTES)
        more = {protocol.SECURE_THRESHOLD: self.threshold}
        self._shares = self._agree("shares", self.roster, more, dict.fromkeys(self.roster, of_all), "shares", form)
        self.nodes = sorted(self._shares)

    def instructions(self, part: int, nodes: Sequence[int]) -> dict[str, Any]:
        """The config keys by which these nodes mask their replies."""
        self._peers[part] = sorted(nodes)
        if len(nodes) < self.threshold:
            raise RunFailed(f"{self._what}: {len(nodes)} clients are left for a sum of at least {self.threshold}")
        peers = np.array(self._peers[part], "<u8").tobytes()
        return {protocol.SECURE: self.token, protocol.SECURE_PART: part, protocol.SECURE_PEERS: peers}

    def open(self, part: int, replies: Iterable[Message], expected: Expected) -> Sums:
        """The sums over the usable replies, after the survivors have revealed what removes the masks."""
        found: dict[int, tuple[Message, Fixed]] = {}
        forms: dict[int, tuple[Form, Readable]] = {}
        failed: list[Message] = []
        for reply in sorted(gate(replies), key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in self._peers[part]:
                failed.append(reply)
                continue
            try:
                records = _masked_records(reply.content, expected)
            except MessageError as error:
                failed.append(refused(reply, str(error)))
                continue
            found[node] = reply, to_vector(records)
            forms[node] = form_of(records), _readable(reply.content)
        most = max(forms.values(), key=list(forms.values()).count, default=((), ()))
        for node, form in forms.items():
            if form != most:
                reply, _ = found.pop(node)
                failed.append(refused(reply, "its arrays or its exchange differ from those of most clients"))
        survivors = list(found)
        if len(survivors) < self.threshold:
            reasons = [f"node {r.metadata.src_node_id}: {r.error.reason}" for r in failed if r.has_error()]
            raise self._too_few("masked replies", len(survivors), len(self._peers[part]), reasons)
        total = np.zeros(found[survivors[0]][1].shape, np.uint64)
        for _, vector in found.values():
            total += vector
        self._remove_masks(total, part, survivors)
        return Sums([reply for reply, _ in found.values()], from_vector(total, most[0]), failed)

    def _remove_masks(self, total: Fixed, part: int, survivors: Sequence[int]) -> None:
        dropped = [node for node in self._peers[part] if node not in survivors]
        wanted = [*survivors, *dropped]
        places = {node: self.roster.index(node) for node in wanted}
        about = {"survivors": np.array(survivors, np.uint64), "dropped": np.array(dropped, np.uint64)}
        arrays = {
            node: {**about, "shares": np.stack([self._shares[sender][places[node], part] for sender in wanted])}
            for node in survivors
        }
        given, _ = self._ask(
            "unmask", survivors, {protocol.SECURE_PART: part}, arrays, "shares", (len(wanted), SHARE_BYTES)
        )
        # Positions of shares begin with 1: the value at 0 is the secret.
        holders = {1 + places[node]: rows for node, rows in list(given.items())[: self.threshold]}
        found = {
            node: join({place: from_bytes(rows[row].tobytes()) for place, rows in holders.items()})
            for row, node in enumerate(wanted)
        }
        add_masks(total, [(stream_key(found[node]), -1) for node in survivors])
        for lost in dropped:
            mine = mask_key(found[lost])
            start = KEY_BYTES * (1 + part)
            if mine.public_key().public_bytes_raw() != self._keys[places[lost], start : start + KEY_BYTES].tobytes():
                raise RunFailed(f"{self._what}: the shares of the secret of node {lost}, which dropped out, are wrong")
            keys = {node: self._keys[places[node], start : start + KEY_BYTES].tobytes() for node in survivors}
            # The survivors' masks with the lost client are left in the sum, with these signs.
            add_masks(
                total, [(pair_key(mine, keys[node]), -1 if places[lost] > places[node] else 1) for node in survivors]
            )

    def _agree(self, stage: str, nodes: Sequence[int], *details: Any) -> dict[int, Any]:
        """`_ask`, before the session begins: nodes that do not answer take no part in it."""
        found, errors = self._ask(stage, nodes, *details)
        self.failed += errors
        return found

    def _ask(
        self,
        stage: str,
        nodes: Sequence[int],
        more: Mapping[str, Any],
        arrays: Mapping[int, Arrays],
        key: str,
        shape: tuple[int, ...],
    ) -> tuple[dict[int, Any], list[Message]]:
        """The array `key` of this shape in each node's answer, and errors; RunFailed below the threshold."""
        config = ConfigRecord({**self._config, protocol.SECURE_STAGE: stage, **more})
        messages = []
        for node in nodes:
            content = RecordDict({"config": config})
            if node in arrays:
                content["secure"] = pack(arrays[node])
            messages.append(Message(content, node, protocol.SECURE_QUERY))
        found: dict[int, Any] = {}
        errors: dict[int, Message] = {}
        for reply in gate(self._grid.send_and_receive(messages, timeout=self._settings.timeout)):
            node = reply.metadata.src_node_id
            if reply.has_error():
                errors[node] = reply
                continue
            value = next((unpack(record).get(key) for record in arrays_in(reply.content).values()), None)
            if value is None or value.shape != shape or value.dtype != np.uint8:
                errors[node] = refused(reply, f"its answer to the stage {stage} has no bytes {key!r} of shape {shape}")
            elif stage == "keys" and not all(is_usable(public.tobytes()) for public in value.reshape(-1, KEY_BYTES)):
                errors[node] = refused(reply, "with one of its public keys no client can agree on a secret")
            else:
                found[node] = value
        reasons = [f"node {node}: {_reason(error)}" for node, error in sorted(errors.items())]
        silent = [node for node in nodes if node not in found and node not in errors]
        reasons += [f"node {node} did not answer in {self._settings.timeout:g} s" for node in silent]
        if len(found) < self.threshold:
            raise self._too_few(f"stage {stage}", len(found), len(nodes), reasons)
        for reason in reasons:
            log(WARNING, "%s, secure aggregation, stage %s: without %s", self._what, stage, one_line(reason))
        return dict(sorted(found.items())), list(errors.values())

    def _too_few(self, stage: str, found: int, asked: int, reasons: Sequence[str]) -> RunFailed:
        listed = "".join(f"\n  - {one_line(reason)}" for reason in reasons)
        return RunFailed(
            f"{self._what}, secure aggregation, {stage}: {found} of {asked} clients answered, {self.threshold} are "
            f"needed to open a sum:{listed or ' no reply'}"
        )


def _reason(error: Message) -> str:
    reason = error.error.reason or f"error code {error.error.code}"
    if "No query function registered" in reason:
        reason += " (its ClientApp does not support secure aggregation; serve it with fedbn_flwr.client_app)"
    return reason


def _masked_records(content: RecordDict, expected: Expected) -> dict[str, Arrays]:
    """The masked arrays of a reply; MessageError if they cannot be added to those of other clients."""
    records = {name: unpack(record) for name, record in arrays_in(content).items()}
    if TOTALS not in records:
        raise MessageError("the reply is not masked; serve the client with fedbn_flwr.client_app")
    for name, arrays in records.items():
        for key, value in arrays.items():
            if value.dtype != np.uint64:
                raise MessageError(f"{key!r} in the record {name!r} is {value.dtype}, expected masked values, uint64")
            if name == TOTALS:
                shape: tuple[int, ...] | None = ()
            else:
                shape = value.shape if expected.shapes is None else expected.shapes.get(key)
            if value.shape != shape:
                raise MessageError(f"{key!r} in the record {name!r} has shape {value.shape}, expected {shape}")
    if missing := sorted(expected.totals - records[TOTALS].keys()):
        raise MessageError(f"the reply lacks the metric {missing[0]!r}")
    return records


Readable = tuple[object, ...]


def _readable(content: RecordDict) -> Readable:
    """What replies to one exchange have in common besides their arrays."""
    kinds = [record[KIND] for record in configs_in(content).values() if KIND in record]
    left = [record.get(protocol.EXCHANGES_LEFT) for record in metrics_in(content).values()]
    return (*map(repr, kinds), *map(repr, left))
