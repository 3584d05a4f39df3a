"""A table and a plot from run folders, for `fedbn report DIR...`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbn_flwr.errors import UserError
from fedbn_flwr.messages.protocol import METRICS

from .clients import evaluated, heading, last_values, plot_boxes, spread
from .folder import RunFolder, deciding, flat_settings
from .summary import BY_DOMAIN, Summary, keys_of

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

MIB = 1024**2

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
    def settings(self) -> dict[str, Any]:
        """The settings that affect results, without the seed and names, by dotted key."""
        config = deciding(RunFolder(self.path).config())
        return flat_settings({key: value for key, value in config.items() if key not in ("name", "label", "seed")})


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in the folders and their subfolders, in the order in which they began."""
    files: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder; give run folders, or folders that contain some")
        found = sorted(folder.rglob("summary.json"))
        if not found:
            raise UserError(f"{str(folder)!r} holds no run (there is no summary.json in it or its subfolders)")
        files |= dict.fromkeys(found)
    runs = []
    for file in files:
        run_folder = RunFolder(file.parent)
        try:
            summary = run_folder.summary()
            assert summary is not None, "its file was found"
            runs.append(Run(file.parent, summary, run_folder.history()))
        except (ValueError, OSError) as error:
            raise UserError(f"{str(file.parent)!r} is not a readable run: {error}") from None
    return sorted(runs, key=lambda run: (run.summary.began, str(run.path)))


@dataclass(frozen=True)
class Row:
    """One line of the table: runs of one label that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]

    def figures(self, key: str) -> list[float]:
        return [float(run.figures[key]) for run in self.runs if key in run.figures]


def group(runs: Sequence[Run]) -> list[Row]:
    """A row for each label, or several where the settings of its runs differ: each row then names its own values."""
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        variants: list[list[Run]] = []
        for run in (run for run in runs if run.label == label):
            same = next((variant for variant in variants if variant[0].settings == run.settings), None)
            if same is None:
                variants.append([run])
            else:
                same.append(run)
        found = [variant[0].settings for variant in variants]
        differing = [key for key in dict.fromkeys(key for each in found for key in each) if _differs(key, found)]
        for variant, settings in zip(variants, found, strict=True):
            values = ", ".join(f"{key}={settings[key]}" for key in differing if key in settings)
            rows.append(Row(f"{label}, {values}" if values else label, tuple(variant)))
    return rows


def _differs(key: str, variants: Sequence[Mapping[str, Any]]) -> bool:
    return any(variant.get(key) != variants[0].get(key) for variant in variants)


_HEADINGS = ("run", "accuracy", "best on test", "rounds", "communication rounds", "MiB down", "MiB up", "seconds")

# Columns that a table has only if one of its runs has these figures.
_OPTIONAL = {
    "mean_iou": "mean IoU",
    "clients_accuracy": "clients' accuracy",
    "clients_own_accuracy": "on own data",
    "clients_mean_iou": "clients' mean IoU",
}


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Headings and cells as text; several seeds are shown as mean ± standard deviation, with their number."""
    metrics = dict.fromkeys(name for row in rows for run in row.runs for name in run.summary.metrics)
    columns = _OPTIONAL | {key: _title(key) for key in keys_of(metrics)}
    present = {key: name for key, name in columns.items() if any(row.figures(key) for row in rows)}
    lines: list[tuple[str, ...]] = [(*_HEADINGS[:3], *present.values(), *_HEADINGS[3:])]
    for row in rows:
        count, seeds = len(row.runs), len({run.summary.seed for run in row.runs})
        repeated = (
            f" ({seeds} seeds)" if count == seeds else f" ({count} runs, {seeds} {'seed' if seeds == 1 else 'seeds'})"
        )
        unfinished = {run.summary.status for run in row.runs} - {"finished"}
        status = f" [{', '.join(sorted(unfinished))}]" if unfinished else ""
        lines.append(
            (
                row.label + (repeated if count > 1 else "") + status,
                _spread(row.figures("accuracy"), 100, 2, "%"),
                _spread(row.figures("best_test_accuracy"), 100, 2, "%"),
                *(_spread(row.figures(key), *_unit(key)) for key in present),
                _spread(row.figures("rounds"), 1, 0),
                _spread(row.figures("communication_rounds"), 1, 0),
                _spread(row.figures("bytes_down"), 1 / MIB, 2),
                _spread(row.figures("bytes_up"), 1 / MIB, 2),
                _spread(row.figures("seconds"), 1, 1),
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
    known = key in _OPTIONAL or key.endswith(METRICS)
    return (100, 2, "%") if known else (1, 4, "")


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
                lines.append((row.label, *(_spread(values, 100, 1, "%") for values in columns)))
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


def client_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Mean, deviation and worst tenth over clients of each metric; only headings if no client was evaluated."""
    lines: list[tuple[str, ...]] = [("run", "metric", "clients", "mean", "deviation", "worst tenth")]
    for row in rows:
        for metric in dict.fromkeys(metric for run in row.runs for metric in evaluated(run.clients)):
            seeds = [list(run.clients[metric].values()) for run in row.runs if metric in run.clients]
            measured = [spread(values, metric) for values in seeds]
            figures = ([getattr(each, name) for each in measured] for name in ("mean", "deviation", "worst_tenth"))
            shown = (_spread(values, 100, 2, "%") for values in figures)
            lines.append((row.label, heading(metric), _spread([len(values) for values in seeds], 1, 0), *shown))
    return lines


def _spread(values: Sequence[float], scale: float, digits: int, unit: str = "") -> str:
    if not values:
        return "-"
    scaled = [value * scale for value in values]
    mean = f"{statistics.fmean(scaled):,.{digits}f}"
    if len(scaled) < 2 or max(scaled) == min(scaled):
        return f"{mean}{unit}"
    return f"{mean}{unit} ± {statistics.stdev(scaled):,.{digits}f}"


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|---" + "|---:" * (len(lines[0]) - 1) + "|"
    return "\n".join([head, rule, *body]) + "\n"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for number, line in enumerate(lines):
        first = line[0].ljust(widths[0])
        text.append("  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]))
        if number == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def plot(rows: Sequence[Row]) -> Plot:
    """Plot accuracy against rounds, communication rounds and bytes; seeds as their mean, with a band for the range."""
    from .figure import Plot

    kinds = by_domain(rows)
    figure = Plot(figsize=(15, 4.2 + 2.8 * len(kinds)), layout="constrained")
    grid = figure.add_gridspec(1 + len(kinds), 3, height_ratios=[4.2] + [2.8] * len(kinds))
    panels = [figure.add_subplot(grid[0, 0])]
    panels += [figure.add_subplot(grid[0, i], sharey=panels[0]) for i in (1, 2)]
    for panel in panels[1:]:
        panel.tick_params(labelleft=False)
    # Segmentation models are compared by mean IoU.
    points = [point for row in rows for run in row.runs for point in _curve(run.history)]
    measure = "mean_iou" if points and all("mean_iou" in point for point in points) else "accuracy"
    axes: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("rounds", lambda point: float(point["round"])),
        ("communication rounds", lambda point: float(point["communication_rounds"])),
        ("MiB down and up", lambda point: (point["bytes_down"] + point["bytes_up"]) / MIB),
    ]
    for panel, (name, spent) in zip(panels, axes, strict=True):
        for number, row in enumerate(rows):
            curves = [{spent(point): 100 * point[measure] for point in _curve(run.history)} for run in row.runs]
            # Only points that all seeds have: an interrupted run shortens the curve.
            places = sorted(set.intersection(*(set(curve) for curve in curves)))
            if not places:
                continue
            columns = [[curve[place] for curve in curves] for place in places]
            colour = COLOURS[number % len(COLOURS)]
            panel.plot(
                places,
                [statistics.fmean(column) for column in columns],
                "-" if number < len(COLOURS) else "--",
                color=colour,
                label=row.label,
                marker="o" if len(places) == 1 else None,
            )
            if len(curves) > 1:
                low, high = [min(column) for column in columns], [max(column) for column in columns]
                panel.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
        panel.set_xlabel(name)
        panel.grid(alpha=0.3)
        panel.set_xlim(left=0)
    panels[0].set_ylabel(f"{measure.replace('_iou', ' IoU')} of the global model, %")
    for number, kind in enumerate(kinds, start=1):
        _plot_domains(figure.add_subplot(grid[number, :]), rows, kind)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    return figure


def _plot_domains(panel: Any, rows: Sequence[Row], kind: Domains) -> None:
    """A group of bars per domain and for their average: one bar per row, with a line for the range over seeds."""
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        columns = [*(row.figures(kind.prefix + name) for name in kind.names), kind.averages(row)]
        for place, values in enumerate(columns):
            if not values:
                continue
            x, mean = place + (number - (len(rows) - 1) / 2) * width, 100 * statistics.fmean(values)
            panel.bar(
                x,
                mean,
                0.9 * width,
                color=COLOURS[number % len(COLOURS)],
                hatch=None if number < len(COLOURS) else "//",
                edgecolor="white",
                linewidth=0,
            )
            if len(values) > 1:
                panel.plot([x, x], [100 * min(values), 100 * max(values)], color="black", lw=1)
    panel.axvline(len(kind.names) - 0.5, color="grey", lw=0.8)
    panel.set_xticks(range(len(kind.names) + 1), [*kind.names, "average"])
    panel.set_xlim(-0.5, len(kind.names) + 0.5)
    panel.set_ylabel("%")
    panel.set_title(kind.title, fontsize="medium", loc="left")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each run's settings, summary and curve: the evaluated rounds, with the traffic up to each of them."""
    return [
        {
            "settings": RunFolder(run.path).config(),
            "summary": run.figures,
            "curve": _curve(run.history),
            "clients": run.clients,
        }
        for row in rows
        for run in row.runs
    ]


def _curve(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    spent = {"communication_rounds": 0, "bytes_down": 0, "bytes_up": 0}
    points = []
    for line in history:
        spent = {key: total + int(line[key]) for key, total in spent.items()}
        if line.get("accuracy") is not None:
            more = {"mean_iou": line["mean_iou"]} if line.get("mean_iou") is not None else {}
            points.append({"round": line["round"], "accuracy": line["accuracy"], **more, "loss": line["loss"], **spent})
    return points


def tables(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of a report, each with its title; the first one has none."""
    found = [("", table(rows)), *((kind.title, kind.table(rows)) for kind in by_domain(rows))]
    if len(individuals := client_table(rows)) > 1:
        found.append((CLIENTS, individuals))
    return found


def tables_as_text(rows: Sequence[Row]) -> str:
    return "\n\n".join((f"{name}\n" if name else "") + as_text(lines) for name, lines in tables(rows))


def write_report(folders: Sequence[Path], out: Path) -> tuple[str, Path, Path]:
    """Write report.md (the table), report.png (the plot) and report.json (the figures of both) into `out`.

    Returns the table as text, and the paths of the first two files.
    """
    rows = group(find_runs(folders))
    try:
        out.mkdir(parents=True, exist_ok=True)
        page, picture = out / "report.md", out / "report.png"
        plot(rows).savefig(picture, dpi=130)
        pictures = [picture.name]
        if plot_boxes({row.label: [run.clients for run in row.runs] for row in rows}, COLOURS, out / "clients.png"):
            pictures.append("clients.png")
        parts = [(f"{name}:\n\n" if name else "") + as_markdown(lines) for name, lines in tables(rows)]
        page.write_text(
            "\n".join([*parts, *(f"![{Path(name).stem}]({name})\n" for name in pictures)]), encoding="utf-8"
        )
        (out / "report.json").write_text(json.dumps(figures(rows), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report into {str(out)!r}: {error.strerror}") from None
    return tables_as_text(rows), page, picture
