"""Asks all sites how their data differ, without training: `rounds: 0` with `evaluate.survey`, and `fedbn survey`.

Each site that agreed to it sends exact sums of its columns and the numbers of examples of its classes, from which the
moments of all sites together follow exactly. With a network, it also sends the statistics of its batch norms' inputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from flwr.serverapp import Grid

from fedbn_flwr.data.disclosed import HIDDEN, blank_answer
from fedbn_flwr.data.moments import moments_of
from fedbn_flwr.errors import LOG, MissingPackage
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.distances import distances, statistics_in
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.files import write_text
from fedbn_flwr.results.report.tables import as_text
from fedbn_flwr.storage import to_json

from ..parts import Parts
from ..settings import Experiment
from .federation import ask_all
from .judge import normalise_as, without_training

FILE = "survey.json"
_SITES, _LINES = 8, 40  # in the table
_LABELS, _INPUTS = 0.2, 0.2  # from here on they differ; docs/clients.md has the values of shipped data
# The rows of the decision table in docs/which-strategy.md.
_ROWS = {
    "labels": 'labels differ, the row "hold few classes": FixBN, for a small network group norm; for a model each '
    "Standalone or FedRep",
    "inputs": 'inputs differ, the row "have different inputs": group norm or FixBN; for a model each FedBN',
    "": 'neither labels nor inputs differ much, the row "train as well together as in one place": FedAvg',
}


@dataclass(frozen=True)
class Site:
    """The data of one site, or of all."""

    examples: int
    moments: Mapping[str, tuple[int, float, float]]  # of columns: how many values, their mean and standard deviation
    classes: Mapping[str, int | None]  # examples; None where the site does not say
    layers: Mapping[str, tuple[float, float, float]]  # mean distance, variance distance and ratio to the network's

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of each class; classes of which the site does not say it have equal shares of the rest."""
        known = {name: count for name, count in self.classes.items() if count is not None}
        rest = max(0, self.examples - sum(known.values())) / max(1, len(self.classes) - len(known))
        return {name: known.get(name, rest) / self.examples for name in self.classes}

    def cells(self) -> dict[str, str]:
        """What a table says about it."""
        found = {"examples": f"{self.examples:,}"}
        for name, (count, mean, deviation) in self.moments.items():
            missing = f" ({self.examples - count:,} missing)" if 0 < count < self.examples else ""
            found[name] = f"{mean:.4g} ± {deviation:.3g}{missing}" if count else "not said"
        for name, number in self.classes.items():
            found[f"share of {name}"] = "not said" if number is None else f"{number / self.examples:.1%}"
        found |= {layer: f"{mean:.2f}, {ratio:.2f}" for layer, (mean, _, ratio) in self.layers.items()}
        return found


@dataclass(frozen=True)
class Survey:
    union: Site  # all sites' data together
    sites: Mapping[int, Site]  # by client

    def apart(self, site: Site) -> dict[str, float]:
        """How far a site is from all together, by row of the table.

        Of columns the difference of the means, in standard deviations; of classes the difference of the shares; of
        layers the mean distance.
        """
        found: dict[str, float] = {}
        for name, (count, mean, deviation) in self.union.moments.items():
            own = site.moments[name]
            found[name] = (own[1] - mean) / deviation if count and own[0] and deviation else 0.0
        found |= {f"share of {name}": share - self.union.shares[name] for name, share in site.shares.items()}
        return found | {layer: mean for layer, (mean, _, _) in site.layers.items()}

    def labels_differ(self, site: Site) -> float:
        """The share of the site's examples whose class would have to change for the shares of all, beyond chance."""
        of_all = self.union.shares
        found = sum(abs(share - of_all[name]) for name, share in site.shares.items()) / 2
        chance = sum(math.sqrt(share * (1 - share) / (2 * math.pi * site.examples)) for share in of_all.values())
        return max(0.0, found - chance)

    def inputs_differ(self, site: Site) -> float:
        """The root mean square over the columns of the differences of the means, in standard deviations of all, and of
        the logarithms of the deviations, beyond what chance makes of as many examples."""
        apart, squares = self.apart(site), [0.0]
        for name, (_, _, deviation) in self.union.moments.items():
            count, _, own = site.moments[name]
            scale = math.log(own / deviation) if count and own and deviation else 0.0
            squares.append(apart[name] ** 2 + scale**2)
        return math.sqrt(max(0.0, sum(squares) / max(1, len(squares) - 1) - 1.5 / site.examples))

    @property
    def differs(self) -> str:
        """What differs most: "labels", "inputs" or nothing, "", in the mean of the sites."""
        labels, inputs = (
            statistics.fmean(map(measure, self.sites.values())) for measure in (self.labels_differ, self.inputs_differ)
        )
        return "labels" if labels >= _LABELS else "inputs" if inputs >= _INPUTS else ""

    def __str__(self) -> str:
        shown = dict(sorted(self.sites.items())[:_SITES])
        columns = [site.cells() for site in (self.union, *shown.values())]
        rows = [["", "all", *(f"client {client}" for client in shown)]]
        rows += [[name, *(cells.get(name, "") for cells in columns)] for name in [*columns[1]][:_LINES]]
        for title, measure in (("labels apart", self.labels_differ), ("inputs apart", self.inputs_differ)):
            rows.append([title, "", *(f"{measure(site):.2f}" for site in shown.values())])
        counts = {"clients": len(self.sites) - len(shown), "lines": len(columns[1]) - _LINES}
        more = [f"{count} further {what} are in {FILE}" for what, count in counts.items() if count > 0]
        return "\n".join([as_text(rows), *more, f"Here {_ROWS[self.differs]} (docs/which-strategy.md)."])


def survey(
    experiment: Experiment,
    make_grid: Callable[[Parts], AbstractContextManager[Grid]],
    out: Path,
    *,
    own_data: bool = False,
) -> Survey:
    """Ask all clients how their data are; write survey.json and survey.png."""
    layers: Mapping[int, Mapping[str, tuple[float, float, float]]] = {}
    with without_training(experiment, make_grid, out, own_data) as (running, models):
        parts = running.prepared
        answers = ask_all(running, protocol.SURVEY_QUERY, blank_answer(parts.shape))
        for model, folder in models.values():
            if folder is not None:
                normalise_as(parts, folder)
            tracked = {key: unpack(model)[key] for key, role in roles(unpack(model)).items() if role is Role.STATISTICS}
            records = {parts.rule.base.arrayrecord_key: model}
            found = ask_all(running, protocol.STATISTICS_QUERY, tracked, records)
            network = statistics_in(tracked)
            layers = {client: distances(statistics_in(own), network) for client, own in found.items()}
    sites = {client: _site(parts, [said], layers.get(client, {})) for client, said in answers.items()}
    made = Survey(_site(parts, [*answers.values()], {}), sites)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, to_json({"differs": made.differs, **asdict(made)}, indent=2) + "\n")
    try:
        _draw(made, out / "survey.png")
    except MissingPackage as error:
        LOG.warning("no picture: %s", error)
    return made


def _site(parts: Parts, answers: Sequence[Arrays], layers: Mapping[str, tuple[float, float, float]]) -> Site:
    sums = np.stack([found["sums"] for found in answers], -1).swapaxes(0, 1)
    counts = np.stack([found["counts"] for found in answers])
    numbers = [None if (some == HIDDEN).any() else int(some.sum()) for some in counts.T]
    data, categories, columns = parts.shape, parts.run.data.categories, parts.of_sites.get("inputs", ())
    of_sites = [f"{name}={value}" if value else name for name in columns for value in categories.get(name, ("",))]
    inputs = getattr(parts.dataset, "input_names", ()) or of_sites
    if len(inputs) != data.normalised:  # of an array
        inputs = [f"input {place}" for place in range(data.normalised)]
    classes = getattr(parts.dataset, "class_names", ()) or parts.of_sites.get("classes", range(data.classes))
    moments = dict(zip([*inputs, *map(str, classes)], map(moments_of, sums), strict=False))
    return Site(int(counts[:, 0].sum()), moments, dict(zip(map(str, classes), numbers[1:], strict=False)), layers)


def _draw(made: Survey, file: Path) -> None:
    """How far each site is from all, by row of the table."""
    from fedbn_flwr.results.report.figure import Plot
    from fedbn_flwr.text import in_plot

    apart = {client: made.apart(site) for client, site in made.sites.items()}
    rows = [*next(iter(apart.values()))]
    values = np.array([[own[row] for own in apart.values()] for row in rows]).reshape(len(rows), len(apart))
    figure = Plot(figsize=(2.5 + 0.4 * min(len(apart), 40), 1.5 + 0.25 * min(len(rows), 60)))
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_title("how far each client is from all together", loc="left", fontsize=9)
    axes.set_xticks(range(len(apart)), [str(client) for client in apart])
    axes.set_yticks(range(len(rows)), [in_plot(row) for row in rows])
    axes.set_xlabel("client")
    figure.colorbar(image, label="means in deviations, shares as they are, up to 1")
    figure.write(file)
