"""Damage to a file of a run folder is refused by the name of the file, in reports and when the run is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr import cli
from fedbn_flwr.errors import UserError
from fedbn_flwr.results.files import read_lines
from fedbn_flwr.results.folder import LINES, RunFolder
from fedbn_flwr.results.page import write_page
from fedbn_flwr.results.report import tables_as_text
from fedbn_flwr.results.rows import find_runs, group
from fedbn_flwr.results.state import read_state
from tests.support.fuzz import cases, changed, check_refusal, damaged

EXPERIMENT = (
    "{name: whole, rounds: 2, clients: 2, train: {steps: 1}, engine: {workers: 0}, strategy: {name: FedBN}, evaluate: "
    "{clients: true, matrix: true}, published: {source: x, accuracy: 0.5}}"
)
JSON = ("history.jsonl", "clients.jsonl", "norms.jsonl", "summary.json", "environment.json", "partition.json",
        "matrix.json", "model.json")  # fmt: skip
FILES = (*JSON, "config.yaml", "checksums.txt", "checkpoint")


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
    rows = group(find_runs([folder]))
    tables_as_text(rows)
    write_page(rows, folder / "page.html")
    RunFolder(folder).model_description()


def resume(folder: Path) -> None:
    """What resuming reads before it trains."""
    run = RunFolder(folder)
    run.is_finished()
    run.check(run.config(), resume=True)
    run.begin(run.config())
    run.checkpoint.read()


@settings(max_examples=cases(150))
@given(
    name=st.sampled_from(FILES),
    seed=st.integers(0, 2**32),
    values=st.booleans(),
    sums=st.booleans(),
    act=st.sampled_from([read_all, resume]),
)
def test_any_damage(whole: Path, name: str, seed: int, values: bool, sums: bool, act: Callable[[Path], None]) -> None:
    folder = whole.parent.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    content = (whole / name).read_bytes()
    change = (
        with_other_value(content, seed, name) if values and name in (*JSON, "config.yaml") else damaged(content, seed)
    )
    (folder / name).write_bytes(change)
    if not sums:
        (folder / "checksums.txt").unlink()
    try:
        act(folder)
    except UserError as error:
        check_refusal(error, str(folder))


@pytest.mark.parametrize("name", LINES)
def test_a_changed_digit_is_found(name: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / name
    text = file.read_text()
    first, second = text.splitlines(keepends=True)
    at = next(i for i, char in enumerate(second) if char.isdigit() and i > 12)
    file.write_text(first + second[:at] + ("1" if second[at] != "1" else "2") + second[at + 1 :])
    with pytest.raises(
        UserError, match=rf"{name}', line 2: it does not have its checksum in checksums\.txt, so it was"
    ):
        read_lines(file)
    assert cli.main(["report", str(tmp_path / "run"), "--html", "--out", str(tmp_path / "page.html")]) == 2
    file.write_text(first + second.rstrip("\n"))  # as after a crash in the middle of the line
    assert len(read_lines(file)) == 1
    file.write_text("")
    with pytest.raises(UserError, match=rf"{name}': it has 0 lines, but checksums\.txt has 2 of them"):
        read_lines(file)


def test_a_changed_summary_is_found(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "accuracy": 0.99}))
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
