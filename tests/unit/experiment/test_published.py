"""The published figures of an experiment, the partition in a run folder, and folder names from labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr import cli
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import parse_overrides, parse_yaml, read_experiment
from fedbn_flwr.results.folder.reader import deciding
from tests.support.command import ROOT
from tests.support.experiments import fault, read

RUNS = "{runs: {FixBN: {rounds: 2}, FedAvg: {rounds: 1}}, published: {FixBN: {accuracy: [0.7, 0.01], source: Table 1}}}"


def test_published_figures_belong_to_the_run_of_their_label() -> None:
    fixbn, fedavg = read_experiment(parse_yaml(RUNS), parse_overrides(("seeds=[3]",))).runs
    assert fixbn.model_dump(mode="json")["published"] == {"source": "Table 1", "differs": None, "accuracy": [0.7, 0.01]}
    assert fedavg.published is None
    assert "published" not in deciding(fixbn.model_dump(mode="json")), "a run may be resumed with other figures"
    single = read("{published: {accuracy: 0.7, source: Table 1}}").published
    assert single.model_dump() == {"source": "Table 1", "differs": None, "accuracy": 0.7}


CELLS = """{sweep: {train.steps: [1, 5]}, tune: {train.lr: [0.1, 0.2]}, runs: {BN: {}, GN: {model: {norm: gn}}},
published: {BN: {accuracy: 0.5, source: a}, "GN, steps=5": {accuracy: 0.6, source: b}}, sizes: {small: {rounds: 2}}}"""


def published_of(*overrides: str) -> list[tuple[str, Any, Any]]:
    runs = read_experiment(parse_yaml(CELLS), parse_overrides(overrides)).runs
    return [(run.label, *((f.source, f.differs) if (f := run.published) else (None, None))) for run in runs]


def test_figures_belong_to_a_row_or_to_one_of_its_conditions() -> None:
    assert published_of() == [
        *[(f"BN, steps={steps}, lr={lr}", "a", None) for steps in (1, 5) for lr in (0.1, 0.2)],
        *[(f"GN, steps=1, lr={lr}", None, None) for lr in (0.1, 0.2)],
        *[(f"GN, steps=5, lr={lr}", "b", None) for lr in (0.1, 0.2)],
    ]
    with pytest.raises(SettingsError, match=r"'GN, steps=50', which isn't a run; did you mean 'GN, steps=5'"):
        read_experiment(parse_yaml(CELLS.replace("steps=5", "steps=50")))


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        (["size=small"], "size small, other rounds"),
        (["size=small", "train.momentum=0.5"], "size small, other rounds, train.momentum"),
        (["size=paper"], None),
        (["size=paper", "rounds=3"], "rounds"),
        (["rounds=3", "train.momentum=0.5"], "rounds, train.momentum"),
        (["seed=4", "engine.workers=0", "data.root=x", "evaluate.every=5"], None),
    ],
)
def test_another_set_up_is_named(overrides: list[str], differs: str | None) -> None:
    label, source, found = published_of(*overrides)[0]
    assert source == "a", label
    assert found == differs


def test_changed_settings_of_a_run_are_another_set_up() -> None:
    """As `config.yaml` has them."""
    settings = read_experiment(parse_yaml(CELLS)).runs[0].model_dump(mode="json")
    assert settings["published"]["differs"] is None
    (run,) = read_experiment(settings, parse_overrides(["rounds=3"])).runs
    assert run.published.differs == "rounds"


@pytest.mark.parametrize(
    ("published", "says"),
    [
        ("{FixBM: {accuracy: 0.7, source: a}}", ["'FixBM'", "'FixBN'"]),
        ("[1]", ["published is [1]", "labels"]),
        ("{FixBN: {accuracy: 0.7}}", ["source", "missing"]),
        ("{FixBN: {source: a}}", ["no result", "accuracy: 0.7689"]),
        ("{FixBN: {accuracy: 70.1, source: a}}", ["accuracy is 70.1", "fraction"]),
        ("{FixBN: {accuracy: high, source: a}}", ["published.accuracy", "'high'", "number"]),
    ],
)
def test_wrong_published_figures_are_refused(published: str, says: list[str]) -> None:
    message = fault(RUNS.replace("{FixBN: {accuracy: [0.7, 0.01], source: Table 1}}", published))
    for words in says:
        assert words in message


def test_a_label_never_leaves_the_folder_of_its_experiment() -> None:
    labels = ["..", ".", "../../x", "a/b", ".hidden", "\u00e9" * 300]
    runs = {"runs": {label: {"rounds": i + 1} for i, label in enumerate(labels)}}
    names = list(read_experiment(runs, parse_overrides(("only=[..]",))).by_folder)
    assert names == ["run"]
    names = list(
        read_experiment(runs, parse_overrides(("only=['../../x', a/b, .hidden, '" + labels[-1] + "']",))).by_folder
    )
    assert names[:3] == ["x", "a-b", "hidden"]
    assert len(names[3].encode()) <= 200


def test_the_experiment_of_the_docs_reports_its_partition_and_published_figures(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my.yaml").write_text(
        "rounds: 3\nclients: 3\nmodel: {name: cnn}\ntrain: {lr: 0.05, steps: 2}\n" + block
    )
    out = tmp_path / "out"
    words = ["seed=7", "data.partition={kind: classes, classes_per_client: 4}", "engine.workers=0"]
    assert cli.main(["run", str(tmp_path / "my.yaml"), *words, "--out", str(out)]) == 0
    partition = json.loads((out / "FixBN" / "partition.json").read_text())
    assert partition["title"].startswith("digits: classes, classes_per_client=4")
    assert [sum(count > 0 for count in counts) for counts in partition["counts"]] == [4, 4, 4]
    assert sum(map(sum, partition["counts"])) == 1438
    assert yaml.safe_load((out / "FixBN" / "config.yaml").read_text())["published"]["accuracy"] == [0.7689, 0.004]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "76.89% ± 0.40" in page.replace("\N{NO-BREAK SPACE}", " ").replace("&nbsp;", " ")
    assert "FixBN, Table 1" in page
