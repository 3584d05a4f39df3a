"""Packed arrays: for Flower an ordinary ArrayRecord, for us the same values without a copy."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedbn_flwr.messages.arrays import pack, record_of, size_of, unpack

MODEL = {
    "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "bn.running_var": np.ones(2, dtype=np.float32),
    "scale": np.array(3.5, dtype=np.float32),  # no dimension
    "none": np.zeros((0, 3), dtype=np.float32),
}
MIXED = {**MODEL, "bn.num_batches_tracked": np.array(7), "mask": np.array([True, False])}
EITHER = pytest.mark.parametrize("arrays", [MODEL, MIXED], ids=["one dtype", "several"])


def same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        np.testing.assert_array_equal(found[key], value)


@EITHER
def test_what_is_packed_is_unpacked(arrays: dict[str, np.ndarray]) -> None:
    same(unpack(pack(arrays)), arrays)


@EITHER
def test_flower_sees_the_bytes_it_would_have_made_itself(arrays: dict[str, np.ndarray]) -> None:
    for key, array in pack(arrays).items():
        own = FlowerArray(arrays[key])
        assert (array.dtype, array.shape, array.stype, array.data) == (own.dtype, own.shape, own.stype, own.data)
        np.testing.assert_array_equal(array.numpy(), arrays[key])


@EITHER
def test_it_survives_all_of_flower_s_serialisations(arrays: dict[str, np.ndarray]) -> None:
    record = pack(arrays)
    by_proto = recorddict_from_proto(recorddict_to_proto(RecordDict({"arrays": record}))).array_records["arrays"]
    same(unpack(by_proto), arrays)
    children = {child_id: child for array in record.values() for child_id, child in array.children.items()}
    inflated = {
        array.object_id: FlowerArray.inflate(array.deflate(), {i: children[i] for i in array.children})
        for array in record.values()
    }
    same(unpack(ArrayRecord.inflate(record.deflate(), inflated)), arrays)
    same(unpack(pickle.loads(pickle.dumps(record))), arrays)
    same(unpack(record.copy()), arrays)
    same(unpack(ArrayRecord(dict(record))), arrays)


def test_arrays_that_nobody_can_change_are_not_copied() -> None:
    arrays = unpack(pack(MODEL))
    for again in (pack(arrays), pack(arrays).copy(), record_of(pack(arrays))):
        assert all(value is arrays[key] for key, value in unpack(again).items())
    for value in unpack(pickle.loads(pickle.dumps(pack(MODEL)))).values():
        assert not value.flags.writeable, "also after a message between processes"


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.ones(2), "Tensor"), (0.5, "float"), ([1, 2], "list"), (None, "NoneType")]
)
def test_a_value_that_is_no_array_of_numpy_is_named(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"'1' is a {kind}; expected a NumPy array"):
        pack({"0": np.ones(2), "1": value})
    with pytest.raises(TypeError, match="'w' holds Python objects"):
        pack({"w": np.array([None])})
    scalar: Any = np.float32(2)
    same(unpack(pack({"0": scalar})), {"0": np.array(2, np.float32)})


def test_a_record_is_changed_like_any_other() -> None:
    record, other = pack(MODEL), pack(MODEL)
    before = record.copy()
    assert record == other == dict(other)
    assert list(record.keys()) == list(MODEL)
    assert "scale" in record
    one = pack({"scale": np.zeros((), np.float32)})["scale"]
    record["scale"] = one
    record["new"] = one
    del record["none"]
    changed = {**MODEL, "scale": np.zeros((), np.float32), "new": np.zeros((), np.float32)}
    del changed["none"]
    same(unpack(record), changed)
    same(unpack(record.copy()), changed)
    same(unpack(pickle.loads(pickle.dumps(record))), changed)
    assert len(record) == len(changed)
    same(unpack(before), MODEL)  # the copy is independent
    assert record != before


@EITHER
def test_the_size_is_that_of_all_elements(arrays: dict[str, np.ndarray]) -> None:
    expected = sum(value.size for value in arrays.values()), sum(value.nbytes for value in arrays.values())
    record = pack(arrays)
    assert size_of(unpack(record)) == expected
    assert len(list(record.values())) == len(arrays)  # whose entries now exist
    assert size_of(unpack(record)) == expected
    assert size_of(unpack(ArrayRecord({key: FlowerArray(value) for key, value in arrays.items()}))) == expected


@EITHER
def test_packing_copies_the_arrays(arrays: dict[str, np.ndarray]) -> None:
    mine = {key: value.copy() for key, value in arrays.items()}
    record = pack(mine)
    mine["conv.weight"][:] = 0
    same(unpack(record), arrays)


@EITHER
def test_shared_arrays_are_read_only(arrays: dict[str, np.ndarray]) -> None:
    record = pack(arrays)
    for value in unpack(record).values():
        with pytest.raises(ValueError, match="read-only"):
            value[...] = 0
    theirs = record["conv.weight"].numpy()  # the caller may write to Flower's own copy
    theirs[:] = 0
    same(unpack(record), arrays)


def test_data_cannot_be_replaced() -> None:
    """Which would leave the array in memory as it was."""
    array = pack({"w": np.ones(3)})["w"]
    with pytest.raises(AttributeError):
        array.data = FlowerArray(np.zeros(3)).data
