"""Bounds against naive float64 twins."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.extensions.bounds.strategy import Bounds, capped, from_settings
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean

Dict = dict[str, np.ndarray]
STATISTICS = ["bn.running_mean", "bn.running_var"]


def model(seed: int, dtype: type = np.float32) -> Dict:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(3, 2, 200, 100)).astype(dtype),
        "bn.weight": rng.normal(size=3).astype(dtype),
        "bn.bias": rng.normal(size=3).astype(dtype),
        "bn.running_mean": rng.normal(size=3).astype(dtype),
        "bn.running_var": rng.uniform(0.5, 2, size=3).astype(dtype),
    }


def same_bits(one: Arrays, two: Arrays) -> bool:
    return list(one) == list(two) and all(
        (one[key].dtype, one[key].shape, one[key].tobytes()) == (two[key].dtype, two[key].shape, two[key].tobytes())
        for key in one
    )


def test_bounds_that_no_client_exceeds_change_no_bit() -> None:
    bounds, sent = Bounds(max_share=0.9, clip_norm=1e9, clip_factor=1e9, plausible=1e9), model(9)
    replies, weights = [model(seed) for seed in range(4)], [3.0, 1.0, 2.0, 5.0]
    assert bounds.weights(weights) == weights
    assert all(map(same_bits, bounds.clip(replies, sent, "round 1"), replies))
    assert not bounds.outliers(dict(enumerate(replies)), STATISTICS)


def test_clipping_measures_only_what_is_trained() -> None:
    """Updates of norm 3 and 4 in 5 values: at the bound 1 they are thirds and quarters; statistics are not clipped."""
    sent = {key: np.zeros_like(value) for key, value in model(0).items()}
    replies: list[Dict] = []
    for norm in (3.0, 4.0):
        reply = {key: value.copy() for key, value in sent.items()}
        reply["conv.weight"][0, 0, 0, 0] = norm
        reply["bn.running_var"][:] = 1e6
        replies.append(reply)
    found = weighted_mean(Bounds(clip_norm=1.0).clip(replies, sent, "round 1"), [1.0, 1.0])
    assert found["conv.weight"].ravel()[0] == pytest.approx(1.0)
    assert (found["bn.running_var"] == 1e6).all()


def test_clipping_by_the_median_of_the_norms() -> None:
    sent = {"w": np.zeros(4)}
    replies = [{"w": np.array([norm, 0.0, 0.0, 0.0])} for norm in (1.0, 2.0, 1e9)]
    found = weighted_mean(Bounds(clip_factor=1.5).clip(replies, sent, "round 1"), [1.0, 1.0, 1.0])
    assert found["w"][0] == pytest.approx((1 + 2 + 3) / 3)


def test_an_update_whose_norm_overflows_becomes_zero() -> None:
    sent = {"w": np.full(4, -1e308)}
    replies = [{"w": np.full(4, 1e308)}, {"w": np.full(4, -1e308)}, {"w": np.full(4, -1e308)}]
    for found in Bounds(clip_norm=1.0).clip(replies, sent, "round 1"):
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


def test_weights_below_the_bound_stay_as_they_are() -> None:
    """Sums of weights may be used too, as FedTAN's exchanges do; so a false weight must not change the others."""
    assert capped([3.0, 1e9, 4.0, 3.0], 0.375) == [3.0, 6.0, 4.0, 3.0]
    assert capped([2.0, 1e9, 3.0], 0.3) == [3.0, 3.0, 3.0]


def test_an_implausible_client_is_named_with_key_value_and_median() -> None:
    replies = [model(seed) for seed in range(5)]
    replies[3]["bn.running_var"] = np.array([1, 1e30, 1], np.float32)
    found = Bounds(plausible=10).outliers(dict(enumerate(replies)), STATISTICS)
    middle = float(np.median([reply["bn.running_var"][1] for reply in replies]))
    assert found.keys() == {3}
    assert f"'bn.running_var' has the value 1e+30 where the clients' median is {middle:.4g}" in found[3]


def test_statistics_of_two_clients_are_not_compared() -> None:
    """Each is as far from their median as the other."""
    replies = [{"bn.running_var": np.array([1.0])}, {"bn.running_var": np.array([1e30])}]
    assert not Bounds(plausible=10).outliers(dict(enumerate(replies)), ["bn.running_var"])


@pytest.mark.parametrize("value", [1e30, -1e-30])
def test_beside_clients_whose_values_are_zero_every_other_one_is_implausible(value: float) -> None:
    """The means of a batch norm in evaluation mode, and gradients where gamma is zero."""
    replies = [{"bn.running_mean": np.zeros(3, np.float32)} for _ in range(4)]
    assert not Bounds(plausible=10).outliers(dict(enumerate(replies)), ["bn.running_mean"])
    replies[2]["bn.running_mean"][1] = value
    assert Bounds(plausible=10).outliers(dict(enumerate(replies)), ["bn.running_mean"]).keys() == {2}


# --- settings ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
        Bounds(**options)
    with pytest.raises(SettingsError, match=rf"bounds\.{message}"):
        from_settings(options)


def test_a_wrong_section_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"bounds\.max_shares is not a bound; did you mean 'max_share'\? known: clip"
    ):
        from_settings({"max_shares": 0.2})
    with pytest.raises(SettingsError, match=r"bounds is 0\.2; expected settings, for instance \{max_share: 0\.2\}"):
        from_settings(0.2)


def test_the_summary_names_what_is_on() -> None:
    assert Bounds(max_share=0.5, plausible=10).notes() == {"max_share": 0.5, "plausible": 10}
    assert from_settings({"clip_norm": 1}) == Bounds(clip_norm=1)
