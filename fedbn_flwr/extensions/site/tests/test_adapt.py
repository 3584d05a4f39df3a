"""A site that joins afterwards: its three models against `evaluate.unseen` and against direct computation."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr import Result, run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import UserError
from fedbn_flwr.extensions.site.newcomer import adapted
from fedbn_flwr.extensions.site.predict import opened
from tests.support.marks import slow_except

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "clients": 4,
    "data": {"name": "sites", "label": "label", "shape": [3], "class_names": ["no", "yes"], "normalise": "moments"},
    "model": "mlp",
    "train": {"lr": 0.1, "batch_size": 20},
    "evaluate": {"server": False, "unseen": {"clients": [3]}},
    "engine": {"workers": 0, "device": "cpu"},
}


def write_site(folder: Path, number: int, share: float = 0.5) -> Path:
    """Each site's sensor has its own scale; `share` of the examples are of the class yes."""
    draw = np.random.default_rng(number)
    folder.mkdir()
    for part, count in (("train", 200), ("test", 150)):
        labels = draw.random(count) < share
        inputs = draw.normal(0, 1, (count, 3)) + np.where(labels, 1.0, -1.0)[:, None] * [1.0, 0.5, 0.0]
        rows = zip(inputs * (1 + number) + 2 * number, np.where(labels, "yes", "no"), strict=True)
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("a", "b", "c", "label"), *((*row, label) for row, label in rows)])
    return folder


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("sites")
    return [write_site(root / f"site{number}", number) for number in range(4)]


@pytest.mark.parametrize("strategy", slow_except({"FedBN"}, ["FedBN", "SiloBN", "FixBN", "FedRep"]))
def test_the_three_models_are_those_of_unseen_clients(strategy: str, sites: list[Path], tmp_path: Path) -> None:
    nodes = [{"data-path": str(site), "min-batch": 1} for site in sites]
    done = run(SETTINGS, strategy=strategy, node_config=nodes, out=tmp_path, progress=False)
    found = adapted(done, opened(done.files, sites[3], part="train"), opened(done.files, sites[3]))
    expected = {way: done.summary[f"unseen_{way}_accuracy"] for way in ("mean", "batch", "own")}
    # The statistics are of all examples; only the batches in which earlier layers normalise are others.
    assert found.measured == pytest.approx(expected, abs=1e-9)
    # Directly, in float64: the only batch norm follows the linear layer of the inputs.
    rows = np.genfromtxt(sites[3] / "train.csv", delimiter=",", skip_header=1, usecols=(0, 1, 2))
    (mean, std), state = (
        (np.array(each) for each in done.files.model_description().normalise.moments),
        done.model().state_dict(),
    )
    weight, bias = (state[f"hidden.{name}"].double().numpy() for name in ("weight", "bias"))
    hidden = ((rows - mean) / std) @ weight.T + bias
    own = found.models["batch"].state_dict()
    assert own["bn.running_mean"].numpy() == pytest.approx(hidden.mean(0), abs=1e-4)
    assert own["bn.running_var"].numpy() == pytest.approx(hidden.var(0, ddof=1), rel=1e-3)
    before = [state[f"bn.running_{name}"].double().numpy() for name in ("mean", "var")]
    shift = (hidden.mean(0) - before[0]) / np.sqrt(before[1] + 1e-5)
    assert found.drift["bn"][0] == pytest.approx(float(np.sqrt(np.mean(shift**2))), rel=1e-4)


@pytest.mark.slow
def test_the_written_model_predicts_and_is_exported(
    sites: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [{"data-path": str(site), "min-batch": 1} for site in sites]
    done = run(SETTINGS, strategy="FedBN", node_config=nodes, out="run", progress=False)
    data = ["--data", str(sites[3] / "train.csv"), "--labels", str(sites[3] / "test.csv")]
    assert cli.main(["adapt", str(done.folder), *data, "--out", "adapted"]) == 0
    shown = capsys.readouterr().out
    row = re.search(r"statistics of this site +batch +([0-9.]+)% +[0-9.]+%", shown)
    assert row is not None
    assert re.search(r"\nbn +\d+\.\d{3} +\d+\.\d{3} +\d+\.\d{3}\n", shown)
    assert cli.main(["predict", "adapted", "--data", str(sites[3] / "test.csv"), "--out", "p.csv"]) == 0
    said = capsys.readouterr()
    assert f"accuracy {float(row[1]) / 100:.4f}" in said.out
    assert "may predict badly" not in said.err
    assert cli.main(["export", "adapted", "--fold", "--out", "m.pt2"]) == 0
    inputs = torch.randn(4, 3)
    result = Result.read("adapted")
    assert result.summary.accuracy is None, "it was another model's"
    assert cli.main(["report", "adapted", "run", "--out", "report"]) == 0
    with torch.no_grad():
        expected = result.model()(result.normalise()(inputs))
    assert torch.allclose(torch.export.load("m.pt2").module()(inputs), expected, atol=1e-3)
    assert cli.main(["adapt", str(done.folder), *data, "--out", "adapted"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_batch_norm_that_was_never_sent_cannot_be_adapted(sites: list[Path], tmp_path: Path) -> None:
    nodes = [{"data-path": str(site), "min-batch": 1} for site in sites]
    strategy = {"name": "FedBN", "global_norm": "initial"}
    done = run(
        {**SETTINGS, "evaluate": {"server": False}}, strategy=strategy, node_config=nodes, out=tmp_path, progress=False
    )
    new = opened(done.files, sites[3], part="train")
    with pytest.raises(UserError, match="never send their batch norm"):
        adapted(done, new, new)


def test_other_classes_are_a_warning(sites: list[Path], tmp_path: Path) -> None:
    """Here all are of one class, whose statistics hide what tells the classes apart."""
    settings = {**SETTINGS, "clients": 2, "evaluate": {}, "data": {**SETTINGS["data"], "name": str(sites[0])}}
    settings["data"].pop("shape")
    done = run(settings, strategy="FedAvg", out=tmp_path / "run", progress=False)
    one = write_site(tmp_path / "one", 0, share=1.0)
    new = opened(done.files, one / "train.csv")
    first, second = adapted(done, new, new).warnings
    assert re.search(r"shares of the classes differ by [45]\d%", first)
    assert "adapting doesn't help on these labels" in second
    (few := tmp_path / "few.csv").write_text("".join((one / "train.csv").read_text().splitlines(keepends=True)[:2]))
    for labelled in (sites[0] / "train.csv", few):  # the shares of a single example say nothing
        found = adapted(done, new, opened(done.files, labelled)).warnings
        assert not any("shares of the classes" in warning for warning in found)


def test_numbers_are_compared_by_their_error(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    inputs = draw.normal(2, 3, (90, 3)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=inputs, y=inputs @ np.float32([1, -2, 3]))
    data = {"name": str(tmp_path / "all.npz"), "inputs": "x", "label": "y", "test": 0.2, "task": "regression"}
    changes: Any = {"data": data, "clients": 2, "evaluate": {}}
    done = run({**SETTINGS, **changes}, out=tmp_path / "run", progress=False)
    new = opened(done.files, tmp_path / "all.npz")
    found = adapted(done, new, new)
    with torch.no_grad():
        error = done.model()(done.normalise()(torch.from_numpy(inputs))).numpy()[:, 0] - inputs @ [1, -2, 3]
    assert found.measured["mean"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-5)
    assert re.search(r"mean of the sites +mean +[\d.]+ +-\n", str(found))
