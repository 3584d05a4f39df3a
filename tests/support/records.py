"""Messages and replies of training, to inspect or to spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.messages.arrays import pack, unpack

# Called with the records of a train message, those of its reply, and the client's partition.
Hook = Callable[[RecordDict, RecordDict, int], None]


def between(inner: ClientApp, hook: Hook, *, evaluations: bool = False) -> ClientApp:
    """`inner`, with `hook` called on each train reply before it is sent, which it may change; also on `evaluations`."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        reply = inner(message, context)
        hook(message.content, reply.content, int(context.node_config["partition-id"]))
        return reply

    app.train()(answer)
    app.evaluate()(answer if evaluations else inner)
    for name in ("exchange", "partition", "statistics"):
        app.query(name)(inner)
    return app


def content(records: RecordDict) -> list[Any]:
    """Everything that records hold, types and bits included, to compare."""
    return [
        (
            name,
            type(record).__name__,
            [
                (key, value.dtype, tuple(value.shape), value.numpy().tobytes())
                if isinstance(value, Array)
                else (key, repr(value))
                for key, value in record.items()
            ],
        )
        for name, record in records.items()
    ]


Spoil = Callable[[RecordDict], None]


def change_record(name: str, key: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Spoil:
    """Changes one array of a record, or takes it out."""

    def apply(content: RecordDict) -> None:
        arrays = dict(unpack(content[name]))
        new = change(arrays.pop(key))
        content[name] = pack(arrays if new is None else arrays | {key: new})

    return apply


def drop_record(name: str) -> Spoil:
    def apply(content: RecordDict) -> None:
        del content[name]

    return apply


def add_array(name: str, key: str, value: np.ndarray) -> Spoil:
    def apply(content: RecordDict) -> None:
        content[name] = pack(unpack(content[name]) | {key: value})

    return apply


def put(*places: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Changes one value of an array."""

    def change(values: np.ndarray) -> np.ndarray:
        values[places] = value
        return values

    return change


# Unusable records of small_net's parameters, and the words that report them.
BAD_RECORDS: dict[str, tuple[Callable[[str], Spoil], str]] = {
    "NaN": (lambda name: change_record(name, "0.weight", lambda a: a * np.nan), "'0.weight' has 72 of 72 values"),
    "huge": (
        lambda name: change_record(name, "4.bias", lambda a: a + np.sqrt(np.finfo(a.dtype).max) / 8),
        "'4.bias' changed by up to ",
    ),
    "shape": (lambda name: change_record(name, "4.bias", lambda a: a[:2]), "'4.bias' has shape (2,)"),
    "dtype": (lambda name: change_record(name, "4.bias", lambda a: a.astype(np.float16)), "'4.bias' is float16"),
    "missing key": (lambda name: change_record(name, "4.bias", lambda a: None), "lacks '4.bias'"),
    "a statistic": (lambda name: add_array(name, "1.running_mean", np.zeros(4, np.float32)), "has '1.running_mean'"),
    "no record": (drop_record, "is missing (is the client served by fedbn_flwr.client_app"),
}
