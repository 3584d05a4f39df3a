"""Client rules that change the loss or the batches: FedGKD of examples/ against plain PyTorch, and others."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, client_app, run
from fedbn_flwr.client.rule import BY_KEY, ClientRule, Key, known_keys
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, FedTAN, FixBN, restore, state_of
from strategies.fixbn import FREEZE, FixBNClient
from tests.support.command import ROOT, python_blocks
from tests.support.federations import Federations, near
from tests.support.fixtures import Batches
from tests.support.twins import sgd, union

GUIDE = ROOT / "docs" / "strategy-reference.md"
SMOOTH, DOUBLED, TWICE = "fedbn.smooth", "fedbn.doubled", "fedbn.twice"


@pytest.fixture
def fedgkd(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("fedgkd")


def teacher_of(models: list[dict[str, Tensor]], like: nn.Module) -> nn.Module:
    teacher = copy.deepcopy(like).eval()
    mean = {key: sum(each[key] for each in models) / len(models) for key in models[0]}
    teacher.load_state_dict(mean, strict=False)
    return teacher


def test_fedgkd_equals_its_loop_by_hand(federation: Federations, fedgkd: Any) -> None:
    """Three rounds in float64 with the mean of the last two global models as the teacher."""
    fed = federation((8, 12), dtype=torch.float64, lr=0.2, momentum=0.5)
    found = fedgkd.FedGKD(gamma=3.0, models=2).start(fed.grid(), fed.arrays(), num_rounds=3)
    counts = [data.num_examples for data in fed.data]
    models = [{key: value.clone() for key, value in fed.model.state_dict().items() if "num_batches" not in key}]
    for _ in range(3):
        teacher, states, losses = teacher_of(models[-2:], fed.model), [], []
        for data in fed.data:
            model = copy.deepcopy(fed.model).train()
            model.load_state_dict(models[-1], strict=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
            for inputs, labels in data.batches:
                optimizer.zero_grad()
                outputs = model(inputs)
                with torch.no_grad():
                    p = teacher(inputs).softmax(1)
                divergence = (p * (p.log() - outputs.log_softmax(1))).sum(1).mean()
                loss = F.cross_entropy(outputs, labels) + 1.5 * divergence
                loss.backward()
                optimizer.step()
                losses.append(loss.item() * len(labels))
            states.append(model.state_dict())
        models.append({
            key: sum(n * state[key] for n, state in zip(counts, states, strict=True)) / sum(counts) for key in models[0]
        })  # fmt: skip
    near(unpack(found.arrays), models[-1], rtol=1e-10, atol=1e-12)
    # The reported loss has the term.
    assert found.train_metrics_clientapp[3]["train-loss"] == pytest.approx(sum(losses) / 20, rel=1e-10)
    plain = FedAvg().start(fed.grid(), fed.arrays(), num_rounds=3)
    assert not np.allclose(plain.arrays["0.weight"].numpy(), found.arrays["0.weight"].numpy(), rtol=1e-3)


def test_fedgkd_is_inside_others_and_its_models_are_saved(federation: Federations, fedgkd: Any) -> None:
    fed = federation((8, 12))
    strategy = FixBN(fedgkd.FedGKD(models=2), freeze_round=1)
    strategy.start(fed.grid(), fed.arrays(), num_rounds=3)
    other = FixBN(fedgkd.FedGKD(models=2), freeze_round=1)
    other.begin(3, fed.arrays())
    restore(other, state_of(strategy))
    for saved, model in zip(other.base.memory.models, strategy.base.memory.models, strict=True):
        assert all(saved[key].tobytes() == model[key].tobytes() for key in model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"name": "fedgkd:FedGKD"}, {"name": "FedRep", "head_epochs": 1}], ids=str)
def test_a_run_in_an_experiment_is_the_same_together_and_in_workers(
    fedgkd: Any, strategy: dict[str, Any], tmp_path: Path
) -> None:
    models = []
    for name, engine in (("plain", {}), ("together", {"together": 5}), ("workers", {"workers": 2})):
        run(
            "quick", out=tmp_path / name, rounds=2, strategy=strategy, progress=False,
            data={"test_examples": 50}, engine={"workers": 0, "device": "cpu", **engine},
        )  # fmt: skip
        (file,) = (tmp_path / name).rglob("model.safetensors")
        models.append(file.read_bytes())
    assert models[0] == models[1] == models[2]


def test_a_client_that_compiles_does_not_compile_such_rounds(federation: Federations, fedgkd: Any) -> None:
    """Compiled ones would differ in their last bits, or lack the term."""
    fed = federation((8, 12))
    ends = []
    for compiled in (False, True):
        fed.options["compile"] = compiled
        ends.append(unpack(fedgkd.FedGKD().start(fed.grid(), fed.arrays(), num_rounds=2).arrays))
    assert all(ends[0][key].tobytes() == ends[1][key].tobytes() for key in ends[0])


# --- others ------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    """The client rule of the guide, which adds a multiple of the outputs' mean square to the loss, and two others."""
    before = set(BY_KEY)
    (code,) = [
        each for each in python_blocks(GUIDE.read_text(encoding="utf-8")) if each.startswith("class SmoothClient")
    ]
    exec(code, {"ClientRule": ClientRule, "Key": Key, "__name__": "guide"})

    class Twice(ClientRule):
        """Doubles the loss, with the terms of the rules before it."""

        keys = {TWICE: Key("true", "double it")}
        order = 5

        def loss(self, inputs: Any, targets: Any, outputs: Tensor, loss: Tensor) -> Tensor:
            return 2 * loss

    class Doubled(ClientRule):
        keys = {DOUBLED: Key("true", "double the inputs")}

        def batches(self, batches: Iterable[Any]) -> Iterable[Any]:
            return ((2 * inputs, targets) for inputs, targets in batches)

    yield
    sys.modules.pop("fedgkd", None)
    for key in [*BY_KEY]:  # the library's own modules add some when they are imported; these stay
        if key not in before and not BY_KEY[key].__module__.startswith(("fedbn_flwr.", "strategies.")):
            BY_KEY.pop(key)


class Asking(FedAvg):
    def __init__(self, **keys: Any) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.own = {f"fedbn.{key}": value for key, value in keys.items()}

    def config(self, round: Any) -> dict[str, Any]:
        return self.own


def test_changed_batches_are_those_of_changed_data(federation: Federations) -> None:
    fed = federation((8, 12))
    found = unpack(Asking(doubled=True).start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    fed.data = [Batches([(2 * inputs, labels) for inputs, labels in data.batches]) for data in fed.data]
    expected = unpack(FedAvg(fraction_evaluate=0.0).start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def test_rules_change_the_loss_in_their_order(federation: Federations) -> None:
    """2 (F + c |z|^2) with the rate 0.1 takes the steps of F + c |z|^2 with the rate 0.2."""
    fed = federation((8, 12), dtype=torch.float64, lr=0.1)
    twice = unpack(Asking(smooth=0.3, twice=True).start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    fed.options["lr"] = 0.2
    once = unpack(Asking(smooth=0.3).start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    near(once, twice, rtol=1e-12, atol=1e-13)


def test_fedtan_s_first_step_has_the_term_too(federation: Federations) -> None:
    """The step of all clients is that of the term and the loss on the union of their batches."""

    class Smoothed(FedTAN):
        def config(self, round: Any) -> dict[str, Any]:
            return {**super().config(round), SMOOTH: 0.7}

    def smooth(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + 0.7 * outputs.square().mean()

    fed = federation((8, 8), dtype=torch.float64, batches=1, lr=0.1)
    strategy = Smoothed(min_batch=1, fraction_evaluate=0.0)
    found = unpack(strategy.start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    near(found, sgd(copy.deepcopy(fed.model).train(), [union(fed)] * 2, smooth, lr=0.1), rtol=1e-9, atol=1e-12)


def test_a_term_that_calls_batch_norm_raises_an_error_in_fedtan_s_step(federation: Federations) -> None:
    class Calls(ClientRule):
        keys = {"fedbn.calls": Key("true", "call the model again")}

        def loss(self, inputs: Any, targets: Any, outputs: Tensor, loss: Tensor) -> Tensor:
            return loss + self.local.model(inputs).mean()

    class Calling(FedTAN):
        def config(self, round: Any) -> dict[str, Any]:
            return {**super().config(round), "fedbn.calls": True}

    fed = federation((8, 8), batches=1)
    with pytest.raises(RunFailed, match="called after it: by the loss"):
        Calling(min_batch=1).start(fed.grid(), fed.arrays(), num_rounds=1)


def test_a_rule_that_adds_a_loss_to_one_that_decides_by_the_message_has_it(federation: Federations) -> None:
    class Frozen(FixBNClient):
        keys = {"frozen-and-smooth": Key("true", "freeze nothing, and smooth")}

        def loss(self, inputs: Any, targets: Any, outputs: Tensor, loss: Tensor) -> Tensor:
            return loss + 0.7 * outputs.square().mean()

    class Ours(FedAvg):
        def config(self, round: Any) -> dict[str, Any]:
            return {"frozen-and-smooth": True, FREEZE: "affine"}

    fed = federation((8, 12))
    plain = FixBN(FedAvg(fraction_evaluate=0.0), freeze_round=0, freeze=["affine"])
    without = unpack(plain.start(fed.grid(), fed.arrays(), num_rounds=1).arrays)
    found = unpack(Ours(fraction_evaluate=0.0).start(fed.grid(), fed.arrays(), num_rounds=1).arrays)
    assert not np.allclose(found["4.weight"], without["4.weight"])
    np.testing.assert_array_equal(found["1.weight"], without["1.weight"], "both are frozen")


def test_only_rules_with_a_loss_train_alone() -> None:
    known_keys()  # imports all
    alone = {rule.__name__ for rule in BY_KEY.values() if rule.trains_alone}
    assert {"SmoothClient", "Twice", "FedRepClient"} <= alone
    assert not {"Doubled", "FedProxClient", "ScaffoldClient", "FixBNClient", "FedTANClient"} & alone


def test_batches_of_a_client_s_own_loader_pass_through(federation: Federations) -> None:
    """A client without `epoch` has the same hook."""
    fed = federation((8, 12))

    def make(context: Any) -> BNClient:
        data = fed.data[int(context.node_config["partition-id"])].batches
        return BNClient(copy.deepcopy(fed.model), data, lr=0.1, context=context)

    fed.options["lr"] = 0.1
    ends = [
        unpack(Asking(doubled=True).start(fed.grid(app), fed.arrays(), num_rounds=1).arrays)
        for app in (None, client_app(make))
    ]
    assert all(ends[0][key].tobytes() == ends[1][key].tobytes() for key in ends[0])
