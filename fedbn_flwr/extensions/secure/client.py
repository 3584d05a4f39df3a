"""A client's half of secure aggregation (strategy.py); masking.py has the arithmetic.

The stages of a session, each one message of the server: `keys` (the client draws its secrets and sends public keys),
`shares` (it sends shares of its secrets, encrypted for the other clients), training and FedTAN's exchanges (their
replies are masked, each as one part of the session), and after each part `unmask`. To unmask a part a client sends, for
each client, the key that opens its share of either that client's own mask (the client replied) or of the client's mask
key (it dropped out), once and never both. The server has the encrypted shares, and finds out which of them open.

The secrets are in the client's state in memory, since every message may reach another process of the node. They are
never written to disk, and are deleted when the last part is unmasked.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedbn_flwr.client.layerwise import model_of_round
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import KIND
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, negative_variance
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import with_content

from . import protocol as secure
from .masking import (
    KEY_BYTES,
    OWN,
    PAIR,
    SEALED_BYTES,
    TOTALS,
    Fixed,
    FixedPoint,
    Secrets,
    add_masks,
    form_of,
    from_vector,
    key_of,
    kind_of_exchange,
    kind_of_metric,
    kinds_of,
    seal,
    sealing_key,
    to_vector,
)

_MOST_PARTS = 100_000
Config = Mapping[str, Any]


def answer(content: RecordDict, context: Context) -> RecordDict:
    """The answer to a stage of a session."""
    config = next(iter(configs_in(content).values()), ConfigRecord())
    arrays = next((unpack(record) for record in arrays_in(content).values()), {})
    stages = {"keys": _begin, "shares": _share, "unmask": _unmask}
    if (stage := config.get(secure.STAGE)) not in stages:
        raise MessageError(f"{secure.STAGE} is {stage!r}; expected keys, shares or unmask")
    return RecordDict({"secure": pack(stages[str(stage)](config, arrays, context))})


class Masks:
    """A mod of messages whose replies must be masked."""

    keys = secure.ALL

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        name, config = next(iter(configs_in(message.content).items()))
        if protocol.COHORT in config and protocol.COHORT_STEP not in config:
            raise MessageError(
                "exchanges over streams are not masked; expected exchanges by messages (strategy.direct)"
            )
        before = model_of_round(message.content, config, context)
        # Without the keys that are honoured here: other clients refuse them, and so would send nothing without masks.
        rest = ConfigRecord({key: value for key, value in config.items() if key not in self.keys})
        reply = call_next(with_content(message, RecordDict({**message.content, name: rest})), context)
        return Message(masked(reply.content, before, config, context), reply_to=message)


masks = Masks()


def masked(content: RecordDict, received: Arrays, config: Config, context: Context) -> RecordDict:
    """A reply to a train message or an exchange, with its arrays and metrics under masks.

    `received` is the model that the round began with. The node's partition, the names and shapes of the arrays, and the
    number and kind of exchanges stay readable.
    """
    session = _Session.of(config, context)
    part, peers = int(config[secure.PART]), _nodes(config[secure.PEERS])
    if not 0 <= part < session.parts or f"masked {part}" in session.record:
        raise MessageError(f"the server asks for part {part} of a session again, or has not agreed on its keys")
    if not {session.node} <= {*peers} <= {*session.nodes} or len({*peers}) < max(2, session.threshold):
        raise MessageError(
            f"the server asks for masks of {len({*peers})} clients; expected this one and {session.threshold - 1} or "
            "more of those that agreed on keys"
        )
    fixed = FixedPoint(len(session.nodes), *config[secure.RANGES])
    metrics = {key: value for record in metrics_in(content).values() for key, value in record.items()}
    weight_key = str(config[secure.WEIGHT])
    weight = metrics.get(weight_key)
    if not isinstance(weight, int | float):
        raise MessageError(f"{weight_key!r} is {weight!r}; expected a number, by which values are weighted")
    equal = set(str(config.get(secure.EQUAL, "")).split(","))
    exchange = next((str(record[KIND]) for record in configs_in(content).values() if KIND in record), None)
    records: dict[str, dict[str, Fixed]] = {}
    for name, record in arrays_in(content).items():
        values = unpack(record)
        kinds = kinds_of(values) if exchange is None else dict.fromkeys(values, kind_of_exchange(exchange))
        if exchange == "moments":  # mean and second moment of a batch add up over clients; a variance does not
            mean, var = (values[key].astype(np.float64) for key in ("mean", "var"))
            values = {"mean": mean, "var": var + mean**2}
        elif exchange is None and name == "arrays":
            if negative := negative_variance(values):
                raise MessageError(negative)
            values = {key: _change(value, received.get(key)) for key, value in values.items()}
        by = 1.0 if name in equal else weight
        records[name] = {key: fixed.encode(key, value, by, kinds[key]) for key, value in values.items()}
    readable = {key: metrics.pop(key) for key in (protocol.PARTITION, protocol.EXCHANGES_LEFT) if key in metrics}
    records[TOTALS] = {}
    for key, value in metrics.items():
        if isinstance(value, int | float):
            kind = kind_of_metric(key, weight_key)
            by = weight if kind == "statistics" else 1.0
            records[TOTALS][key] = fixed.encode(key, np.asarray(value), by, kind)
    session.record[f"masked {part}"] = config[secure.PEERS]
    hidden = {name: pack(values) for name, values in session.mask(records, part, peers).items()}
    return RecordDict({**hidden, "metrics": MetricRecord(readable), **configs_in(content)})


def _change(value: Array, before: Array | None) -> Array:
    """An array that the server did not send is sent itself: FedBN's batch norm, for its mean."""
    new = value.astype(np.float64)
    return new if before is None else new - before.astype(np.float64)


class _Session:
    """The session in a client's state."""

    def __init__(self, record: Any, node: int) -> None:
        self.record, self.node = record, node
        self.secrets = Secrets(record["root"])
        self.parts: int = record["parts"]
        self.threshold: int = record.get("threshold", 0)
        self.nodes = _nodes(record.get("nodes", b""))  # those that agreed on keys, in the order of their positions

    @classmethod
    def of(cls, config: Config, context: Context) -> _Session:
        record = context.state.get(secure.SECRET)
        if record is None or record.get("session") != config.get(secure.SESSION):
            raise MessageError(
                "this client has no secrets of the session of secure aggregation that the server names; has the node "
                "been restarted in this round?"
            )
        return cls(record, context.node_id)

    def keys(self, position: int) -> bytes:
        """The public keys of a client: that of its channel, and those of all parts."""
        each = KEY_BYTES * (1 + 2 * self.parts)
        return bytes(self.record["keys"][position * each : (position + 1) * each])

    def channel(self, position: int) -> bytes:
        return self.secrets.channel(self.keys(position)[:KEY_BYTES])

    def about(self, part: int, which: int, sender: int, receiver: int) -> bytes:
        return f"{self.record['session']!r} {part} {which} {sender} {receiver}".encode()

    def mask(
        self, records: Mapping[str, Mapping[str, Fixed]], part: int, peers: list[int]
    ) -> dict[str, dict[str, Fixed]]:
        mine = self.nodes.index(self.node)
        others = {
            place: self.keys(place)[key_of(part, PAIR)] for place in map(self.nodes.index, peers) if place != mine
        }
        vector = to_vector(records)
        add_masks(vector, self.secrets.mask_keys(part, mine, others))
        return from_vector(vector, form_of(records))


def _begin(config: Config, arrays: Arrays, context: Context) -> Arrays:
    parts = int(config[secure.PARTS])
    if not 1 <= parts <= _MOST_PARTS:
        raise MessageError(f"{secure.PARTS} is {parts}; expected 1 to {_MOST_PARTS}")
    root = secrets.token_bytes(KEY_BYTES)  # not a function of the seed: it must be secret
    session = {"session": config[secure.SESSION], "root": root, "parts": parts}
    context.state[secure.SECRET] = ConfigRecord(session)
    return {"keys": _array(Secrets(root).public_keys(parts))}


def _share(config: Config, arrays: Arrays, context: Context) -> Arrays:
    session = _Session.of(config, context)
    if "nodes" in session.record:
        raise MessageError("the server asks for the shares of this session again")
    nodes, threshold = [int(node) for node in arrays["nodes"]], int(config[secure.THRESHOLD])
    keys = arrays["keys"].astype(np.uint8).tobytes()
    each = KEY_BYTES * (1 + 2 * session.parts)
    of_each = [keys[i : i + each] for i in range(0, len(keys), each)]
    if len(set(of_each)) != len(of_each) or len(of_each) != len(nodes) or nodes != sorted({*nodes}):
        raise MessageError("the public keys that the server sent are not one set for each client")
    if session.node not in nodes or of_each[nodes.index(session.node)] != session.secrets.public_keys(session.parts):
        raise MessageError("the public keys that the server sent do not contain this client's")
    if not 2 <= threshold <= len(nodes) or 2 * threshold <= len(nodes):
        raise MessageError(f"the threshold is {threshold} of {len(nodes)} clients; expected more than half of them")
    session.record.update(nodes=arrays["nodes"].astype("<u8").tobytes(), keys=keys, threshold=threshold)
    mine = nodes.index(session.node)
    channels = [session.channel(place) for place in range(len(nodes))]
    sealed = np.zeros((len(nodes), session.parts, 2, SEALED_BYTES), np.uint8)
    for part, which in itertools.product(range(session.parts), (OWN, PAIR)):
        for place, share in enumerate(session.secrets.shares(part, which, threshold, len(nodes))):  # its own share, too
            key = sealing_key(channels[place], session.about(part, which, mine, place))
            sealed[place, part, which] = _array(seal(key, share))
    return {"shares": sealed}


def _unmask(config: Config, arrays: Arrays, context: Context) -> Arrays:
    session, part = _Session.of(config, context), int(config[secure.PART])
    survivors, dropped = ([int(node) for node in arrays[name]] for name in ("survivors", "dropped"))
    masked_for = session.record.get(f"masked {part}")
    if masked_for is None or f"unmasked {part}" in session.record:
        raise MessageError(f"the server asks to unmask part {part}, which this client did not mask or has unmasked")
    if sorted(survivors + dropped) != sorted(_nodes(masked_for)) or session.node not in survivors:
        raise MessageError("the server asks to unmask a sum of other clients than those that this client has masks for")
    if len(survivors) < session.threshold:
        raise MessageError(
            f"the server asks to unmask the sum of {len(survivors)} clients, and at least {session.threshold} must be "
            "in a sum"
        )
    # Before anything is revealed: a second request with other survivors must never be answered.
    session.record[f"unmasked {part}"] = True
    mine = session.nodes.index(session.node)
    wanted = [(node, OWN) for node in survivors] + [(node, PAIR) for node in dropped]
    places = [(session.nodes.index(node), which) for node, which in wanted]
    keys = [sealing_key(session.channel(at), session.about(part, which, at, mine)) for at, which in places]
    if part == 0:
        del context.state[secure.SECRET]
    return {"keys": _array(b"".join(keys)).reshape(-1, KEY_BYTES)}


def _array(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _nodes(data: bytes) -> list[int]:
    return [int(node) for node in np.frombuffer(data, "<u8")]
