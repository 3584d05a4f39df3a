"""Which model `fedbn predict` and `fedbn model` use after a run on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr import run
from fedbn_flwr.commands import cli
from fedbn_flwr.results.result import Result

TINY: dict[str, Any] = {"rounds": 2, "clients": 3, "engine": {"workers": 0, "device": "cpu"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    np.savez(folder / "new.npz", inputs=np.random.default_rng(0).integers(0, 256, (9, 8, 8)).astype(np.uint8))
    return {
        name: run("quick", **TINY, strategy=name, out=folder / name, progress=False)
        for name in ("FedAvg", "FedBN", "Standalone")
    }


def fedbn(result: Result, command: str, *words: str) -> tuple[int, Path]:
    out = result.folder / "out"
    out.unlink(missing_ok=True)
    data = ["--data", str(result.folder.parent.parent / "new.npz")] if command == "predict" else []
    return cli.main([command, str(result.folder), *words, *data, "--out", str(out)]), out


@pytest.mark.parametrize("name", ["FedBN", "Standalone"])
def test_a_client_of_a_local_run_uses_its_own_model(
    name: str, runs: dict[str, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    result = runs[name]
    found = set()
    for client in range(3):
        code, file = fedbn(result, "predict", "--client", str(client))
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        assert f"the model of client {client}: {name} after round 2, and " in said.out
        found.add(file.read_text())
        code, file = fedbn(result, "model", "--client", str(client))
        own = result.model(client=client).state_dict()
        assert code == 0
        assert all(torch.equal(own[key], value) for key, value in load_file(file).items())
    assert len(found) == 3


def test_a_client_has_a_name(runs: dict[str, Result]) -> None:
    partition = runs["FedBN"].folder / "partition.json"
    before = partition.read_text()
    partition.write_text(json.dumps(json.loads(before) | {"clients": ["ulm", "bonn", "kiel"]}))
    code, file = fedbn(runs["FedBN"], "model", "--client", "bonn")
    partition.write_text(before)
    own = runs["FedBN"].model(client=1).state_dict()
    assert code == 0
    assert all(torch.equal(own[key], value) for key, value in load_file(file).items())


def test_a_global_model_of_a_run_that_personalises_predicts_with_a_warning(
    runs: dict[str, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, warned in {"FedAvg": "", "FedBN": "warning: with FedBN each client has a model of its own"}.items():
        assert fedbn(runs[name], "predict")[0] == 0
        said = capsys.readouterr()
        assert f"the global model of {name}" in said.out
        assert said.err.startswith(warned)
        assert bool(said.err) is bool(warned)


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("FedBN", ["--client", "ulm"], "there is no client 'ulm'; give its number"),
        ("FedBN", ["--client", "77"], "there is no client 77; the run has the clients 0 to 2"),
        ("FedAvg", ["--client", "1"], "client 1 has no model of its own"),
        ("Standalone", [], "has no global model; each client has its own"),
    ],
)
def test_another_model_is_never_taken_instead(
    name: str, words: list[str], reason: str, runs: dict[str, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    code, file = fedbn(runs[name], "predict", *words)
    assert (code, file.exists()) == (2, False)
    assert reason in capsys.readouterr().err


def test_whose_model_is_asked(runs: dict[str, Result], capsys: pytest.CaptureFixture[str]) -> None:
    assert fedbn(runs["FedBN"], "model")[0] == 2
    assert "whose model? Give --client N" in capsys.readouterr().err
