"""What benchmarks share: raw files below docs/results with a line of JSON for each measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def measured(file: str) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file."""
    path = RESULTS / file
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def pending(file: str, cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The cases that the file lacks, so that a benchmark which was stopped continues."""
    done = measured(file)
    yield from (case for case in cases if not any(line.items() >= case.items() for line in done))


def note(file: str, **line: Any) -> None:
    """Append a measurement, with the machine's load."""
    line["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(line), flush=True)
    with (RESULTS / file).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
