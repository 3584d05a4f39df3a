"""Every strategy has a page in docs/strategies, whose experiment is valid and names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.registry import STRATEGIES
from fedbn_flwr.strategies import FedTAN, Secure, as_rule
from tests.support.command import ROOT, python_blocks

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "strategies").glob("*.md")}


def test_each_strategy_has_a_page_and_a_row_in_the_tables_of_the_comparison_and_of_privacy() -> None:
    titles = [name for text in PAGES.values() for name in text.splitlines()[0].removeprefix("# ").split(", ")]
    docs = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("strategies", "privacy")}
    compared = re.findall(r"^\| \[[^]]*?(\w+)\]\(", docs["strategies"], re.MULTILINE)
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", docs["privacy"], re.MULTILINE)  # a row may be of several
    assert sorted(titles) == sorted(STRATEGIES) == sorted(re.findall(r"\w+", " ".join(rows)))
    assert {*compared} <= {*STRATEGIES}
    assert len(compared) == len(STRATEGIES)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_all_parts_and_a_valid_experiment(page: str, tmp_path: Path) -> None:
    text = PAGES[page]
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings == ["Idea", "Equation", "Settings", "Cost", "When it fails"]
    names: dict[str, Any] = {}
    for code in python_blocks(text):  # the first one is how a Flower app uses the strategy
        exec(code, names)
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert yaml.safe_load(block)["strategy"]["name"] in text.splitlines()[0]
        file = tmp_path / "page.yaml"
        file.write_text("model: {name: cnn}\n" * ("model:" not in block) + block)
        (prepared,) = prepare(load_experiment(str(file), []))
        assert type(prepared.rule).__name__ in text.splitlines()[0]
        if block == blocks[0] and "strategy" in names:  # an experiment puts MeanStatistics around Flower's strategies
            assert str(names["strategy"]) == str(prepared.rule)
            assert str(as_rule(names["strategy"]).base) == str(prepared.rule.base)


def test_the_comparison_combines_the_same_strategies_in_python_and_in_a_file(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    (code,) = python_blocks(text)
    exec(code, names)
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    file = tmp_path / "page.yaml"
    file.write_text("model: {name: cnn}\n" + block)
    (prepared,) = prepare(load_experiment(str(file), []))
    assert [*map(str, prepared.rule.chain)] == [*map(str, names["strategy"].chain)] == ["Secure", "FixBN", "FedProx"]
    with pytest.raises(SettingsError, match="exchanges statistics"):
        Secure(FedTAN())
