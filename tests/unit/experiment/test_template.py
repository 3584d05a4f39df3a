"""Experiment files that `fedbn new` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.experiment.file.content import read_content, shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment, parse_yaml
from fedbn_flwr.experiment.file.template import KEYS, template
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.folder import flat_settings

COMMENTED = re.compile(r"^( *)# ( *)(\w+):(?! \{?\w+: \{strategy)", re.MULTILINE)


@pytest.mark.parametrize("source", sorted(shipped_experiments()))
def test_the_file_has_the_settings_of_the_experiment_it_is_made_from(source: str) -> None:
    content, name = read_content(source)
    text = template(content, "mine.yaml")
    assert parse_yaml(text) == content
    assert load_experiment(text, [f"name={name}"]).runs == load_experiment(source).runs


def test_every_key_is_in_the_file_with_its_default_and_meaning() -> None:
    text = template({}, "mine.yaml")
    body = re.sub(r"(?s)\A.*?\n(?=# rounds)|\n# To compare.*", "\n", text)
    content = parse_yaml(re.sub(r"(?m)^( *)# ", r"\1", body))
    written = {key: value for key, value in flat_settings(content).items() if value is not None}
    default = flat_settings(Settings().model_dump(mode="json"))
    assert written == {key: default[key] for key in written}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        assert name in (content[section] if section else content), key
    assert re.search(r"# rounds: 10 +# rounds of training", text)
    assert re.search(r"#   lr: 0.1 +# learning rate", text)


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
    assert cli.main(["new", "mine", "--from", "demo"]) == 2
    assert "'mine.yaml' exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_bytes() == before
    assert cli.main(["new", "other", "--from", "demoo"]) == 2
    assert "did you mean 'demo'" in capsys.readouterr().err
    assert cli.main(["new", "other", "--out", "other.txt"]) == 2
    assert cli.main(["new", "other", "--out", "no/such/folder.yaml"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out"]


@pytest.mark.parametrize("text", ["1e-4", "1e3", "two\nlines", "two\u2028lines", "{}: #", "2026-01-01", "true", ""])
def test_text_stays_text(text: str) -> None:
    content = {
        "description": text,
        "data": {"name": text, "partition": {"kind": text}},
        "runs": {text: {"label": text, "strategy": {"name": text}}},
    }
    assert parse_yaml(template(content, "mine.yaml")) == content
