"""The weighted mean against arithmetic by hand, and every fault by name."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedbn_flwr.messages.aggregate import cast, pooled_mean, total_weight, weighted_mean
from fedbn_flwr.messages.limits import MOST_EXAMPLES, arrays_problem, largest, values_problems

DTYPES = [np.float16, np.float32, np.float64, np.int64, np.bool_]


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        # Client 0 holds 1 example, client 1 holds 3: (1 * 2.0 + 3 * 6.0) / (1 + 3) = 20 / 4 = 5.
        ([np.float32([2.0]), np.float32([6.0])], [1, 3], [5.0]),
        # 1e8 + 1 - 1e8 is 0 in float32 and 1 in float64; a third of it is the mean.
        ([np.float32([value]) for value in (1e8, 1.0, -1e8)], [1, 1, 1], [np.float32(1 / 3)]),
        # Flower's own mean of ten equal counters returns 15.999999999999998, which a model loads as 15.
        ([np.array(16)] * 10, [7] * 10, 16),
        # Integers are rounded to the nearest, booleans go with the majority of weights.
        ([np.array([1, 10, -10]), np.array([2, 11, -11])], [1, 2], [2, 11, -11]),
        ([np.array([True, False]), np.array([False, True])], [1, 3], [False, True]),
        # Large integers keep their small differences.
        ([np.array([2**62 + step]) for step in (0, 4096, 8192)], [1, 1, 1], [2**62 + 4096]),
        *([[np.array([value, 7])] * 3, [1, 2, 3], [value, 7]] for value in (2**62 + 1, 2**63 - 1, -(2**63), 2**53 + 1)),
        ([np.uint64([2**64 - step]) for step in (8192, 2048)], [2, 1], [2**64 - 6144]),
        ([np.array([3, 4]), np.array([4, 5])], [1, 1], [4, 4]),
        # A small weight takes no digits.
        ([np.array([value]) for value in (1e12, 0.5, 0.25)], [1e-300, 1.0, 1.0], [0.375]),
    ],
)
def test_a_mean_that_a_person_can_verify(values: list[np.ndarray], weights: list[float], expected: Any) -> None:
    """It does not depend on the scale of the weights."""
    for scale in (1, 2, 1000):
        mean = weighted_mean([{"w": value} for value in values], [scale * weight for weight in weights])["w"]
        assert (mean.tolist(), mean.dtype) == (expected, values[0].dtype)
    assert cast(mean, mean.dtype).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_dtype_and_shape_are_kept(dtype: type, shape: tuple[int, ...]) -> None:
    replies: list[dict[str, np.ndarray]] = [{"w": np.ones(shape, dtype)}, {"w": np.zeros(shape, dtype)}]
    mean = weighted_mean(replies, [3, 1])["w"]
    assert isinstance(mean, np.ndarray)
    assert mean.dtype == dtype
    assert mean.shape == shape
    expected = {"b": True, "i": 1}.get(np.dtype(dtype).kind, 0.75)
    assert (mean == expected).all()


# --- values that training cannot make ---

SENT = {
    "w": np.array([1.0, -2.0], np.float32),
    "bn.running_mean": np.array([0.0], np.float32),
    "bn.running_var": np.array([1.0], np.float32),
}


def left_out(*values: float, key: str = "w", sent: Mapping[str, Any] = SENT) -> list[int]:
    """Of replies in which the last element of an array has these values."""
    cohort = []
    for value in values:
        changed = sent[key].copy()
        changed[-1] = value
        cohort.append({**sent, key: changed})
    return sorted(values_problems(dict(enumerate(cohort)), sent))


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ((-1.9, -2.1, 1e18), "w", [2]),
        ((-1.9, -1e18, -2.1, 1e30, -2.2), "w", [1, 3]),  # two of five
        ((-1.9, -2.1, 1e18, 1e18), "w", [2, 3]),  # each beside the others
        ((-2.0, -2.0, 1e13), "w", [2]),  # the others made no step
        ((0.9, 1.1, 1e37), "bn.running_var", [2]),
        ((-1.9, 1e18), "w", []),  # which of the two is wrong is not known
        ((-2.0, -2.0, -1.9), "w", []),  # one of three made steps
        ((-1.9, -2.1, 1.9e9), "w", []),  # the largest value of a run that diverged
        ((-1.9, -2.1, 6e12), "w", []),
        ((1e13, 2e13, 9e15), "w", []),  # a regression in small units
        ((5e15, -3e15, 6e18), "w", []),  # a run that diverged on all clients
        # One client has the feature in millions, another one as time in milliseconds.
        ((1.0, 1.0, 1e12, 3e24), "bn.running_var", []),
        ((0.0, 0.0, 1e6, 1.7e12), "bn.running_mean", []),
    ],
)
def test_values_that_training_cannot_make_are_absurd_beside_ordinary_ones(
    values: tuple[float, ...], key: str, expected: list[int]
) -> None:
    assert left_out(*values, key=key) == expected


def test_a_large_constant_of_the_model_is_not_absurd() -> None:
    """For instance a mask that is a persistent buffer."""
    assert left_out(-1.9, -2.1, -2.2, sent={"mask": np.full(3, -1e18, np.float32), **SENT}) == []
    counts = {"n": np.array([2**60]), **SENT}
    cohort = counts, SENT | {"n": np.array([0])}, SENT | {"n": np.array([0])}
    assert values_problems(dict(enumerate(cohort)), SENT) == {}, "integers"


def test_an_absurd_value_is_named_with_the_others_changes() -> None:
    replies = [SENT | {"w": np.array([1.0, value], np.float32)} for value in (-1.9, -2.1, 1e18)]
    assert values_problems(dict(enumerate(replies)), SENT, compared=False) == {}
    assert values_problems(dict(enumerate(replies)), SENT) == {
        2: "'w' changed by up to 1e+18, and by 0.1 in the median of the other clients; "
        "expected at most 1,000 times the median for values this large"
    }


@pytest.mark.parametrize("count", [1, 2])
def test_replies_are_left_unmodified_and_the_mean_is_a_copy(count: int) -> None:
    replies = [{"w": np.full(4, i + 0.5)} for i in range(count)]
    before = [reply["w"].copy() for reply in replies]
    mean = weighted_mean(replies, [9] * count)
    for reply, old in zip(replies, before, strict=True):
        assert reply["w"].tobytes() == old.tobytes()
        assert not np.shares_memory(reply["w"], mean["w"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -1], "a weight is -1"),
        ([1, float("nan")], "a weight is nan"),
        ([1, float("inf")], "a weight is inf"),
        ([0, 0], "sum to zero"),
        ([], "sum to zero"),
    ],
)
def test_meaningless_weights_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        total_weight(weights)


def test_a_weight_for_each_reply_or_an_error() -> None:
    replies = [{"w": np.zeros(1)}, {"w": np.zeros(1)}]
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean(replies, [1])
    with pytest.raises(ValueError, match="longer"):
        weighted_mean(replies, [1, 1, 1])


def test_a_mean_of_large_models_takes_little_memory() -> None:
    block = np.ones(2 << 20, np.float32)
    tracemalloc.start()
    try:
        mean = weighted_mean([{"w": block}] * 40, [1] * 40)["w"]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * mean.nbytes, "the result twice, and little else"


def test_an_element_s_mean_does_not_depend_on_its_position() -> None:
    random = np.random.default_rng(0)
    sizes = {"one": 1, "none": 0, "two": 2, "odd": 37, "more": (1 << 17) + 1}
    weights = list(random.random(19))
    replies = [{key: random.normal(size=size) for key, size in sizes.items()} for _ in weights]
    apart = weighted_mean(replies, weights)
    assert [*apart] == [*sizes]
    for key in sizes:
        expected = np.average([reply[key] for reply in replies], axis=0, weights=weights)
        np.testing.assert_allclose(apart[key], expected, rtol=1e-11, atol=1e-13)
        assert not apart[key].flags.writeable
    together = weighted_mean([{"w": np.concatenate([*reply.values()])} for reply in replies], weights)
    np.testing.assert_array_equal(together["w"], np.concatenate([*apart.values()]))


def same_shape(dtype: type, elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[np.ndarray]]:
    shapes = array_shapes(max_dims=2, max_side=3)
    return shapes.flatmap(
        lambda shape: st.lists(arrays(dtype, shape, elements=elements), min_size=1, max_size=6)  # type: ignore[arg-type]
    )


FLOATS = {
    dtype: st.floats(-1000, 1000, width=width, allow_subnormal=False)
    for dtype, width in ((np.float16, 16), (np.float32, 32), (np.float64, 64))
}
ELEMENTS = FLOATS | {np.int64: st.integers(-(2**40), 2**40)}


@pytest.mark.parametrize("dtype", list(ELEMENTS))
@given(data=st.data())
def test_mean_lies_between_the_smallest_and_the_largest(dtype: type, data: st.DataObject) -> None:
    values = data.draw(same_shape(dtype, ELEMENTS[dtype]))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=len(values), max_size=len(values)))
    mean = weighted_mean([{"w": value} for value in values], weights)["w"]
    low, high = np.min(values, 0), np.max(values, 0)
    if dtype is np.float64:  # sums run in float64, so only here their rounding shows
        slack = 4 * np.spacing(np.maximum(abs(low), abs(high)))
        low, high = low - slack, high + slack
    assert (mean >= low).all()
    assert (mean <= high).all()


@pytest.mark.parametrize("dtype", list(ELEMENTS))
@given(data=st.data())
def test_equal_replies_come_back_exactly(dtype: type, data: st.DataObject) -> None:
    value = data.draw(arrays(dtype, array_shapes(max_dims=2, max_side=3), elements=ELEMENTS[dtype]))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=10))
    mean = weighted_mean([{"w": value.copy()} for _ in weights], weights)["w"]
    np.testing.assert_array_equal(mean, value)


# --- faults ------------------------------------------------------------------

LIKE = {
    "conv.weight": np.zeros((2, 3), np.float32),
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.ones(2, np.float32),
    "bn.num_batches_tracked": np.array(3),
}


def reply(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """A good reply with changes; None removes a key. Two underscores in a name stand for a point."""
    names = {key.replace(".", "__"): key for key in LIKE}
    changed = LIKE | {names.get(key, key): value for key, value in changes.items()}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (reply(conv__weight=None), ["lacks", "'conv.weight'"]),
        (reply(other=np.zeros(1)), ["has 'other'", "did not request"]),
        (reply(conv__weight=np.zeros((3, 2), np.float32)), ["'conv.weight'", "(3, 2)", "(2, 3)"]),
        (reply(conv__weight=np.zeros((2, 3), np.float64)), ["'conv.weight'", "float64", "float32"]),
        (reply(bn__num_batches_tracked=np.array(3.0)), ["'bn.num_batches_tracked'", "float64", "int64"]),
        (
            reply(conv__weight=np.array([[0, np.nan, 0], [0, 0, np.nan]], np.float32)),
            ["'conv.weight'", "2 of 6", "not finite"],
        ),
        (reply(bn__running_mean=np.array([np.inf, 0], np.float32)), ["'bn.running_mean'", "1 of 2", "not finite"]),
        (reply(bn__running_var=np.array([1, -0.5], np.float32)), ["'bn.running_var'", "negative values", "-0.5"]),
    ],
)
def test_each_fault_is_named(bad: dict[str, np.ndarray], words: list[str]) -> None:
    found = str(arrays_problem(bad, LIKE))
    assert all(word in found for word in words), found


def test_a_good_reply_has_no_fault_and_only_expected_keys_must_come_back() -> None:
    for good in (reply(), reply(bn__running_var=np.zeros(2, np.float32))):
        assert arrays_problem(good, LIKE) is None
    part = {"conv.weight": LIKE["conv.weight"]}
    assert arrays_problem(part, LIKE, expected=["conv.weight"]) is None
    assert "bn.running_mean" in str(arrays_problem(reply(), LIKE, expected=["conv.weight"]))
    assert "'w0', 'w1', 'w2' and 6 more" in str(arrays_problem({}, {f"w{i}": np.zeros(1) for i in range(9)}))


@pytest.mark.parametrize(("dtype", "shown"), [(np.float16, "90"), (np.float32, "6.5e+18"), (np.float64, "4.7e+153")])
def test_squares_and_sums_of_accepted_values_are_finite_in_their_dtype(dtype: Any, shown: str) -> None:
    most, square = (largest(np.dtype(dtype), is_variance=each) for each in (False, True))
    for key, limit in (("bn.running_mean", most), ("bn.running_var", square)):
        good = {
            "bn.running_mean": np.zeros(2, dtype),
            "bn.running_var": np.zeros(2, dtype),
            key: np.full(2, 0.999 * limit, dtype),
        }
        assert arrays_problem(good, good) is None
        for factor in (1.01, 7.0):
            bad = good | {key: np.full(2, limit * factor, dtype)}
            expected = f"{shown} in" if key == "bn.running_mean" else "expected at most"
            assert expected in str(arrays_problem(bad, good)), (key, factor)
    low, high = dtype(-most), dtype(most)
    with np.errstate(all="raise"):
        assert np.isfinite((high - low) ** 2)
        assert np.isfinite(dtype(square) + dtype(square))
        assert np.isfinite(weighted_mean([good, good], [MOST_EXAMPLES, MOST_EXAMPLES])["bn.running_var"]).all()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_a_reply_of_weight_zero_has_no_influence(place: int, dtype: type) -> None:
    others: list[np.ndarray] = [np.array([5.25, -7.0]).astype(dtype), np.array([1.125, 3.0]).astype(dtype)]
    largest = np.finfo(dtype).max if dtype != np.int64 else 2**62
    for value in (largest, -largest):
        values, weights = others.copy(), [1.0, 2.0]
        values.insert(place, np.full(2, value, dtype))
        weights.insert(place, 0.0)
        mean = weighted_mean([{"w": each} for each in values], weights)["w"]
        assert mean.tobytes() == weighted_mean([{"w": each} for each in others], [1.0, 2.0])["w"].tobytes()
        expected = (others[0].astype(float) + 2 * others[1]) / 3
        np.testing.assert_allclose(mean, expected.astype(dtype) if dtype != np.int64 else np.rint(expected), rtol=1e-6)


# --- pooled statistics ---


def moments(values: np.ndarray, ddof: int = 0, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    return {
        "bn.running_mean": values.mean(0, keepdims=True)[0].astype(dtype),
        "bn.running_var": values.var(0, ddof=ddof).astype(dtype),
        "w": values[0].astype(dtype),
    }


def test_pooled_statistics_are_the_moments_of_the_union() -> None:
    """Clients of 5, 20 and 40 values in 3 channels, whose means and scales differ; the other arrays are averaged."""
    rng = np.random.default_rng(0)
    data = [rng.normal(5 * i, 1 + i, (size, 3)) for i, size in enumerate((5, 20, 40))]
    sizes, union = [len(values) for values in data], np.concatenate(data)
    found = pooled_mean([moments(values) for values in data], sizes)
    np.testing.assert_allclose(found["bn.running_mean"], union.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found["bn.running_var"], union.var(0), rtol=1e-13)
    np.testing.assert_allclose(found["w"], np.average([values[0] for values in data], 0, sizes), rtol=1e-13)
    # PyTorch's unbiased variances: each n_i / (n_i - 1) times as large, as in their mean.
    unbiased = pooled_mean([moments(values, ddof=1) for values in data], sizes)
    more = sum(n / 65 * values.var(0) / (n - 1) for n, values in zip(sizes, data, strict=True))
    np.testing.assert_allclose(unbiased["bn.running_var"], union.var(0) + more, rtol=1e-13)


def test_pooled_statistics_of_float32_do_not_lose_a_small_variance_to_a_large_mean() -> None:
    """E[x^2] - E[x]^2 would be a difference of 1e10 and 1e10, of which float32 has the first seven digits."""
    data = [np.full((2, 1), value) for value in (1e5, 1e5 + 0.25)]
    found = pooled_mean([moments(values, dtype=np.float32) for values in data], [1, 1])
    assert found["bn.running_var"].dtype == np.float32
    assert found["bn.running_var"].item() == pytest.approx(0.125**2, rel=1e-2)


VALUES = st.floats(-(2.0**60), 2.0**60, width=32)


@given(
    arrays(np.float32, (3, 4), elements=VALUES),
    arrays(np.float32, (3, 4), elements=st.floats(0, 2.0**60, width=32)),
    st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any),
)
def test_pooled_variances_are_never_below_the_mean_of_the_variances(
    means: np.ndarray, variances: np.ndarray, weights: list[int]
) -> None:
    replies = [{"bn.running_mean": m, "bn.running_var": v} for m, v in zip(means, variances, strict=True)]
    plain, found = weighted_mean(replies, weights), pooled_mean(replies, weights)
    assert (found["bn.running_var"] >= plain["bn.running_var"]).all()
    assert found["bn.running_mean"].tobytes() == plain["bn.running_mean"].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_huge_mean_leaves_a_pooled_variance_finite(dtype: Any) -> None:
    limit = largest(np.dtype(dtype))
    replies = [moments(np.full((2, 2), value), dtype=dtype) for value in (-limit, limit)]
    replies[1] = {**replies[1], "bn.running_var": np.full(2, limit**2 / 2, dtype)}
    found = pooled_mean(replies, [1, 1])
    assert arrays_problem(found, found) is None, "which is limited"
    assert (found["bn.running_var"] > 0.9 * limit**2).all()
    kept = pooled_mean(replies, [1, 0])  # without weight it has no part in the variance
    assert (kept["bn.running_var"] == 0).all()


def test_equal_clients_keep_every_bit_and_models_without_statistics_are_averaged() -> None:
    reply = moments(np.random.default_rng(1).normal(3, 2, (7, 5)), dtype=np.float32)
    assert pooled_mean([reply] * 3, [3, 5, 7])["bn.running_var"].tobytes() == reply["bn.running_var"].tobytes()
    assert pooled_mean([{"w": np.ones(2)}, {"w": np.zeros(2)}], [3, 1])["w"].tolist() == [0.75, 0.75]
