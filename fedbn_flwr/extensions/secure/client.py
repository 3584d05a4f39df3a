"""A client's half of secure aggregation (strategy.py); masking.py has the arithmetic.

A session has four stages, and each is one message from the server:

1. `keys`: the client draws its secrets and sends public keys.
2. `shares`: the client sends shares of its secrets, encrypted for the other clients. The server stores them.
3. Training: the reply is masked.
4. `unmask`: for each client, this client reveals the key to one of two shares: the share of the other's own mask if it
   replied, or the share of its mask key if it dropped out. It reveals a key once, and never both.

The secrets are in the client's state, since each message may reach another process of the node. They are never written
to disk, and `unmask` deletes them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedbn_flwr.client.node_state import partition_metric
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, squared_distance
from fedbn_flwr.messages.arrays import arrays_in, config_of, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.limits import negative_variance
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import sent_model, with_config

from .masking import (
    CHANNEL,
    KEY_BYTES,
    OWN,
    PAIR,
    TOTALS,
    Fixed,
    FixedPoint,
    Place,
    Secrets,
    add_masks,
    from_vector,
    key_of,
    seal,
    sealing_key,
    to_vector,
)

SESSION = "fedbn.secure"
STAGE = "fedbn.secure-stage"
PEERS = "fedbn.secure-peers"
RANGES = "fedbn.secure-ranges"
WEIGHT = "fedbn.secure-weight"
EQUAL = "fedbn.secure-equal"
POOLED = "fedbn.secure-pooled"
QUERY = "query.secure"  # the stages that STAGE names
SECRET = f"{protocol.VOLATILE}secure"  # the record in a client's state with the secrets of a session


class Masks:
    """A mod for messages whose replies must be masked."""

    keys = {
        SESSION: protocol.Key("32 hexadecimal digits", "mask everything that is sent, with the masks of this session"),
        STAGE: protocol.Key("`keys`, `shares` or `unmask`", "(with `query.secure`) what to send for the session"),
        PEERS: protocol.Key("bytes", "the node ids of the clients whose masks must cancel, 8 bytes each"),
        RANGES: protocol.Key("three floats", "the largest change of a parameter, value of a statistic, and weight"),
        WEIGHT: protocol.Key("name of a metric", "the metric by which values are weighted"),
        EQUAL: protocol.Key("names, comma separated", "records in which all clients count equally"),
        POOLED: protocol.Key("bool", "add the squared change of the running mean to each running variance"),
    }

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        config = config_of(message.content)
        if protocol.EXCHANGE in config:
            raise MessageError(
                f"the exchanges of {protocol.EXCHANGE!r} are not masked; expected a strategy without them"
            )
        before = unpack(sent_model(message.content))
        # Remove the keys that this mod handles. A client without the mod does not know them: it raises an error instead
        # of sending values without masks.
        reply = call_next(with_config(message, {}, without=self.keys), context)
        return Message(masked(reply.content, before, config, context), reply_to=message)


masks = Masks()


def masked(content: RecordDict, received: Arrays, config: Config, context: Context) -> RecordDict:
    """A reply to a train message, with masked arrays and metrics.

    `received` is the model that the round began with. The node's partition, and the names and shapes of the arrays,
    stay readable.
    """
    session, values, peers = Session.of(config, context), values_in(content), nodes_in(config[PEERS])
    if not session.nodes or "masked" in session.record:
        raise MessageError("the server asks for masks of a session again, or has not agreed on its keys")
    if not {session.node} <= {*peers} <= {*session.nodes} or len({*peers}) < max(2, session.threshold):
        raise MessageError(
            f"the server asks for masks of {len({*peers})} clients; expected this one and at least "
            f"{session.threshold - 1} others that agreed on keys"
        )
    metrics = {key: value for record in metrics_in(content).values() for key, value in record.items()}
    readable = {key: metrics.pop(key) for key in (protocol.PARTITION,) if key in metrics}
    values |= {(TOTALS, key): np.asarray(value) for key, value in metrics.items() if not isinstance(value, list)}
    update, statistics, examples = config[RANGES]
    equal = str(config[EQUAL]).split(",")
    fixed = FixedPoint(len(session.nodes), update, statistics, examples, str(config[WEIGHT]), equal)
    kinds = fixed.kinds(values)
    model = {key: value for (record, key), value in values.items() if record == "arrays"}
    if negative := negative_variance(model):
        raise MessageError(negative)
    # Second moments about the received mean are linear: the server subtracts that of the mean (`MaskedRound.means`).
    shifts = squared_distance(model, received) if config.get(POOLED) else {}
    values |= {("arrays", key): _change(value + shifts.get(key, 0), received.get(key)) for key, value in model.items()}
    encoded = fixed.encode(values, kinds)
    session.record["masked"] = config[PEERS]
    hidden = session.mask(encoded, peers)
    return RecordDict({**records_of(hidden), "metrics": MetricRecord(readable), **configs_in(content)})


def _change(value: Array, before: Array | None) -> Array:
    """The changes of arrays, and unchanged values where the server sent none, as for FedBN's batch norm."""
    return value if before is None else value.astype(np.float64) - before.astype(np.float64)


def values_in(content: RecordDict) -> dict[Place, Array]:
    return {(name, key): value for name, record in arrays_in(content).items() for key, value in unpack(record).items()}


def records_of(values: Mapping[Place, Array]) -> dict[str, ArrayRecord]:
    """The inverse of `values_in`."""
    names = dict.fromkeys(name for name, _ in values)
    return {record: pack({key: value for (name, key), value in values.items() if name == record}) for record in names}


# --- the stages --------------------------------------------------------------


class Session:
    """The session in a client's state."""

    def __init__(self, record: Any, node: int) -> None:
        self.record, self.node = record, node
        self.secrets = Secrets(record["root"])
        self.threshold: int = record.get("threshold", 0)
        self.nodes = nodes_in(record.get("nodes", b""))  # those that agreed on keys

    @classmethod
    def of(cls, config: Config, context: Context) -> Session:
        record = context.state.get(SECRET)
        if record is None or record.get("session") != config.get(SESSION):
            raise MessageError(
                "this client has no secrets for the server's session of secure aggregation; was the node restarted in "
                "this round?"
            )
        return cls(record, context.node_id)

    def key(self, node: int, which: int) -> bytes:
        """The public key of a client's secret."""
        start = 3 * KEY_BYTES * self.nodes.index(node)
        return bytes(self.record["keys"][start : start + 3 * KEY_BYTES][key_of(which)])

    def sealing_key(self, which: int, sender: int, receiver: int) -> bytes:
        """The key of a share that this client has sent or received."""
        channel = self.secrets.channel(self.key(receiver if sender == self.node else sender, CHANNEL))
        return sealing_key(channel, f"{self.record['session']!r} {which} {sender} {receiver}".encode())

    def mask(self, values: Mapping[Place, Fixed], peers: Sequence[int]) -> dict[Place, Fixed]:
        others = {node: self.key(node, PAIR) for node in peers if node != self.node}
        vector = to_vector(values)
        add_masks(vector, self.secrets.mask_keys(self.node, others))
        return from_vector(vector, values)


def answer(content: RecordDict, context: Context) -> RecordDict:
    """The answer to a stage of a session: bytes, in rows."""
    config = config_of(content)
    stages = {"keys": _begin, "shares": _share, "unmask": _unmask}
    if (stage := config.get(STAGE)) not in stages:
        raise MessageError(f"{STAGE} is {stage!r}; expected keys, shares or unmask")
    (arrays,) = map(unpack, arrays_in(content).values())
    rows = stages[str(stage)](config, arrays, context)
    answer = pack({"secure": np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)})
    return RecordDict({"secure": answer, "metrics": MetricRecord(partition_metric(context))})


def _begin(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    root = secrets.token_bytes(KEY_BYTES)  # no function of the seed: it must be secret
    context.state[SECRET] = ConfigRecord({"session": config[SESSION], "root": root})
    return [Secrets(root).public_keys()]


def _share(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    begun, threshold = Session.of(config, context), int(arrays["threshold"])
    if begun.nodes:
        raise MessageError("the server asks for the shares of this session again")
    nodes, keys = arrays["nodes"].astype("<u8").tobytes(), arrays["keys"].tobytes()
    more: dict[str, Any] = {"nodes": nodes, "keys": keys, "threshold": threshold}
    session, count = Session(ConfigRecord({**begun.record, **more}), context.node_id), arrays["nodes"].size
    if not 2 <= threshold <= count < 2 * threshold:
        raise MessageError(f"the threshold is {threshold} of {count} clients; expected more than half of them")
    context.state[SECRET] = session.record
    shares = [(which, session.secrets.shares(which, threshold, count)) for which in (OWN, PAIR)]
    return [
        b"".join(seal(session.sealing_key(which, session.node, node), of_secret[place]) for which, of_secret in shares)
        for place, node in enumerate(session.nodes)  # itself, too
    ]


def _unmask(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    session, survivors = Session.of(config, context), {int(node) for node in arrays["survivors"]}
    masked_for = nodes_in(session.record.get("masked", b""))
    if not masked_for:
        raise MessageError("the server asks to unmask a reply that this client did not mask")
    if not {session.node} <= survivors <= {*masked_for}:
        raise MessageError("the server asks to unmask a sum of other clients than this client made its masks for")
    if len(survivors) < session.threshold:
        raise MessageError(
            f"the server asks to unmask the sum of {len(survivors)} clients; expected at least {session.threshold}"
        )
    # Before anything is revealed: a second request with other survivors must never be answered.
    del context.state[SECRET]
    return [session.sealing_key(which, node, session.node) for node, which in revealed(masked_for, survivors)]


def revealed(peers: Sequence[int], survivors: Collection[int]) -> list[tuple[int, int]]:
    """Each client's secret for opening the survivors' sum: of its own mask or, if it dropped out, of its mask key."""
    return [(node, OWN if node in survivors else PAIR) for node in peers]


def nodes_in(data: bytes) -> list[int]:
    return [int(node) for node in np.frombuffer(data, "<u8")]
