"""Damage to a file of a run folder is refused by the name of the file, in reports and when the run is resumed."""

from __future__ import annotations

import functools
import json
import math
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch import nn

from fedbn_flwr import LocalGrid, Result, Results, client_app, run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import FedbnError, SettingsError, UserError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.messages.arrays import configs_in, metrics_in
from fedbn_flwr.results.folder.reader import LINES
from fedbn_flwr.results.folder.summary import Summary
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs, read_state
from fedbn_flwr.results.report.tables import notes, tables
from fedbn_flwr.results.report.write import page, write_report
from fedbn_flwr.storage import read_store, write_store
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
    rows = rows_of(folder)
    page(rows, tables(rows), notes(rows))
    for found in find_runs([folder]):
        for name in ("partition.json", "norms.jsonl", "clients.jsonl"):
            RunFolder(found.folder).lines(name) if name.endswith("l") else RunFolder(found.folder).read(name)
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


# --- What a run folder from someone else can do to those who read it: it executes no code that they haven't allowed.


TINY: dict[str, Any] = {"rounds": 1, "clients": 2, "train": {"steps": 1}, "engine": {"workers": 0, "device": "cpu"}}
# A module and a repository of the folder's author: each leaves a file where it was imported.
CODE = "import pathlib; pathlib.Path('executed').touch()\ndef net(*_, **__): pass\nRule = Norm = net\n"


class TinyNet(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))


HUB = {"repo_or_dir": ".", "model": "net", "source": "local", "trust_repo": True}
SYSTEM = {"command": "touch executed"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("quick", **TINY, strategy="FedBN", out=tmp_path_factory.mktemp("run"), progress=False).folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run's folder, in a working folder with code of its author; and data to predict."""
    shutil.copytree(trained, tmp_path / "run")
    for name in ("evil.py", "hubconf.py"):
        (tmp_path / name).write_text(CODE)
    np.savez(tmp_path / "new.npz", inputs=np.zeros((4, 8, 8), np.uint8))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def change(folder: Path, **sections: Any) -> None:
    """Change the mappings in model.json."""
    content = json.loads((folder / "model.json").read_text())
    for key, values in sections.items():
        content[key] = {**content.get(key, {}), **values}
    (folder / "model.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("section", "key", "name", "more"),
    [
        ("build", "name", "torch.hub:load", {"arguments": HUB}),
        ("build", "name", "os:system", {"arguments": SYSTEM}),
        ("build", "name", "fedbn_flwr.models.build:inspect.os.system", {"arguments": SYSTEM}),
        ("build", "name", "evil:net", {}),
        ("build", "name", "evil:net(width=1)", {}),
        ("build", "norm", "evil:Norm", {}),
    ],
)
@pytest.mark.parametrize("words", [("predict", "--data", "new.npz"), ("model",)], ids=lambda words: words[0])
def test_code_that_its_model_names_is_refused(
    section: str,
    key: str,
    name: str,
    more: dict[str, Any],
    words: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder, **{section: {key: name, **more}})
    assert cli.main([*words, "run", "--client", "0", "--out", "found"]) == 2
    said, plain = capsys.readouterr().err, name.partition("(")[0]
    assert f"{name!r} is code that the run folder names" in said
    assert f"--allow {plain}, in Python Result.read(folder, allow={plain!r})" in said
    with pytest.raises(SettingsError, match="is code that the run folder names"):
        Result.read(folder, allow="other:net").model(client=0)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"build": {"num_classes": "a"}},
        {"build": {"groups": 0, "norm": "gn"}},
        {"build": {"input_shape": [2, 8, 8]}},
        {"normalise": {}},
        {"normalise": {"std": [0.0]}},
        {"normalise": {"mean": [math.nan]}},
        {"normalise": {"mean": [0.5, 0.5]}},
        {"normalise": {"mean": [0.5] * 3, "std": [0.5] * 3}},
        {"targets": {"std": [1.0]}},
        {"targets": {"mean": [1.0], "std": [1.0]}},
        {"classes": ["a", "a"]},
        {"classes": ["a"]},
        {"inputs": {"a": 1}},
        {"inputs": ["a", "b"]},
        {"inputs": ["a", "b"], "types": ["int64", "int64"]},
        {"local": "last"},
        [],
    ],
    ids=str,
)
def test_a_model_whose_description_cannot_be_right_is_damaged(
    sections: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.json"
    whole = json.loads(file.read_text())
    for key, value in dict(sections).items():
        whole[key] = {**whole[key], **value} if value and isinstance(whole[key], dict) else value
    file.write_text(json.dumps(whole if sections else sections))
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 2
    assert "'run/model.json'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["environment.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).rename(tmp_path / "own")
    (folder / name).symlink_to(tmp_path / "own")
    assert cli.main(["adapt", "run", "--data", "new.npz", "--out", "adapted"]) == 2
    assert f"'run/{name}': it is a link to a file outside of the folder" in capsys.readouterr().err


def test_a_label_does_not_reach_the_terminal_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_summary(folder, label="A\x1b[2J\x9b1m")
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 0
    assert cli.main(["export", "run", "--format", "safetensors", "--out", "found"]) == 0
    assert {"\x1b", "\x9b"}.isdisjoint("".join(capsys.readouterr()))


def test_weights_that_are_not_finite_are_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    save_file({key: np.full_like(value, np.nan) for key, value in load_file(file).items()}, file, {"round": "1"})
    assert cli.main(["predict", "run", "--data", "new.npz", "--out", "found"]) == 2
    assert "has values that are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": {"name": "evil:net"}},
        {"strategy": {"name": "FixBN", "base": {"name": "evil:net"}}},
        {"data": {"name": "evil:net"}},
        {"data": {"name": "os:system", "options": SYSTEM}},
        {"data": {"augment": ["evil:net"]}},
        {"data": {"partition": {"kind": "evil:net"}}},
        {"model": {"name": "evil:net", "norm": "evil:Norm"}},
        {"train": {"loss": "evil:net"}},
        {"train": {"loss": {"name": "os:system", **SYSTEM}}},
        {"train": {"optimizer": {"name": "evil:net"}}},
        {"train": {"schedule": {"kind": "evil:net"}}},
        {"evaluate": {"metrics": ["evil:net"]}},
        {"track": ["evil:net"]},
    ],
    ids=str,
)
def test_its_settings_execute_nothing(
    changes: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 0
    for words in (["report", "--out", "report"], ["report", "--html", "--out", "page.html"], ["status"]):
        assert cli.main([*words, "run"]) == 0
    given = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]
    shutil.copytree(folder, "out/FedBN")
    assert cli.main(["run", "quick", *given, "strategy=FedBN", "--out", "out", "--resume"]) == (
        2 if "track" not in changes else 0
    )
    assert not Path("executed").exists(), capsys.readouterr()


class Executed:
    """When it is unpickled, a file is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("executed").touch, ()


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint", "checkpoint's model"])
def test_pickled_content_is_never_unpickled(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled, file = pickle.dumps(Executed()), folder / name.removesuffix("'s model")
    if file.name == name:
        file.write_bytes(pickled)
    else:
        entries = read_store(file)
        write_store(file, {**entries, "model": pickled}.items())
    client = ["--client", "0"] if file.name == "checkpoint" else []
    assert cli.main(["predict", "run", *client, "--data", "new.npz", "--out", "found"]) == 2
    assert f"'run/{file.name}'" in capsys.readouterr().err
    assert not Path("executed").exists()
    pickle.loads(pickled)
    assert Path("executed").exists()


def test_a_network_of_one_s_own_is_built_if_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `run` the names are the caller's own."""
    monkeypatch.chdir(tmp_path)
    result = run("quick", **TINY, strategy="FedAvg", model=TinyNet, out="out", progress=False)
    name = f"{TinyNet.__module__}:TinyNet"
    same = run("quick", **TINY, strategy="FedAvg", model=TinyNet, out="out", progress=False, resume=True)
    found = [result, same, Result.read(result.folder, allow=name), Results.read("out", allow=[name])[0]]
    assert all(isinstance(each.model(), TinyNet) for each in found)
    with pytest.raises(SettingsError, match="is code that the run folder names"):
        Result.read(result.folder).model()
    np.savez("new.npz", inputs=np.zeros((4, 8, 8), np.uint8))
    command = ["predict", str(result.folder), "--data", "new.npz", "--out", "found.csv"]
    assert cli.main(command) == 2
    assert cli.main([*command, "--allow", name]) == 0
