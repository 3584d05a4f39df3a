"""Damage to a file of a run folder is refused by the name of the file, in reports and when the run is resumed."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.commands import cli
from fedbn_flwr.engines.traffic import Traffic
from fedbn_flwr.errors import FedbnError, UserError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.messages.arrays import configs_in, metrics_in
from fedbn_flwr.results.folder.reader import LINES
from fedbn_flwr.results.folder.summary import Summary
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs, read_state
from fedbn_flwr.results.report.tables import DEFAULT
from fedbn_flwr.results.report.write import page, write_report
from tests.support.fixtures import drawing
from tests.support.fuzz import cases, changed, check_refusal, damaged
from tests.support.hostile import kept_log
from tests.support.runs import change_summary, rows_of

EXPERIMENT = (
    "{name: whole, rounds: 2, clients: 2, train: {steps: 1}, engine: {workers: 0}, strategy: {name: FedBN}, evaluate: "
    "{clients: true}}"
)
JSON = ("history.jsonl", "clients.jsonl", "norms.jsonl", "summary.json", "environment.json", "partition.json",
        "model.json")  # fmt: skip
FILES = (*JSON, "config.yaml", "checkpoint")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli.main(["run", EXPERIMENT, "--out", str(out)]) == 0
    folder = next(path for path in out.iterdir() if path.is_dir())
    norms = {"layers": {"bn1": {"mean_drift": 0.5}}, "clients": {"0": {"bn1": {"mean_deviation": 0.25}}}}
    for number in (1, 2):
        RunFolder(folder).add_line("norms.jsonl", {"round": number, **norms})
    return folder


def with_other_value(content: bytes, seed: int, name: str) -> bytes:
    """One value of a JSON or YAML file is another one."""
    if name.endswith(".yaml"):
        return yaml.dump(changed(yaml.safe_load(content), seed)).encode(errors="replace")
    if not name.endswith(".jsonl"):
        return json.dumps(changed(json.loads(content), seed)).encode()
    lines = content.splitlines()
    lines[seed % len(lines)] = json.dumps(changed(json.loads(lines[seed % len(lines)]), seed)).encode()
    return b"\n".join(lines) + b"\n"


def read_all(folder: Path) -> None:
    """What a report and `fedbn status` read."""
    read_state(folder)
    page(rows_of(folder), DEFAULT)
    for run in find_runs([folder]):
        for name in ("partition.json", "norms.jsonl", "clients.jsonl"):
            RunFolder(run.folder).lines(name) if name.endswith("l") else RunFolder(run.folder).read(name)
    RunFolder(folder).model_description()


def resume(folder: Path) -> None:
    """What resuming reads before it trains."""
    run = RunFolder(folder)
    run.end(run.config())
    run.check(run.config(), resume=True)
    run.begin(run.config())
    run.checkpoint.read()


@settings(max_examples=cases(150))
@given(
    name=st.sampled_from(FILES),
    seed=st.integers(0, 2**32),
    values=st.booleans(),
    act=st.sampled_from([read_all, resume]),
)
def test_any_damage(whole: Path, name: str, seed: int, values: bool, act: Callable[[Path], None]) -> None:
    folder = whole.parent.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    content = (whole / name).read_bytes()
    change = (
        with_other_value(content, seed, name) if values and name in (*JSON, "config.yaml") else damaged(content, seed)
    )
    (folder / name).write_bytes(change)
    try:
        act(folder)
    except UserError as error:
        check_refusal(error, str(folder))


# --- any accepted reply -----------------------------------------------------------

METRICS = [
    "train-loss", "loss", "accuracy", "round", "clients", "seconds", "bytes-up", "best-round", "best-round-accuracy",
    "evaluated-with", "mean-iou", "own-accuracy", "own-loss", "own-x", "own-accuracy-std", "own@a-accuracy", "examples",
    "validation-accuracy", "validation-examples", "num-examples", "own-num-examples", "partition-id", "status", "label",
    "accuracy-std", "clients-own-accuracy-std", "rounds", "name", "privacy", "x" * 300, "\n", "",
]  # fmt: skip
NUMBERS = [0, 1, -1, 0.5, -(2**63), 2**63 - 1, 2**63, 10**30, 1e39, -1e39, 1e300, math.nan, math.inf, 2**31, 5e-324]
numbers = st.sampled_from(NUMBERS) | st.floats() | st.integers()
metrics = st.dictionaries(
    st.sampled_from(METRICS) | st.text(max_size=5), numbers | st.lists(st.floats(0, 1), max_size=3), max_size=4
)


class Adding(ClientApp):
    """The clients of an experiment, of which some (`who`) add metrics to their replies to one kind of message.

    After round `last` no client trains, which stops the run.
    """

    def __init__(self, inner: ClientApp, kind: str, who: Sequence[int], metrics: Mapping[str, Any], last: int) -> None:
        super().__init__()
        self.inner, self.kind, self.who, self.metrics, self.last = inner, kind, who, metrics, last

    def __call__(self, message: Message, context: Context) -> Message:
        if (
            message.metadata.message_type == "train"
            and configs_in(message.content)["config"]["server-round"] > self.last
        ):
            raise RuntimeError("this session is over")
        reply = self.inner(message, context)
        if message.metadata.message_type == self.kind and context.node_config["partition-id"] in self.who:
            (record,) = metrics_in(reply.content).values()
            for key, value in self.metrics.items():
                record[key] = value
        return reply


@functools.cache
def two_rounds(more: str) -> tuple[Any, Any]:
    experiment = load_experiment(
        "{rounds: 2, clients: 3, model: mlp, train: {steps: 1}, engine: {workers: 0, device: cpu}, evaluate: {every: 2,"
        f" clients: true, {more}}}}}"
    )
    return experiment, prepare(experiment)[0]


def no_literal(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check_folder(folder: Path) -> None:
    """Every file is JSON, and every reader accepts it."""
    for file in folder.glob("*.json*"):
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=no_literal)
    read_all(folder)
    assert read_state(folder) is not None


def carry_out_with(folder: RunFolder, more: str, kind: str, who: Sequence[int], added: Mapping[str, Any]) -> None:
    """Train two rounds, in two sessions if there is a checkpoint of the first one."""
    experiment, prepared = two_rounds(more)

    def make(context: Context, config: Mapping[str, Any]) -> Any:
        return ClientMaker(experiment)(context, config)

    for last in (1, 2):
        item = replace(prepared, rule=make_rule(prepared.run))
        with LocalGrid(Adding(client_app(make), kind, who, added, last), 3) as grid, suppress(FedbnError):
            settings = prepared.run.model_dump(mode="json")
            run_one(item, grid, folder, Reporter(), folder.begin(settings))
        check_folder(folder.path)
    write_report([folder.path], folder.path / "page.html", only_page=True)


# Each example takes a second, most of it for the pictures. Those that are named here are tried too.
@pytest.mark.slow
@settings(max_examples=cases(5), phases=[phase for phase in Phase if phase is not Phase.shrink])
@given(
    kind=st.sampled_from(["train", "evaluate"]),
    who=st.sampled_from([(1,), (0, 1, 2)]),
    added=metrics,
    more=st.sampled_from(["batch_size: 50", "validation: 0.2"]),
)
@example(kind="train", who=(1,), added={"train-loss": -(2**63)}, more="batch_size: 50")
@example(kind="train", who=(1,), added={"x": 2**63 - 1}, more="batch_size: 50")
@example(kind="evaluate", who=(1,), added={"loss": -(2**63)}, more="batch_size: 50")
@example(
    kind="train", who=(0, 1, 2), added={"round": 7, "best-round": 1.5, "class-accuracy": [0.5]}, more="validation: 0"
)
@example(kind="evaluate", who=(0, 1, 2), added={"accuracy": [0.5, 1.0]}, more="batch_size: 50")
@example(kind="train", who=(0, 1, 2), added={"train-loss": -(2**63)}, more="validation: 0.2")  # no round is evaluated
def test_any_accepted_reply_leaves_a_folder_that_is_read_and_resumed(
    tmp_path_factory: pytest.TempPathFactory, kind: str, who: tuple[int, ...], added: dict[str, Any], more: str
) -> None:
    folder = RunFolder(tmp_path_factory.getbasetemp() / "added" / "run")
    shutil.rmtree(folder.path, ignore_errors=True)
    with kept_log(), drawing():
        carry_out_with(folder, more, kind, who, added)


def test_a_metric_of_training_does_not_replace_a_figure_of_the_round(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    carry_out_with(folder, "server: true", "train", (0, 1, 2), {"round": 7, "accuracy": 0.75, "mine": 4, "each": [1.0]})
    first, second = folder.history()
    assert (first["round"], second["round"], first["train_round"], second["mine"]) == (
        1,
        2,
        pytest.approx(7.0),
        pytest.approx(4.0),
    )
    assert "accuracy" not in first  # it was not evaluated
    assert second["accuracy"] != 0.75
    assert second["train_accuracy"] == pytest.approx(0.75)
    assert "each" not in first


def test_figures_that_are_not_finite_are_null_in_files_and_nan_when_they_are_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin({"name": "x", "rounds": 1, "clients": 2})
    line = {
        **vars(Traffic()),
        "round": 1,
        "seconds": 0.5,
        "accuracy": 0.5,
        "loss": math.nan,
        "clients_loss_std": math.inf,
    }
    of_clients = {"0": {"train_loss": math.inf, "examples": 3}}
    folder.add_line("history.jsonl", line)
    folder.add_line("clients.jsonl", {"round": 1, "clients": of_clients})
    names = ("name", "label", "strategy", "model", "norm", "device", "accuracy_of")
    summary = Summary(**dict.fromkeys(names, "x"), seed=0, parameters=1, began="2026-01-01T00:00:00+00:00")  # type: ignore[arg-type]
    summary.notes = {"freeze_round": None, "epsilon": math.inf}
    summary.account(line)
    folder.write_summary(summary)
    for file in folder.path.glob("*.json*"):
        assert "NaN" not in file.read_text()
        assert "Infinity" not in file.read_text()
    (found,) = folder.history()
    assert (found["accuracy"], repr(found["loss"]), repr(found["clients_loss_std"])) == (0.5, "nan", "nan")
    assert repr(folder.lines("clients.jsonl")[0]["clients"]["0"]) == "{'train_loss': nan, 'examples': 3}"
    again = folder.summary()
    assert (repr(again.loss), again.notes) == ("nan", {"freeze_round": None, "epsilon": None})


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_is_found(name: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file, folder = tmp_path / "run" / name, RunFolder(tmp_path / "run")
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(first + second.rstrip("\n"))  # as after a crash in the middle of the line
    assert len(folder.lines(name)) == 1
    file.write_text(first + second.replace(":", ";", 1))
    with pytest.raises(UserError, match=rf"{name}', line 2: it is not JSON: .*; restore the file from a copy"):
        folder.lines(name)
    file.write_text(first + second.replace('"round": 2', '"round": true'))
    with pytest.raises(UserError, match=rf"{name}', line 2: round is True; expected a valid integer; restore"):
        folder.lines(name)
    file.write_text(first + first)
    with pytest.raises(UserError, match=rf"{name}', line 2: round 1 follows round 1"):
        folder.lines(name)


def test_a_changed_summary_is_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    change_summary(tmp_path / "run", accuracy=0.99)
    with pytest.raises(
        UserError, match=r"summary\.json': accuracy is 0\.99, but 0\.\d+ by the lines of history\.jsonl"
    ):
        find_runs([tmp_path])


@pytest.mark.parametrize("content", ["[", '{"label": 3}', None])
def test_a_run_is_resumed_without_its_summary(content: str | None, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out" / whole.name)
    file = tmp_path / "out" / whole.name / "summary.json"
    before = json.loads(file.read_text())
    file.unlink() if content is None else file.write_text(content)
    assert cli.main(["run", EXPERIMENT, "--out", str(tmp_path / "out"), "--resume"]) == 0
    after = json.loads(file.read_text())
    assert {**after, "began": 0} == {**before, "began": 0}
