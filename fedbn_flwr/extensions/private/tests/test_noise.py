"""The arithmetic of differential privacy: against published values, a twin in NumPy and the moments of the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from fedbn_flwr.extensions.private.noise import clipped, delta_of, epsilon_of, gaussian, parts_of
from fedbn_flwr.norms.roles import roles

# --- epsilon and delta -------------------------------------------------------

# Gaussian mechanism: noise multiplier, releases, delta, and epsilon by Google's dp-accounting 0.6.0: from its privacy
# loss distributions, which are tight to some 1e-8, and from its Renyi accountant, which is an upper bound.
PUBLISHED = [
    (1.0, 1, 1e-5, 4.37717810002493, 4.728507067217623),
    (0.5, 1, 1e-6, 10.997151218387838, 11.68862679916635),
    (20.0, 10, 1e-6, 0.648105106233496, 0.7002126957830125),
    (4.0, 100, 1e-5, 13.206712241909576, 14.132226163159334),
    (8.0, 1000, 1e-5, 23.995358989263888, 25.51842095026798),
    (1.0, 200, 1e-5, 159.44148628636688, 166.03553359954904),
]


@pytest.mark.parametrize(("noise", "releases", "delta", "tight", "renyi"), PUBLISHED)
def test_epsilon_is_that_of_google_s_accountants(
    noise: float, releases: int, delta: float, tight: float, renyi: float
) -> None:
    epsilon = epsilon_of(math.sqrt(releases) / noise, delta)
    assert epsilon == pytest.approx(tight, rel=1e-7)
    assert epsilon < renyi


def test_the_table_of_gaussian_privacy() -> None:
    """Dong, Roth and Su 2022, figure 1 and section 2.2: a mu of 1 and epsilon 1 give delta 0.1269."""
    assert delta_of(1.0, 1.0) == pytest.approx(0.12693673750664, rel=1e-12)
    assert delta_of(1.0, 0.0) == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-12)  # the total variation distance


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
def test_the_classic_gaussian_mechanism_is_not_reported_as_less_private(epsilon: float) -> None:
    """Dwork and Roth 2014, theorem A.1: noise of sqrt(2 ln(1.25 / delta)) / epsilon is enough, and more than needed."""
    delta = 1e-5
    assert 0.5 * epsilon < epsilon_of(epsilon / math.sqrt(2 * math.log(1.25 / delta)), delta) <= epsilon


@given(st.floats(1e-4, 60.0), st.floats(1e-12, 0.5))
def test_epsilon_is_the_smallest_that_delta_allows(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    if epsilon:
        assert delta_of(mu, epsilon * (1 - 1e-6)) > delta * (1 - 1e-9)


def test_extremes() -> None:
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(math.inf, 1e-5) == math.inf
    assert epsilon_of(1e-7, 1e-5) == 0.0
    assert math.isfinite(epsilon_of(1e5, 1e-5))


# --- noise -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7, None])
def test_noise_is_normal_and_independent(seed: int | None) -> None:
    """With the system's random numbers each of these bounds fails in one run of 10^9."""
    n = 200_001  # odd: Box and Muller make pairs
    noise = gaussian(n, 3.0, seed)
    assert noise.shape == (n,)
    assert kstest(noise / 3.0, "norm").pvalue > 1e-9
    assert abs(noise.mean()) < 6.2 * 3.0 / math.sqrt(n)
    assert noise.std() == pytest.approx(3.0, rel=6.2 / math.sqrt(2 * n))
    half = n // 2  # sine and cosine of the same pair
    for one, other in ((noise[:-1], noise[1:]), (noise[:half], noise[-half:])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 6.2 / math.sqrt(half)


def test_only_a_seed_repeats_the_noise() -> None:
    assert gaussian(8, 1.0, 3).tobytes() == gaussian(8, 1.0, 3).tobytes()
    assert gaussian(8, 1.0, 3).tobytes() != gaussian(8, 1.0, 4).tobytes()
    assert gaussian(8, 1.0, None).tobytes() != gaussian(8, 1.0, None).tobytes()


# --- changes -----------------------------------------------------------------


def model(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "conv.weight": draw.normal(size=(3, 2)).astype(np.float32),
        "bn.weight": draw.normal(size=3).astype(np.float32),
        "bn.running_mean": draw.normal(size=3).astype(np.float32),
        "bn.running_var": draw.uniform(0.1, 9.0, 3).astype(np.float32),
        "bn.num_batches_tracked": np.asarray(int(draw.integers(1, 90))),
        "table": draw.integers(0, 9, 4),
    }


def test_a_change_has_no_counters_and_no_integers() -> None:
    before, after = model(0), model(1)
    parts = parts_of(before, roles(before))
    assert parts.weights == ("conv.weight", "bn.weight")
    assert parts.statistics == ("bn.running_mean", "bn.running_var")
    change = parts.change(before, after)
    expected = np.concatenate([(after[key].astype(float) - before[key]).ravel() for key in parts.weights])
    np.testing.assert_array_equal(change.weights, expected)


def test_statistics_are_in_deviations_and_logarithms_and_come_back() -> None:
    before, after = model(0), model(1)
    parts = parts_of(before, roles(before))
    change = parts.change(before, after)
    np.testing.assert_allclose(
        change.statistics,
        [
            *(after["bn.running_mean"] - before["bn.running_mean"]) / np.sqrt(before["bn.running_var"]),
            *np.log(after["bn.running_var"] / before["bn.running_var"]),
        ],
        rtol=1e-5,
    )
    for key, value in parts.apply(change, before).items():
        np.testing.assert_allclose(value, after[key], rtol=1e-6)
        assert value.dtype == after[key].dtype


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e300])
def test_a_variance_is_positive_and_finite_after_any_noise(dtype: type, size: float) -> None:
    before: dict[str, np.ndarray] = {
        "running_mean": np.zeros(64, dtype),
        "running_var": np.geomspace(1e-7, 100, 64).astype(dtype),
    }
    before["running_var"][0] = 0
    parts = parts_of(before, roles(before))
    change = parts.change(before, before)
    noised = type(change)(change.weights, change.statistics + gaussian(128, size, 5))
    variance = parts.apply(noised, before)["running_var"]
    assert np.isfinite(variance).all()
    assert (variance >= 0).all()
    if dtype is not np.float16:  # which has no 1e-10
        assert (variance > 0).all()


def test_clipping() -> None:
    vector = np.array([3.0, 4.0])
    np.testing.assert_allclose(clipped(vector, 1.0), [0.6, 0.8])
    assert clipped(vector, 5.0) is vector
    np.testing.assert_array_equal(clipped(np.zeros(3), 1.0), np.zeros(3))  # Flower's divides by zero
    np.testing.assert_array_equal(clipped(np.array([1e200, 1e200]), 1.0), np.zeros(2))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_a_clipped_vector_is_within_the_norm(values: list[float], limit: float) -> None:
    assert np.linalg.norm(clipped(np.array(values), limit)) <= limit * (1 + 1e-12)
