"""Runs as Python objects, read from their folders: `Result` is one run, `Results` several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr import named
from fedbn_flwr.errors import UserError, did_you_mean, few, needs
from fedbn_flwr.tasks import title_of
from fedbn_flwr.text import in_html
from fedbn_flwr.trees import Json

from .metric_key import MetricKey
from .read.runs import Run, find_runs
from .report.pictures import plot
from .report.rows import Row, choose, group
from .report.tables import ReportForm, as_html, numbers, tables, tables_as_text

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from .read.portable import Format
    from .report.figure import Plot


class Result(Run):
    """One run: its settings, its metrics by round, and its model.

    A result doesn't change after it was read; `Result.read(result.folder)` reads a run again that has continued.
    """

    @classmethod
    def read(cls, folder: str | Path, *, allow: str | Collection[str] = ()) -> Result:
        """The run in a folder, or in the only run folder below it.

        The folder's author chose what its model calls, so it may call only this library and what you `allow`, such as
        `"own:net"`.
        """
        found = Results.read(folder, allow=allow)
        if len(found) > 1:
            raise UserError(
                f"{str(folder)!r} holds {len(found)} runs: {few((run.folder.name for run in found), 5)}; give the "
                "folder of one, or use Results.read"
            )
        return found[0]

    @cached_property
    def history(self) -> pd.DataFrame:
        """A row per round, with the columns of history.jsonl."""
        frame = frame_of("Result.history", self.lines)
        return frame if frame.empty else frame.set_index("round")

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the model's outputs; empty if the server had no data."""
        return tuple(self.files.model_description()["classes"] or ())

    def model(
        self, client: int | None = None, *, file: str = "model.safetensors", state: str | Path | None = None
    ) -> nn.Module:
        """The network with its trained weights, in evaluation mode, on the CPU.

        Parameters
        ----------
        client
            The number of a client, for its personal model (`FedBN`, `Standalone`); only for runs on the local engine.
            By default the global model.
        file
            The file of the run folder with the global model.
        state
            A site's state folder, to make its personal model. Give `client` too if it holds several clients' states.
        """
        from .read.trained import global_model, personal_model, site_model

        with named.only(self.allowed):
            if state is not None:
                return site_model(self.files, Path(state), client).network
            return global_model(self.files, file) if client is None else personal_model(self.files, client).network

    def normalise(self) -> nn.Module:
        """The normalisation of the model's inputs, a module that takes inputs with pixel values from 0 to 1."""
        from .read.portable import normaliser

        return normaliser(self.files)

    def export(
        self, out: str | Path, client: int | None = None, *, form: Format = "torch", fold: bool = False
    ) -> list[str]:
        """Write the model, or a client's, to a file that loads without this project, as `fedbn export` does."""
        from .read.portable import export

        return export(self.files, self.model(client), Path(out), form, fold=fold)

    def plot(self, measure: str | None = None, axis: str | None = None) -> Plot:
        """Plot the first metric of the table against rounds, communication rounds and bytes; see `Results.plot`."""
        return Results([self]).plot(measure, axis)

    def __repr__(self) -> str:
        summary = self.summary
        metric = "" if summary.main is None else f", {title_of(summary.of_task.main)} {summary.main:.4f}"
        rounds = f"{summary.rounds} of {self.config.get('rounds', '?')} rounds"
        return f"<Result {self.label!r}: {summary.status}, {rounds}{metric}, in {str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        return Results([self])._repr_html_() + f"<p>{in_html(str(self.folder))}</p>"


class Results(tuple[Result, ...]):
    """Several runs in the order of their experiment, for instance `Results([run("quick"), run("quick", seed=1)])`."""

    @classmethod
    def read(cls, *folders: str | Path, allow: str | Collection[str] = ()) -> Results:
        """The runs in the folders and their subfolders; `allow` as for `Result.read`."""
        found, names = (
            find_runs([Path(folder).expanduser() for folder in folders]),
            (allow,) if isinstance(allow, str) else allow,
        )
        return cls(Result(run.folder, run.summary, run.lines, names) for run in found)

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


def frame_of(what: str, lines: Sequence[Json]) -> pd.DataFrame:
    with needs("data", what):
        import pandas as pd
    return pd.DataFrame(lines)
