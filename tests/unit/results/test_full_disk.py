"""A disk that becomes full ends a run with one line, and the run continues when there is space again."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from tests.support.disks import files_of_at_most
from tests.support.marks import slow_except

EXPERIMENT = (
    "{name: full, rounds: 3, clients: 2, train: {steps: 1}, strategy: {name: FedBN}, engine: {workers: 0, "
    "checkpoint_every: 1}}"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli.main(["run", EXPERIMENT, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("name", slow_except({"checkpoint"}, ["config.yaml", "history.jsonl", "checkpoint", "report"]))
def test_a_full_disk_is_one_line_and_the_run_continues(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if name == "report":
        request.getfixturevalue("plots")
    sizes = {file.name: file.stat().st_size for file in (whole / "FedBN").iterdir() if file.is_file()}
    limit = {
        "config.yaml": 100,
        "history.jsonl": max(sizes["config.yaml"], sizes["environment.json"], sizes["history.jsonl"] // 2) + 1,
        # Between the two largest files, since the checkpoint has seconds and so not always the same size.
        "checkpoint": (sizes["checkpoint"] + sizes["model.safetensors"]) // 2,
        "report": 2 * sizes["checkpoint"],  # less than a picture
    }[name]
    words = ["run", EXPERIMENT, "--out", str(tmp_path / "out")]
    with files_of_at_most(limit):
        assert cli.main(words) == 1
    error, *more = capsys.readouterr().err.splitlines()
    assert "cannot be written" in error
    assert "File too large" in error
    assert str(tmp_path / "out") in error
    began = (tmp_path / "out" / "FedBN" / "config.yaml").exists()
    assert began == (name != "config.yaml")
    resumed = shlex.join(["fedbn", "run", EXPERIMENT, "--out", str(tmp_path / "out"), "--resume"])
    assert [line.partition(" continue with: ")[2] for line in more] == [resumed] * (
        name in ("history.jsonl", "checkpoint")
    )
    assert cli.main([*words, "--resume"] if began else words) == 0
    assert (tmp_path / "out/FedBN/model.safetensors").read_bytes() == (whole / "FedBN/model.safetensors").read_bytes()
    history = [json.loads(line) for line in (tmp_path / "out/FedBN/history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == [1, 2, 3]


def test_standard_output_may_be_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert cli.main(["list", "norms"]) == 1
    with suppress(OSError):
        full.close()
    assert capsys.readouterr().err == "fedbn: error: the output cannot be written: No space left on device\n"
