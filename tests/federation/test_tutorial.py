"""The tutorial's commands and programs, in its order, in one folder; and that they print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.results.several import Results
from tests.support.command import ROOT
from tests.support.pages import REWRITE, Page, differences, excerpt, printed

TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_the_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    page, ran = Page(TUTORIAL), 0
    for kind, text, shown in page.blocks():
        if kind == "yaml":
            (tmp_path / "compare.yaml").write_text(text)
        elif kind == "python":
            code = compile(text, "tutorial.md", "exec")
            page.compare(shown, printed(lambda code=code: exec(code, {"__name__": "tutorial"})))
        else:
            ran += page.command(text, shown)
    assert ran == 9
    results = Results.read("runs/compare")
    assert len(results) == 6
    picture = TUTORIAL.parent / "images" / "tutorial.png"
    if REWRITE:
        figure = results.plot("accuracy", "round")
        figure.set_size_inches(6, 3.4)
        figure.savefig(picture, dpi=120, bbox_inches="tight", metadata={"Software": None})
    assert picture.read_bytes().startswith(b"\x89PNG")


SHOWN = """\
run    accuracy  seconds
-----  --------  -------
FixBN    92.48%      1.2
"""


@pytest.mark.parametrize(
    ("printed_now", "same"),
    [
        (SHOWN.replace("1.2", "17.9"), True),
        (SHOWN.replace("92.48", "9.01"), True),
        (SHOWN.replace("FixBN", "FixNB"), False),
        (SHOWN.replace("FixBN", "2 FixBN"), False),
    ],
)
def test_a_page_is_compared_but_for_times_and_processors(printed_now: str, same: bool) -> None:
    assert (differences(SHOWN, printed_now) == []) is same


def test_an_excerpt_leaves_out_lines() -> None:
    output = "begins\na 1\nb 2\nc 3\nd 4\n"
    assert excerpt("a 1\n...\nc 3\nd 4\n", output) == "a 1\n...\nc 3\nd 4\n"
    assert excerpt("a 1\nb 2\n...\n", output) == "a 1\nb 2\n...\n", "also those at its end"
    with pytest.raises(AssertionError, match="'e 5' is not printed any more"):
        excerpt("e 5\n", output)
