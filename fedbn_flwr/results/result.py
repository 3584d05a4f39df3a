"""A run as a Python object, read from its folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr import named
from fedbn_flwr.errors import UserError, few, needs
from fedbn_flwr.results.text import in_html
from fedbn_flwr.tasks import title_of
from fedbn_flwr.trees import Draft, Tree, flat_settings

from .folder.clients import last_values
from .folder.reader import RunReader, deciding
from .folder.summary import Summary

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from .read.portable import Format
    from .report.figure import Plot


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """One run: its settings, its metrics by round, and its model.

    A result doesn't change after it was read; `Result.read(result.folder)` reads a run again that has continued.
    """

    folder: Path
    summary: Summary  # the content of summary.json, for instance `summary.accuracy`; `summary.to_json()` is a dict
    lines: list[Tree]  # of history.jsonl
    allowed: Collection[str] = ()  # the names `module:callable` that its model may call

    @classmethod
    def read(cls, folder: str | Path, *, allow: str | Collection[str] = ()) -> Result:
        """The run in a folder, or in the only run folder below it.

        The folder's author chose what its model calls, so it may call only this library and what you `allow`, such as
        `"own:net"`.
        """
        from fedbn_flwr import Results

        found = Results.read(folder, allow=allow)
        if len(found) > 1:
            raise UserError(
                f"{str(folder)!r} holds {len(found)} runs: {few((run.folder.name for run in found), 5)}; give the "
                f"folder of one, such as {str(found[0].folder)!r}"
            )
        return found[0]

    @property
    def label(self) -> str:
        """The run's name in tables and plots."""
        return self.summary.label

    @cached_property
    def config(self) -> Tree:
        """All settings; `run(result.config, rounds=20)` repeats the run with a change."""
        return self.files.config()

    @property
    def files(self) -> RunReader:
        return RunReader(self.folder)

    @cached_property
    def history(self) -> pd.DataFrame:
        """A row per round, with the columns of history.jsonl."""
        frame = frame_of("Result.history", self.lines)
        return frame if frame.empty else frame.set_index("round")

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the model's outputs; empty if the server had no data."""
        return self.files.model_description().classes

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
        from fedbn_flwr.results.units import in_units

        network = self._network(client, file, state)
        in_units(network, self.files.model_description().units)  # for as long as it lives
        return network

    def _network(
        self, client: int | None, file: str = "model.safetensors", state: str | Path | None = None
    ) -> nn.Module:
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

        return export(self.files, self._network(client), Path(out), form, fold=fold)

    def plot(self, measure: str | None = None, axis: str | None = None) -> Plot:
        """Plot the first metric of the table against rounds, communication rounds and bytes; see `Results.plot`."""
        from fedbn_flwr import Results

        return Results([self]).plot(measure, axis)

    def __repr__(self) -> str:
        summary = self.summary
        metric = "" if summary.main is None else f", {title_of(summary.of_task.main)} {summary.main:.4f}"
        rounds = f"{summary.rounds} of {self.config.get('rounds', '?')} rounds"
        return f"<Result {self.label!r}: {summary.status}, {rounds}{metric}, in {str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        from fedbn_flwr import Results

        return Results([self])._repr_html_() + f"<p>{in_html(str(self.folder))}</p>"

    # --- for reports ---

    @cached_property
    def origin(self) -> tuple[str, str]:
        """The same for all copies of a run's folder, but not for a run that continues another under a new label."""
        return str((self.files.read("environment.json") or {}).get("token", self.folder)), self.label

    @cached_property
    def values(self) -> Tree:
        return self.summary.to_json()

    @cached_property
    def clients(self) -> dict[str, dict[str, float]]:
        """The values by metric and client, of the last evaluated round."""
        return last_values(self.files.lines("clients.jsonl"))

    @property
    def cell(self) -> Tree:
        """The run's place in its experiment: its row, its condition (`sweep`), and the values to try (`tune`)."""
        return self.config.get("cell") or {}

    @property
    def place(self) -> tuple[str, list[int], int, str, str]:
        """The key by which runs are sorted: their experiment, and their place in its file."""
        found = self.cell.get("place")
        place = found if isinstance(found, list) and all(type(number) is int for number in found) else []
        return str(self.folder.parent), place, self.summary.seed, self.summary.began, str(self.folder)

    @cached_property
    def settings(self) -> Draft:
        """The settings that affect results, without the seed and names, by dotted key."""
        config = deciding(self.config)
        return flat_settings({key: value for key, value in config.items() if key not in ("name", "label", "seed")})

    @property
    def data(self) -> str:
        """What the run trained on, in words: the data set, or the sites' own data."""
        name, sites = str(self.settings.get("data.name")), self.summary.own_data_sites or 0
        own = f"own data of {sites} site{'s' if sites > 1 else ''}"
        return name if not sites else own if sites == self.config.get("clients") else f"{name} and {own}"

    @property
    def data_checksum(self) -> str | None:
        """The checksum of the examples, if the server had them."""
        return (self.files.read("environment.json") or {}).get("data_checksum")

    @property
    def fixed_settings(self) -> Tree:
        """The settings without those that its experiment varies by `sweep` and `tune`."""
        lists = (found for kind in ("sweep", "tune") if isinstance(found := self.cell.get(kind), Mapping))
        # The value of a key can be a section, and the kind of a partition decides which other keys the section has.
        varied = tuple(f"{str(key).removesuffix('.kind')}." for found in lists for key in found)
        return {key: value for key, value in self.settings.items() if not f"{key}.".startswith(varied)}


def frame_of(what: str, lines: Sequence[Tree]) -> pd.DataFrame:
    with needs("data", what):
        import pandas as pd
    return pd.DataFrame(lines)
