"""A paper is a file: the client's half of a method stands in the module of its strategy."""

from __future__ import annotations

import pytest

from fedbn_flwr.client import rule
from fedbn_flwr.client.rule import ClientRule
from fedbn_flwr.experiment.registry import STRATEGIES, class_of
from tests.support.command import ROOT, python


def ours() -> set[type[ClientRule]]:
    rule.known_keys()
    return {rule.rule_of(key) for key in rule.BY_KEY if rule.rule_of(key).__module__.startswith("fedbn_flwr.")}


def test_every_client_rule_stands_with_its_strategy() -> None:
    """In the same module; an extension has a module for each half."""
    modules = {class_of(name).__module__ for name in STRATEGIES}
    for found in ours():
        assert found.__module__ in modules or ".extensions." in found.__module__, found


def test_a_listed_key_selects_the_class_that_declares_it() -> None:
    for found in ours():
        for key in found.keys:
            assert rule.rule_of(key) is found


CLIENT = """
import sys
from fedbn_flwr.client.rule import rules_for
print([rule.__name__ for rule in rules_for({"server-round": 1, "fedbn.run": "a", KEY: "statistics"})])
print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("fedbn_flwr.strategies.")))
"""


@pytest.mark.parametrize(
    ("key", "found", "modules"),
    [
        ("server-round", [], []),
        ("fedbn.freeze", ["FixBNClient"], ["fixbn"]),
        ("proximal-mu", ["FedProxClient"], ["fedavg", "fedprox"]),
        ("fedbn.control", ["ScaffoldClient"], ["fedavg", "scaffold"]),
        ("fedbn.momentum", ["GlobalMomentumClient"], ["globalmomentum"]),
        ("fedbn.clip", ["FedWonClient"], ["fedavg", "fedwon"]),
        ("fedbn.exchange-step", ["FedTANClient"], ["fedavg", "fedtan", "fixbn"]),
    ],
)
def test_a_client_imports_the_file_of_a_rule_and_its_base(key: str, found: list[str], modules: list[str]) -> None:
    done = python(CLIENT.replace("KEY", repr(key)), cwd=ROOT)
    rules, imported = done.stdout.splitlines() if done.returncode == 0 else pytest.fail(done.stderr)
    assert rules == str(found)
    assert [name for name in imported.split() if not name.startswith("_")] == modules
