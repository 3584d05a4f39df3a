"""Records as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as draw

from fedbn_flwr.messages.serialization import dump, parse
from tests.support.records import content

ODD = RecordDict(
    {
        "arrays": ArrayRecord(
            {
                key: Array(value)
                for key, value in {
                    "scalar": np.array(0.1),
                    "empty": np.zeros((0, 3), np.float16),
                    "nan": np.array([np.nan, -0.0, np.inf, 5e-324]),
                    "yes": np.array([True, False]),
                    "big": np.array(2**64 - 1, np.uint64),
                    "i8": np.arange(-3, 3, dtype=np.int8).reshape(2, 3),
                    "a/b": np.ones((1, 1), np.float32),
                }.items()
            }
        ),
        "a": ArrayRecord({"b/c": Array(np.ones(2)), "": Array(np.zeros(1))}),
        "none": ArrayRecord(),
        "metrics": MetricRecord({"f": 0.1 + 0.2, "i": 3, "one": 1.0, "list": [1.5, 2.5], "nan": float("inf")}),
        "config": ConfigRecord({"t": True, "s": "ä\n", "b": b"\x00\xff", "l": [b"\x01"], "e": [], "i": 2**53 + 1}),
    }
)


def test_records_come_back_exactly() -> None:
    assert content(parse(dump(ODD), RecordDict)) == content(ODD)
    assert content(parse(dump(RecordDict()), RecordDict)) == []


def test_other_bytes_are_refused() -> None:
    data = dump(ODD)
    for other in (b"", b"{}", data[:-1], data[: len(data) // 2], data[8:]):
        with pytest.raises(ValueError, match="these bytes are not records"):
            parse(other, RecordDict)


@example({"fedbn.volatile/": 0.0})  # the prefix of records, in the key of an entry
@given(draw.dictionaries(draw.text(), draw.floats() | draw.integers(-(2**62), 2**62) | draw.booleans() | draw.binary()))
def test_any_numbers_come_back_exactly(values: dict[str, Any]) -> None:
    records = RecordDict({"config": ConfigRecord(values)})
    assert content(parse(dump(records), RecordDict)) == content(records)


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer\.w is a complex64, which cannot be saved; expected numbers"):
        dump(RecordDict({"layer": ArrayRecord({"w": Array(np.zeros(1, np.complex64))})}))
