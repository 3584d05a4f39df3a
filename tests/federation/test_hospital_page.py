"""docs/hospital.md: the files of examples/hospital, its commands in their order, and what they print."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.pages import Page

FILES = ROOT / "examples" / "hospital"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MONAI's
def test_the_page_s_commands_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("scans", "client_app", "server_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    scans = importlib.import_module("scans")
    scans.write("scans", scans.SCANNERS, seed=0)
    scans.write("new", scans.NEW, seed=1)
    page = Page(ROOT / "docs" / "hospital.md")
    assert sum(page.command(code, shown) for kind, code, shown in page.blocks() if kind == "bash") == 7


def test_the_code_of_the_page_is_that_of_the_example() -> None:
    """Each block is in a file, but for the change of the server's strategy."""
    files = [file.read_text(encoding="utf-8") for file in FILES.glob("*.*")]
    shown = [code for kind, code, _ in Page(ROOT / "docs" / "hospital.md").blocks() if kind in ("python", "yaml")]
    missing = [code for code in shown if not any(code.strip() in file for file in files)]
    assert [code.splitlines()[0].rpartition(" ")[2] for code in missing] == ["FedBN"]
