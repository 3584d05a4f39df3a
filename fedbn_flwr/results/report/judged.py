"""The table of a model that clients evaluated without training: what each measured on its own test examples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from ..metric_key import MetricKey
from .rows import Row
from .tables import Lines, as_measured, as_text, paired


def by_client(rows: Sequence[Row]) -> str:
    """A column for each row, and a line for how each differs from the first one, in pairs by client.

    Empty if no client measured anything.
    """
    runs = {row.label: row.counted[0] for row in rows}
    own = MetricKey(rows[0].first.summary.of_task.main, "own") if rows else MetricKey("")
    counts = [run.clients.get(str(MetricKey("examples", "own")), {}) for run in runs.values()]
    examples = {int(client): count for found in counts for client, count in found.items() if count}
    tables = {label: _known(run.clients.get(str(own), {}), examples) for label, run in runs.items()}
    if not any(tables.values()):
        return ""
    first, *others = tables
    lines: Lines = [("client", "examples", *tables)]
    for client in sorted(examples):
        found = ([table[client]] if client in table else [] for table in tables.values())
        lines.append(
            (
                rows[0].first.files.name_of(client),
                f"{examples[client]:,.0f}",
                *(as_measured(own, values) for values in found),
            )
        )
    means = (
        [statistics.fmean(table.values(), [examples[client] for client in table])] if table else []
        for table in tables.values()
    )
    lines.append(("weighted", f"{sum(examples.values()):,.0f}", *(as_measured(own, mean) for mean in means)))
    said = [f"{own.of('').title} on each client's own test examples", as_text(lines)]
    for label in others:
        pair = paired(tables[label], tables[first])
        middle, low, high = (as_measured(own, [value]) for value in (pair.difference, pair.low, pair.high))
        tested = f"; 95 % interval {low} to {high}, p = {pair.p:.2g}" if math.isfinite(pair.p) else ""
        said.append(f"{label} minus {first}: {middle}, the mean of {pair.pairs} clients{tested}")
    return "\n".join(said)


def _known(values: Mapping[str, float], examples: Collection[int]) -> dict[int, float]:
    """The values of the clients that say on how many examples they are."""
    return {int(client): value for client, value in values.items() if int(client) in examples}
