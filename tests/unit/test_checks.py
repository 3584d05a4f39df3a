"""What the README promises of its own commands, and the promised names."""

from __future__ import annotations

import re

from tests.support.command import ROOT


def test_quick_start_has_two_commands_of_one_line_each() -> None:
    section = (ROOT / "README.md").read_text().split("## Quick start", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) == 2
    assert all(block.strip().count("\n") == 0 for block in blocks)
    assert blocks[0].endswith(".venv/bin/fedbn run demo\n")
    assert blocks[1].endswith(".venv/bin/pytest -n 3\n")


def test_every_promised_name_can_be_imported() -> None:
    import fedbn_flwr
    from fedbn_flwr import strategies
    from fedbn_flwr.experiment.registry import STRATEGIES, class_of
    from fedbn_flwr.extensions import declared

    assert sorted(set(fedbn_flwr.__all__)) == sorted(fedbn_flwr.__all__)
    for name in fedbn_flwr.__all__:
        assert getattr(fedbn_flwr, name) is not None
    assert {*fedbn_flwr.__all__} <= {*dir(fedbn_flwr)}, "a shell completes them"
    assert {"annotations", "Any", "importlib"}.isdisjoint(dir(fedbn_flwr))
    assert set(STRATEGIES) == {
        "FedAvg", "FedProx", "Scaffold", "FedBN", "SiloBN", "FedBS", "FixBN", "FedTAN", "FedTANII",
        "FedAvgGlobalStats", "HeteroBN", "FedWon", "GlobalMomentum", "MeanStatistics", "Standalone", "FedNova",
        "FedRep", "HBN",
        *declared("strategies"),
    }  # fmt: skip
    for name in STRATEGIES:
        assert getattr(strategies, name) is class_of(name)


def test_a_star_imports_the_strategies() -> None:
    from fedbn_flwr import strategies

    names: dict[str, object] = {}
    exec("from fedbn_flwr.strategies import *", names)
    assert names["FedAvg"] is strategies.FedAvg
    assert {"FixBN", "Traits", "mean_is_enough"} <= names.keys()
    assert {"Any", "declared", "part"}.isdisjoint(names)
    assert dir(strategies) == sorted(strategies.__getattr__("__all__"))


def test_a_listed_key_selects_the_client_rule_that_declares_it_beside_its_strategy() -> None:
    """In the same module; an extension has a module for each half."""
    from fedbn_flwr.client import rule
    from fedbn_flwr.experiment.registry import STRATEGIES, class_of

    rule.known_keys()
    modules = {class_of(name).__module__ for name in STRATEGIES}
    ours = {each for each in rule.BY_KEY.values() if re.match(r"fedbn_flwr\.(?!.*\.tests\.)", each.__module__)}
    for found in ours:
        assert {rule.BY_KEY[key] for key in found.keys} == {found}
        assert rule.module_of(next(iter(found.keys))) == found.__module__
        assert found.__module__ in modules or ".extensions." in found.__module__, found


def test_strategies_have_one_identity_whichever_way_they_are_imported() -> None:
    from fedbn_flwr.strategies.fixbn import FixBN as Same  # type: ignore[import-untyped]

    from fedbn_flwr.strategies import FixBN

    assert FixBN is Same
