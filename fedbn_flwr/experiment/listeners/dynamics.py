"""Records how batch norm's statistics change from round to round, and from client to client (`evaluate.dynamics`).

norms.jsonl gets figures from arrays that the server has anyway: the statistics in the clients' replies, and their mean.
No client computes or sends anything more.

All figures are per layer. They compare two pairs of running statistics (m, v) and (m', v') channel by channel, on the
scale of the layer's own output: s' = sqrt(v' + eps) is what batch norm divides by.

    mean distance       root mean square over the channels of (m - m') / s'
    variance distance   root mean square over the channels of log(s^2 / s'^2)
    variance ratio      geometric mean over the channels of s^2 / s'^2

A mean distance of 1 shifts the layer's normalised outputs by one standard deviation. A variance distance of 0.1 stands
for variances that differ by a factor of about 1.1; the ratio says in which direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.common import log
from numpy.typing import NDArray

from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import number_of, read_reply
from fedbn_flwr.norms.roles import MEAN, VARIANCE, Role, layers
from fedbn_flwr.results.folder import RunFolder

from ..settings import strategy_name
from .listener import Listener, Round, Running

Arrays = Mapping[str, NDArray[Any]]
Statistics = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]  # running mean and variance of each layer

DRIFT = ("mean_drift", "variance_drift")
DEVIATION = ("mean_deviation", "variance_deviation", "variance_ratio")
EPS = 1e-5  # PyTorch's default; the arrays do not contain a layer's own


class Dynamics(Listener):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._before: Statistics | None = None  # of the previous round; None if nothing is recorded

    def on_start(self, running: Running, at: Round) -> Round:
        arrays, traits = unpack(at.arrays), running.prepared.rule.traits
        self.sizes = sizes_of(arrays)
        reason = None
        if not self.sizes:
            reason = "the model has no batch norm with running statistics"
        elif Role.STATISTICS in traits.unsent:
            reason = f"with these settings, {strategy_name(running.run.strategy)} leaves the statistics on the clients"
        if reason is None:
            self._before = statistics_in(arrays, self.sizes)
        else:
            log(WARNING, "%s: evaluate.dynamics records nothing: %s", running.prepared.name, reason)
        return at

    def on_round(self, running: Running, at: Round) -> Round:
        before, self._before = self._before, self._before and statistics_in(unpack(at.arrays), self.sizes)
        if before and self._before and at.is_evaluated:
            clients = self._clients(at.replies, self._before)
            layers = distances(before, self._before, DRIFT)
            self.folder.add_line("norms.jsonl", {"round": at.number, "layers": layers, "clients": clients})
        return replace(at, replies=())

    def _clients(self, replies: Sequence[Message], overall: Statistics) -> dict[str, Any]:
        found = {}
        for reply in sorted(replies, key=number_of):
            if (statistics := statistics_in(read_reply(reply).arrays, self.sizes)) is not None:
                found[str(number_of(reply))] = distances(statistics, overall, DEVIATION)
        return found


def sizes_of(arrays: Arrays) -> dict[str, int]:
    """The channels of each layer that tracks running statistics, by its prefix."""
    return {prefix: arrays[f"{prefix}{MEAN}"].size for prefix in layers(arrays)}


def statistics_in(arrays: Arrays, sizes: Mapping[str, int]) -> Statistics | None:
    """The statistics of these layers; None if one is missing, has another size or is not finite."""
    found = {}
    for prefix, size in sizes.items():
        pair = [arrays[key].reshape(-1) for name in (MEAN, VARIANCE) if (key := f"{prefix}{name}") in arrays]
        if [each.size for each in pair] != [size, size] or not np.isfinite(pair).all():
            return None
        mean, var = (each.astype(np.float64) for each in pair)
        found[prefix.removesuffix(".") or "norm"] = mean, np.maximum(var, 0)  # a privacy strategy's noise may be larger
    return found


def distances(found: Statistics, overall: Statistics, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By layer: mean distance, variance distance and variance ratio, or the first of them, under these names."""
    of_layers = {}
    for layer, (mean, var) in overall.items():
        scaled = (found[layer][0] - mean) / np.sqrt(var + EPS)
        ratios = np.log((found[layer][1] + EPS) / (var + EPS))
        figures = (_rms(scaled), _rms(ratios), float(np.exp(ratios.mean())))
        # Six digits, because a file has a number for every round, client and layer.
        of_layers[layer] = {name: float(f"{value:.6g}") for name, value in zip(names, figures, strict=False)}
    return of_layers


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values * values)))
