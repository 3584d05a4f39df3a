"""How far the running statistics of two models are apart, layer by layer and in units of the layer's own output.

Two pairs of running statistics (m, v) and (m', v') are compared channel by channel; s' = sqrt(v' + eps) is what batch
norm divides by.

    mean distance       root mean square over the channels of (m - m') / s'
    variance distance   root mean square over the channels of log(s^2 / s'^2)
    variance ratio      geometric mean over the channels of s^2 / s'^2

A mean distance of 1 shifts the layer's normalised outputs by one standard deviation. A variance distance of 0.1 stands
for variances that differ by a factor of about 1.1; the ratio says in which direction.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .roles import MEAN, VARIANCE, layers

Statistics = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]  # running mean and variance of each layer

EPS = 1e-5  # PyTorch's default; the arrays don't contain the layer's value


def statistics_in(arrays: Mapping[str, NDArray[np.generic]]) -> Statistics:
    """The statistics of each layer that tracks some; the gate has checked that they are finite and fit the model."""
    return {
        prefix.removesuffix(".") or "norm": (
            arrays[f"{prefix}{MEAN}"].astype(np.float64).reshape(-1),
            arrays[f"{prefix}{VARIANCE}"].astype(np.float64).reshape(-1),
        )
        for prefix in layers(arrays)
    }


def distances(found: Statistics, overall: Statistics) -> dict[str, tuple[float, float, float]]:
    """Mean distance, variance distance and variance ratio, by layer."""
    of_layers = {}
    for layer, (mean, var) in found.items():
        overall_mean, overall_var = overall[layer]
        scaled = (mean - overall_mean) / np.sqrt(overall_var + EPS)
        ratios = np.log((var + EPS) / (overall_var + EPS))
        of_layers[layer] = rms(scaled), rms(ratios), float(np.exp(ratios.mean()))
    return of_layers


def rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values * values)))
