"""Robust means, bounds and plausibility against naive float64 twins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean
from fedbn_flwr.messages.arrays import FlatArrays, flat_block
from fedbn_flwr.messages.robust import Robust, capped, krum, median, trimmed_mean

Dict = dict[str, np.ndarray]
TRAINED = ["conv.weight", "bn.weight", "bn.bias"]
STATISTICS = ["bn.running_mean", "bn.running_var"]


def model(seed: int, dtype: type = np.float32) -> Dict:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(3, 2, 200, 100)).astype(dtype),  # more than one piece
        "bn.weight": rng.normal(size=3).astype(dtype),
        "bn.bias": rng.normal(size=3).astype(dtype),
        "bn.running_mean": rng.normal(size=3).astype(dtype),
        "bn.running_var": rng.uniform(0.5, 2, size=3).astype(dtype),
    }


def flat(arrays: Arrays) -> FlatArrays:
    block = flat_block(arrays)
    assert block is not None
    return block


def same_bits(one: Arrays, two: Arrays) -> bool:
    return list(one) == list(two) and all(
        (one[key].dtype, one[key].shape, one[key].tobytes()) == (two[key].dtype, two[key].shape, two[key].tobytes())
        for key in one
    )


def naive_trimmed(values: Sequence[np.ndarray], trim: int) -> np.ndarray:
    """scipy.stats.trim_mean, value by value."""
    columns = np.stack(values).astype(np.float64).reshape(len(values), -1).T
    kept = [sorted(column.tolist())[trim : len(values) - trim] for column in columns]
    return np.array([math.fsum(each) / len(each) for each in kept]).reshape(values[0].shape)


def naive_krum(models: Sequence[np.ndarray], malicious: int) -> list[int]:
    """Blanchard et al., section 4: the scores from every pair, and the n - f lowest."""
    n = len(models)
    scores = []
    for i in range(n):
        others = sorted(float(((models[i] - models[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(math.fsum(others[: n - malicious - 2]))
    return sorted(sorted(range(n), key=scores.__getitem__)[: n - malicious])


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_median_is_numpy_s(count: int, dtype: type) -> None:
    replies = [model(seed, dtype) for seed in range(count)]
    found = median(replies)
    for key, value in found.items():
        rows = np.stack([reply[key] for reply in replies]).astype(np.float64)
        twin: np.ndarray = np.median(rows, axis=0).astype(dtype)
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, twin)
    assert same_bits(median([flat(reply) for reply in replies]), found)


@pytest.mark.parametrize(("count", "trim"), [(3, 1), (5, 1), (10, 2)])
def test_the_trimmed_mean_is_that_of_sorted_values(count: int, trim: int) -> None:
    replies = [{key: model(seed, np.float64)[key] for key in STATISTICS} for seed in range(count)]
    found = trimmed_mean(replies, trim)
    for key, value in found.items():
        np.testing.assert_allclose(value, naive_trimmed([each[key] for each in replies], trim), rtol=1e-14)
    assert same_bits(trimmed_mean([flat(reply) for reply in replies], trim), found)


def test_the_average_of_equal_models_is_this_model() -> None:
    replies = [model(0, np.float64)] * 7
    assert same_bits(trimmed_mean(replies, 2), replies[0])
    assert same_bits(median(replies), replies[0])


def test_counters_stay_integers() -> None:
    counters = [{"bn.num_batches_tracked": np.array(value)} for value in (3, 5, 10**9)]
    for found in (median(counters), trimmed_mean(counters, 1)):
        assert found["bn.num_batches_tracked"].dtype == np.int64
        assert found["bn.num_batches_tracked"].tolist() == 5


@pytest.mark.parametrize("malicious", [1, 2, 3])
def test_krum_chooses_as_the_naive_one(malicious: int) -> None:
    sent = model(99)
    replies = [model(seed) for seed in range(9)]
    replies[4] = {key: value * 20 for key, value in replies[4].items()}
    vectors = [np.concatenate([reply[key].ravel() for key in TRAINED]).astype(np.float64) for reply in replies]
    found = krum(replies, sent, TRAINED, malicious)
    assert found == naive_krum(vectors, malicious)
    assert 4 not in found


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_krum_leaves_out_updates_whose_distances_overflow(value: float) -> None:
    sent, replies = model(9, np.float64), [model(seed, np.float64) for seed in range(7)]
    for i, factor in ((1, value), (5, value**5 if value < 1e31 else value**8)):
        replies[i] = {key: np.sign(array) * factor for key, array in replies[i].items()}
    assert krum(replies, sent, TRAINED, 2) == [0, 2, 3, 4, 6]


OPTIONS: list[dict[str, Any]] = [
    {"robust": "median"},
    {"robust": "trimmed"},
    {"robust": "krum"},
    {"robust": "krum", "robust_statistics": "trimmed"},
    {"robust_statistics": "median", "clip_factor": 1.0},
    {"clip_norm": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_order_of_clients_does_not_matter(options: dict[str, Any]) -> None:
    robust, sent = Robust(**options), model(9)
    replies = [{key: sent[key] + np.float32(0.1) * value for key, value in model(seed).items()} for seed in range(5)]
    results = []
    for order in list(permutations(range(5)))[::17]:
        weights = robust.weights([[1.0, 4.0, 2.0, 9.0, 3.0][i] for i in order])
        results.append(robust.combine([replies[i] for i in order], weights, sent, "round 1"))
    for found in results[1:]:
        for key, value in found.items():
            np.testing.assert_allclose(value, results[0][key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", [flat, dict])
def test_bounds_that_no_client_exceeds_change_no_bit(form: Any) -> None:
    robust, sent = Robust(max_share=0.9, clip_norm=1e9, clip_factor=1e9, plausible=1e9), model(9)
    replies, weights = [form(model(seed)) for seed in range(4)], [3.0, 1.0, 2.0, 5.0]
    assert robust.weights(weights) == weights
    assert same_bits(robust.combine(replies, weights, sent, "round 1"), weighted_mean(replies, weights))
    assert not robust.implausible(replies, STATISTICS)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum"])
@pytest.mark.parametrize("bad", [{0}, {1, 6}])
def test_the_model_stays_between_the_honest_clients(rule: Any, bad: set[int]) -> None:
    robust, sent = Robust(robust=rule, malicious=0.2 if rule == "median" else 2), model(9)
    honest = [
        {key: value + np.float32(0.01 * (i + 1)) * np.abs(value) for key, value in sent.items()} for i in range(7)
    ]
    false = {key: np.full_like(value, 1e30) for key, value in sent.items()}
    replies = [false if i in bad else reply for i, reply in enumerate(honest)]
    found = robust.combine(replies, robust.weights([1.0] * 7), sent, "round 1")
    for key, value in found.items():
        kept = np.stack([honest[i][key] for i in range(7) if i not in bad])
        assert (value >= kept.min(axis=0) - 1e-6).all()
        assert (value <= kept.max(axis=0) + 1e-6).all()


def test_statistics_have_a_rule_of_their_own() -> None:
    sent, replies = model(9), [model(seed) for seed in range(5)]
    robust = Robust(robust="median", robust_statistics="mean")
    weights = robust.weights([1.0, 2.0, 3.0, 4.0, 5.0])
    found = robust.combine(replies, weights, sent, "round 1")
    middle, plain = median(replies), weighted_mean(replies, weights)
    for key in found:
        assert found[key].tobytes() == (plain if key in STATISTICS else middle)[key].tobytes()


def test_a_client_without_examples_does_not_count() -> None:
    sent, replies = model(9), [model(seed) for seed in range(4)]
    robust = Robust(robust="median")
    found = robust.combine(replies, robust.weights([5.0, 0.0, 1.0, 2.0]), sent, "round 1")
    assert same_bits(found, median([replies[0], *replies[2:]]))


# --- bounds ---


def test_clipping_measures_only_what_is_trained() -> None:
    """Updates of norm 3 and 4 in 5 values: at the bound 1 they are thirds and quarters; statistics are not clipped."""
    sent = {key: np.zeros_like(value) for key, value in model(0).items()}
    replies: list[Dict] = []
    for norm in (3.0, 4.0):
        reply = {key: value.copy() for key, value in sent.items()}
        reply["conv.weight"][0, 0, 0, 0] = norm
        reply["bn.running_var"][:] = 1e6
        replies.append(reply)
    found = Robust(clip_norm=1.0).combine(replies, [1.0, 1.0], sent, "round 1")
    assert found["conv.weight"].ravel()[0] == pytest.approx(1.0)
    assert (found["bn.running_var"] == 1e6).all()


def test_clipping_by_the_median_of_the_norms() -> None:
    sent = {"w": np.zeros(4)}
    replies = [{"w": np.array([norm, 0.0, 0.0, 0.0])} for norm in (1.0, 2.0, 1e9)]
    found = Robust(clip_factor=1.5).combine(replies, [1.0, 1.0, 1.0], sent, "round 1")
    assert found["w"][0] == pytest.approx((1 + 2 + 3) / 3)


def test_an_update_whose_norm_overflows_becomes_zero() -> None:
    sent = {"w": np.full(4, -1e308)}
    replies = [{"w": np.full(4, 1e308)}, {"w": np.full(4, -1e308)}, {"w": np.full(4, -1e308)}]
    found = Robust(clip_norm=1.0).combine(replies, [1.0, 1.0, 1.0], sent, "round 1")
    assert found["w"].tolist() == sent["w"].tolist()


@pytest.mark.parametrize(
    ("weights", "share", "expected"),
    [
        ([1.0, 1.0, 8.0], 0.5, [0.25, 0.25, 0.5]),
        ([4.0, 4.0, 2.0], 0.35, [0.35, 0.35, 0.3]),
        ([1.0, 2.0, 7.0], 0.4, [0.2, 0.4, 0.4]),
        ([1.0, 2.0**53, 1.0], 0.2, [1 / 3, 1 / 3, 1 / 3]),
        ([0.0, 5.0, 1.0], 0.5, [0.0, 0.5, 0.5]),
        ([0.0, 5.0, 0.0], 0.5, [0.0, 1.0, 0.0]),
    ],
)
def test_no_share_is_above_the_bound(weights: list[float], share: float, expected: list[float]) -> None:
    for order in permutations(range(3)):
        found = np.array(capped([weights[i] for i in order], share))
        np.testing.assert_allclose(found / found.sum(), [expected[i] for i in order], rtol=1e-14)


def test_an_implausible_client_is_named_with_key_value_and_median() -> None:
    replies = [model(seed) for seed in range(5)]
    replies[3]["bn.running_var"] = np.array([1, 1e30, 1], np.float32)
    found = Robust(plausible=10).implausible(replies, STATISTICS)
    middle = float(np.median([reply["bn.running_var"][1] for reply in replies]))
    assert found.keys() == {3}
    assert f"'bn.running_var' has the value 1e+30 where the clients' median is {middle:.4g}" in found[3]


def test_statistics_of_two_clients_are_not_compared() -> None:
    """Each is as far from their median as the other."""
    replies = [{"bn.running_var": np.array([1.0])}, {"bn.running_var": np.array([1e30])}]
    assert not Robust(plausible=10).implausible(replies, ["bn.running_var"])


# --- settings ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"robust": "mean"}, "robust is 'mean'; expected 'median', 'trimmed' or 'krum'"),
        ({"robust_statistics": "krum"}, "robust_statistics is 'krum'; expected 'mean'"),
        ({"robust": "krum", "malicious": 0.5}, "malicious is 0.5; expected a number"),
        ({"robust": "krum", "malicious": 0}, "malicious is 0; expected a number"),
        ({"robust": "krum", "malicious": True}, "malicious is True; expected a number"),
        ({"robust": "median", "malicious": 2}, "malicious is 2, which has no effect"),
        ({"max_share": 0.0}, r"max_share is 0.0; expected a share above 0"),
        ({"max_share": 1.5}, r"max_share is 1.5; expected a share above 0"),
        ({"clip_norm": 0}, "clip_norm is 0; expected a number above zero"),
        ({"clip_factor": math.nan}, "clip_factor is nan; expected a number above zero"),
        ({"clip_factor": "2"}, "clip_factor is '2'; expected a number above zero"),
        ({"plausible": 1}, "plausible is 1; expected a factor above 1"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Robust(**options)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"robust": "median"}, 3),
        ({"robust": "trimmed", "malicious": 2}, 5),
        ({"robust": "krum", "malicious": 2}, 7),
        ({"robust": "krum"}, 5),
        ({"robust_statistics": "trimmed", "malicious": 3}, 7),
        ({"clip_norm": 1.0}, 1),
    ],
)
def test_the_number_of_clients_is_checked(options: dict[str, Any], least: int) -> None:
    robust = Robust(**options)
    assert robust.least() == least
    robust.check_clients(least)
    if least > 1:
        with pytest.raises(SettingsError, match=rf"needs {least} clients in a round of {least - 1}"):
            robust.check_clients(least - 1)
        replies = [model(seed) for seed in range(least - 1)]
        with pytest.raises(RunFailed, match=r"round 3: .* needs"):
            robust.combine(replies, [1.0] * (least - 1), model(9), "round 3")


def test_the_summary_names_what_is_on() -> None:
    assert Robust(robust="krum").notes() == {"robust": "krum", "robust_statistics": "median", "malicious": 0.2}
    assert Robust(max_share=0.5, plausible=10).notes() == {"max_share": 0.5, "plausible": 10}
