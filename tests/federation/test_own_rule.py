"""The rule that docs/plugin.md walks through, from the page's own code; and how many modules a round executes."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context

from fedbn_flwr import BNClient, LocalGrid, Role, client_app, roles
from fedbn_flwr.client.layerwise import parked_rounds
from fedbn_flwr.client.rule import BY_KEY
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.registry import STRATEGIES
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import FedAvg, FixBN, GlobalMomentum, restore, state_of
from tests.support.command import PATIENCE, ROOT

Federations = Callable[..., Any]
PAGE = "# strategies/fednova.py"  # the first line of its code


def code(first_line: str) -> str:
    blocks = (ROOT / "docs" / "plugin.md").read_text().split("```python\n")
    (found,) = [block.split("```")[0] for block in blocks if block.startswith(first_line)]
    return found


@pytest.fixture
def fed_nova() -> Iterator[Any]:
    """The documented strategy, its client rule registered during a test."""
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(code(PAGE), PAGE, "exec", dont_inherit=True), scope)
    yield scope["FedNova"]
    BY_KEY.pop("fedbn.steps", None)


def test_the_walk_through_is_short() -> None:
    lines = code(PAGE).splitlines()
    assert len([line for line in lines if line.strip()]) < 60


def test_with_equal_steps_it_is_fedavg(federation: Federations, fed_nova: Any) -> None:
    fed = federation((8, 12), dtype=torch.float64, steps=3)
    found = unpack(fed_nova().start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    for key, value in unpack(FedAvg().start(fed.grid(), fed.arrays(), num_rounds=2).arrays).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-12, atol=1e-14, err_msg=key)


def test_with_unequal_steps_it_is_the_formula(federation: Federations, fed_nova: Any) -> None:
    """p = (8, 16) / 24, tau_i = 1 and 4: tau = 3; w + 3 * sum_i p_i (w_i - w) / tau_i."""
    fed = federation((8, 16), dtype=torch.float64)

    def make(context: Context) -> BNClient:
        partition = int(context.node_config["partition-id"])
        return BNClient(copy.deepcopy(fed.model), fed.data[partition], lr=0.1, steps=(1, 4)[partition], context=context)

    rule = fed_nova(fraction_evaluate=0.0)
    found = unpack(rule.start(LocalGrid(client_app(make), 2), fed.arrays(), num_rounds=1).arrays)
    assert rule.notes() == {"tau": pytest.approx(3.0, rel=1e-15)}
    before = unpack(fed.arrays())
    ends = [
        BNClient(copy.deepcopy(fed.model), fed.data[i], lr=0.1, steps=(1, 4)[i]).train_round(before, {}).arrays
        for i in (0, 1)
    ]
    for key, role in roles(before).items():
        one, two = (end[key] - before[key] for end in ends)
        move = one / 3 + two * 2 / 3 if role is Role.STATISTICS else 3 * (one / 3 / 1 + two * 2 / 3 / 4)
        np.testing.assert_allclose(found[key], before[key] + move, rtol=1e-12, atol=1e-14, err_msg=key)


def test_it_composes_and_is_saved(federation: Federations, fed_nova: Any) -> None:
    fed = federation((8, 12), steps=2, momentum=0.9)
    rule = GlobalMomentum(FixBN(fed_nova(), freeze_round=1))
    models: list[Any] = []
    rule.start(fed.grid(), fed.arrays(), num_rounds=2, evaluate_fn=lambda _, arrays: models.append(unpack(arrays)))
    assert models[1]["1.running_mean"].tobytes() == models[2]["1.running_mean"].tobytes()
    other = GlobalMomentum(FixBN(fed_nova(), freeze_round=1))
    other.begin(2, fed.arrays())
    restore(other, state_of(rule))
    assert other.notes() == rule.notes() == {"freeze_round": 1, "frozen": ["statistics"], "tau": 2.0}


def test_a_client_without_the_client_rule_refuses_the_message(federation: Federations, fed_nova: Any) -> None:
    BY_KEY.pop("fedbn.steps")
    fed = federation()
    with pytest.raises(RunFailed, match=r"asks for 'fedbn\.steps'"):
        fed_nova().start(fed.grid(), fed.arrays(), num_rounds=1)


@pytest.mark.parametrize("name", declared("strategies"))
def test_its_use_of_single_replies_is_refused_where_there_is_only_their_mean(name: str, fed_nova: Any) -> None:
    around: Any = STRATEGIES[name]
    with pytest.raises(SettingsError, match=r"FedNova has problem\(\) of its own, which may use the replies of single"):
        around(fed_nova())
    with pytest.raises(SettingsError, match="FedNova has problem"):
        around(FixBN(fed_nova(), freeze_round=1))

    class Harmless(FedAvg):
        lacks = {}

        def combine(self, round: Any, replies: Any, weights: Any) -> Any:
            return super().combine(round, replies, weights)

    around(Harmless())
    with pytest.raises(SettingsError, match=r"Own has combine\(\) of its own"):
        around(type("Own", (Harmless,), {"combine": Harmless.combine})())


def test_a_node_imports_the_client_rule_of_an_experiment_s_strategy(tmp_path: Path) -> None:
    """In a process that has not made the strategy: an actor of Ray, or at a site."""
    (tmp_path / "nova.py").write_text(code(PAGE))
    script = (
        "from flwr.app import Context, RecordDict\nfrom fedbn_flwr.client.client import rules_for\n"
        "from fedbn_flwr.experiment.node import make_client\n"
        "text = 'clients: 2\\nstrategy: {name: FixBN, freeze_round: 1, base: {name: nova:FedNova}}'\n"
        "context = Context(0, 1, {'partition-id': 0}, RecordDict(), {'experiment': text, 'set': ''})\n"
        "config = {'fedbn.steps': True}\nmake_client(context, config)\n"
        "print([rule.__name__ for rule in rules_for(config)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "['FedNovaClient']\n", done.stderr


def test_a_file_and_a_line_extend_the_package_by_both_halves(tmp_path: Path) -> None:
    for folder in ("strategies", "fedbn_flwr"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    own = code(PAGE).replace("from fedbn_flwr.strategies import", "from .fedavg import")
    (tmp_path / "strategies" / "fednova.py").write_text(own)
    names, last = tmp_path / "strategies" / "_names.py", "from .standalone import Standalone as Standalone\n"
    names.write_text(names.read_text().replace(last, f"{last}from .fednova import FedNova as FedNova\n"))

    def stdout(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "FedAvg of each client's change per local step" in stdout(
        "-m", "fedbn_flwr.cli", "list", "strategies", "FedNova"
    )
    client = "from fedbn_flwr.client.client import rules_for; print(rules_for({'fedbn.steps': True}))"
    assert stdout("-c", client) == "{<class 'fedbn_flwr.strategies.fednova.FedNovaClient'>}\n"


# --- the modules of a round --------------------------------------------------


def test_a_round_of_fedavg_executes_sixteen_modules(federation: Federations) -> None:
    """From configure_train through two clients on the local engine to aggregate_train, each client with its model."""
    parked_rounds.clear()  # of other tests, which the next train message would end
    fed = federation()
    tensors = [ModelTensors(copy.deepcopy(fed.model)) for _ in fed.data]

    def make(context: Context) -> BNClient:
        partition = int(context.node_config["partition-id"])
        return BNClient(tensors[partition], fed.data[partition], context=context)

    grid, strategy, executed = LocalGrid(client_app(make), 2), FedAvg(), set()
    arrays = fed.arrays()
    strategy.begin(2, arrays)

    def one_round(number: int) -> None:
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_train(number, grid.send_and_receive(messages))

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS:
            executed.add(".".join(file.relative_to(ROOT).with_suffix("").parts))

    one_round(1)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        one_round(2)
    finally:
        sys.setprofile(before)
    assert executed == ROUND


OURS = ("fedbn_flwr", "strategies")
ROUND = {
    "strategies.fedavg", "strategies._rule",
    "fedbn_flwr.engines.local", "fedbn_flwr.engines.nodes",
    "fedbn_flwr.models.tensors", "fedbn_flwr.batch",
    "fedbn_flwr.client.app", "fedbn_flwr.client.client", "fedbn_flwr.client.training", "fedbn_flwr.client.losses",
    "fedbn_flwr.client.node_state",
    "fedbn_flwr.messages.arrays", "fedbn_flwr.messages.gate", "fedbn_flwr.messages.aggregate",
    "fedbn_flwr.seeding",
}  # fmt: skip
