"""Paths, names, times and addresses that cannot be used end with one line, and outputs that others read are valid."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli, flower_app
from fedbn_flwr.commands.common import parse_pairs
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.command import ROOT
from tests.support.refusals import refusal
from tests.support.runs import write_run

LONG = "x" * 300  # longer than file systems allow


@pytest.mark.parametrize(
    "words",
    [
        ["status", LONG],
        ["report", LONG],
        ["partition", "quick", "--out", f"{LONG}/x.png"],
        ["explain", "quick", f"data.name=/{LONG}"],
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedbn: error: '")
    assert LONG in error
    assert error.endswith(": File name too long\n")
    assert error.count("\n") == 1
    monkeypatch.setenv("FEDBN_DEBUG", "1")
    with pytest.raises(OSError, match="File name too long"):
        cli.main(words)


def test_a_folder_for_runs_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(capsys, "run", "quick", "--out", LONG)
    assert error.startswith(f"fedbn: error: '{tmp_path / LONG}/FixBN/config.yaml' cannot be read")
    assert error.endswith(": File name too long\n")


def test_an_error_of_the_system_without_a_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5000, "unheard of")

    monkeypatch.setattr("fedbn_flwr.results.folder.places.default_folder", fail)
    with pytest.raises(OSError, match="unheard of"):
        cli.main(["status"])


def test_standard_output_may_be_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for code, words in ((0, ["list", "norms"]), (0, ["explain", "quick"]), (2, ["run", "demoo"])):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", None)  # as Python starts after >&-
            assert cli.main(words) == code
            sys.stdout.close()
    assert "did you mean 'demo'" in capsys.readouterr().err


def test_standard_output_may_lack_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "größe.yaml"
    file.write_text("clients: 3\nruns: {straße: {seed: 1}}\n", encoding="utf-8")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))  # as with PYTHONIOENCODING=ascii
    assert cli.main(["explain", str(file)]) == 0
    assert b"stra\\xdfe" in shown.getvalue()


OTHER_APP = (
    '[project]\nname = "other"\n[tool.flwr.app.components]\nserverapp = "a:b"\nclientapp = "a:c"\n'
    '[tool.flwr.app.config]\nout = ""\n'
)


def test_out_of_another_flower_app_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text(OTHER_APP)
    run = RunFolder(tmp_path / "out")
    write_run(run.path, "label", status="running")

    def stopped(*_: object, run_config: dict[str, Any], **__: object) -> None:
        assert run_config["out"] in (5, str(run.path))
        raise KeyboardInterrupt

    monkeypatch.setattr(flower_app, "run_app", stopped)
    for out in ("out=5", f"out='{run.path}'"):
        assert cli.main(["flwr", "run", str(tmp_path), "--run-config", out]) == 130
    assert "stopped" in capsys.readouterr().err
    assert cli.main(["flwr", "run", str(tmp_path), "--run-config", "lr=0.1"]) == 2
    assert "--run-config has no key 'lr'; known: out" in capsys.readouterr().err
    assert json.loads((run.path / "summary.json").read_text())["status"] == "running", "it is not written to"


@pytest.mark.parametrize(
    ("given", "options"), [("pairs", []), ("a file", ["--engine", "ray"]), ("pairs", ["--workers", "2"])]
)
def test_the_command_that_continues_a_flower_run_resumes_it(
    given: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Flower takes pairs or one TOML file, not both."""
    out, file = tmp_path / "it's out", tmp_path / "config.toml"
    pairs = f"experiment='quick' set='clients=4' out=\"{out}\" resume=false"
    text = 'extends: quick  # it\'s "quick", \\\\ and \U0001f600\n' if given == "a file" else "quick"
    file.write_text(f"experiment = '''{text}'''\nset = \"clients=4\"\nout = \"{out}\"\n", encoding="utf-8")

    def stopped(*_: object, **__: object) -> None:
        write_run(out / "FixBN", "FixBN", status="running", config={"rounds": 10})
        raise KeyboardInterrupt

    monkeypatch.setattr(flower_app, "run_app", stopped)
    words = ["flwr", "run", str(ROOT), *options, "--run-config", pairs if given == "pairs" else str(file)]
    assert cli.main(words) == 130
    shown = shlex.split(capsys.readouterr().err.partition("continue with: ")[2].splitlines()[0])
    assert shown[:-1] == ["fedbn", *words[:-1]]
    expected = {"experiment": text, "set": "clients=4", "out": str(out), "resume": True}
    assert parse_pairs(shown[-1:], "--run-config") == expected


@pytest.mark.parametrize(
    ("before", "meanwhile"), [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_a_flower_app_under_nohup_ignores_the_end_of_its_terminal(
    before: signal.Handlers, meanwhile: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(OTHER_APP)
    seen = []
    monkeypatch.setattr(flower_app, "run_app", lambda *_, **__: seen.append(signal.getsignal(signal.SIGHUP)))
    own = signal.signal(signal.SIGHUP, before)
    try:
        assert cli.main(["flwr", "run", str(tmp_path)]) == 0
        assert seen == [meanwhile]
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, own)


OF_EXPERIMENT = [str(ROOT), "--run-config", "experiment='quick' set='clients=4' out='OUT'"]


@pytest.mark.parametrize(
    ("words", "nodes", "actors"),
    [
        ([], 2, None),
        (OF_EXPERIMENT, 4, None),
        ([*OF_EXPERIMENT, "--federation-config", "num-supernodes=9"], 9, None),
        ([*OF_EXPERIMENT, "--engine", "ray"], 4, {"cpus": 1, "gpus": 0}),
        (["--engine", "ray", "--federation-config", "client_resources_num_cpus=2"], 2, {"cpus": 2, "gpus": 0}),
    ],
)
def test_a_flower_app_has_its_number_of_nodes_and_their_resources(
    words: list[str],
    nodes: int,
    actors: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pyproject.toml").write_text(OTHER_APP)
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(flower_app, "run_app", lambda _, nodes, **options: seen.append((nodes, options["actors"])))
    assert cli.main(["flwr", "run", *words]) == 0
    assert seen == [(nodes, actors)]
    assert ("2 nodes, Flower's default; for another number" in capsys.readouterr().out) is (nodes == 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("foo=2", "--federation-config has no key 'foo' on the engine 'local'; known: num-supernodes"),
        ("client-resources-num-cpus=2", "no key 'client-resources-num-cpus' on the engine 'local'; known: num-super"),
        ("num-supernode=2", "no key 'num-supernode' on the engine 'local'; did you mean 'num-supernodes'?"),
        ("num-supernodes='x'", "num-supernodes is 'x'; expected a number from 4 on"),
        ("num_supernodes=3", "num-supernodes is 3; expected a number from 4 on"),
    ],
)
def test_a_wrong_federation_is_refused(
    given: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config = f"experiment='quick' set='clients=4' out='{tmp_path / 'out'}'"
    words = ["flwr", "run", str(ROOT), "--run-config", run_config, "--federation-config", given]
    assert says in refusal(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", ".yaml", "folder/", os.fsdecode(b"caf\xe9"), "two\nlines"])
def test_names_that_cannot_be_used_make_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(capsys, "new", name)
    assert "expected the name of an experiment" in error or "expected a name of printable characters" in error
    assert not list(tmp_path.iterdir())


def test_a_new_experiment_is_named_as_a_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine.yml"]) == 0
    assert cli.main(["new", "a b"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a b.yaml", "mine.yaml"]
    assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == ["fedbn", "run", "a b.yaml"]
    assert "fedbn run 'a b.yaml'" in (tmp_path / "a b.yaml").read_text()
    load_experiment(str(tmp_path / "a b.yaml"))


def test_the_status_of_a_run_that_diverged_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "a", config={"rounds": 2, "clients": 2}, lines=[{"accuracy": 0.1, "loss": float("nan")}])
    assert cli.main(["status", "--json", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["accuracy"], found["loss"]) == (0.1, None)
