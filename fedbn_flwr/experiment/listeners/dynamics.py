"""Records how batch norm's statistics change from round to round, and from client to client (`evaluate.dynamics`).

norms.jsonl is computed from arrays that the server has anyway: the statistics in the clients' replies, and their mean.
No client computes or sends anything more.

All metrics are per layer. They compare two pairs of running statistics (m, v) and (m', v') channel by channel, on the
scale of the layer's own output: s' = sqrt(v' + eps) is what batch norm divides by.

    mean distance       root mean square over the channels of (m - m') / s'
    variance distance   root mean square over the channels of log(s^2 / s'^2)
    variance ratio      geometric mean over the channels of s^2 / s'^2

For a client they are the distances between its statistics and the round's mean, and their spread over the rounds since
the line before, if it took part in at least two of them:

    mean spread         root mean square over the channels of the deviation of m, over s'
    variance spread     root mean square over the channels of the deviation of log(s^2)

A mean distance of 1 shifts the layer's normalised outputs by one standard deviation. A variance distance of 0.1 stands
for variances that differ by a factor of about 1.1; the ratio says in which direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.errors import LOG
from fedbn_flwr.messages.arrays import Arrays, unpack
from fedbn_flwr.messages.reply import read_reply, sender_of
from fedbn_flwr.norms.roles import MEAN, VARIANCE, Role, layers

from .listener import FinishedRound, Listener, Running

Statistics = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]  # running mean and variance of each layer

DRIFT = ("mean_drift", "variance_drift")
DEVIATION = ("mean_deviation", "variance_deviation", "variance_ratio")
SPREAD = ("mean_spread", "variance_spread")
EPS = 1e-5  # PyTorch's default; the arrays don't contain the layer's value


class Dynamics(Listener):
    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self._before: Statistics = {}  # of the previous round; empty if nothing is recorded
        self._windows: dict[str, Window] = {}  # of each client, the rounds since the last line
        self._is_whole = not finished.number % running.run.evaluate.every  # resumed in between, the window lacks rounds
        if Role.STATISTICS not in running.prepared.rule.traits.unsent:
            self._before = statistics_in(unpack(finished.arrays))
        if not self._before:
            text = "%s: evaluate.dynamics records nothing: with these settings, clients send no running statistics"
            LOG.warning(text, running.prepared.name)

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        if before := self._before:
            self._before = now = statistics_in(unpack(finished.arrays))
            records = running.prepared.rule.traits.records
            found = {
                str(sender_of(reply)): statistics_in(read_reply(reply, records=records).arrays)
                for reply in sorted(finished.replies, key=sender_of)
            }
            for key, own in found.items():
                self._windows.setdefault(key, Window(own)).add(own)
            if finished.is_evaluated:
                clients = {key: distances(own, now, DEVIATION) for key, own in found.items()}
                for key, layers in clients.items() if self._is_whole else ():
                    for layer, metrics in layers.items():
                        metrics |= self._windows[key].spreads(layer, now[layer][1])
                line = {"round": finished.number, "layers": distances(before, now, DRIFT), "clients": clients}
                running.folder.add_line("norms.jsonl", line)
                self._windows, self._is_whole = {}, True
        return replace(finished, replies=())


def statistics_in(arrays: Arrays) -> Statistics:
    """The statistics of each layer that tracks some; the gate has checked that they are finite and fit the model."""
    return {
        prefix.removesuffix(".") or "norm": (
            arrays[f"{prefix}{MEAN}"].astype(np.float64).reshape(-1),
            arrays[f"{prefix}{VARIANCE}"].astype(np.float64).reshape(-1),
        )
        for prefix in layers(arrays)
    }


def distances(found: Statistics, overall: Statistics, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By layer: mean distance, variance distance and variance ratio, or the first of them, under these names."""
    of_layers = {}
    for layer, (mean, var) in found.items():
        overall_mean, overall_var = overall[layer]
        scaled = (mean - overall_mean) / np.sqrt(overall_var + EPS)
        ratios = np.log((var + EPS) / (overall_var + EPS))
        values = (_rms(scaled), _rms(ratios), float(np.exp(ratios.mean())))
        of_layers[layer] = {name: _short(value) for name, value in zip(names, values, strict=False)}
    return of_layers


class Window:
    """How a client's statistics vary over rounds, from sums of their differences from the first round."""

    def __init__(self, first: Statistics) -> None:
        self.first, self.rounds = first, 0
        self.sums = {layer: np.zeros((2, 2, len(mean))) for layer, (mean, _) in first.items()}

    def add(self, found: Statistics) -> None:
        self.rounds += 1
        for layer, (mean, var) in found.items():
            first_mean, first_var = self.first[layer]
            moved = np.stack([mean - first_mean, np.log((var + EPS) / (first_var + EPS))])
            self.sums[layer] += moved, moved * moved

    def spreads(self, layer: str, overall_var: NDArray[np.float64]) -> dict[str, float]:
        """Empty for a single round."""
        means, squares = self.sums[layer] / self.rounds
        means, variances = np.sqrt(np.maximum(squares - means * means, 0))
        values = _rms(means / np.sqrt(overall_var + EPS)), _rms(variances)
        return dict(zip(SPREAD, map(_short, values), strict=True)) if self.rounds > 1 else {}


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a file has a number for every round, client and layer


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values * values)))
