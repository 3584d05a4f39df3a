"""The parts of a report's page that need further files of a run folder: clients, partition, matrix, layers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .clients import Values, is_count, is_loss, spread
from .curves import Measure, is_number, thinned
from .folder import RunFolder
from .report import Domains, by_domain
from .rows import Row, Run

_CELLS = 100  # rows and columns of a heat map
_POINTS = 200  # clients of a row drawn as points; beyond that only outliers are
_ROUNDS = 200  # of a layer's curve


def name_of(run: Run, row: Row) -> str:
    return row.label if len(row.runs) == 1 else f"{row.label}, seed {run.summary.seed}"


# --- clients ------------------------------------------------------------------


def clients(rows: Sequence[Row]) -> dict[str, Any] | None:
    """For each measure of clients and each row, the spread over clients in the last round that has the measure."""
    found = [[_finite(run.clients) for run in row.counted] for row in rows]
    measured = dict.fromkeys(key for runs in found for values in runs for key in values)
    keys = dict.fromkeys(sorted(measured, key=lambda key: (is_count(key), is_loss(key))))  # the page opens on the first
    if not keys:
        return None
    boxes = {
        key: [_box([values.get(key, {}) for values in runs], row, key) for runs, row in zip(found, rows, strict=True)]
        for key in keys
    }
    return {"measures": [_measure_of_client(key, keys) for key in keys], "boxes": boxes}


def _finite(values: Mapping[str, Values]) -> dict[str, dict[str, float]]:
    """measure -> client -> value, without those of clients that diverged"""
    return {key: {name: value for name, value in each.items() if is_number(value)} for key, each in values.items()}


def _measure_of_client(key: str, keys: Iterable[str]) -> dict[str, Any]:
    measure = Measure.of_client(key, keys)
    title = "training images" if key == "images" else measure.full_title
    return {"key": key, "title": title.replace("(clients, ", "("), "fraction": measure.is_fraction}


def _box(runs: Sequence[Mapping[str, float]], row: Row, key: str) -> dict[str, Any] | None:
    measured = [list(values.values()) for values in runs if values]
    if not measured:
        return None
    spreads = [spread(values, key) for values in measured]
    everything = sorted(float(value) for values in measured for value in values)  # quartiles are floats too
    first, median, third = (
        statistics.quantiles(everything, n=4, method="inclusive") if len(everything) > 1 else everything * 3
    )
    reach = 1.5 * (third - first)
    inside = [value for value in everything if first - reach <= value <= third + reach]
    points = [
        (value, f"client {client}" + (f", seed {run.summary.seed}" if len(row.runs) > 1 else ""))
        for values, run in zip(runs, row.counted, strict=True)
        for client, value in values.items()
    ]
    if len(points) > _POINTS:
        points = [(value, name) for value, name in points if not inside[0] <= value <= inside[-1]]
    return {
        "count": len(everything),
        "runs": len(measured),
        "mean": statistics.fmean(each.mean for each in spreads),
        "deviation": statistics.fmean(each.deviation for each in spreads),
        "worst": None if key.endswith("images") else statistics.fmean(each.worst_tenth for each in spreads),
        "whiskers": [inside[0], inside[-1]],
        "quartiles": [first, median, third],
        "range": [everything[0], everything[-1]],
        "points": sorted(points)[:_POINTS],
    }


# --- data and models of clients ---------------------------------------------


def partitions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each different partition of the runs, with the runs that use it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for run in row.runs:
            content = RunFolder(run.path).partition()
            if content is None:
                continue
            same = found.setdefault(json.dumps(content), {**content, "runs": []})
            same["runs"].append(name_of(run, row))
    for content in found.values():
        content["total"] = len(content["counts"])
        content["counts"] = content["counts"][:_CELLS]
        content["clients"] = content["clients"][:_CELLS] or [str(i) for i in range(len(content["counts"]))]
    return list(found.values())


def matrices(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The accuracy of each client's model on each client's images; means of blocks if there are many clients."""
    found = []
    for row in rows:
        for run in row.runs:
            content = RunFolder(run.path).matrix()
            if content is None:
                continue
            names, values = content["clients"], content["accuracy"]
            side = -(-len(names) // _CELLS)
            blocks = [range(start, min(start + side, len(names))) for start in range(0, len(names), side)]
            if side > 1:
                values = [[_mean(values[i][j] for i in down for j in across) for across in blocks] for down in blocks]
                names = [f"{names[block[0]]} to {names[block[-1]]}" for block in blocks]
            found.append({"run": name_of(run, row), "clients": names, "values": values, "block": side})
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.fmean(measured) if measured else None


# --- layers -------------------------------------------------------------------


def layers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What norms.jsonl has of each layer: over the rounds, and of each client in the last recorded round."""
    return [found for row in rows for run in row.runs if (found := _layers_of(run, name_of(run, row))) is not None]


def _layers_of(run: Run, name: str) -> dict[str, Any] | None:
    lines = thinned(RunFolder(run.path).lines("norms.jsonl"), _ROUNDS)
    if not lines:
        return None
    names = list(dict.fromkeys(layer for line in lines for layer in line.get("layers", {}))) or list(
        dict.fromkeys(layer for line in lines for of in line.get("clients", {}).values() for layer in of)
    )
    series: dict[str, list[list[float | None]]] = {}

    def put(key: str, layer: str, place: int, value: float | None) -> None:
        series.setdefault(key, [[None] * len(lines) for _ in names])[names.index(layer)][place] = value

    for place, line in enumerate(lines):
        for layer, figures in line.get("layers", {}).items():
            for key, value in figures.items():
                put(key, layer, place, value)
        of_clients: dict[tuple[str, str], list[float]] = {}
        for figures_of in line.get("clients", {}).values():
            for layer, figures in figures_of.items():
                for key, value in figures.items():
                    of_clients.setdefault((key, layer), []).append(value)
        for (key, layer), values in of_clients.items():
            if layer in names:
                put(f"{key}, mean over clients", layer, place, _mean(filter(is_number, values)))
    last = lines[-1].get("clients", {})
    keys = list(dict.fromkeys(key for of in last.values() for figures in of.values() for key in figures))
    by_client = {
        key: [[of.get(layer, {}).get(key) for layer in names] for of in list(last.values())[:_CELLS]] for key in keys
    }
    rounds = [line["round"] for line in lines]
    shown = list(last)[:_CELLS]
    return {"run": name, "layers": names, "rounds": rounds, "series": series, "clients": shown, "by_client": by_client}


# --- domains ---------------------------------------------------


def domains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and deviation over runs of each row in each domain, and of the mean over domains."""

    def bars(kind: Domains, row: Row) -> list[list[float] | None]:
        columns = [*(row.figures(kind.prefix + name) for name in kind.names), kind.averages(row)]
        return [
            [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0] if values else None
            for values in columns
        ]

    return [
        {"title": kind.title, "names": [*kind.names, "average"], "bars": [bars(kind, row) for row in rows]}
        for kind in by_domain(rows)
    ]
