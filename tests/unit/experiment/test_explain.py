"""`fedbn explain`: what it says is what a run then does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.experiment.file.layers import load_experiment, settings_of
from fedbn_flwr.experiment.run.loop import carry_out
from fedbn_flwr.experiment.trial import explain

SMALL = """
rounds: 5
clients: 4
train: {steps: 2, batch_size: 8, momentum: 0.5}
engine: {workers: 0}
evaluate: {every: 5}
"""
STRATEGIES = """
runs:
  FedAvg: {}
  half: {strategy: {name: FedAvg, fraction_train: 0.5}}
  three: {strategy: {name: FedAvg, fraction_train: 0.5, min_train_nodes: 3}}
  FedBN: {strategy: {name: FedBN}}
  initial: {strategy: {name: FedBN, global_norm: initial}}
  SiloBN: {strategy: {name: SiloBN}}
  FixBN: {strategy: {name: FixBN, freeze_round: 2}}
  Scaffold: {strategy: {name: Scaffold}}
  momentum: {strategy: {name: GlobalMomentum, base: {name: FedTAN, min_batch: 8}}}
  Standalone: {strategy: {name: Standalone}}
  FedTAN: {strategy: {name: FedTAN, exchange: paper, min_batch: 8}}
  FedTANII: {strategy: {name: FedTANII, fedtan_rounds: 3, min_batch: 8}}
"""


def test_the_bytes_are_those_of_the_ledger_in_every_round(tmp_path: Path) -> None:
    experiment = load_experiment(SMALL + STRATEGIES)
    explained = {run.label: run.costs for run in explain(experiment).runs}
    carry_out(experiment, tmp_path, resume=False)
    for name, run in experiment.named.items():
        measured = explained[run.label]
        assert measured is not None
        lines = [json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        phases = dict(measured.traffic)
        now = phases[1]
        for line in lines:
            now = phases.get(line["round"], now)
            assert measured.clients * now.bytes_down == line["bytes_down"], (name, line["round"])
            assert measured.clients * now.bytes_up == line["bytes_up"], (name, line["round"])
            assert measured.clients * (1 + now.exchanges) == line["messages_up"], (name, line["round"])
        assert measured.total() == tuple(sum(line[key] for line in lines) for key in ("bytes_down", "bytes_up"))


def test_clients_that_never_train_are_not_counted() -> None:
    changes = "evaluate: {every: 5, unseen: 3, validation: 0.5}\ntrain: {epochs: 1, batch_size: 8}\n"
    (run,) = explain(load_experiment(f"rounds: 1\nclients: 5\nengine: {{workers: 0}}\n{changes}")).runs
    assert run.costs is not None
    assert run.costs.clients == 2


def test_what_travels_is_named_by_role() -> None:
    text = SMALL + STRATEGIES
    runs = {run.label: run for run in explain(load_experiment(text, ["only=[FedBN,SiloBN,FedTANII,Scaffold]"])).runs}
    whole = ("weights", "affine", "statistics")
    sizes = {role: part.bytes for role, part in runs["FedBN"].model.items()}
    found = {label: (run.down, run.up) for label, run in runs.items()}
    assert found["FedBN"] == (("weights",), whole)
    assert found["SiloBN"] == (("weights", "affine"), whole)
    for label, (down, up) in found.items():
        traffic = runs[label].costs
        assert traffic is not None
        if label in ("FedBN", "SiloBN"):
            assert traffic.traffic[0][1].bytes_down == sum(sizes[role] for role in down)
            assert traffic.traffic[0][1].bytes_up == sum(sizes[role] for role in up)
    fedtan, scaffold = runs["FedTANII"], runs["Scaffold"]
    assert fedtan.costs is not None
    assert scaffold.costs is not None
    assert [(first, each.exchanges) for first, each in fedtan.costs.traffic] == [(1, 4), (4, 0)]
    assert fedtan.up[:3] == whole
    (_, one), (first, two) = scaffold.costs.traffic
    assert first == 2
    assert two.bytes_down - one.bytes_down == sizes["weights"] + sizes["affine"]


def test_every_setting_has_its_origin() -> None:
    text = "{rounds: 3, data: {name: digits}, train: {lr: 0.5}, seeds: [1, 2], "
    text += "runs: {a: {train: {steps: 1}}, b: {strategy: {name: FixBN, freeze_round: 2}}}}"
    experiment = load_experiment(text, ["train.lr=0.1", "strategy.freeze_round=1", "only=b"])
    run = experiment.runs[0]
    assert run.label == "b, strategy.freeze_round=1"
    found = {each.key: (each.value, each.origin) for each in settings_of(experiment, run)}
    assert found["rounds"] == (3, "file")
    assert found["seed"] == (1, "file")
    assert found["train.lr"] == (0.1, "command line")
    assert found["strategy.name"] == ("FixBN", "run b")
    assert found["strategy.freeze_round"] == (1, "command line")
    assert found["data.normalise"] == ("moments", "data set")
    assert found["train.batch_size"] == (32, "default")
    assert "train.steps" not in found


def test_published_figures_are_no_settings() -> None:
    experiment = load_experiment("fedwon/digits-five", ["only=FedBN"])
    run = experiment.runs[0]
    assert run.published is not None
    assert not [each for each in settings_of(experiment, run) if each.key.startswith("published")]


def test_explain_prints_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SMALL)
    assert cli.main(["explain", str(file), "rounds=3"]) == 0
    text = capsys.readouterr().out
    for line in ("rounds +3 +command line", "clients +4 +file", "examples per client: 359 to 360", "weights, affine"):
        assert re.search(line, text), line
    (run,) = explain(load_experiment(SMALL, ["rounds=3"])).runs
    assert run.costs is not None
    assert run.costs.total()[1] == 3 * 4 * run.costs.traffic[0][1].bytes_up
    assert cli.main(["explain", str(file), "--no-trial"]) == 0
    assert "all 3 rounds" not in capsys.readouterr().out
    assert cli.main(["explain", str(file), "evaluate.server=false", "data={classes: 10, channels: 1, size: 8}"]) == 0
    assert "The data are at the sites" in capsys.readouterr().out
    assert not list(tmp_path.glob("runs*"))


def test_a_training_that_diverges_is_explained() -> None:
    """The trial's rounds have no schedule and little data; it measures bytes, so it need not learn."""
    (explained,) = explain(load_experiment(SMALL, ["train.lr=1.0e+30"])).runs
    assert explained.costs is not None


def test_all_runs_with_all_seeds_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL + "seeds: [0, 1]\nruns: {FedBN: {strategy: FedBN}, Scaffold: {strategy: Scaffold}}"
    assert cli.main(["explain", text, "evaluate.validation=0.2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("for each of 2 seeds") == 2
    assert cli.main(["explain", SMALL, "strategy=FedTAN", "clients=100", "train.batch_size=32"]) == 2
    assert "100 of 100 clients have fewer than 32 training examples" in capsys.readouterr().err
