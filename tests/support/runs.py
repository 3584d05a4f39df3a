"""Run folders as a finished run leaves them, without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.results.folder.summary import Summary
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import Row, group

TRAFFIC = vars(Traffic(communication_rounds=1, bytes_down=2**20, bytes_up=2**20)) | {"seconds": 0.5}


def write_run(
    folder: Path,
    label: str,
    seed: int = 0,
    *,
    lines: Sequence[Mapping[str, Any]] = (),
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    status: Any = "finished",
    diverged: bool = False,
    task: str | None = None,
    metrics: Sequence[str] = (),
    personal: bool = False,
    **figures: Any,
) -> None:
    """`lines` have the measures of each round; without them there are three rounds with `figures`.

    `files` are further files of the folder: a value, or the lines of a .jsonl file.
    """
    folder.mkdir(parents=True)
    seen = {key: value for key, value in figures.items() if value is not None}
    lines = lines or [{"accuracy": 0.2 * number, "loss": 1.0, **seen} for number in (1, 2, 3)]
    history = [{"round": number, **TRAFFIC, **line} for number, line in enumerate(lines, start=1)]
    write_lines(folder / "history.jsonl", history)
    summary = Summary("name", label, label, "cnn", "bn", seed, 10, "cpu", "2026-01-01", "the global model", status)
    summary.task, summary.metrics, summary.personal = task, metrics, personal or None
    for line in history:
        summary.account(line)
    if diverged:
        summary.status, summary.diverged_in = "failed", len(history) + 1
    RunFolder(folder).write_summary(summary)
    if config is not None:
        content = json.dumps({"label": label, "seed": seed, **config})  # of equal values none is an alias
        (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(content)))
    for name, content in (files or {}).items():
        if name.endswith(".jsonl"):
            write_lines(folder / name, content)
        else:
            (folder / name).write_text(json.dumps(content))


def write_seeds(folder: Path, accuracies: Mapping[str, Iterable[float]], **more: Any) -> None:
    """A run for each accuracy of a label, with seeds from 0 on."""
    for label, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            write_run(folder / f"{label}{seed}", label, seed, accuracy=accuracy, **more)


def rows_of(*folders: Path) -> list[Row]:
    """The rows of a report on the folders."""
    return group(find_runs(folders))


def change_summary(run: Path, **values: Any) -> None:
    file = run / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def is_finished(folder: Path) -> bool:
    summary = RunFolder(folder).summary()
    return summary is not None and summary.status == "finished"


def saved_round(folder: Path) -> int:
    """The round of the checkpoint in a run folder; 0 if there is none."""
    checkpoint = RunFolder(folder).checkpoint
    return checkpoint.read().round if checkpoint.path.exists() else 0


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
