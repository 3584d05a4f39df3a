"""How batch norm's statistics change during training: from round to round, and from client to client.

All figures are per layer. They compare two pairs of running statistics (m, v) and (m', v') channel by channel, on the
scale of the layer's own output: s' = sqrt(v' + eps) is what batch norm divides by.

    mean distance       root mean square over the channels of (m - m') / s'
    variance distance   root mean square over the channels of log(s^2 / s'^2)
    variance ratio      geometric mean over the channels of s^2 / s'^2

A mean distance of 1 shifts the layer's normalised outputs by one standard deviation. A variance distance of 0.1 stands
for variances that differ by a factor of about 1.1; the ratio says in which direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.norms.roles import MEAN, VARIANCE, layers

Arrays = Mapping[str, NDArray[Any]]
Vector = NDArray[np.float64]  # of all layers, one after the other
Figures = dict[str, float]

EPS = 1e-5  # PyTorch's default; the arrays do not contain a layer's own


class Statistics(NamedTuple):
    """The running statistics of all layers."""

    mean: Vector
    var: Vector


class NormLayers:
    """The layers of a model that track running statistics, in the order of its arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self.prefixes = layers(arrays)
        self.names = [prefix.removesuffix(".") or "norm" for prefix in self.prefixes]
        self._sizes = np.array([arrays[f"{prefix}{MEAN}"].size for prefix in self.prefixes], dtype=np.intp)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def statistics(self, arrays: Arrays) -> Statistics | None:
        """The statistics among the arrays; None if one is missing, has another size or is not finite."""
        vectors = []
        for name in (MEAN, VARIANCE):
            parts = [arrays[key].reshape(-1) for prefix in self.prefixes if (key := f"{prefix}{name}") in arrays]
            if [part.size for part in parts] != self._sizes.tolist():
                return None
            vectors.append(np.concatenate(parts).astype(np.float64))
        found = Statistics(vectors[0], np.maximum(vectors[1], 0))  # a privacy strategy's noise can make it negative
        return found if np.isfinite(found.mean).all() and np.isfinite(found.var).all() else None

    def drift(self, before: Statistics, after: Statistics) -> dict[str, Figures]:
        """The distances of each layer's statistics from those of the round before."""
        mean, log_ratio = _differences(after, before, scale=after.var)
        columns = (self._rms(mean), self._rms(log_ratio))
        return self._by_layer(("mean_drift", "variance_drift"), columns)

    def deviation(self, client: Statistics, overall: Statistics) -> dict[str, Figures]:
        """The distances of each layer's statistics on a client from the global ones, and the variance ratio."""
        mean, log_ratio = _differences(client, overall, scale=overall.var)
        columns = (self._rms(mean), self._rms(log_ratio), np.exp(self._means(log_ratio)))
        return self._by_layer(("mean_deviation", "variance_deviation", "variance_ratio"), columns)

    def _means(self, values: Vector) -> Vector:
        sums: Vector = np.add.reduceat(values, self._starts)
        return sums / self._sizes

    def _rms(self, values: Vector) -> Vector:
        return np.sqrt(self._means(values * values))

    def _by_layer(self, names: tuple[str, ...], columns: tuple[Vector, ...]) -> dict[str, Figures]:
        rows = zip(*(column.tolist() for column in columns), strict=True)
        # Six digits, because a file has a number for every round, client and layer.
        rounded = ([float(f"{value:.6g}") for value in row] for row in rows)
        return {layer: dict(zip(names, row, strict=True)) for layer, row in zip(self.names, rounded, strict=True)}


def _differences(one: Statistics, other: Statistics, *, scale: Vector) -> tuple[Vector, Vector]:
    mean = (one.mean - other.mean) / np.sqrt(scale + EPS)
    return mean, np.log((one.var + EPS) / (other.var + EPS))
