"""If a run of an experiment personalises, clients are evaluated in all of its runs; `explain` names the cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import Result, run_all
from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.layers import load_experiment, settings_of
from fedbn_flwr.experiment.listeners.recording import History
from fedbn_flwr.experiment.preview import explain
from fedbn_flwr.strategies import FedAvg, Traits

BOTH = "runs: {FedAvg: {}, FedBN: {strategy: {name: FedBN}}, Local: {strategy: {name: Standalone}}}\n"
SMALL = """
rounds: 2
clients: 3
data: {name: digits, examples: 120, test_examples: 90, partition: {kind: dirichlet, alpha: 0.5}}
model: {name: mlp}
train: {steps: 2, batch_size: 8, lr: 0.1}
evaluate: {metrics: [macro_f1], validation: 0.2}
engine: {workers: 0, device: cpu}
"""


def clients_of(text: str, *changes: str) -> dict[str, Any]:
    return {run.label: run.evaluate.clients for run in load_experiment(f"{text}\n", changes).runs}


class Own(FedAvg):
    """What stays on its clients is declared on the class, so nothing is made to find it out."""

    traits = Traits(local=frozenset({"last"}))

    def __init__(self) -> None:
        raise AssertionError("reading a file made a strategy")


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (BOTH, [], {"FedAvg": "own", "FedBN": True, "Local": True}),
        (BOTH, ["only=FedAvg"], {"FedAvg": "own"}),
        (BOTH, ["only=FedAvg", "evaluate.clients=null"], {"FedAvg": None}),
        (f"{BOTH}\nevaluate: {{clients: true}}", ["only=[FedAvg, FedBN]"], {"FedAvg": True, "FedBN": True}),
        ("runs: {FedAvg: {}, GN: {model: {norm: gn}}}", [], {"FedAvg": None, "GN": None}),
        ("runs: {A: {evaluate: {clients: false}}, B: {strategy: SiloBN}}", [], {"A": False, "B": True}),
        ("runs: {A: {}, B: {strategy: {name: FixBN, base: {name: FedBN}}}}", [], {"A": "own", "B": True}),
        (
            "sweep: {strategy.name: [FedAvg, FedBN]}",
            [],
            {"FedAvg, strategy=FedAvg": "own", "FedBN, strategy=FedBN": True},
        ),
        ("{}", ["strategy=FedBN"], {"FedBN": True}),
        (f"runs: {{A: {{}}, B: {{strategy: '{__name__}:Own'}}}}", [], {"A": "own", "B": True}),
        ("runs: {A: {}, B: {strategy: 'no.module:Here'}}", ["only=A"], {"A": None}),
    ],
)
def test_clients_are_evaluated_in_all_runs_if_one_personalises(
    text: str, changes: list[str], expected: dict[str, Any]
) -> None:
    assert clients_of(text, *changes) == expected


def test_the_origin_names_the_strategy() -> None:
    experiment = load_experiment(BOTH)
    for run in experiment.runs:
        (found,) = (each for each in settings_of(experiment, run) if each.key == "evaluate.clients")
        assert found.origin == "default, as FedBN personalises"


def test_explain_has_the_examples_that_clients_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    tests = {each.label: each.tests for each in explain(load_experiment(SMALL + BOTH))}
    assert tests == {"FedAvg": ("own", 90), "FedBN": ("all, own", 3 * 90 + 90), "Local": ("all, own", 3 * 90 + 90)}
    assert cli.main(["explain", SMALL + BOTH]) == 0
    shown = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert [line.split() for line in shown[2:4]] == [["FedAvg", "own", "90"], ["FedBN", "all,", "own", "360"]]
    assert [each.tests for each in explain(load_experiment(SMALL))] == [("none", 0)]


def test_a_strategy_that_personalises_joins_a_finished_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished runs stay, and the report says what they lack; an interrupted one has own accuracy from then on."""
    runs = "runs: {FedAvg: {}, FedProx: {strategy: {name: FedProx, proximal_mu: 0.1}}}\n"
    words = ["--out", str(tmp_path), "--jobs", "1"]
    assert cli.main(["run", SMALL + runs, "only=FedAvg", *words]) == 0
    finished = (tmp_path / "FedAvg" / "summary.json").read_bytes()
    on_round = History.on_round
    with monkeypatch.context() as patch:
        patch.setattr(History, "on_round", lambda *given: replace(on_round(*given), stop=KeyboardInterrupt()))
        assert cli.main(["run", SMALL + runs, "only=FedProx", *words]) == 130
    joined = runs.replace("}\n", ", FedBN: {strategy: {name: FedBN}}}\n")
    assert cli.main(["run", SMALL + joined, *words, "--resume"]) == 0
    assert (tmp_path / "FedAvg" / "summary.json").read_bytes() == finished
    fedavg, fedprox, fedbn = (Result.read(tmp_path / name) for name in ("FedAvg", "FedProx", "FedBN"))
    assert ["clients_own_accuracy" in each.summary.values for each in (fedavg, fedprox, fedbn)] == [False, True, True]
    assert ["clients_own_accuracy" in line for line in fedprox.lines] == [False, True]
    note = "No accuracy on own data: FedAvg, whose clients were not evaluated. To measure it, train these runs again"
    assert note in capsys.readouterr().out
    assert note in (tmp_path / "report.md").read_text()
    assert cli.main(["run", SMALL + joined, "evaluate.clients=true", *words, "--resume"]) == 2
    assert "cannot be resumed with other settings: evaluate.clients" in capsys.readouterr().err


def test_values_on_own_examples_are_those_of_an_evaluation_on_all(tmp_path: Path) -> None:
    """With the same models; and clients take no time for the test examples of others."""
    found = {}
    for clients in ("own", "true"):
        out = tmp_path / clients
        results = run_all(
            SMALL + BOTH, only=["FedAvg", "FedBN"], out=out, evaluate={"clients": clients == "true" or "own"}
        )
        for result in results:
            lines = [json.loads(line) for line in (result.folder / "clients.jsonl").read_text().splitlines()]
            found[result.label, clients] = result.lines[-1], lines[-1]["clients"]
            assert result.summary.personal is (True if result.label == "FedBN" else None)
    for label in ("FedAvg", "FedBN"):
        (line, values), (whole, all_values) = found[label, "own"], found[label, "true"]
        assert line["accuracy"] == whole["accuracy"]
        own = {key: value for key, value in whole.items() if key.startswith(("clients_own_", "validation_"))}
        assert {"clients_own_accuracy", "clients_own_macro_f1", "clients_own_accuracy_std"} <= own.keys()
        assert {key: line[key] for key in own} == own
        assert [key for key in line if key.startswith("clients_") and key not in own] == ["clients_digest"]
        assert "clients_accuracy" in whole
        for client, metrics in values.items():
            assert metrics.items() <= all_values[client].items()
            assert not {"accuracy", "loss", "test_examples"} & metrics.keys()
        assert sum(metrics["own_examples"] for metrics in values.values()) == 90
    of_all = found["FedAvg", "true"][1].values()
    assert {metrics["accuracy"] for metrics in of_all} == {found["FedAvg", "own"][0]["accuracy"]}, "nothing is lost"


@pytest.mark.parametrize("label", ["A", "B"])
def test_all_runs_of_a_regression_have_it(tmp_path: Path, label: str) -> None:
    """Weighted by nothing but the clients: the mean of their own errors, of which lower ones are better."""
    file = tmp_path / "a.csv"
    file.write_text("x,z,y\n" + "".join(f"{i / 10},{i % 7},{i / 30}\n" for i in range(90)))
    text = f"""
data: {{name: {file}, label: y, task: regression, test: 0.3, partition: {{kind: iid}}}}
model: {{name: mlp}}
train: {{lr: 0.01, steps: 2}}
rounds: 2
clients: 3
engine: {{workers: 0, device: cpu}}
runs: {{A: {{}}, B: {{strategy: FedBN}}}}
"""
    (result,) = run_all(text, only=label, out=tmp_path / "out")
    errors = list(result.clients["own_rmse"].values())
    assert result.lines[-1]["clients_own_rmse"] == pytest.approx(sum(errors) / 3)
    assert result.lines[-1]["clients_own_rmse_worst_tenth"] == max(errors)
    assert ("rmse" in result.clients) == (label == "B")


def test_where_only_clients_evaluate_they_use_all_test_examples(tmp_path: Path) -> None:
    """Their means are the metrics of the run."""
    (local,) = run_all(SMALL + BOTH, only="Local", out=tmp_path / "a", evaluate={"clients": "own"})
    assert local.summary.accuracy == local.lines[-1]["clients_accuracy"]
    sites = {"server": False, "clients": "own"}
    data = {"classes": 10, "channels": 1, "size": 8}
    (average,) = run_all(SMALL + BOTH, only="FedAvg", out=tmp_path / "b", evaluate=sites, data=data)
    assert average.summary.accuracy == average.lines[-1]["clients_accuracy"]
