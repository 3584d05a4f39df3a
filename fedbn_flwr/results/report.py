"""Groups runs into the rows of a report, and makes its tables, for `fedbn report DIR...`."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import UserError

from .clients import evaluated, heading, last_values, main, spread
from .curves import MIB, Measure
from .files import damaged
from .folder import RunFolder, deciding, flat_settings
from .summary import BY_DOMAIN, GLOBAL_MODEL, Summary, keys_of
from .text import in_markdown, printable

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


@dataclass(frozen=True)
class Run:
    path: Path
    summary: Summary
    history: list[dict[str, Any]]

    @property
    def label(self) -> str:
        return self.summary.label

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.summary.to_json()

    @cached_property
    def clients(self) -> dict[str, dict[str, float]]:
        """The values by metric and client, of the last evaluated round."""
        return last_values(RunFolder(self.path).lines("clients.jsonl"))

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings."""
        return RunFolder(self.path).config()

    @property
    def cell(self) -> Mapping[str, Any]:
        """The run's place in its experiment: its row, its condition (`sweep`), and the values to try (`tune`)."""
        found = self.config.get("cell")
        return found if isinstance(found, Mapping) else {}

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
    def is_segmentation(self) -> bool:
        """Segmentation always has mean IoU; classification has it if `evaluate.metrics` names it."""
        if self.summary.mean_iou is not None and "mean_iou" in self.summary.metrics:
            return (RunFolder(self.path).partition() or {}).get("classes") == ["images"]  # not counted by class
        return self.summary.mean_iou is not None


def headline(runs: Iterable[Run]) -> str:
    """The measure that runs are compared by: mean IoU if all that were evaluated are of segmentation, else accuracy."""
    segmented = {run.is_segmentation for run in runs if run.summary.accuracy is not None}
    return "mean_iou" if segmented == {True} else "accuracy"


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in the folders and their subfolders, in the order in which they began."""
    files: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder; give run folders, or folders that contain some")
        # A subfolder may disappear during the search, or not be readable: os.walk leaves it out.
        found = sorted(Path(where, "summary.json") for where, _, names in os.walk(folder) if "summary.json" in names)
        if not found:
            raise UserError(f"{str(folder)!r} holds no run (there is no summary.json in it or its subfolders)")
        files |= dict.fromkeys(found)
    runs = []
    for file in files:
        run_folder = RunFolder(file.parent)
        if (summary := run_folder.summary()) is None:  # deleted meanwhile
            continue
        history = run_folder.history()
        try:
            summary.check(history)
        except (ValueError, TypeError) as error:
            raise damaged(file, str(error)) from None
        runs.append(Run(file.parent, summary, history))
    return sorted(runs, key=lambda run: (run.summary.began, str(run.path)))


@dataclass(frozen=True)
class Row:
    """One line of the table: runs of one label that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]
    accuracy_of: str = ""  # where rows differ: what `accuracy` is of, if not the global model; a part of the label

    @cached_property
    def unfinished(self) -> str:
        """The states of its runs that have not finished, for instance `failed`."""
        return ", ".join(sorted({run.summary.status for run in self.runs} - {"finished"}))

    @property
    def title(self) -> str:
        """The label, and a mark if figures are not those of finished runs."""
        return self.label + (f" [{self.unfinished}]" if self.unfinished else "")

    def figures(self, key: str) -> list[float]:
        return [float(run.figures[key]) for run in self.runs if key in run.figures]


def group(runs: Sequence[Run]) -> list[Row]:
    """A row for each label, or several where the settings of its runs differ: each row then names its own values."""
    rows = []
    mixed = len({run.summary.accuracy_of for run in runs}) > 1
    for label in dict.fromkeys(run.label for run in runs):
        variants: list[list[Run]] = []
        for run in (run for run in runs if run.label == label):
            same = next((variant for variant in variants if variant[0].settings == run.settings), None)
            if same is None:
                variants.append([run])
            else:
                same.append(run)
        for variant, values in zip(variants, differences([each[0].settings for each in variants]), strict=True):
            of = variant[0].summary.accuracy_of.removesuffix(", mean")
            note = f" ({of})" if mixed and of != GLOBAL_MODEL else ""
            rows.append(Row((f"{label}, {values}" if values else label) + note, tuple(variant), note))
    return rows


def differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if any(each.get(key) != found[0].get(key) for each in found)]


def differences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several settings in words: its values where they differ; empty if they are equal."""
    keys = differing(found)
    return [", ".join(f"{key}={each[key]}" for key in keys if key in each) for each in found]


def repetitions(row: Row) -> str:
    count, seeds = len(row.runs), len({run.summary.seed for run in row.runs})
    words = f"{seeds} {'seed' if seeds == 1 else 'seeds'}"
    return words if count == seeds else f"{count} runs, {words}"


_HEADINGS = ("run", "accuracy", "best on test", "rounds", "communication rounds", "MiB down", "MiB up", "seconds")

# Columns that a table has only if one of its runs has these figures.
_OPTIONAL = {
    "best_round_accuracy": "best by validation",
    "mean_iou": "mean IoU",
    "clients_accuracy": "clients' accuracy",
    "clients_own_accuracy": "on own data",
    "clients_mean_iou": "clients' mean IoU",
    "unseen_accuracy": "new clients",
    "unseen_accuracy_tuned": "fine-tuned",
}


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Headings and cells as text; several seeds are shown as mean ± standard deviation, with their number."""
    metrics = dict.fromkeys(name for row in rows for run in row.runs for name in run.summary.metrics)
    columns = _OPTIONAL | {key: _title(key) for key in keys_of(metrics)}
    present = {key: name for key, name in columns.items() if any(row.figures(key) for row in rows)}
    lines: list[tuple[str, ...]] = [(*_HEADINGS[:3], *present.values(), *_HEADINGS[3:])]
    for row in rows:
        lines.append(
            (
                row.title + (f" ({repetitions(row)})" if len(row.runs) > 1 else ""),
                figure(row.figures("accuracy"), 100, 2, "%"),
                figure(row.figures("best_test_accuracy"), 100, 2, "%"),
                *(figure(row.figures(key), *_unit(key)) for key in present),
                figure(row.figures("rounds"), 1, 0),
                figure(row.figures("communication_rounds"), 1, 0),
                figure(row.figures("bytes_down"), 1 / MIB, 2),
                figure(row.figures("bytes_up"), 1 / MIB, 2),
                figure(row.figures("seconds"), 1, 1),
            )
        )
    return lines


def _title(key: str) -> str:
    """The heading of a metric of `evaluate.metrics`."""
    name = key.removeprefix("clients_")
    own = name.startswith("own_") and name != key
    words = name.removeprefix("own_").replace("_", " ") if own else name.replace("_", " ")
    return words if name == key else f"clients' {words}" + (" on own data" if own else "")


def _unit(key: str) -> tuple[float, int, str]:
    """Scale, digits and unit of a column: metrics of the user need not be fractions."""
    return (100, 2, "%") if key in _OPTIONAL or Measure.of(key).is_fraction else (1, 4, "")


@dataclass(frozen=True)
class Domains:
    """One kind of accuracy by domain."""

    title: str
    prefix: str
    names: tuple[str, ...]

    def averages(self, row: Row) -> list[float]:
        """The unweighted mean over domains of each run that has all of them."""
        keys = [self.prefix + name for name in self.names]
        whole = [run.summary.domains for run in row.runs if run.summary.domains.keys() >= set(keys)]
        return [statistics.fmean(domains[key] for key in keys) for domains in whole]

    def table(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        lines: list[tuple[str, ...]] = [("run", *self.names, "average")]
        for row in rows:
            columns = [*(row.figures(self.prefix + name) for name in self.names), self.averages(row)]
            if any(columns):
                lines.append((row.title, *(figure(values, 100, 1, "%") for values in columns)))
        return lines


def by_domain(rows: Sequence[Row]) -> list[Domains]:
    """The kinds of accuracy by domain that at least one run has."""
    found = []
    for prefix, title in BY_DOMAIN.items():
        names = {
            key.removeprefix(prefix): None
            for row in rows
            for run in row.runs
            for key in run.summary.domains
            if key.startswith(prefix)
        }
        if names:
            found.append(Domains(title, prefix, tuple(names)))
    return found


CLIENTS = "clients with equal weights, last evaluated round"


def client_table(rows: Sequence[Row], *, every: bool) -> list[tuple[str, ...]]:
    """Mean, deviation and worst tenth over clients of each metric, or of the main ones; maybe only headings."""
    chosen = evaluated if every else main
    lines: list[tuple[str, ...]] = [("run", "metric", "clients", "mean", "deviation", "worst tenth")]
    for row in rows:
        for metric in dict.fromkeys(metric for run in row.runs for metric in chosen(run.clients)):
            seeds = [list(run.clients[metric].values()) for run in row.runs if metric in run.clients]
            measured = [spread(values, metric) for values in seeds]
            figures = ([getattr(each, name) for each in measured] for name in ("mean", "deviation", "worst_tenth"))
            names = [name for run in row.runs for name in run.clients]
            unit = (100, 2, "%") if Measure.of_client(metric, names).is_fraction else (1, 4, "")
            shown = (figure(values, *unit) for values in figures)
            lines.append((row.title, heading(metric), figure([len(values) for values in seeds], 1, 0), *shown))
    return lines


class Cell(str):
    """The text of a cell, and the number that a table is sorted by."""

    value: float | None = None


def figure(values: Sequence[float], scale: float, digits: int, unit: str = "", *, mark: str = "") -> Cell:
    """The mean, and the standard deviation if values differ; and a mark."""
    mark = f" [{mark}]" if mark else ""
    if not values:
        return Cell("-" + mark)
    scaled = [value * scale for value in values]
    text = f"{mean(scaled):,.{digits}f}{unit}"
    if spread := deviation(scaled):
        text += f" ± {spread:,.{digits}f}"
    cell = Cell(text + mark)
    cell.value = mean(scaled)
    return cell


def mean(values: Sequence[float]) -> float:
    """Infinite or NaN if a value is: a metric of the user may be."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of at least two values, all of which are finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(in_markdown, line))} |" for line in lines]
    rule = "|---" + "|---:" * (len(lines[0]) - 1) + "|"
    return "\n".join([head, rule, *body]) + "\n"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for number, line in enumerate(lines):
        first = line[0].ljust(widths[0])
        text.append("  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]))
        if number == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def tables(rows: Sequence[Row], *, every: bool = False) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of a report, each with its title; the first one has none. `every`: with all metrics of clients."""
    found = [("", table(rows)), *((kind.title, kind.table(rows)) for kind in by_domain(rows))]
    if len(individuals := client_table(rows, every=every)) > 1:
        found.append((CLIENTS, individuals))
    return found


def tables_as_text(rows: Sequence[Row]) -> str:
    return "\n\n".join((f"{name}\n" if name else "") + as_text(lines) for name, lines in tables(rows))
