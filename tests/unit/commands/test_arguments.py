"""Arguments of commands that say something else than they do are refused before anything is written."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli, flower_app
from fedbn_flwr.commands.common import parse_pairs
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import from_run_config, load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.results.folder.places import default_out, out_folder
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import STATES
from tests.support.command import ROOT, commands_of
from tests.support.refusals import refusal
from tests.support.runs import write_run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("][", "'][' is not of the form key=value"),
        ("rounds", "'rounds' is not of the form key=value"),
        ("set='rounds=1' ]", "']' is not of the form key=value"),
        ("experiment.yaml", "'experiment.yaml' is not of the form key=value"),
        ("resume=true", "to resume runs, give their folder"),
        ("resume='yes'", "resume is 'yes'; expected true or false"),
        ("set=3", "set is 3; expected text, in quotes"),
        ("rounds=3", "--run-config has no key 'rounds'"),
        ("set='a=\"b'", "has a quote without its closing counterpart"),
        ("out=[1]", "--run-config 'out=[1]' cannot be read"),
        ("missing.toml", "--run-config 'missing.toml' cannot be read"),
    ],
)
def test_a_run_config_is_read_as_a_whole(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, "flwr", "run", str(ROOT), "--run-config", text)


def test_a_flower_run_is_not_resumed_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mistyped"
    text = (ROOT / "pyproject.toml").read_text()
    for line, value in (('out = ""', f'out = "{out}"'), ("resume = false", "resume = true")):
        assert text.count(line) == 1
        text = text.replace(line, value)
    (tmp_path / "pyproject.toml").write_text(text)
    assert "mistyped' has no run to resume" in refusal(capsys, "flwr", "run", str(tmp_path))
    assert not out.exists()


def test_a_folder_that_holds_a_run_is_named_with_the_keys_of_a_run_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "FixBN").mkdir(parents=True)
    (tmp_path / "out" / "FixBN" / "config.yaml").write_text("{rounds: 5}")
    error = refusal(capsys, "flwr", "run", str(ROOT), "--run-config", f"experiment='quick' out='{tmp_path / 'out'}'")
    assert "holds a run already; give another `out` in --run-config, or `resume=true` in --run-config to" in error
    assert "--out" not in error


def test_what_the_simulation_cannot_do_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["flwr", "ls"])
    assert "run" in capsys.readouterr().err
    assert "pyproject.toml has no federation 'remote'" in refusal(capsys, "flwr", "run", str(ROOT), "remote")
    assert "is not a Flower app" in refusal(capsys, "flwr", "run", str(ROOT / "docs"), "--stream")
    assert "has no key 'rounds'" in refusal(capsys, "flwr", "run", str(ROOT), "-cset='seed=1'", "-c", "rounds=2")


QUOTED = re.compile(r"--run-config (?:'([^']*)'|\"((?:[^\"\\]|\\.)*)\")")
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if QUOTED.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_run_configs_in_the_documentation_can_begin(page: Path) -> None:
    defaults = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for single, double in QUOTED.findall(page.read_text(encoding="utf-8")):
        text = single or double.replace('\\"', '"')
        if "..." not in text and ".yaml" not in text:
            planned = from_run_config(defaults | parse_pairs([text], "--run-config"))
            assert "evaluate.models" in text or prepare(planned), text  # the models are elsewhere


@pytest.mark.parametrize("out", ["/", ".", "plot", "plot.docx"])
def test_a_partition_is_plotted_into_a_picture_in_a_folder(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{out!r}" in refusal(capsys, "partition", "demo", "--out", out)
    assert not list(tmp_path.iterdir())


def test_the_name_of_an_experiment_does_not_leave_the_folder_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_OUT", "there")
    for name in ("../../x", "/etc/x", "..", ""):
        assert default_out(name).parent == Path("there")


def test_a_folder_for_output_is_a_path() -> None:
    with pytest.raises(SettingsError, match=r"out is 'a\\x00b'; expected a path without the character"):
        out_folder("name", "a\0b", resume=False)


# --- Paths, names, times and addresses that cannot be used end with one line, and outputs that others read are valid.


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


# --- `fedbn status` on run folders as a deployment leaves them, and logs.


DAY = 86400
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def make_run(folder: Path, status: Any, *, days: float, rounds: int = 10) -> Path:
    """A run with three rounds of 0.5 s that last wrote some days ago."""
    write_run(folder, folder.name, status=status, config={"rounds": rounds, "clients": 4}, clients=3)
    (folder / "checkpoint").write_bytes(bytes(5000))
    (folder / "model.safetensors").write_bytes(bytes(100))
    for file in folder.iterdir():
        os.utime(file, (time.time() - days * DAY,) * 2)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    make_run(tmp_path / "old", "finished", days=40, rounds=3)
    make_run(tmp_path / "new", "finished", days=1, rounds=3)
    make_run(tmp_path / "stopped", "interrupted", days=40)
    make_run(tmp_path / "now", "running", days=0, rounds=1000)
    make_run(tmp_path / "waits", "running", days=50)
    make_run(tmp_path / "killed", "running", days=0)
    with RunFolder(tmp_path / "now").locked(), RunFolder(tmp_path / "waits").locked():
        yield tmp_path


def test_status_says_which_runs_still_write(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(runs), "--json"]) == 0
    found = {run["label"]: run for run in json.loads(capsys.readouterr().out)}
    assert {label: run["status"] for label, run in found.items()} == {
        "old": "finished", "new": "finished", "stopped": "interrupted", "now": "running", "waits": "silent",
        "killed": "interrupted",
    }  # fmt: skip
    assert json.loads((runs / "killed" / "summary.json").read_text())["status"] == "running"
    now = found["now"]
    assert (now["round"], now["rounds"], now["clients"], now["clients_expected"]) == (3, 1000, 3, 4)
    assert 0 <= now["seconds_left"] <= 997 * 0.5
    assert found["waits"]["seconds_left"] is None


def test_status_lists_the_last_changed_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(runs)]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "round", "accuracy", "changed", "left"]
    assert [Path(line.split()[0]).name for line in lines][1:3] == ["now", "new"]
    assert lines[2].split()[1:4] == ["finished", "3/3", "0.6000"]


@pytest.mark.parametrize(
    ("minutes", "status", "says"),
    [(1, "running", ""), (4, "silent", "nothing written for 4.0 min, and its longest round took 0.5 s: it waits")],
)
def test_a_run_that_does_not_write_looks_stopped(
    minutes: float,
    status: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its rounds took half a second, and nobody can know whether it is locked."""
    make_run(tmp_path / "run", "running", days=minutes / 60 / 24)
    (tmp_path / "run" / ".lock").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 0
    _, _, line, *more = capsys.readouterr().out.splitlines()
    assert line.split()[1] == status
    assert line.endswith("ago"), "no time left: the round is late"
    assert [text.strip()[: len(says)] for text in more] == ([says] if says else [])
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds_left"] is None
    assert (found["silence"] is None) == (not says)


def test_status_names_the_folders_that_it_cannot_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "old" / "summary.json").write_text("{")
    assert cli.main(["status", str(runs), "--json"]) == 0
    printed = capsys.readouterr()
    assert {run["label"] for run in json.loads(printed.out)} == {"new", "stopped", "now", "waits", "killed"}
    assert printed.err == f"not shown, because the files are damaged or not of a run: {runs / 'old'}\n"


def left(runs: Path) -> set[str]:
    return {path.name for path in runs.iterdir()}


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder" in refusal(capsys, "status", tmp_path / "missing")
    assert not left(tmp_path)


def test_the_commands_of_the_page_succeed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change nothing."""
    folder = runs.rename(runs.with_name("runs"))
    monkeypatch.chdir(folder.parent)
    before = left(folder)
    words = commands_of(PAGE)
    assert words
    for _, *arguments in words:
        assert cli.main(arguments) == 0
    assert left(folder) == before
    table = PAGE.split("| status | meaning |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == STATES


@pytest.mark.parametrize("key", ["engine", "evaluate"])
def test_a_section_without_settings_is_damage(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "run", config={"rounds": 10, key: None})
    error = refusal(capsys, "report", tmp_path, "--out", tmp_path / "report")
    assert f"config.yaml': {key} is None; expected a valid dictionary" in error
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "the files are damaged" in capsys.readouterr().err
