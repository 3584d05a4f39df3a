"""Replies of hostile clients under secure aggregation, stage by stage, and what must become of the round.

An attack changes the records that an honest client has made. Its outcome is what the run must be like: LATER (the
client is left out of this round and takes part in the next one), UNKNOWN (the round is skipped, and no client is named)
or HONEST (nothing changes, and no client is named).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr.extensions.secure import client as secure
from fedbn_flwr.extensions.secure.masking import (
    CHANNEL,
    KEY_BYTES,
    OWN,
    PAIR,
    SEALED_BYTES,
    Secrets,
    key_of,
    seal,
)
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, metrics_in, pack, unpack

LATER, UNKNOWN, HONEST = "later", "unknown", "honest"
KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"

Spoil = Callable[[RecordDict, Context], None]


class Absent(Exception):
    """The client sends an error."""


@dataclass(frozen=True)
class Attack:
    name: str
    stage: str
    spoil: Spoil
    outcome: str
    then: str = ""  # a later stage at which the client sends an error


def stage_of(message: Message) -> str:
    kind = message.metadata.message_type
    return MASKED if kind == "train" else str(config_of(message.content).get(secure.STAGE))


class Hostile(ClientApp):
    """`inner`, where the clients of the partitions in `bad` carry out an attack in some rounds."""

    def __init__(self, inner: ClientApp, bad: Collection[int], plan: Mapping[int, Attack]) -> None:
        super().__init__()
        self.inner, self.bad, self.plan = inner, bad, plan
        self.sent = 0  # hostile replies

    def __call__(self, message: Message, context: Context) -> Message:
        stage, attack = stage_of(message), self.plan.get(config_of(message.content).get(protocol.ROUND, 0))  # type: ignore[call-overload]
        if attack is None or context.node_config["partition-id"] not in self.bad:
            return self.inner(message, context)
        reply = self.inner(message, context)
        if stage not in (attack.stage, attack.then) or reply.has_error():
            return reply
        content = RecordDict({name: record.copy() for name, record in reply.content.items()})
        try:
            if stage == attack.then:
                raise Absent
            attack.spoil(content, context)
        except Absent:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "absent"), reply_to=message)
        finally:
            self.sent += 1
        return Message(content, reply_to=message)


# --- changes -----------------------------------------------------------------


def named_as_records(content: RecordDict, context: Context) -> None:
    """Metrics under another name, and a config that has the name of what the server makes."""
    for name in [*metrics_in(content)]:
        content[f"other {name}"] = content.pop(name)
    content["metrics"] = ConfigRecord({"what": 1})


Change = Callable[[np.ndarray], np.ndarray]


def arrays_as(change: Change, where: Callable[[str, str], bool] = lambda record, key: True) -> Spoil:
    """All arrays of the reply changed, or those of some records and keys."""

    def spoil(content: RecordDict, context: Context) -> None:
        for name, record in arrays_in(content).items():
            values = {key: change(value) if where(name, key) else value for key, value in unpack(record).items()}
            content[name] = pack({key: value for key, value in values.items() if value is not None})

    return spoil


def only(record: str, end: str = "") -> Callable[[str, str], bool]:
    return lambda name, key: name == record and key.endswith(end)


def absent(content: RecordDict, context: Context) -> None:
    raise Absent


def random(value: np.ndarray) -> np.ndarray:
    drawn = np.random.default_rng(value.size).integers(0, 256, value.size * value.dtype.itemsize, np.uint8)
    return drawn.view(value.dtype).reshape(value.shape)


def zeros(value: np.ndarray) -> np.ndarray:
    return np.zeros_like(value)


def added(number: int) -> Change:
    return lambda value: value + np.uint64(number % 2**64)


def rolled(value: np.ndarray) -> np.ndarray:
    return np.roll(value, 1, axis=0)


def first_row(change: Change) -> Change:
    """Only the first receiver's shares, or the first client's of the revealed keys."""

    def some(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[0] = change(value[0])
        return value

    return some


def repeated(value: np.ndarray) -> np.ndarray:
    """The first key in all places."""
    return np.tile(value[:, :KEY_BYTES], value.size // KEY_BYTES)


def constant_keys(value: np.ndarray) -> np.ndarray:
    """Usable keys, the same for all that send them."""
    return np.frombuffer(Secrets(bytes(KEY_BYTES)).public_keys(), np.uint8).reshape(value.shape)


def other_keys(place: slice) -> Spoil:
    """A usable public key of a secret that the client does not have."""

    def spoil(content: RecordDict, context: Context) -> None:
        keys = unpack(content["secure"])["secure"].copy()  # type: ignore[arg-type]
        others = Secrets(context.node_id.to_bytes(KEY_BYTES, "little")).public_keys()
        keys[0, place] = np.frombuffer(others[place], np.uint8)
        content["secure"] = pack({"secure": keys})

    return spoil


def other_shares(content: RecordDict, context: Context) -> None:
    """Well-sealed shares that belong to no secret."""
    session = secure.Session(context.state[secure.SECRET], context.node_id)
    sealed = unpack(content["secure"])["secure"].reshape(len(session.nodes), -1, SEALED_BYTES).copy()  # type: ignore[arg-type]
    for place, which in np.ndindex(*sealed.shape[:2]):
        key = session.sealing_key(which, context.node_id, session.nodes[place])
        sealed[place, which] = np.frombuffer(seal(key, (place * place + 5).to_bytes(32, "little")), np.uint8)
    content["secure"] = pack({"secure": sealed.reshape(len(sealed), -1)})


def half(value: np.ndarray) -> np.ndarray:
    return value[: len(value) // 2]


def floats(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32)


def attacks() -> list[Attack]:
    false_masks = other_keys(key_of(PAIR))
    return [
        Attack("the same keys as others", KEYS, arrays_as(constant_keys), UNKNOWN),
        Attack("one key in all places", KEYS, arrays_as(repeated), UNKNOWN),
        Attack("keys of zeros", KEYS, arrays_as(zeros), LATER),
        Attack("half of the keys", KEYS, arrays_as(half), LATER),
        Attack("another dtype of keys", KEYS, arrays_as(floats), LATER),
        Attack("no keys", KEYS, lambda content, context: content.clear(), LATER),
        Attack("a channel key of another secret", KEYS, other_keys(key_of(CHANNEL)), UNKNOWN),
        Attack("own keys of other secrets", KEYS, other_keys(key_of(OWN)), UNKNOWN),
        Attack("mask keys of other secrets", KEYS, false_masks, UNKNOWN),
        Attack("mask keys of other secrets, then it drops out", KEYS, false_masks, UNKNOWN, MASKED),
        Attack("random shares", SHARES, arrays_as(random), UNKNOWN),
        Attack("shares of zeros", SHARES, arrays_as(zeros), UNKNOWN),
        Attack("shares for other receivers", SHARES, arrays_as(rolled), UNKNOWN),
        Attack("shares of no secret", SHARES, other_shares, UNKNOWN),
        Attack("random shares, then it drops out", SHARES, arrays_as(random), UNKNOWN, MASKED),
        Attack("random shares, then no answer to unmask", SHARES, arrays_as(random), UNKNOWN, UNMASK),
        Attack("random shares for one receiver", SHARES, arrays_as(first_row(random)), HONEST),
        Attack("half of the shares", SHARES, arrays_as(half), LATER),
        Attack("an error instead of shares", SHARES, absent, LATER),
        Attack("a masked reply of zeros", MASKED, arrays_as(zeros), UNKNOWN),
        Attack("a random masked reply", MASKED, arrays_as(random), UNKNOWN),
        Attack("zeros in one array", MASKED, arrays_as(zeros, only("arrays", "0.weight")), UNKNOWN),
        Attack("2**60 more in one array", MASKED, arrays_as(added(2**60), only("arrays", "0.weight")), UNKNOWN),
        Attack("a variance below zero", MASKED, arrays_as(added(-(2**40)), only("arrays", "running_var")), UNKNOWN),
        Attack("-2**40 examples", MASKED, arrays_as(added(-(2**40)), only("totals", "num-examples")), UNKNOWN),
        Attack("2**40 examples", MASKED, arrays_as(added(2**40), only("totals", "num-examples")), UNKNOWN),
        Attack("2**60 more in the loss", MASKED, arrays_as(added(2**60), only("totals", "train-loss")), UNKNOWN),
        Attack("half of an array", MASKED, arrays_as(half, only("arrays", "0.weight")), LATER),
        Attack("another dtype of arrays", MASKED, arrays_as(floats), LATER),
        Attack("no arrays", MASKED, arrays_as(lambda value: None, only("arrays")), LATER),  # type: ignore[arg-type,return-value]
        Attack("an error instead of a reply", MASKED, absent, LATER),
        Attack("revealed keys of zeros", UNMASK, arrays_as(zeros), HONEST),
        Attack("revealed keys of ones", UNMASK, arrays_as(lambda value: np.full_like(value, 255)), HONEST),
        Attack("random revealed keys", UNMASK, arrays_as(random), HONEST),
        Attack("revealed keys of other clients", UNMASK, arrays_as(rolled), HONEST),
        Attack("one wrong revealed key", UNMASK, arrays_as(first_row(zeros)), HONEST),
        Attack("half of the revealed keys", UNMASK, arrays_as(half), HONEST),
        Attack("an error instead of revealed keys", UNMASK, absent, HONEST),
    ]  # fmt: skip
