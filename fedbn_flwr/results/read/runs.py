"""A finished run, or one so far, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import UserError

from ..folder import RunFolder, deciding, find_folders, flat_settings
from ..folder.clients import last_values
from ..folder.files import damaged
from ..folder.summary import Summary


@dataclass(frozen=True)
class Run:
    path: Path
    summary: Summary
    history: list[dict[str, Any]]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def label(self) -> str:
        return self.summary.label

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.summary.to_json()

    @cached_property
    def clients(self) -> dict[str, dict[str, float]]:
        """The values by metric and client, of the last evaluated round."""
        return last_values(self.folder.lines("clients.jsonl"))

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings."""
        return self.folder.config()

    @property
    def cell(self) -> Mapping[str, Any]:
        """The run's place in its experiment: its row, its condition (`sweep`), and the values to try (`tune`)."""
        return self.config.get("cell") or {}

    @property
    def place(self) -> tuple[str, list[int], int]:
        """What the runs of a folder are sorted by: their experiment, and their place in its file."""
        found = self.cell.get("place")
        place = found if isinstance(found, list) and all(type(each) is int for each in found) else []
        return str(self.path.parent), place, self.summary.seed

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that affect results, without the seed and names, by dotted key."""
        config = deciding(self.config)
        return flat_settings({key: value for key, value in config.items() if key not in ("name", "label", "seed")})

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """The settings without those that its experiment varies by `sweep` and `tune`."""
        lists = (found for kind in ("sweep", "tune") if isinstance(found := self.cell.get(kind), Mapping))
        # The value of a key can be a section, and the kind of a partition decides which other keys the section has.
        varied = tuple(f"{str(key).removesuffix('.kind')}." for found in lists for key in found)
        return {key: value for key, value in self.settings.items() if not f"{key}.".startswith(varied)}

    @cached_property
    def published(self) -> dict[str, tuple[float, float | None]]:
        """Mean and, if known, standard deviation of each figure that the experiment names for this run."""
        figures: dict[str, tuple[float, float | None]] = {}
        for key, value in (self.config.get("published") or {}).items():
            mean, *deviation = value if isinstance(value, list) and value else [value]
            if is_number(mean) and all(map(is_number, deviation)):
                figures[key] = (mean, deviation[0] if deviation else None)
        return figures


def is_number(value: object) -> bool:
    """Whether a value can be drawn: figures of a run that diverged are not finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in the folders and their subfolders, in the order of the folders, and in them of the experiment file."""
    folders = list(folders)
    found = find_folders(folders)
    for folder in folders:
        if not any(path.is_relative_to(folder) for path in found):
            raise UserError(f"{str(folder)!r} holds no run (there is no summary.json in it or its subfolders)")
    runs = []
    for path, number in found.items():
        if (summary := RunFolder(path).summary()) is None:  # deleted meanwhile
            continue
        run = Run(path, summary, RunFolder(path).history())
        try:
            summary.check(run.history)
        except (ValueError, TypeError) as error:
            raise damaged(path / "summary.json", str(error)) from None
        runs.append((number, *run.place, summary.began, str(run.path), run))
    return [run for *_, run in sorted(runs)]
