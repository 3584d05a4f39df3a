"""The commands as docs/commands.md shows them, and how wrong words are refused."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from tests.support.command import ROOT, commands_of
from tests.support.pages import Page

PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "flower_app" / "make_images.py"), run_name="__main__")  # for `adapt`
    page, ran = Page(ROOT / "docs" / "commands.md"), 0
    for kind, text, shown in page.blocks():
        if kind == "sh" and commands_of(f"```sh\n{text}```\n"):
            ran += page.command(text, shown)
    assert ran == 10
    assert (tmp_path / "report" / "report.md").exists()
    assert (tmp_path / "partition.png").exists()


def test_every_command_is_on_the_page_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    help = capsys.readouterr().out
    assert (cli.main([]), capsys.readouterr().out) == (2, help)
    for name in re.findall(r"^    (\w+) ", help, re.MULTILINE):
        assert re.search(rf"^## .*\b{name}\b", PAGE, re.MULTILINE), name
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu", "demo"], "did you mean 'run'?"),
        (["list", "strategy"], "did you mean 'strategies'?"),
        (["run", "demo", "--engine", "rai"], "did you mean 'ray'?"),
        (["run", "demo", "--bla"], "--bla"),
        (["run", "demo", "--rounds", "5"], "write rounds=5"),
        (["explain", "demo", "--train.lr=0.1"], "write train.lr=0.1"),
        (["run", "demo", "model.name=torchvision.models:resnet99"], " resnet50, resnet34, "),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.startswith("fedbn: error: ")
    assert error.count("\n") == 1
