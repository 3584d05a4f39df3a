"""Every strategy has a page in docs/strategies, whose experiment is valid and names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.registry import STRATEGIES
from tests.support.command import ROOT

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "strategies").glob("*.md")}


def test_each_strategy_has_a_page() -> None:
    titles = [name for text in PAGES.values() for name in text.splitlines()[0].removeprefix("# ").split(", ")]
    assert sorted(titles) == sorted(STRATEGIES)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_all_parts_and_a_valid_experiment(page: str, tmp_path: Path) -> None:
    text = PAGES[page]
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings == ["Idea", "Equation", "Settings", "Cost", "When it fails"]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert yaml.safe_load(block)["strategy"]["name"] in text.splitlines()[0]
    file = tmp_path / "page.yaml"
    file.write_text("model: {name: cnn}\n" * ("model:" not in block) + block)
    (prepared,) = prepare(load_experiment(str(file), []))
    assert type(prepared.rule).__name__ in text.splitlines()[0]
