"""What a comparison has shown, which tuned row to take, and what to do next: the end of `fedbn run`."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence

from fedbn_flwr.errors import few
from fedbn_flwr.results.text import printable
from fedbn_flwr.tasks import goodness

from ..folder.places import from_here
from .rows import Row, differing, headline, mean, runs_of
from .tables import FEWEST, paired, test_to_train, with_holm


def seen(rows: Sequence[Row]) -> str:
    """How far the worst and the best row end from central training; without it, the best one from the worst.

    Empty without two such rows that have finished, if their data differ by more than the partition, or if a value is
    swept.
    """
    key = headline(runs_of(rows))
    ends = {row: mean(values) for row in rows if not row.unfinished and (values := row.values(key))}
    ranked = sorted(ends, key=lambda row: goodness(key.name, ends[row]))
    federated = [row for row in ranked if row.first.config.get("clients") != 1]
    central = [row for row in ranked if row not in federated]
    compared = [*dict.fromkeys((*central[-1:], *federated[:1], *federated[-1:]))]
    apart = [name.replace("data.partition", "") for name in differing([row.first.settings for row in ranked])]
    on_other_data = any(name.startswith("data.") for name in apart)
    swept = any(row.first.cell.get("sweep") for row in ranked)
    if len(compared) < 2 or on_other_data or swept or not all(map(math.isfinite, ends.values())):
        return ""
    base, *others = compared
    digits = 1 if key.is_fraction else key.digits(ends.values())

    def gap(row: Row) -> str:
        difference = key.scale * (ends[row] - ends[base])
        amount = f"{abs(difference):.{digits}f}"
        where = f"{'points ' if key.is_fraction else ''}{'above' if difference > 0 else 'below'}"
        return f"{amount} {where}" if float(amount) else "level with"

    words = [f"In {key.title}, {others[0].label} ends {gap(others[0])} {base.label}"]
    return printable(", ".join([*words, *(f"{row.label} {gap(row)} it" for row in others[1:])]) + ".")


def decided(rows: Sequence[Row]) -> str:
    """Which tuned row is best, by paired t tests over the seeds; empty without two such rows, or with too few seeds."""
    key = headline(runs_of(rows))
    tuned = [row for row in rows if row.first.cell.get("tune") and not row.first.cell.get("sweep")]
    ends = {row: mean(row.values(key)) for row in tuned if not row.unfinished and row.first.config.get("clients") != 1}
    if len(ends) < 2:
        return ""
    *others, best = sorted(ends, key=lambda row: goodness(key.name, ends[row]))
    share = max(map(test_to_train, ends))
    pairs = with_holm({row.label: paired(best.by_seed(key), row.by_seed(key), share) for row in reversed(others)})
    if min(pair.pairs for pair in pairs.values()) < FEWEST:
        return ""
    like = [label for label, pair in pairs.items() if not pair.p_holm < 0.05]  # NaN isn't
    worse, name = [label for label in pairs if label not in like], best.label
    said = [f"{name} is better than {few(worse, 5)}."] if worse else []
    said.append(f"The data don't decide between {name} and {few(like, 5)}." if like else f"Take {name}.")
    return printable(" ".join([*said, f"(Paired t tests over {len(best.counted)} seeds, at 5 % for all together.)"]))


def next_step(rows: Sequence[Row], experiment: str) -> str:
    """A command that goes on from here. A shipped experiment is an example; others are used, repeated or compared."""
    folder = from_here(rows[0].first.folder)
    words = (
        ["new", "mine"]
        if not os.path.isfile(experiment)
        else ["predict", str(folder), "--data", "PATH"]
        if len(rows) == 1
        else ["run", experiment, "seeds=[0,1,2,3,4]"]
        if any(len(row.counted) < FEWEST for row in rows)
        else ["report", str(folder.parent), "--baseline", rows[0].label]
    )
    return f"Next: {shlex.join(['fedbn', *words])}"
