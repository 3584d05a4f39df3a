"""Seconds to an accuracy as a function of the round trip time, with the numbers of rounds in docs/results/mnist.

    python benchmarks/time_to_accuracy.py

A round of one message takes R seconds with every strategy. A FedTAN round over streams takes R, a round trip for each
exchange, and four to connect. The network of docs/results/mnist.md has one batch norm: two exchanges, of statistics and
of gradients. `never`: at least one seed did not reach the accuracy in 500 rounds.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = json.loads((ROOT / "docs" / "results" / "mnist" / "noniid-lr0.5" / "report.json").read_text())
RULES = ("FedAvg+BN", "FixBN", "FedAvg+GN", "FedTAN", "FedTAN-II M=10", "FedTAN-II M=50")
CONNECT = 4  # round trips: TCP, TLS, HTTP/2, the token


def rounds_to(label: str, accuracy: float) -> float | None:
    """Mean over seeds of the first evaluated round (one in ten) with this accuracy; None if a seed has none."""
    rounds = []
    for run in RUNS:
        if run["settings"]["label"] == label:
            reached = [point["round"] for point in run["curve"] if point["accuracy"] >= accuracy]
            if not reached:
                return None
            rounds.append(reached[0])
    return statistics.fmean(rounds)


def round_trips(label: str, rounds: float, exchanges: int) -> float:
    """The round trips of all exchanges and connections in these rounds."""
    if label == "FedTAN":
        return rounds * (exchanges + CONNECT)
    if label.startswith("FedTAN-II"):
        return min(rounds, int(label.rpartition("=")[2])) * (exchanges + CONNECT)
    return 0.0


for norms, exchanges in ((1, 2), (19, 38)):
    print(f"\n{norms} batch norms, {exchanges} exchanges in an iteration")
    for accuracy in (0.75, 0.85, 0.90, 0.93):
        print(f"  {100 * accuracy:.0f} %: strategy, rounds, round trips in all")
        table = {}
        for label in RULES:
            rounds = rounds_to(label, accuracy)
            if rounds is None:
                print(f"    {label:16} never")
                continue
            table[label] = rounds, round_trips(label, rounds, exchanges)
            print(f"    {label:16} {rounds:6.0f} {table[label][1]:8.0f}")
        tan, trips = table.get("FedTAN", (None, None))
        for label, (rounds, others) in table.items():
            if tan is None or trips is None or label == "FedTAN":
                continue
            # tan R + trips t = rounds R + others t
            if rounds <= tan:
                print(f"    {label} is at least as fast as FedTAN, for any round trip time")
            elif trips > others:
                share = (rounds - tan) / (trips - others)
                print(f"    {label} is faster than FedTAN if a round trip takes more than {share:.3f} R")
