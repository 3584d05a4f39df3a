"""CONTRIBUTING's table of the way of a round names functions that exist, in the order in which a round calls them."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import weight

from fedbn_flwr.strategies import FedAvg

ROOT = Path(__file__).parents[2]
# Other engines, strategies and listeners than those of the round below.
ELSEWHERE = {"train_round", "BaseStrategy.ask", "FedTAN.exchanges", "WorkerPool.serve", "Listener.on_round"}


def test_the_way_of_a_round_is_as_described() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| `([\w/]+)\.py` \|$", guide, re.MULTILINE)
    described = [(function, f"{file.replace('/', '.')}:{function}") for function, file in rows]
    assert len(described) > len(ELSEWHERE)
    for _, place in described:
        pkgutil.resolve_name(place)  # raises an error if there is no such function
    called = weight.way_of_a_round(FedAvg())[1]
    of_round = [place for function, place in described if function not in ELSEWHERE]
    assert of_round == [place for place in called if place in of_round]
