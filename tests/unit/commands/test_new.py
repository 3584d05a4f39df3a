"""Experiment files that `fedbn new` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
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


def test_each_folder_of_tables_is_a_client_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("basel", "cleveland")):
        (tmp_path / "site" / name).mkdir(parents=True)
        for part, rows in (("train", 40), ("test", 10)):
            frame = pd.DataFrame({"age": np.arange(rows) + 40.0 * number, "ill": [0, 1] * (rows // 2)})
            frame.to_csv(f"site/{name}/{part}.csv", index=False)
    assert cli.main(["new", "mine", "--data", "site", "--label", "ill"]) == 0
    (parts,) = prepare(load_experiment("mine.yaml", ["only=FedBN"]))
    assert (parts.run.data.test, len(parts.dataset.test), parts.dataset.input_names) == (None, 20, ("age",))
    ages = [parts.dataset.train.inputs[rows].flatten().tolist() for rows in parts.partition]
    assert ages == [[*range(40)], [*range(40, 80)]]
    (tmp_path / "short.yaml").write_text('{clients: 2, data: {name: "./site/*", label: ill}, model: mlp}')
    (short,) = prepare(load_experiment("short.yaml"))
    assert [*map(len, short.partition)] == [40, 40]
    words = ["rounds=1", "only=FedBN", "engine.workers=0", "engine.device=cpu"]
    assert cli.main(["run", "mine.yaml", *words, "--out", "out"]) == 0
    assert cli.main(["model", "out/FedBN", "--client", "cleveland", "--out", "its.safetensors"]) == 0
    assert "the model of client 1 cleveland: FedBN after round 1" in capsys.readouterr().out
    judge = ["evaluate", "mine.yaml", "only=FedAvg", "engine.workers=0", "engine.device=cpu", "--model", "out/FedBN"]
    assert cli.main([*judge, "--out", "judged"]) == 0
    assert "\n1 cleveland        10 " in capsys.readouterr().out


def test_a_column_without_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--label is for data of your own" in refusal(capsys, "new", "mine", "--label", "ill")


def test_a_table_with_a_row_for_each_time_is_recognised_and_becomes_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flower_log: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, times = np.random.default_rng(0), np.tile(np.arange(12) / 25, 20)
    recordings = np.repeat([f"r{number}" for number in range(20)], 12)
    frame = pd.DataFrame({"rec": recordings, "t": times, "x": rng.normal(size=240), "y": rng.normal(size=240)})
    frame = frame.assign(sport=np.repeat(["run", "row"] * 10, 12), person=np.repeat([*"abcd"], 60))
    frame.to_csv("watch.csv", index=False)
    frame[5:].to_csv("uneven.csv", index=False)
    words = ["--label", "sport", "--group", "person"]
    assert cli.main(["new", "rows", "--data", "watch.csv", *words]) == 0
    assert "a row for each 't' of each 'rec'" in flower_log.text
    words += ["--series", "rec", "--time", "t"]
    assert "give --window N too" in refusal(capsys, "new", "mine", "--data", "uneven.csv", *words)
    assert cli.main(["new", "mine", "--data", "watch.csv", *words, "--window", "4"]) == 0
    (parts,) = prepare(load_experiment("mine.yaml", ["only=FedBN"]))
    assert parts.dataset.input_names == ()
    assert (parts.dataset.shape, parts.run.model.name, [*parts.dataset.types]) == ((2, 4), "cnn1d", ["x", "y"])
    assert len(parts.dataset.train) + len(parts.dataset.test) == 20 * 5
