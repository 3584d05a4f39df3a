"""Experiment files that `fedbn new` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr import cli
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from tests.support.marks import slow_except
from tests.support.refusals import refusal


@pytest.mark.parametrize("source", slow_except({"demo", "fixbn/table4"}, sorted(shipped_experiments())))
def test_the_file_has_the_settings_and_comments_of_the_experiment_it_is_made_from(source: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert cli.main(["new", "mine", "--from", source, "--out", str(file)]) == 0
    assert load_experiment(str(file), [f"name={source.replace('/', '-')}"]).runs == load_experiment(source).runs
    assert file.read_text().endswith(shipped_experiments()[source].read_text())


def test_a_new_experiment_runs_and_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine"]) == 0
    assert "fedbn run mine.yaml" in capsys.readouterr().out
    assert cli.main(["run", "mine.yaml", "rounds=1", "train.steps=1", "train.epochs=null",
                     "strategy.freeze_round=1", "engine.workers=0", "--out", "out"]) == 0  # fmt: skip
    assert (tmp_path / "out" / "FixBN" / "model.safetensors").exists()
    before = (tmp_path / "mine.yaml").read_bytes()
    capsys.readouterr()
    assert "'mine.yaml' exists already" in refusal(capsys, "new", "mine", "--from", "demo")
    assert (tmp_path / "mine.yaml").read_bytes() == before
    assert "did you mean 'demo'" in refusal(capsys, "new", "other", "--from", "demoo")
    assert cli.main(["new", "other", "--out", "other.txt"]) == 2
    assert cli.main(["new", "other", "--out", "no/such/folder.yaml"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out"]


def test_a_copy_in_another_folder_must_find_what_it_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "first.yaml").write_text("rounds: 2\n")
    (tmp_path / "there" / "second.yaml").write_text("extends: first.yaml\n")
    assert "cannot read the experiment 'first.yaml'" in refusal(capsys, "new", "mine", "--from", "there/second.yaml")
    assert cli.main(["new", "there/mine", "--from", "there/second.yaml"]) == 0
    assert load_experiment("there/mine.yaml").runs[0].rounds == 2


def test_an_experiment_for_a_table_has_its_columns_categories_classes_and_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": rng.integers(20, 90, 90), "sex": ["f", "m", "f"] * 30, "note": [f"no. {row}" for row in range(90)]}
    )
    frame = frame.assign(ill=["no", "yes"] * 45, ward=np.repeat(["north", "south", "west"], 30)).astype({"age": float})
    frame.loc[3, "age"] = np.nan
    frame.to_csv("patients.csv", index=False)
    assert cli.main(["new", "mine", "--data", "patients.csv", "--label", "ill", "--group", "ward"]) == 0
    first, *_ = load_experiment("mine.yaml").runs
    data = first.data
    assert (data.inputs, data.categories, data.class_names) == (("age", "sex"), {"sex": ("f", "m")}, ("no", "yes"))
    assert (first.clients, data.partition.kind, data.group, data.missing) == (3, "natural", "ward", "mean")
    words = ["rounds=1", "only=[FedBN]", "engine.workers=0", "engine.device=cpu"]
    assert cli.main(["run", "mine.yaml", *words, "--out", "out"]) == 0


def test_a_column_without_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'ill' is a column of your data" in refusal(capsys, "new", "mine", "--label", "ill")
