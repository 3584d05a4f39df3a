"""`fedbn explain`: what it says is what a run then does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.layers import load_experiment, settings_of
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.preview import explain
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.extensions.together.choice import clients_at_once, hint_of

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
  FedBN: {strategy: {name: FedBN}}
  SiloBN: {strategy: {name: SiloBN}}
  FixBN: {strategy: {name: FixBN, freeze_round: 2}}
  Standalone: {strategy: {name: Standalone}}
  FedTANII: {strategy: {name: FedTANII, fedtan_rounds: 3, min_batch: 8}}
  Scaffold: {strategy: {name: Scaffold}}
"""
WHOLE = ("weights", "affine", "statistics")


def test_the_bytes_are_those_of_the_ledger(tmp_path: Path) -> None:
    experiment = load_experiment(SMALL + STRATEGIES, ["rounds=3", "only=[FedAvg,FedBN,SiloBN,FixBN,Standalone]"])
    explained = {run.label: run for run in explain(experiment)}
    carry_out(experiment, tmp_path, resume=False)
    for name, run in experiment.by_folder.items():
        found = explained[run.label]
        line = json.loads((tmp_path / name / "history.jsonl").read_text().splitlines()[0])
        assert 4 * found.bytes_of(found.down) == line["bytes_down"], name
        assert 4 * found.bytes_of(found.up) == line["bytes_up"], name


def test_what_travels_is_named_by_role() -> None:
    runs = {run.label: run for run in explain(load_experiment(SMALL + STRATEGIES))}
    found = {label: (run.down, run.up) for label, run in runs.items()}
    assert found["FedAvg"] == (WHOLE, WHOLE)
    assert found["FedBN"] == (("weights",), WHOLE)
    assert found["SiloBN"] == (("weights", "affine"), WHOLE)
    for label, words in (("FedTANII", "statistics of batches"), ("Scaffold", "record `control`")):
        *roles, more = found[label][1]
        assert (tuple(roles), more.startswith(words)) == (WHOLE, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("engine.together=3", "3 clients train at once"),
        ("engine.together=30", "4 clients train at once"),
        ("strategy=FedTAN", "4 clients train at once"),
        ("train.optimizer=adam", "clients train one after the other: the optimiser is Adam"),
        (
            "train.precision=bfloat16",
            "clients train one after the other: its passes are compiled, or computed in another precision",
        ),
        ("model.name=cnn", "clients train one after the other: 'conv1' is Conv2d"),
    ],
)
def test_clients_that_train_at_once(given: str, expected: str) -> None:
    changes = ["model.name=mlp", "train.momentum=0", "train.batch_size=32"]
    (alone,) = explain(load_experiment(SMALL, [*changes, given.replace("engine.together=", "rounds=")]))
    (run,) = explain(load_experiment(SMALL, [*changes, "engine.together=4", given]))
    assert alone.together == ""
    assert run.together.startswith(expected)


@pytest.mark.parametrize(
    ("changes", "cores", "clients", "expected"),
    [
        ((), 2, 10, "10 clients train at once, with 185.6 kB for their models"),
        (("clients=4",), 2, 4, "4 clients train at once"),
        (("engine.workers=0",), 16, 10, "10 clients train at once"),
        ((), 16, 1, "each process trains one client at a time"),
        (("engine.workers=2",), 2, 1, "each process trains one client at a time"),
        (("model.name=cnn",), 2, 1, "clients train one after the other: 'conv1' is Conv2d"),
    ],
)
def test_as_many_clients_at_once_as_is_fast(
    changes: tuple[str, ...],
    cores: int,
    clients: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedbn_flwr.experiment.prepare.cores", lambda: cores)
    given = [
        "model.name=mlp",
        "train.momentum=0",
        "clients=20",
        "engine.together=auto",
        "engine.workers=auto",
        *changes,
    ]
    experiment = load_experiment(SMALL, given)
    assert explain(experiment)[0].together.startswith(expected)
    (parts,) = prepare(experiment)
    assert clients_at_once(parts) == clients
    (parts,) = prepare(load_experiment(SMALL, [*given, "engine.together=1"]))
    assert clients_at_once(parts) == 1
    assert hint_of([parts], 1).partition(" at once")[0] == (f"hint:  {clients} clients" if clients > 1 else "")


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


def test_explain_prints_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SMALL)
    assert cli.main(["explain", str(file), "rounds=3"]) == 0
    text = capsys.readouterr().out
    for line in ("rounds +3 +command line", "clients +4 +file", "examples per client: 359 to 360", "weights, affine"):
        assert re.search(line, text), line
    assert cli.main(["explain", str(file), "evaluate.server=false", "data={classes: 10, channels: 1, size: 8}"]) == 0
    assert "a client sends" in capsys.readouterr().out
    assert not list(tmp_path.glob("runs*"))


def test_explain_prints_the_use_of_each_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.csv"
    file.write_text(",age,ill,town\x1b\n" + "".join(f"{i},{20 + i},{i % 2},x\n" for i in range(40)))
    text = f"{SMALL}data: {{name: {file}, label: ill, test: 0.2}}\nmodel: {{name: mlp}}\n"
    assert cli.main(["explain", text, "clients=2"]) == 0
    lines = "inputs (1): age\nother columns: a column without name (index of pandas), ill (data.label), town\ufffd (str"
    assert lines in capsys.readouterr().out


def test_all_runs_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    text = SMALL + "seeds: [0, 1]\nruns: {FedBN: {strategy: FedBN}, Scaffold: {strategy: Scaffold}}"
    assert cli.main(["explain", text, "evaluate.validation=0.2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"run Scaffold, a round +size +arrays", printed)
    _, compared, cost, *_ = printed.splitlines()
    assert compared == "compares 2 runs, each with 2 seeds: FedBN, Scaffold"
    assert cost.endswith(f"({2 * 2 * 5 * 4 * 2} training steps)"), "runs, seeds, rounds, clients, steps"
    assert cli.main(["explain", SMALL, "strategy=FedTAN", "clients=100", "train.batch_size=32"]) == 2
    assert "100 of 100 clients have fewer than 32 training examples" in capsys.readouterr().err
