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
from fedbn_flwr.strategies import FedTAN, Secure
from tests.support.command import ROOT, python_blocks

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "strategies").glob("*.md")}


def test_each_strategy_has_a_page() -> None:
    titles = [name for text in PAGES.values() for name in text.splitlines()[0].removeprefix("# ").split(", ")]
    assert sorted(titles) == sorted(STRATEGIES)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_all_parts_and_a_valid_experiment(page: str, tmp_path: Path) -> None:
    text = PAGES[page]
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings == ["Idea", "Equation", "Settings", "Cost", "When it fails"]
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert yaml.safe_load(block)["strategy"]["name"] in text.splitlines()[0]
        file = tmp_path / "page.yaml"
        file.write_text("model: {name: cnn}\n" * ("model:" not in block) + block)
        (prepared,) = prepare(load_experiment(str(file), []))
        assert type(prepared.rule).__name__ in text.splitlines()[0]


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


def test_the_comparison_has_every_strategy_and_what_stays_on_the_client() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    rows = {row[0]: row for row in (re.findall(r"[^|]+", line) for line in text.splitlines() if line.startswith("| ["))}
    named = {re.sub(r" \[(\w+)\].*", r"\1", name): [cell.strip() for cell in row[1:]] for name, row in rows.items()}
    assert sorted(named) == sorted(STRATEGIES)
    assert not [name for name, (does, *_, avoid) in named.items() if "" in (does, avoid)]
    stays = {name: cells[1] for name, cells in named.items()}
    assert (stays["FedBN"], stays["SiloBN"]) == ("gamma, beta, statistics", "statistics")
    assert (stays["Standalone"], stays["FedAvg"]) == ("the model", "")
    assert not {word for cells in named.values() for word in cells} & {"nothing", "none"}, "these cells are empty"


def test_the_table_of_privacy_has_the_statistics_that_a_strategy_s_models_and_queries_have() -> None:
    """FedWon's and HeteroBN's models have no running statistics; HBN's evaluation queries some by default."""
    lines = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")[2:6]] for line in lines if "| `" in line[:4]}
    assert sorted(rows) == sorted(STRATEGIES)
    assert {name for name, (_, _, statistics, _) in rows.items() if statistics == "none"} == {"FedWon", "HeteroBN"}
    queried = "statistics of all its examples, in each evaluated round"
    assert rows["HBN"][3] == queried
    assert rows["HeteroBN"][3] == f"with `statistics: query` {queried}"
