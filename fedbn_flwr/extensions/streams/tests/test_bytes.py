"""Values of exchanges as bytes: they arrive bit for bit, and all others are one kind of error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import (
    Agreement,
    Contribution,
    agreement_from_records,
    contribution_from_records,
)
from fedbn_flwr.extensions.streams.client import from_bytes, to_bytes
from tests.support.fuzz import cases, frames

described = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(["float16", "float32", "float64"]), st.lists(st.integers(0, 3), max_size=3), st.binary()),
    max_size=3,
)
counts = st.integers(0, 2**31)


def arrays_of(described: dict[str, Any]) -> dict[str, np.ndarray]:
    made = {}
    for name, (dtype, shape, content) in described.items():
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        made[name] = np.frombuffer((content * (size + 1) or b"\0" * size)[:size], dtype).reshape(shape)
    return made


def assert_same(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()


@given(described, counts, counts, st.text(max_size=9), counts, st.none() | st.integers(0, 10_000))
def test_contributions_arrive_as_they_were(
    described: dict[str, Any], batch: int, values: int, layer: str, examples: int, partition: int | None
) -> None:
    sent = Contribution(layer, "moments", arrays_of(described), batch, values, examples, partition)
    found = contribution_from_records(from_bytes(to_bytes(sent)))
    assert isinstance(found, Contribution)
    assert (found.layer, found.kind, found.batch, found.values) == (layer, "moments", batch, values)
    assert (found.examples, found.partition) == (examples, partition)
    assert_same(found.tensors, sent.tensors)


@given(described, counts, st.floats(allow_nan=False))
def test_agreements_arrive_as_they_were(described: dict[str, Any], values: int, per_example: float) -> None:
    sent = Agreement(arrays_of(described), values, per_example)
    found = agreement_from_records(from_bytes(to_bytes(sent)))
    assert (found.values, found.per_example) == (values, per_example)
    assert_same(found.tensors, sent.tensors)


def file(header: str, values: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + values


def changed(**entries: Any) -> bytes:
    """A valid contribution's bytes, with other entries in the header of the file."""
    data = to_bytes(Contribution("0", "mean", {"mean": np.ones(2, np.float32)}, 4, 4))
    end = 8 + int.from_bytes(data[:8], "little")
    return file(json.dumps(json.loads(data[8:end]) | entries), data[end:])


def tensor(dtype: str, shape: Any, begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_bytes_that_are_changed_below_are_valid() -> None:
    assert isinstance(contribution_from_records(from_bytes(changed())), Contribution)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        file("{}"),
        file("[" * 5000),
        file("not json"),
        file(" " * 20_000),
        changed() + b"\0",
        changed()[:-1],
        changed(**{"0/mean": tensor("F32", [3])}),
        changed(**{"0/mean": tensor("F32", [-1])}),
        changed(**{"0/mean": tensor("F32", [True, 2])}),
        changed(**{"0/mean": tensor("F32", [2**53, 2**53])}),
        changed(**{"0/mean": tensor("F32", [2], 0, 2**63)}),
        changed(**{"0/mean": tensor("object", [1])}),
        changed(**{"0/mean": 3}),
        changed(**{"0/other": tensor("F32", [2])}),
        changed(__metadata__={}),
        changed(__metadata__={"records": "[]"}),
        changed(__metadata__={"records": "[[[[["}),
        changed(__metadata__={"records": "9" * 5000}),
        to_bytes(Agreement({"mean": np.ones(2, np.float32)}, 4, 1.0)),
    ],
)
def test_bytes_that_are_no_contribution_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        contribution_from_records(from_bytes(data))


MOMENTS = {"mean": np.zeros(3), "var": np.ones(3)}
FRAMES = [to_bytes(Contribution("0", "moments", MOMENTS, 4, 8, 9, 1)), to_bytes(Agreement(MOMENTS, 8, 2.0))]


@settings(max_examples=cases(200))
@given(frames(FRAMES) | st.binary(max_size=200).map(lambda content: file("", content)))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    for read in (contribution_from_records, agreement_from_records):
        with contextlib.suppress(MessageError):
            read(from_bytes(data))
