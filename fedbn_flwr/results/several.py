"""Several runs as Python objects: `Results`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.errors import UserError, did_you_mean

from .metric_key import MetricKey
from .read.runs import find_runs
from .report.pictures import plot
from .report.rows import Row, choose, group
from .report.tables import ReportForm, as_html, numbers, tables, tables_as_text
from .result import Result, frame_of

if TYPE_CHECKING:
    import pandas as pd

    from .report.figure import Plot


class Results(tuple[Result, ...]):
    """Several runs in the order of their experiment, for instance `Results([run("quick"), run("quick", seed=1)])`."""

    @classmethod
    def read(cls, *folders: str | Path, allow: str | Collection[str] = ()) -> Results:
        """The runs in the folders and their subfolders; `allow` as for `Result.read`."""
        names = (allow,) if isinstance(allow, str) else allow
        return cls(find_runs([Path(folder).expanduser() for folder in folders], names))

    def find(self, name: str) -> Result:
        """The run of this label, or in a folder of this name."""
        found = [result for result in self if name in (result.label, result.folder.name)]
        if len(found) != 1:
            names = did_you_mean(name, (result.folder.name for result in self))
            raise UserError(f"{len(found)} runs are called {name!r}; give the label or the folder of one; {names}")
        return found[0]

    @property
    def labels(self) -> list[str]:
        """The different labels; runs that differ only in their seed have the same one."""
        return list(dict.fromkeys(result.label for result in self))

    @property
    def summaries(self) -> pd.DataFrame:
        """A row per run, with the columns of summary.json."""
        return frame_of("Results.summaries", [result.summary.to_json() for result in self])

    @property
    def history(self) -> pd.DataFrame:
        """A row per run and round: label, seed, and the columns of history.jsonl."""
        seeds = [({"label": result.label, "seed": result.summary.seed}, result.lines) for result in self]
        return frame_of("Results.history", [{**names, **line} for names, history in seeds for line in history])

    def table(self) -> str:
        """The tables of `fedbn report`: a row per label, with mean and standard deviation over seeds."""
        return tables_as_text(tables(self._rows))

    def frame(self, columns: str | Sequence[str] = (), *, baseline: str = "") -> pd.DataFrame:
        """The first table of `fedbn report` as numbers: a row per label, a mean and a deviation (`_std`) per metric.

        Parameters
        ----------
        columns
            A key of summary.json, or several; by default the columns of the table.
        baseline
            The row with which the others are compared in the first column, by a paired t test over seeds: its name in
            the table, or its label in the experiment.
        """
        found = numbers(
            choose(self._rows), ReportForm((columns,) if isinstance(columns, str) else tuple(columns), baseline)
        )
        return frame_of("Results.frame()", found).set_index("run")

    def plot(self, measure: str | None = None, axis: str | None = None) -> Plot:
        """The plot of `fedbn report`: the first metric of the table against what was spent.

        It is a figure of matplotlib, which a notebook shows.

        Parameters
        ----------
        measure
            Another key of the history.
        axis
            `round`, `communication_rounds`, `mib` or `seconds`: a single panel with its legend inside.
        """
        return plot(choose(self._rows), None if measure is None else MetricKey.parse(measure), axis)

    @property
    def _rows(self) -> list[Row]:
        return group(self)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return "".join(as_html(*table) for table in tables(self._rows))
