"""Records how batch norm's statistics change from round to round, and from client to client (`evaluate.dynamics`).

norms.jsonl is computed from arrays that the server has anyway: the statistics in the clients' replies, and their mean.
No client computes or sends anything more.

All metrics are per layer: the distances of `norms.distances`. The drift compares the global statistics of two rounds.
For a client they are the distances between its statistics and the round's mean, and their spread over the rounds since
the line before, if it took part in at least two of them:

    mean spread         root mean square over the channels of the deviation of m, over s'
    variance spread     root mean square over the channels of the deviation of log(s^2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.errors import LOG
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.distances import EPS, Statistics, distances, rms, statistics_in
from fedbn_flwr.norms.roles import Role

from .listener import FinishedRound, Listener, Running

DRIFT = ("mean_drift", "variance_drift")
DEVIATION = ("mean_deviation", "variance_deviation", "variance_ratio")
SPREAD = ("mean_spread", "variance_spread")


class Dynamics(Listener):
    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self._before: Statistics = {}  # of the previous round; empty if nothing is recorded
        self._windows: dict[str, Window] = {}  # of each client, the rounds since the last line
        self._is_whole = not finished.number % running.run.evaluate.every  # resumed in between, the window lacks rounds
        if Role.STATISTICS not in running.prepared.rule.traits.never_sent:
            self._before = statistics_in(unpack(finished.arrays))
        if not self._before:
            text = "%s: evaluate.dynamics records nothing: with these settings, clients send no running statistics"
            LOG.warning(text, running.prepared.name)

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        if before := self._before:
            self._before = now = statistics_in(unpack(finished.arrays))
            found = {str(client): statistics_in(reply.arrays) for client, reply in sorted(finished.replies.items())}
            for key, own in found.items():
                self._windows.setdefault(key, Window(own)).add(own)
            if finished.is_evaluated:
                clients = {key: by_layer(own, now, DEVIATION) for key, own in found.items()}
                for key, layers in clients.items() if self._is_whole else ():
                    for layer, metrics in layers.items():
                        metrics |= self._windows[key].spreads(layer, now[layer][1])
                line = {"round": finished.number, "layers": by_layer(before, now, DRIFT), "clients": clients}
                running.folder.add_line("norms.jsonl", line)
                self._windows, self._is_whole = {}, True
        return replace(finished, replies={})


def by_layer(found: Statistics, overall: Statistics, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean distance, variance distance and variance ratio, or the first of them, under these names, by layer."""
    return {
        layer: {name: _short(value) for name, value in zip(names, values, strict=False)}
        for layer, values in distances(found, overall).items()
    }


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
        values = rms(means / np.sqrt(overall_var + EPS)), rms(variances)
        return dict(zip(SPREAD, map(_short, values), strict=True)) if self.rounds > 1 else {}


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a file has a number for every round, client and layer
