"""Runs as Python objects, read from their folders: `Result` is one run, `Results` several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, Unpack, overload

from fedbn_flwr.errors import UserError, did_you_mean, needs
from fedbn_flwr.tasks import title_of

from .read.runs import Run, find_runs
from .report.pictures import Look, plot
from .report.rows import Choice, choose, group
from .report.tables import Form, as_html, numbers, tables, tables_as_text
from .text import in_html

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from .report.figure import Plot


class Result(Run):
    """One run: its settings, its figures by round, and its model.

    It has the figures of the moment when it was read; `Result.read(result.folder)` reads them again.
    """

    @classmethod
    def read(cls, folder: str | Path) -> Result:
        """The run in a folder, or in the only run folder below it."""
        found = Results.read(folder)
        if len(found) > 1:
            raise UserError(
                f"{str(folder)!r} holds {len(found)} runs: {', '.join(run.folder.name for run in found)}; give the "
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

    def model(self, client: int | None = None, *, file: str = "model.safetensors") -> nn.Module:
        """The network with its trained weights, in evaluation mode, on the CPU.

        Parameters
        ----------
        client
            The number of a client, for its personal model (`FedBN`, `SiloBN`, `Standalone`); only for runs on the local
            engine. By default the global model.
        file
            The file of the run folder with the global model.
        """
        from .read.trained import global_model, personal_model

        folder = self.files
        return global_model(folder, file) if client is None else personal_model(folder, client)

    def normalise(self) -> Callable[[Any], Any]:
        """The normalisation of the model's inputs: a function of inputs with pixel values from 0 to 1."""
        from .read.trained import normalisation

        return normalisation(self.files)

    def plot(self, **look: Unpack[Look]) -> Plot:
        """The main figure of the task against rounds, communication rounds and bytes; a notebook shows it.

        The options are those of `Results.plot`.
        """
        return Results([self]).plot(**look)

    def __repr__(self) -> str:
        summary = self.summary
        figure = "" if summary.main is None else f", {title_of(summary.of_task.main)} {summary.main:.4f}"
        rounds = f"{summary.rounds} of {self.config.get('rounds', '?')} rounds"
        return f"<Result {self.label!r}: {summary.status}, {rounds}{figure}, in {str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        return Results([self])._repr_html_() + f"<p>{in_html(str(self.folder))}</p>"


class Results(tuple[Result, ...]):
    """Several runs in the order of their experiment, for instance `Results([run("quick"), run("quick", seed=1)])`.

    `results[0]` is a run by its number and `results["FixBN"]` by its label, or by the name of its folder.
    """

    @classmethod
    def read(cls, *folders: str | Path) -> Results:
        """The runs in the folders and their subfolders."""
        if not folders:
            raise UserError("Results.read() needs a folder, for instance Results.read('runs')")
        found = find_runs([Path(folder).expanduser() for folder in folders])
        return cls(Result(run.folder, run.summary, run.lines) for run in found)

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Result: ...
    @overload
    def __getitem__(self, key: slice) -> Results: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> Result | Results:
        if isinstance(key, slice):
            return Results(super().__getitem__(key))
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = [result for result in self if key in (result.label, result.folder.name)]
        if not found:
            raise KeyError(f"there is no run {key!r}; {did_you_mean(key, self.labels)}")
        if len(found) > 1:
            folders = ", ".join(repr(result.folder.name) for result in found)
            raise KeyError(f"{len(found)} runs are called {key!r}; use one of {folders}")
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
        return tables_as_text(tables(self._choice))

    def frame(self, columns: Sequence[str] = (), *, baseline: str = "") -> pd.DataFrame:
        """The first table of `fedbn report` as numbers: a row per label, a mean and a deviation (`_std`) per figure.

        Parameters
        ----------
        columns
            Keys of summary.json; by default those of the table.
        baseline
            The label of a row, with which the others are compared in the first column by a paired t test over seeds.
        """
        found = numbers(self._choice.rows, Form(tuple(columns), baseline))
        return frame_of("Results.frame()", found).set_index("run")

    def plot(self, **look: Unpack[Look]) -> Plot:
        """The plot of `fedbn report`: the main figure of the task against what was spent; a notebook shows it.

        For a paper: `measure`, a key of the history; `axis` (`round`, `communication_rounds`, `mib` or `seconds`) for
        a single panel; `size`, width and height in inches; `band=False` without the deviation over runs.
        """
        return plot(self._choice.rows, **look)

    @property
    def _choice(self) -> Choice:
        return choose(group(self))

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return "".join(as_html(*table) for table in tables(self._choice))


def frame_of(what: str, lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    with needs("data", what):
        import pandas as pd
    return pd.DataFrame(lines)
