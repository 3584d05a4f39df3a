"""The examples of docs/training.md, as they are in the page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from fedbn_flwr import BNClient
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.tasks import title_of
from tests.support.command import ROOT, python_blocks

PAGE = (ROOT / "docs" / "training.md").read_text()


EXPERIMENTS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the page, in the folder in which the command is started."""
    (code,) = [block for block in python_blocks(PAGE) if block.startswith("# my_training.py")]
    (tmp_path / "my_training.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_training", raising=False)


SMALL = ["rounds=3", "clients=2", "model.name=cnn", "train.steps=2", "engine.workers=0", "engine.device=cpu"]


@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize("number", range(len(EXPERIMENTS)))
def test_the_experiments_train(tmp_path: Path, number: int) -> None:
    text = EXPERIMENTS[number]
    wanted = yaml.safe_load(text)["evaluate"]["metrics"]
    outcome = carry_out(load_experiment(text, [*SMALL, "evaluate.clients=true"]), tmp_path / "out", resume=False)
    (folder,) = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    for name in (name.rpartition(":")[2] for name in wanted):
        for key in (name, f"clients_{name}", f"clients_own_{name}"):
            assert all(-1 <= line[key] <= 1 for line in lines), key
            assert summary[key] == lines[-1][key]
        assert f"{title_of(name)} on own data" in outcome.report
    assert summary["status"] == "finished"


def test_the_clients_of_the_page_train() -> None:
    (code,) = [block for block in python_blocks(PAGE) if "BNClient(" in block]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batches = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(2)]
    scope: dict[str, Any] = {
        "BNClient": BNClient,
        "model": model,
        "batches": batches,
        "test_batches": batches,
    }
    exec(compile(code, "docs/training.md", "exec", dont_inherit=True), scope)
    client = scope["client"]
    before = client.get_parameters({})
    after, examples, _ = client.fit(before, {"server-round": 1})
    assert examples == 32
    assert any((new != old).any() for new, old in zip(after, before, strict=True))
    _, _, metrics = client.evaluate(after, {})
    assert 0 <= metrics["macro-f1"] <= 1
