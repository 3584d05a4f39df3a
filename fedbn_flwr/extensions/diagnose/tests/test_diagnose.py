"""The two gradients against plain PyTorch in float64, by the strategy and by the command."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import diagnose
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.extensions.diagnose.candidates import propose
from fedbn_flwr.extensions.diagnose.measure import deal
from fedbn_flwr.extensions.diagnose.strategy import Diagnose
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.strategies import FedAvg, Secure
from tests.support.federations import Federations, last_model, same
from tests.support.models import two_norms, two_norms_with_dropout
from tests.support.twins import union


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    F.cross_entropy(model(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def twin(model: nn.Module, fed: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The mean of the gradients of the clients' first batches, and the gradient of these batches as one."""
    sizes = [len(data.batches[0][1]) for data in fed.data]
    alone = [gradient(model, *data.batches[0]) for data in fed.data]
    own = {key: sum(n * each[key] for n, each in zip(sizes, alone, strict=True)) / sum(sizes) for key in alone[0]}
    return own, gradient(model, *union(fed))  # type: ignore[return-value]


def flat(arrays: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([value.flatten() for value in arrays.values()]).numpy()


def of(own: dict[str, Tensor], both: dict[str, Tensor]) -> tuple[float, float]:
    a, b = flat(own), flat(both)
    return np.linalg.norm(a - b) / np.linalg.norm(b), a @ b / np.linalg.norm(a) / np.linalg.norm(b)


OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0, "min_batch": 1}


@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "clip": 1.0}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_errors_are_those_of_plain_pytorch(federation: Federations, options: dict[str, Any]) -> None:
    """Clients of unequal sizes, at the initial model and after a round of training with any optimiser."""
    fed = federation((6, 9, 4), batches=1, model=two_norms, dtype=torch.float64, lr=0.05, steps=2, **options)
    rule = Diagnose(batches=2, warm_up=1, **OPTIONS)
    model = last_model(fed, rule, 5)
    found = rule.notes()["gradients"]
    trained = copy.deepcopy(fed.model)
    warm = last_model(fed, FedAvg(fraction_evaluate=0.0), 1)
    trained.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in warm.items()}, strict=False)
    assert same(model, warm)
    for place, at in (("0", fed.model), ("1", trained)):
        own, both = twin(at, fed)
        assert (found[place]["error"], found[place]["cosine"]) == pytest.approx(of(own, both), rel=1e-9)
        assert found[place]["error"] > 0.01
        assert found[place]["of_one_batch"]["mean"] == pytest.approx(found[place]["error"])
        for layer, measured in found[place]["layers"].items():
            one, other = ({key: value for key, value in each.items() if key.startswith(layer)} for each in (own, both))
            assert (measured["error"], measured["cosine"]) == pytest.approx(of(one, other), rel=1e-9)


def test_one_client_has_no_error_also_with_dropout(federation: Federations) -> None:
    """Both passes draw the same."""
    fed = federation((8,), model=two_norms_with_dropout, dtype=torch.float64, lr=0.1)
    rule = Diagnose(batches=3, warm_up=0, min_train_nodes=1, min_available_nodes=1, **OPTIONS)
    assert same(last_model(fed, rule, 3), last_model(fed, FedAvg(), 0))
    assert rule.notes()["gradients"]["0"]["error"] < 1e-12


def test_a_site_may_ask_for_larger_batches(federation: Federations) -> None:
    fed = federation((6, 6), model=two_norms, min_batch=7)
    with pytest.raises(RunFailed, match=r"refuses to exchange the statistics of fewer than 7 examples"):
        last_model(fed, Diagnose(batches=1, warm_up=0, **OPTIONS), 1)


def test_secure_refuses_it() -> None:
    with pytest.raises(SettingsError, match="exchanges statistics of batches, which Secure does not mask"):
        Secure(Diagnose())


# --- the command ---

DIGITS: dict[str, Any] = {
    "clients": 3,
    "data": {"name": "digits", "examples": 300, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"name": "mlp", "norm": "gn"},
    "train": {"steps": 2, "optimizer": "adam", "clip": 1.0, "schedule": "cosine"},
    "strategy": {"name": "FixBN", "freeze_round": 1, "base": {"name": "FedAvg"}},
    "engine": {"workers": 0, "device": "cpu"},
}


def test_an_experiment_is_diagnosed_beside_the_same_examples_dealt_at_random(tmp_path: Path) -> None:
    """Clients that draw equal shares of the classes differ from the dealt ones by chance only; whatever is trained."""
    found = diagnose({**DIGITS, "seed": 3}, batches=3, out=tmp_path, progress=False)
    sizes = [json.loads((tmp_path / "gradients" / run / "partition.json").read_text())["counts"] for run in RUNS]
    assert [sum(client) for client in sizes[0]] == [sum(client) for client in sizes[1]]
    assert found.clients.keys() == found.dealt.keys() == {"0", "1"}
    assert found.clients["0"]["error"] > found.dealt["0"]["error"] + 0.1
    assert (found.labels or 0) > 0.2
    written = json.loads((tmp_path / "diagnosis.json").read_text())
    assert written["clients"]["0"]["error"] == found.clients["0"]["error"]
    assert found.clients["0"]["batches"] == 3


RUNS = "the-clients", "dealt-at-random"


def test_dealt_rows_are_each_drawn_once() -> None:
    sizes = [3, 1, 5]
    parts = deal(np.zeros(10), 3, np.random.default_rng(0), sizes)
    assert [*map(len, parts)] == sizes
    assert len({*np.concatenate(parts).tolist()}) == 9


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(dump_yaml(DIGITS))
    words = [
        "diagnose",
        str(file),
        "strategy=FedAvg",
        "--rounds",
        "0",
        "--batches",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^mlp +\d\.\d\d +\d\.\d\d", printed, re.MULTILINE)
    assert "round 1" not in printed
    assert "what differs: labels apart 0." in printed
    hiding = "strategy={name: FixBN, freeze_round: 1, base: {name: Secure}}"
    assert cli.main([*words[:2], hiding, *words[3:]]) == 2
    assert "strategy Secure hides what single clients send, but a diagnosis" in capsys.readouterr().err


def test_sites_with_their_own_data_are_diagnosed_without_a_survey_that_they_refuse(tmp_path: Path) -> None:
    draw, sites = np.random.default_rng(0), [tmp_path / "a", tmp_path / "b"]
    for place, site in enumerate(sites):
        site.mkdir()
        frame = pd.DataFrame({"x": draw.normal(3 * place, 1 + place, 60), "ill": draw.integers(0, 2, 60)})
        for part in ("train", "test"):
            frame.to_csv(site / f"{part}.csv", index=False)
    content = {
        "clients": 2,
        "data": {"name": "sites", "label": "ill", "shape": [1], "class_names": ["0", "1"]},
        "model": "mlp",
        "evaluate": {"server": False},
        "engine": {"workers": 0, "device": "cpu"},
    }
    nodes = [{"data-path": str(site)} for site in sites]
    found = diagnose(content, rounds=0, batches=2, node_config=nodes, out=tmp_path / "out", progress=False)
    assert found.clients["0"]["error"] > 0.05
    assert (found.dealt, found.labels) == ({}, None)
    assert "the clients took part in no survey" in str(found)


def test_a_run_of_the_candidates_ends_with_the_paired_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {**DIGITS, "train": {"steps": 2, "batch_size": 40, "lr": 0.05}, "name": "mine"}
    found = diagnose(content, rounds=0, batches=1, out=tmp_path / "out", progress=False)
    assert [*found.candidates] == ["FedAvg+GN", "FixBN", "FedTANII"]
    file = tmp_path / "out" / "mine-candidates.yaml"
    planned = load_experiment(str(file)).runs
    assert {run.label.partition(",")[0] for run in planned} == {*found.candidates, "FedAvg+BN", "Centralised"}
    assert {run.train.lr for run in planned} == {0.015, 0.05, 0.15}
    some = ["only=[FedAvg+BN, FedAvg+GN]", "seeds=[0, 1, 2]", "train.lr=0.05", "rounds=2", "tune.train.lr=[0.05]"]
    assert cli.main(["run", str(file), *some, f"--out={tmp_path / 'runs'}", "--jobs=1"]) == 0
    assert "Paired t tests over 3 seeds" in capsys.readouterr().out


def test_candidates_depend_on_whose_model_it_is_and_how_clients_train() -> None:
    (run,) = load_experiment(dump_yaml(DIGITS)).runs
    assert [*propose(run, False, None)] == ["FedAvg+GN", "FixBN"]  # FedTAN needs sgd
    assert [*propose(run, True, 0.5)] == ["FixBN", "FedBN", "Standalone"]
