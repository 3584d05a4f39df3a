"""Arguments of commands that say something else than they do are refused before anything is written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.commands.common import parse_pairs
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import from_run_config
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.results.folder.places import default_out, out_folder
from tests.support.command import ROOT
from tests.support.refusals import refusal


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
