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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedbn_flwr.client.layerwise import model_of_round
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import KIND
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, negative_variance
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import with_content

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
PART = "fedbn.secure-part"
PEERS = "fedbn.secure-peers"
RANGES = "fedbn.secure-ranges"
WEIGHT = "fedbn.secure-weight"
EQUAL = "fedbn.secure-equal"
QUERY = "query.secure"  # the stages that STAGE names
SECRET = f"{protocol.VOLATILE}secure"  # the record in a client's state with the secrets of a session

Config = Mapping[str, Any]


class Masks:
    """A mod of messages whose replies must be masked."""

    keys = {
        SESSION: protocol.Key("32 hexadecimal digits", "send everything under the masks of this session"),
        STAGE: protocol.Key("`keys`, `shares` or `unmask`", "(with `query.secure`) what to send for the session"),
        PART: protocol.Key("int", "which reply of the session this is: 0 that to the train message, k exchange k"),
        PEERS: protocol.Key("bytes", "the node ids of the clients whose masks must cancel, 8 bytes each"),
        RANGES: protocol.Key("three floats", "the largest change of a parameter, value of a statistic, and weight"),
        WEIGHT: protocol.Key("name of a metric", "the metric by which values are weighted"),
        EQUAL: protocol.Key("names, comma separated", "records in which all clients count equally"),
    }

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

    `received` is the model that the round began with. The node's partition, the names and shapes of the arrays, the
    number and kind of exchanges, and the number of values of an example in a batch norm stay readable.
    """
    session, values, exchange = Session.of(config, context), values_in(content), kind_in(content)
    part, peers = int(config[PART]), nodes_in(config[PEERS])
    if not 0 <= part < session.parts or f"masked {part}" in session.record:
        raise MessageError(f"the server asks for part {part} of a session again, or has not agreed on its keys")
    if not {session.node} <= {*peers} <= {*session.nodes} or len({*peers}) < max(2, session.threshold):
        raise MessageError(
            f"the server asks for masks of {len({*peers})} clients; expected this one and {session.threshold - 1} or "
            "more of those that agreed on keys"
        )
    metrics = {key: value for record in metrics_in(content).values() for key, value in record.items()}
    readable = {key: metrics.pop(key) for key in (protocol.PARTITION, protocol.EXCHANGES_LEFT) if key in metrics}
    if exchange:
        batch, total = metrics[protocol.BATCH_EXAMPLES], metrics.pop(protocol.BATCH_VALUES)
        if total % batch:
            raise MessageError(
                f"a batch norm of this client has {total} values per channel of {batch} examples, which differ in "
                "length (padded series with a mask), and the server cannot weight masked statistics by lengths that it "
                "does not know; expected examples of one length, or a strategy other than Secure"
            )
        readable[protocol.BATCH_VALUES] = total // batch  # of an example: that of most clients
    values |= {(TOTALS, key): np.asarray(each) for key, each in metrics.items() if not isinstance(each, list)}
    update, statistics, examples = config[RANGES]
    equal = str(config[EQUAL]).split(",")
    fixed = FixedPoint(len(session.nodes), update, statistics, examples, str(config[WEIGHT]), equal)
    kinds = fixed.kinds(values, exchange)
    if exchange == "moments":  # mean and second moment of a batch add up over clients; a variance does not
        mean = values["arrays", "mean"].astype(np.float64)
        values |= {("arrays", "mean"): mean, ("arrays", "var"): values["arrays", "var"] + mean**2}
    elif not exchange:
        model = {key: value for (record, key), value in values.items() if record == "arrays"}
        if negative := negative_variance(model):
            raise MessageError(negative)
        values |= {("arrays", key): _change(value, received.get(key)) for key, value in model.items()}
    encoded = fixed.encode(values, kinds)
    session.record[f"masked {part}"] = config[PEERS]
    hidden = session.mask(encoded, part, peers)
    return RecordDict({**records_of(hidden), "metrics": MetricRecord(readable), **configs_in(content)})


def _change(value: Array, before: Array | None) -> Array:
    """An array that the server did not send is sent itself: FedBN's batch norm, for its mean."""
    return value if before is None else value.astype(np.float64) - before.astype(np.float64)


def kind_in(content: RecordDict) -> str:
    """The kind of the exchange that a reply is for; empty for a reply to a train message."""
    return next((str(record[KIND]) for record in configs_in(content).values() if KIND in record), "")


def values_in(content: RecordDict) -> dict[Place, Array]:
    return {(name, key): each for name, record in arrays_in(content).items() for key, each in unpack(record).items()}


def records_of(values: Mapping[Place, Array]) -> dict[str, ArrayRecord]:
    """The inverse of `values_in`."""
    names = dict.fromkeys(name for name, _ in values)
    return {each: pack({key: value for (name, key), value in values.items() if name == each}) for each in names}


# --- the stages --------------------------------------------------------------


class Session:
    """The session in a client's state."""

    def __init__(self, record: Any, node: int) -> None:
        self.record, self.node = record, node
        self.secrets = Secrets(record["root"])
        self.parts: int = record["parts"]
        self.threshold: int = record.get("threshold", 0)
        self.nodes = nodes_in(record.get("nodes", b""))  # those that agreed on keys

    @classmethod
    def of(cls, config: Config, context: Context) -> Session:
        record = context.state.get(SECRET)
        if record is None or record.get("session") != config.get(SESSION):
            raise MessageError(
                "this client has no secrets of the session of secure aggregation that the server names; has the node "
                "been restarted in this round?"
            )
        return cls(record, context.node_id)

    def keys(self, node: int) -> bytes:
        """The public keys of a client: that of its channel, and those of all parts."""
        each = KEY_BYTES * (1 + 2 * self.parts)
        start = each * self.nodes.index(node)
        return bytes(self.record["keys"][start : start + each])

    def channel(self, node: int) -> bytes:
        return self.secrets.channel(self.keys(node)[key_of(*CHANNEL)])

    def sealing_key(self, channel: bytes, part: int, which: int, sender: int, receiver: int) -> bytes:
        return sealing_key(channel, f"{self.record['session']!r} {part} {which} {sender} {receiver}".encode())

    def mask(self, values: Mapping[Place, Fixed], part: int, peers: Sequence[int]) -> dict[Place, Fixed]:
        others = {node: self.keys(node)[key_of(part, PAIR)] for node in peers if node != self.node}
        vector = to_vector(values)
        add_masks(vector, self.secrets.mask_keys(part, self.node, others))
        return from_vector(vector, values)


def answer(content: RecordDict, context: Context) -> RecordDict:
    """The answer to a stage of a session: bytes, in rows."""
    config = next(iter(configs_in(content).values()), ConfigRecord())
    stages = {"keys": _begin, "shares": _share, "unmask": _unmask}
    if (stage := config.get(STAGE)) not in stages:
        raise MessageError(f"{STAGE} is {stage!r}; expected keys, shares or unmask")
    (arrays,) = map(unpack, arrays_in(content).values())
    rows = stages[str(stage)](config, arrays, context)
    return RecordDict({"secure": pack({"secure": np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)})})


def _begin(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    parts, root = int(arrays["parts"]), secrets.token_bytes(KEY_BYTES)  # no function of the seed: it must be secret
    context.state[SECRET] = ConfigRecord({"session": config[SESSION], "root": root, "parts": parts})
    return [Secrets(root).public_keys(parts)]


def _share(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    begun, threshold = Session.of(config, context), int(arrays["threshold"])
    if "nodes" in begun.record:
        raise MessageError("the server asks for the shares of this session again")
    nodes, keys = arrays["nodes"].astype("<u8").tobytes(), arrays["keys"].tobytes()
    more: dict[str, Any] = {"nodes": nodes, "keys": keys, "threshold": threshold}
    session, count = Session(ConfigRecord({**begun.record, **more}), context.node_id), arrays["nodes"].size
    if session.node not in session.nodes or session.keys(session.node) != session.secrets.public_keys(session.parts):
        raise MessageError("the public keys that the server sent do not contain this client's")
    if not 2 <= threshold <= count < 2 * threshold:
        raise MessageError(f"the threshold is {threshold} of {count} clients; expected more than half of them")
    context.state[SECRET] = session.record
    places = list(itertools.product(range(session.parts), (OWN, PAIR)))
    shares = [session.secrets.shares(*place, threshold, count) for place in places]
    rows = []
    for node, of_node in zip(session.nodes, zip(*shares, strict=True), strict=True):  # its own shares, too
        channel = session.channel(node)
        sealing = [session.sealing_key(channel, *place, session.node, node) for place in places]
        rows.append(b"".join(map(seal, sealing, of_node)))
    return rows


def _unmask(config: Config, arrays: Arrays, context: Context) -> list[bytes]:
    session, part = Session.of(config, context), int(arrays["part"])
    survivors, masked_for = {int(node) for node in arrays["survivors"]}, session.record.get(f"masked {part}")
    if masked_for is None or f"unmasked {part}" in session.record:
        raise MessageError(f"the server asks to unmask part {part}, which this client did not mask or has unmasked")
    if not {session.node} <= survivors <= {*nodes_in(masked_for)}:
        raise MessageError("the server asks to unmask a sum of other clients than those that this client has masks for")
    if len(survivors) < session.threshold:
        raise MessageError(
            f"the server asks to unmask the sum of {len(survivors)} clients, and at least {session.threshold} must be "
            "in a sum"
        )
    # Before anything is revealed: a second request with other survivors must never be answered.
    session.record[f"unmasked {part}"] = True
    if part == 0:
        del context.state[SECRET]
    return [
        session.sealing_key(session.channel(node), part, which, node, session.node)
        for node, which in revealed(nodes_in(masked_for), survivors)
    ]


def revealed(peers: Sequence[int], survivors: Collection[int]) -> list[tuple[int, int]]:
    """The secret of each client that the survivors' sum needs: its own mask's, or the mask key's if it dropped out."""
    return [(node, OWN if node in survivors else PAIR) for node in peers]


def nodes_in(data: bytes) -> list[int]:
    return [int(node) for node in np.frombuffer(data, "<u8")]
