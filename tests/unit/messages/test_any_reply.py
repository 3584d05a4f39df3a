"""Any reply passes the gate with typed content or becomes an error with a reason under 2 kB; the gate never raises."""

from __future__ import annotations

import json
import math
import tracemalloc
from operator import mul
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr import LocalGrid
from fedbn_flwr.messages.arrays import arrays_in, metrics_in, unpack
from fedbn_flwr.messages.gate import gate
from tests.support.attacks import BYTES, DECLARED, all_attacks, npy, with_header
from tests.support.fuzz import cases

LocalGrid(ClientApp(), 1)  # messages need the identity of a run
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
ATTACKS = all_attacks()
KEYS = ["arrays", "metrics", "config", "client", "0.weight", "bn.running_var", "num-examples", "partition-id", "", "x"]
MEMORY = 8 << 20  # bytes that a reply of a few kB may take while it is checked

keys = st.sampled_from(KEYS) | st.text(max_size=8) | st.builds(mul, st.just("k"), st.integers(0, 9000))
dtypes = st.sampled_from(
    ["float32", "<f4", ">f4", "float64", "float16", "bool", "int64", "complex64", "O", "U3", "S3", "V0", "M8[ns]",
     "f4,i4", "nonsense", "", "float128", "(3,)f4", "\ud800", "\0", "f4" * 3000]
)  # fmt: skip
sizes = st.integers(-2, 6) | st.sampled_from([10**15, 2**31, 2**63, 2**64, 10**30, True])
shapes = st.lists(sizes, max_size=4).map(tuple) | st.integers(0, 3000).map(lambda n: (1,) * n)
numbers = st.integers() | st.floats() | st.integers(0, 9)


def an_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    shape = tuple(abs(int(n)) % 5 for n in shape[:4])
    try:
        made = np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)
    except (TypeError, ValueError, SyntaxError):
        made = np.zeros(shape, np.float32)
    return made if not made.dtype.hasobject else np.zeros(shape, np.float32)


def damaged(data: bytes, at: int, length: int, new: bytes) -> bytes:
    at %= max(len(data), 1)
    return data[:at] + new + data[at + length :]


arrays_of_numpy = st.builds(an_array, dtypes, shapes, st.integers(0, 99))
headers = st.builds(
    lambda descr, order, shape: f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}",
    dtypes.map(repr) | st.sampled_from(["[('x', '<f4')]", "None", "{}", "1", "'<f4'"]),
    st.sampled_from(["True", "False", "None", "1", "[]"]),
    shapes.map(repr) | st.sampled_from(["()", "4", "None", "('4',)", "[4]", "(4.0,)", "((4,),)", "(" * 500]),
)
data = st.one_of(
    arrays_of_numpy.map(npy),
    st.binary(max_size=80),
    st.builds(damaged, arrays_of_numpy.map(npy), st.integers(0, 200), st.integers(0, 9), st.binary(max_size=4)),
    st.builds(with_header, headers, st.binary(max_size=64)),
    st.builds(lambda name, array: BYTES[name][0](array), st.sampled_from(sorted(BYTES)), arrays_of_numpy),
)  # fmt: skip
stypes = st.just("numpy.ndarray") | st.sampled_from(["", "torch.tensor", "numpy.ndarray\0", "x" * 5000])
honest = arrays_of_numpy.map(Array)
arrays = honest | st.builds(Array, dtype=dtypes, shape=shapes, stype=stypes, data=data)
tagged = st.builds(
    lambda array, changes: Array(
        **{"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data, **changes}
    ),
    honest,
    st.sampled_from([changes for changes, _ in DECLARED.values()]),
)
array_records = st.dictionaries(keys, arrays | tagged, max_size=4).map(ArrayRecord)
metric_values = numbers | st.lists(st.integers(), max_size=5) | st.lists(st.floats(), max_size=5)
metric_records = st.dictionaries(keys, metric_values, max_size=5).map(MetricRecord)
config_values = (
    metric_values | st.text(max_size=9) | st.binary(max_size=9) | st.booleans() | st.lists(st.text(max_size=3))
)
config_records = st.dictionaries(keys, config_values, max_size=5).map(ConfigRecord)
contents = st.dictionaries(keys, array_records | metric_records | config_records, max_size=5).map(RecordDict)


def usual() -> RecordDict:
    """A reply as an honest client sends it to any kind of message."""
    model = {"0.weight": np.ones((3, 2), np.float32), "1.running_var": np.ones(3, np.float32)}
    return RecordDict(
        {
            "arrays": ArrayRecord({key: Array(value) for key, value in model.items()}),
            "momentum": ArrayRecord({"0.weight": Array(np.ones((3, 2), np.float32))}),
            "metrics": MetricRecord(
                {"num-examples": 20, "batch-examples": 4, "train-loss": 0.5, "accuracy": 1.0}
            ),
            "config": ConfigRecord({"what": "moments", "layer": "norm"}),
            "client": ConfigRecord({"partition-id": 1}),
        }
    )  # fmt: skip


def attacked(number: int, others: RecordDict) -> RecordDict:
    """A usual reply after an attack, with more records."""
    content = usual()
    content.update(others)
    try:
        ATTACKS[number].spoil(content)
    except Exception:  # the other records may have arrays that the attack cannot read
        return usual()
    return content


attacks = st.builds(attacked, st.integers(0, len(ATTACKS) - 1), st.just(RecordDict()) | contents)


def reply(content: RecordDict | Error, node: int) -> Message:
    return Message(content, reply_to=Message(RecordDict(), node, "train"))


def bits(content: RecordDict) -> list[Any]:
    return [(name, list(record)) for name, record in content.items()]


@settings(max_examples=cases(2000))
@given(content=contents | attacks, kind=st.sampled_from(["only", "first", "last"]))
def test_any_reply_passes_typed_or_is_refused(content: RecordDict, kind: str) -> None:
    given = reply(content, 3)
    cohort = {"only": [given], "first": [given, reply(usual(), 1), reply(usual(), 2)],
              "last": [reply(usual(), 1), reply(usual(), 2), given]}[kind]  # fmt: skip
    before = bits(content)
    found = gate(cohort)
    assert len(found) == len(cohort)
    assert bits(content) == before, "the reply itself is not changed"
    for each, sent in zip(found, cohort, strict=True):
        assert each.metadata.src_node_id == sent.metadata.src_node_id
        if sent is not given:
            assert each.has_content(), f"an honest client is refused: {each.error.reason}"
        if each.has_error():
            check_reason(each.error.reason)
        else:
            check_content(each.content)
    again = gate(found)
    assert [each.has_error() for each in again] == [each.has_error() for each in found], "a second call changes nothing"


def check_reason(reason: str) -> None:
    assert 0 < len(reason.encode()) < 2048
    assert reason.isprintable()
    assert "pickle" not in reason
    json.dumps(reason)


def check_content(content: RecordDict) -> None:
    for record in arrays_in(content).values():
        for key, value in unpack(record).items():
            assert type(value) is np.ndarray
            assert value.dtype.kind in "fciub", value.dtype
            assert (str(value.dtype), value.shape) == (record[key].dtype, tuple(record[key].shape))
    for metrics in metrics_in(content).values():
        for value in metrics.values():
            for number in value if isinstance(value, list) else [value]:
                assert math.isfinite(number)


@settings(max_examples=max(cases(100), 20))
@given(content=contents | attacks)
def test_the_gate_takes_little_memory(content: RecordDict) -> None:
    """A declared shape of 1e15 allocates nothing."""
    given = reply(content, 3)
    tracemalloc.start()
    try:
        gate([given])
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@given(code=st.integers(0, 9), reason=st.text(max_size=30) | st.builds(mul, st.text(max_size=3), st.just(3000)))
def test_the_reason_of_a_client_s_error_is_fit_for_a_log(code: int, reason: str) -> None:
    (found,) = gate([reply(Error(code, reason), 3)])
    assert found.error.code == code
    check_reason(found.error.reason)
    if 0 < len(reason) < 99 and reason.isprintable() and reason == " ".join(reason.split()):
        assert found.error.reason == reason
