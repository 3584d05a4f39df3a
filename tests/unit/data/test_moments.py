"""Moments of columns: those of a union are the same, bit for bit, however its rows are split."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbn_flwr.data.moments import moments_from, sums_of


def twin(inputs: Tensor) -> tuple[list[float], list[float]]:
    """Mean and deviation of each column, in rational numbers."""
    means, deviations = [], []
    for column in inputs.transpose(0, 1).flatten(1).tolist():
        values = [Fraction(value) / (255 if inputs.dtype == torch.uint8 else 1) for value in column]
        mean = sum(values, Fraction(0)) / len(values)
        means.append(float(mean))
        deviations.append(math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)))
    return means, deviations


def tables() -> dict[str, Tensor]:
    random = np.random.default_rng(0)
    values = random.normal(size=(90, 3))
    standardised = (values - values.mean(0)) / values.std(0)
    return {
        "standardised": torch.tensor(standardised, dtype=torch.float32),  # whose mean is a rounding error
        "far from zero": torch.tensor(values + np.array([1e6, -1e4, 3e7]), dtype=torch.float32),
        "of all sizes": torch.tensor(values * 10.0 ** random.integers(-30, 18, (90, 1)), dtype=torch.float32),
        "whole numbers": torch.tensor(random.integers(-5, 5, (90, 3)), dtype=torch.float32),
        "bytes": torch.tensor(random.integers(0, 256, (90, 3, 4, 4)), dtype=torch.uint8),
        "series": torch.tensor(random.normal(2, 3, (90, 3, 7)), dtype=torch.float32),
    }


@pytest.mark.parametrize("name", tables())
def test_moments_are_exact_and_do_not_depend_on_the_split(name: str) -> None:
    inputs = tables()[name]
    means, deviations = twin(inputs)
    whole = moments_from([sums_of(inputs)])
    assert (list(whole[0]), list(whole[1])) == (means, deviations)
    for sizes in ([1, 89], [30, 30, 30], [7, 40, 3, 40]):
        assert moments_from(list(map(sums_of, inputs.split(sizes)))) == whole


def test_a_column_of_one_value_has_the_deviation_1() -> None:
    inputs = torch.tensor([[0.1, row] for row in range(5)])
    assert moments_from([sums_of(inputs)] * 2) == ((float(np.float32(0.1)), 2.0), (1.0, math.sqrt(2)))


def test_missing_values_and_padding_do_not_count() -> None:
    values = torch.tensor(np.random.default_rng(0).normal(3, 2, (20, 2)), dtype=torch.float32)
    with_gaps = values.clone()
    with_gaps[:8, 0] = torch.nan
    gaps = sums_of(with_gaps)
    assert gaps[0].tolist() == [12, 20]
    np.testing.assert_array_equal(gaps[:, 0], sums_of(values[8:])[:, 0])
    whole = values[:, 0].double()
    (mean, _), (deviation, _) = moments_from([gaps, sums_of(values[:8])])
    assert [mean, deviation] == pytest.approx([whole.mean().item(), whole.std(correction=0).item()], rel=1e-12)
    series, mask = values.reshape(4, 5, 2).movedim(2, 1), torch.arange(5) < torch.tensor([[5], [2], [4], [1]])
    np.testing.assert_array_equal(sums_of({"inputs": series, "mask": mask}), sums_of(values[mask.flatten()]))
    flat = sums_of({"inputs": series[:, 0], "mask": mask})
    assert flat[0].tolist() == [4, 3, 2, 2, 1], "the examples that are so long"
