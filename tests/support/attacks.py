"""Replies of a hostile client: what it sends instead of an honest reply, and what must become of it.

An attack changes the records of a reply in place, or raises `Unfit` where the reply has nothing of that kind. Each one
has a verdict: the reply must be REFUSED (the run is that of an absent client, and the log names the client), it is
HARMLESS (the run is that of the honest reply), either of both is right (EITHER), or it is a LIE, a possible value that
only a robust rule can resist: the run must stay finite, or end with an error of this library.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, configs_in, metrics_in, pack, unpack

REFUSED, HARMLESS, EITHER, LIE = "refused", "harmless", "either", "lie"
BAD = 2  # the partition of the hostile client

Spoil = Callable[[RecordDict], None]


class Unfit(Exception):
    """The reply has nothing that this attack changes."""


class SentError(Exception):
    """The hostile client sends an error with this reason."""


@dataclass(frozen=True)
class Attack:
    name: str
    spoil: Spoil
    verdict: str = REFUSED
    kinds: tuple[str, ...] = ("train", "evaluate", protocol.EXCHANGE_QUERY, protocol.STATISTICS_QUERY)


# --- arrays ------------------------------------------------------------------


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=True)
    return file.getvalue()


def npz(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


def with_header(text: str, data: bytes = b"") -> bytes:
    head = text.encode(errors="replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


def header(shape: str, descr: str = "'<f4'", more: str = "") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {more}}}"


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


BYTES: dict[str, tuple[Callable[[np.ndarray], bytes], str]] = {
    "npz": (npz, REFUSED),
    "pickle": (pickle.dumps, REFUSED),
    "garbage": (lambda a: b"\x00\xffgarbage" * 9, REFUSED),
    "nothing": (lambda a: b"", REFUSED),
    "cut": (lambda a: halved(npy(a)), REFUSED),
    "header only": (lambda a: npy(a)[:80], REFUSED),
    "magic only": (lambda a: b"\x93NUMPY", REFUSED),
    "version 2": (lambda a: npy(a, (2, 0)), EITHER),
    "version 3": (lambda a: npy(a, (3, 0)), EITHER),
    "version 9": (lambda a: b"\x93NUMPY\x09" + npy(a)[7:], REFUSED),
    "trailing bytes": (lambda a: npy(a) + b"more", EITHER),
    "compressed": (lambda a: zlib.compress(npy(a)), REFUSED),
    "objects": (lambda a: npy(np.array([a, {}], dtype=object)), REFUSED),
    "expression": (lambda a: with_header(header("(__import__('os').getpid(),)")), REFUSED),
    "shape 1e15": (lambda a: with_header(header("(1000000000000000,)")), REFUSED),
    "shape of 5,000 digits": (lambda a: with_header(header(f"({'9' * 5000},)")), REFUSED),
    "shape overflows": (lambda a: with_header(header("(4294967296, 4294967296)")), REFUSED),
    "negative shape": (lambda a: with_header(header("(-1,)"), bytes(16)), REFUSED),
    "shape of booleans": (lambda a: with_header(header("(True,)"), bytes(4)), REFUSED),
    "shape of floats": (lambda a: with_header(header("(4.0,)"), bytes(16)), REFUSED),
    "shape is text": (lambda a: with_header(header("'(4,)'"), bytes(16)), REFUSED),
    "nested header": (lambda a: with_header("(" * 9000 + ")" * 9000), REFUSED),
    "header with more keys": (lambda a: with_header(header("(4,)", more="'x': 1"), bytes(16)), REFUSED),
    "header no dict": (lambda a: with_header("[1, 2]", bytes(16)), REFUSED),
    "dtype unknown": (lambda a: with_header(header("(4,)", "'nonsense'"), bytes(16)), REFUSED),
    "dtype of objects": (lambda a: with_header(header("(4,)", "'|O'"), bytes(32)), REFUSED),
    "dtype structured": (lambda a: with_header(header("(4,)", "[('x', '<f4')]"), bytes(16)), REFUSED),
    "dtype of width 0": (lambda a: with_header(header("(1000000000000000,)", "'|V0'")), REFUSED),
    "dtype nested": (lambda a: with_header(header("(1,)", "[('x', '<f4', (1000000, 1000000))]")), REFUSED),
}

# Arrays that are read, and are not those of the model.
CHANGED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "float64": (lambda a: a.astype(np.float64), REFUSED),
    "float16": (lambda a: a.astype(np.float16), REFUSED),
    "long double": (lambda a: a.astype(np.longdouble), REFUSED),
    "int64": (lambda a: a.astype(np.int64), REFUSED),
    "uint8": (lambda a: a.astype(np.uint8), REFUSED),
    "bool": (lambda a: a > 0, REFUSED),
    "complex": (lambda a: a.astype(np.complex64), REFUSED),
    "text": (lambda a: a.astype(str), REFUSED),
    "bytes": (lambda a: a.astype("S8"), REFUSED),
    "dates": (lambda a: a.astype("M8[s]"), REFUSED),
    "records": (lambda a: np.zeros(a.shape, [("x", "f4"), ("y", "i4")]), REFUSED),
    "big endian": (lambda a: a.astype(">f4"), EITHER),
    "Fortran order": (lambda a: np.asfortranarray(a), HARMLESS),
    "another axis": (lambda a: a[None], REFUSED),
    "scalar": (lambda a: a.reshape(-1)[0], REFUSED),
    "empty": (lambda a: a.reshape(-1)[:0], REFUSED),
    "shorter": (lambda a: a[:-1], REFUSED),
    "flat and longer": (lambda a: np.concatenate([a.reshape(-1), a.reshape(-1)]), REFUSED),
    "one NaN": (lambda a: with_first(a, np.nan), REFUSED),
    "all NaN": (lambda a: np.full_like(a, np.nan), REFUSED),
    "infinite": (lambda a: with_first(a, np.inf), REFUSED),
    "minus infinite": (lambda a: with_first(a, -np.inf), REFUSED),
    "a million times": (lambda a: a * np.float32(1e6), LIE),
    "1e18": (lambda a: np.full_like(a, 1e18), REFUSED),
    "1e30": (lambda a: np.full_like(a, 1e30), REFUSED),
    "3e38": (lambda a: np.full_like(a, 3e38), REFUSED),
    "denormal": (lambda a: np.full_like(a, 1e-45), LIE),
    "sign": (lambda a: -np.abs(a) - 1, LIE),
    "noise": (lambda a: np.random.default_rng(0).normal(size=a.shape).astype(a.dtype), LIE),
    "zero": (lambda a: np.zeros_like(a), LIE),
}

DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype nonsense": ({"dtype": "nonsense"}, REFUSED),
    "dtype empty": ({"dtype": ""}, REFUSED),
    "dtype O": ({"dtype": "O"}, REFUSED),
    "dtype structured": ({"dtype": "f4,i4"}, REFUSED),
    "dtype long": ({"dtype": "f4," * 30_000}, REFUSED),
    "dtype of 10**9 bytes": ({"dtype": "V1000000000"}, REFUSED),
    "dtype other": ({"dtype": "float64"}, REFUSED),
    "dtype with a NUL": ({"dtype": "float32\0\n\x1b[2J"}, REFUSED),
    "shape 1e30": ({"shape": (10**15, 10**15)}, REFUSED),
    "shape negative": ({"shape": (-1, -4)}, REFUSED),
    "shape missing": ({"shape": ()}, REFUSED),
    "shape of 10,000 axes": ({"shape": (1,) * 10_000}, REFUSED),
    "shape with a zero": ({"shape": (0,)}, REFUSED),
    "stype empty": ({"stype": ""}, REFUSED),
    "stype torch": ({"stype": "torch.tensor"}, REFUSED),
    "stype long": ({"stype": "numpy.ndarray" * 10_000}, REFUSED),
}


def with_first(array: np.ndarray, value: float) -> np.ndarray:
    if array.dtype.kind != "f":
        raise Unfit
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


def chosen(content: RecordDict, where: str) -> tuple[ArrayRecord, str]:
    """The record and the key that an attack changes; `where` is "first", "variance" or "additional"."""
    records = arrays_in(content)
    if where == "additional":
        names = [name for name in records if name != "arrays"]
        if not names:
            raise Unfit
        record = records[names[0]]
        key = next(iter(record), None)
    else:
        record = records.get("arrays", ArrayRecord())
        ends = ("running_var", "var", "deviation") if where == "variance" else ("",)
        key = next((key for key in record if key.endswith(ends)), None)
    if key is None:
        raise Unfit
    return record, key


def by_array(where: str, change: Callable[[Array], Array]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record, key = chosen(content, where)
        record[key] = change(record[key])

    return spoil


def bytes_as(make: Callable[[np.ndarray], bytes]) -> Callable[[Array], Array]:
    return lambda array: Array(array.dtype, tuple(array.shape), "numpy.ndarray", make(array.numpy()))


def value_as(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Array], Array]:
    return lambda array: Array(np.asarray(make(array.numpy())))


def declared_as(**changes: Any) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        fields = {"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data}
        return Array(**(fields | changes))

    return change


# Enough of the bytes and declarations for further arrays of a reply.
SHORT = ("npz", "garbage", "cut", "nothing", "trailing bytes", "dtype nonsense", "dtype other", "shape 1e30")


def on_arrays(where: str) -> list[Attack]:
    found = [Attack(f"bytes, {n}", by_array(where, bytes_as(m)), v) for n, (m, v) in BYTES.items()]
    found += [Attack(f"array, {n}", by_array(where, value_as(m)), v) for n, (m, v) in CHANGED.items()]
    found += [Attack(f"declared, {n}", by_array(where, declared_as(**c)), v) for n, (c, v) in DECLARED.items()]
    if where != "first":
        found = [attack for attack in found if attack.name.startswith("array") or attack.name.endswith(SHORT)]
    if where == "variance":
        found += [Attack("array, negative variance", by_array(where, value_as(lambda a: -np.abs(a) - 1)), REFUSED)]
        # Features of 1e9 have variances of 1e18.
        found = [attack for attack in found if attack.name not in ("array, sign", "array, 1e18")]
    return [
        Attack(f"{where}: {attack.name}", attack.spoil, attack.verdict, with_arrays(where, attack)) for attack in found
    ]


def with_arrays(where: str, attack: Attack) -> tuple[str, ...]:
    if where == "additional":
        return ("train",)
    if attack.name == "array, negative variance":  # a gradient with respect to a variance may be negative
        return ("train", "moments")
    return ("train", protocol.EXCHANGE_QUERY, protocol.STATISTICS_QUERY)


# --- records -----------------------------------------------------------------


def records(change: Callable[[RecordDict, dict[str, ArrayRecord]], None]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        if not (found := arrays_in(content)):
            raise Unfit
        change(content, found)

    return spoil


def rekeyed(old: int, new: str | None) -> Spoil:
    """The array at a position under another key, or left out."""

    def change(content: RecordDict, found: dict[str, ArrayRecord]) -> None:
        name = next(iter(found))
        items = list(found[name].items())
        if not items:
            raise Unfit
        _, value = items.pop(old)
        content[name] = ArrayRecord(dict([*items, *([(new, value)] if new is not None else [])]))

    return records(change)


def put(name: str, record: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content[name] = record.copy()

    return spoil


def renamed(content: RecordDict, found: dict[str, ArrayRecord]) -> None:
    for number, name in enumerate(found):
        content[f"other-{number}"] = content.pop(name)


def turned(content: RecordDict, found: dict[str, ArrayRecord]) -> None:
    content["arrays"] = pack(dict(reversed(list(unpack(found["arrays"]).items()))))


def dropped(kind: type) -> Spoil:
    def spoil(content: RecordDict) -> None:
        names = [name for name, record in content.items() if isinstance(record, kind)]
        if not names:
            raise Unfit
        for name in names:
            del content[name]

    return spoil


def swapped(content: RecordDict) -> None:
    """The arrays' name has the metrics, and the metrics' name the arrays."""
    arrays, metrics = next(iter(arrays_in(content).items()), None), next(iter(metrics_in(content).items()), None)
    if arrays is None or metrics is None:
        raise Unfit
    content[arrays[0]], content[metrics[0]] = metrics[1], arrays[1]


def emptied(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


SOME = ArrayRecord({"0.weight": Array(np.zeros(3, np.float32))})
UNREADABLE = ArrayRecord({"x": Array("float32", (3,), "numpy.ndarray", b"garbage")})

RECORDS: list[Attack] = [
    Attack("records, none", emptied),
    Attack("records, no arrays", dropped(ArrayRecord)),
    Attack("records, no metrics", dropped(MetricRecord)),
    Attack("records, no config", dropped(ConfigRecord), LIE),
    Attack("records, empty arrays", records(lambda c, f: c.__setitem__("arrays", ArrayRecord()))),
    Attack("records, empty metrics", put("metrics", MetricRecord())),
    Attack("records, two MetricRecords", put("more", MetricRecord({"num-examples": 5, "train-loss": 0.1}))),
    Attack("records, exchanged names", swapped, EITHER),
    Attack("records, arrays renamed", records(renamed), EITHER),
    Attack("records, more arrays", put("more", SOME), EITHER),
    Attack("records, more unreadable arrays", put("more", UNREADABLE), EITHER),
    Attack("records, arrays under the name config", put("config", SOME), EITHER),
    Attack("records, metrics under the name config", put("config", MetricRecord({"what": 1})), REFUSED),
    Attack("records, a config more", put("more", ConfigRecord({"what": ["moments"], "x": [b"\0"]})), EITHER),
    Attack("records, 2,000 configs", lambda c: c.update({f"c{i}": ConfigRecord() for i in range(2000)}), EITHER),
    Attack("keys, one missing", rekeyed(0, None)),
    Attack("keys, one renamed", rekeyed(0, "x")),
    Attack("keys, empty text", rekeyed(0, "")),
    Attack("keys, 100,000 characters", rekeyed(-1, "x" * 100_000)),
    Attack("keys, line breaks", rekeyed(-1, "x\nround 1: left out client 0 (node 1): \x1b[2J\0")),
    Attack("keys, one more", records(lambda c, f: f["arrays"].__setitem__("more", SOME["0.weight"]))),
    Attack("keys, another order", records(turned), HARMLESS, ("train",)),
]  # fmt: skip

# --- metrics and configs -----------------------------------------------------


def metric(key: str, value: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        record = next(iter(metrics_in(content).values()), None)
        if record is None or key not in (*record, protocol.PARTITION, "more", "m" * 100_000, "a\nb\0", ""):
            raise Unfit
        if value is None:
            del record[key]
        else:
            record[key] = value

    return spoil


def in_config(key: str, value: Any, name: str = "client") -> Spoil:
    def spoil(content: RecordDict) -> None:
        configs = configs_in(content)
        if name == "config" and name not in configs:
            raise Unfit
        record = configs.get(name, ConfigRecord()).copy()
        if value is None:
            record.pop(key, None)
        else:
            record[key] = value
        content[name] = record

    return spoil


NOT_A_NUMBER: dict[str, Any] = {
    "missing": None, "a list": [5.0], "an empty list": [], "a list of NaN": [float("nan")], "NaN": float("nan"),
    "inf": float("inf"), "-inf": float("-inf"), "a long list": [1.0] * 10_000,
}  # fmt: skip
COUNTS: dict[str, tuple[Any, str]] = {
    **{name: (value, REFUSED) for name, value in NOT_A_NUMBER.items()},
    "-1": (-1, REFUSED),
    "1e300": (1e300, REFUSED),
    "2**63 - 1": (2**63 - 1, REFUSED),
    "2**31": (2**31, LIE),
    "0": (0, LIE),
    "2.5": (2.5, LIE),
    "1e-300": (1e-300, LIE),
}
MEASURES: dict[str, tuple[Any, str]] = {
    **{name: (value, REFUSED) for name, value in NOT_A_NUMBER.items() if name != "missing"},
    "missing": (None, LIE),
    "1e300": (1e300, REFUSED),
    "-1e300": (-1e300, REFUSED),
    "-1": (-1.0, LIE),
    "1e30": (1e30, LIE),
}
SHARES = {"7": (7.0, REFUSED), "-1": (-1.0, REFUSED), "1 as an integer": (1, LIE)}
PARTITIONS: dict[str, tuple[Any, str]] = {
    "10**18": (10**18, REFUSED), "-1": (-1, REFUSED), "a list": ([2], REFUSED), "2.5": (2.5, REFUSED),
    "NaN": (float("nan"), REFUSED), "another client's": (0, LIE), "client 7, which there is not": (7, LIE),
}  # fmt: skip

EXCHANGE = (protocol.EXCHANGE_QUERY,)
EVALUATE = ("evaluate",)
ALL = ("train", "evaluate", protocol.EXCHANGE_QUERY, protocol.STATISTICS_QUERY)


def values() -> list[Attack]:
    found = [Attack(f"num-examples, {n}", metric("num-examples", v), verdict) for n, (v, verdict) in COUNTS.items()]
    for name, (value, verdict) in COUNTS.items():
        if name in ("2**31", "2.5", "1e-300"):
            verdict = REFUSED
        found.append(Attack(f"batch-examples, {name}", metric(protocol.BATCH_EXAMPLES, value), verdict, EXCHANGE))
    for key in (protocol.TRAIN_LOSS, "loss", "accuracy", "own-accuracy", "own-loss", "own-num-examples"):
        kinds = ("train",) if key == protocol.TRAIN_LOSS else EVALUATE
        given = (
            COUNTS | {"missing": (None, LIE)}
            if key.endswith("examples")
            else MEASURES | (SHARES if "accuracy" in key else {})
        )
        if "accuracy" in key:
            given |= {"1e30": (1e30, REFUSED)}
        found += [
            Attack(f"{key}, {name}", metric(key, value), verdict, kinds) for name, (value, verdict) in given.items()
        ]
    for name, (value, verdict) in PARTITIONS.items():
        found.append(Attack(f"partition in the metrics, {name}", metric(protocol.PARTITION, value), verdict))
        if name != "NaN":
            found.append(Attack(f"partition in the config, {name}", in_config(protocol.PARTITION, value), verdict))
    for name, value in {"text": "2", "bytes": b"2", "a boolean": True}.items():
        found.append(Attack(f"partition in the config, {name}", in_config(protocol.PARTITION, value)))
    found += [
        Attack("metrics, one more", metric("more", 1.0), EITHER),
        Attack("metrics, one more that is NaN", metric("more", float("nan"))),
        Attack("metrics, one more that is a list", metric("more", [1.0, 2.0]), EITHER),
        Attack("metrics, a name of 100,000 characters", metric("m" * 100_000, 1.0), EITHER),
        Attack("metrics, a name with line breaks", metric("a\nb\0", 1.0), EITHER),
        Attack("metrics, an empty name", metric("", 1.0), EITHER),
    ]
    whats = {
        "a list": ["moments"], "missing": None, "nonsense": "nonsense", "bytes": b"moments", "a number": 1,
        "another kind": "variance", "a long text": "moments" * 20_000,
    }  # fmt: skip
    found += [
        Attack(f"exchange, {key} is {n}", in_config(key, v, "config"), REFUSED, EXCHANGE)
        for key in ("what", "layer")
        for n, v in whats.items()
    ]
    return found


def errors() -> list[Attack]:
    reasons = {
        "long": "x" * 1_000_000, "empty": "", "of several lines": "a\nround 1: left out client 0 (node 1): b\x1b[2J\0",
    }  # fmt: skip

    def sending(reason: str) -> Spoil:
        def spoil(content: RecordDict) -> None:
            raise SentError(reason)

        return spoil

    return [Attack(f"an error with a reason that is {name}", sending(reason)) for name, reason in reasons.items()]


def all_attacks() -> list[Attack]:
    found = [attack for where in ("first", "variance", "additional") for attack in on_arrays(where)]
    return [*found, *RECORDS, *values(), *errors()]


# --- the hostile client ------------------------------------------------------


def over_a_network(content: RecordDict) -> RecordDict:
    """The records as they arrive from another machine; in process, types that cannot be sent would pass."""
    arrived = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrived[name] = ArrayRecord({key: sent_array(array) for key, array in record.items()})
        else:
            arrived[name] = recorddict_from_proto(recorddict_to_proto(RecordDict({name: record})))[name]
    return arrived


def sent_array(array: Array) -> Array:
    """Flower sends the bytes apart, and the rest as JSON."""
    dtype, shape, stype = json.loads(json.dumps([array.dtype, list(array.shape), array.stype]))
    return Array(dtype, tuple(shape), stype, bytes(array.data))


class Hostile(ClientApp):
    """`inner`, where client BAD trains honestly and then sends something else.

    `spoil` changes the records of its replies to messages of `kind` in `rounds`; None sends an error instead. "moments"
    is the kind of an exchange's forward pass.
    """

    def __init__(self, inner: ClientApp, kind: str, rounds: Sequence[int], spoil: Spoil | None) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind
        self.rounds = frozenset(rounds)
        self.spoil = spoil
        self.sent = 0  # hostile replies
        self.largest = 0  # bytes of the arrays of the largest one
        self.failure: Exception | None = None  # of the attack itself

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.inner(message, context)
        if context.node_config["partition-id"] != BAD or reply.has_error() or not self._is_meant(message, reply):
            return reply
        self.sent += 1
        if self.spoil is None:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "absent"), reply_to=message)
        content = RecordDict({name: record.copy() for name, record in reply.content.items()})
        try:
            self.spoil(content)
            content = over_a_network(content)
        except SentError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
        except Exception as error:
            self.failure = error  # the engine reports it as an error of the client
            raise
        size = sum(len(array.data) for record in arrays_in(content).values() for array in record.values())
        self.largest = max(self.largest, size)
        return Message(content, reply_to=message)

    def _is_meant(self, message: Message, reply: Message) -> bool:
        config = config_of(message.content)
        kind = message.metadata.message_type
        if config.get(protocol.ROUND) not in self.rounds:  # a query before the first round has round 0
            return False
        if self.kind == "moments":
            return kind == protocol.EXCHANGE_QUERY and configs_in(reply.content)["config"].get("what") == "moments"
        return kind == self.kind
