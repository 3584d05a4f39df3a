"""CONTRIBUTING's tables of a round and an exchange name functions that exist, in the order in which they are called."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import weight

from fedbn_flwr.strategies import FedAvg, FedTAN

ROOT = Path(__file__).parents[2]
# Other engines, strategies and listeners than those of the round below.
ELSEWHERE = {"train_round", "ask", "Base.ask", "FedTAN.run_exchanges", "WorkerPool.serve", "Listener.on_round"}


def described(begin: str, end: str) -> list[tuple[str, str]]:
    """The functions in the table between two sentences of the guide, with their places; each function exists."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = guide.partition(begin)[2].partition(end)[0]
    rows = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| `([\w/]+)\.py` \|$", table, re.MULTILINE)
    found = [(function, f"{file.replace('/', '.')}:{function}") for function, file in rows]
    for _, place in found:
        pkgutil.resolve_name(place)  # raises an error if there is no such function
    return found


def test_the_way_of_a_round_is_as_described() -> None:
    rows = described("A round calls these functions", "In an exchange of FedTAN")
    assert len(rows) > len(ELSEWHERE)
    called = weight.way_of_a_round(FedAvg())[1]
    of_round = [place for function, place in rows if function not in ELSEWHERE]
    assert of_round == [place for place in called if place in of_round]


def test_the_way_of_an_exchange_is_as_described() -> None:
    rows = [place for _, place in described("In an exchange of FedTAN", "In the client's thread")]
    called = weight.way_of_a_round(FedTAN(min_batch=1))[1]
    assert len(rows) > 5
    assert rows == [place for place in called if place in rows]
