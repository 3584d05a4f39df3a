"""The codec: values arrive bit for bit, and all other bytes are one kind of error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.exchange.codec import (
    HEADER_LIMIT,
    TEXT_LIMIT,
    Agreement,
    CodecError,
    Contribution,
    agreement_from_bytes,
    agreement_from_records,
    agreement_to_records,
    answer_from_bytes,
    contribution_from_records,
    contribution_to_records,
    to_bytes,
)

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


@given(described, counts, counts, counts, st.none() | st.integers(0, 10_000))
def test_contributions_arrive_as_they_were(
    described: dict[str, Any], images: int, remaining: int, examples: int, partition: int | None
) -> None:
    sent = Contribution("moments", arrays_of(described), images, remaining, examples, partition)
    for found in (
        contribution_from_records(contribution_to_records(sent)),
        answer_from_bytes(to_bytes(sent)),
    ):
        assert isinstance(found, Contribution)
        assert (found.kind, found.images, found.remaining) == ("moments", images, remaining)
        assert (found.examples, found.partition) == (examples, partition)
        assert_same(found.tensors, sent.tensors)


@given(described, counts)
def test_agreements_arrive_as_they_were(described: dict[str, Any], images: int) -> None:
    sent = Agreement(arrays_of(described), images)
    for found in (agreement_from_records(agreement_to_records(sent)), agreement_from_bytes(to_bytes(sent))):
        assert found.images == images
        assert_same(found.tensors, sent.tensors)


@given(st.text(max_size=2 * TEXT_LIMIT))
def test_reasons_arrive_and_are_cut_where_they_are_long(reason: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):  # lone surrogates
        reason.encode()
        assert answer_from_bytes(to_bytes(reason)) == reason[:TEXT_LIMIT]


def test_the_longest_reason_fits_the_header() -> None:
    assert answer_from_bytes(to_bytes("\U0001f4a5" * TEXT_LIMIT)) == "\U0001f4a5" * TEXT_LIMIT


def file(header: str, values: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + values


def changed(**entries: Any) -> bytes:
    """A valid contribution's bytes, with other entries in the header of the file."""
    data = to_bytes(Contribution("mean", {"mean": np.ones(2, np.float32)}, 4, 1))
    end = 8 + int.from_bytes(data[:8], "little")
    return file(json.dumps(json.loads(data[8:end]) | entries), data[end:])


def tensor(dtype: str, shape: Any, begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_bytes_that_are_changed_below_are_valid() -> None:
    assert isinstance(answer_from_bytes(changed()), Contribution)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        file("{}"),
        file("[" * 5000),
        file("not json"),
        file(" " * (HEADER_LIMIT + 1)),
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
        to_bytes(Agreement({"mean": np.ones(2, np.float32)}, 4)),
    ],
)
def test_bytes_that_are_no_answer_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        answer_from_bytes(data)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda content: file("", content)))
def test_any_bytes_are_an_answer_or_refused(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        answer_from_bytes(data)
    with contextlib.suppress(CodecError):
        agreement_from_bytes(data)


def with_number(key: str, value: Any) -> RecordDict:
    records = contribution_to_records(Contribution("mean", {"mean": np.ones(2, np.float32)}, 4, 1, examples=9))
    metrics = records["metrics"]
    assert isinstance(metrics, MetricRecord)
    metrics[key] = value
    return records


@pytest.mark.parametrize("key", ["num-examples", "batch-examples", "exchanges-left"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 2**60, [4]])
def test_numbers_are_finite_and_not_negative(key: str, value: Any) -> None:
    with pytest.raises(CodecError, match=f"{key}.*expected a number from 0"):
        contribution_from_records(with_number(key, value))


def test_counts_are_whole_numbers_and_weights_need_not_be() -> None:
    for key in ("batch-examples", "exchanges-left"):
        with pytest.raises(CodecError, match=f"{key}.*expected a whole number"):
            contribution_from_records(with_number(key, 0.5))
    assert contribution_from_records(with_number("num-examples", 0.5)).examples == 0.5


def test_records_of_another_kind_of_reply_are_refused() -> None:
    with pytest.raises(CodecError, match="no contribution to an exchange; serve the client with"):
        contribution_from_records(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 3})}))
    with pytest.raises(CodecError, match=r"fedbn\.cohort-batch"):
        agreement_from_records(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}))
