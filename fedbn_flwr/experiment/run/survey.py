"""Asks all sites how their data differ, without training: `rounds: 0` with `evaluate.survey`, and `fedbn survey`.

Each site that agreed to it sends exact sums of its columns and the numbers of examples of its classes, from which the
moments of all sites together follow exactly. With a network, it also sends the statistics of its batch norms' inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from fedbn_flwr.data.dataset import DataForm
from fedbn_flwr.data.disclosed import HIDDEN, blank_answer
from fedbn_flwr.data.moments import moments_of
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.distances import distances, statistics_in
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.report.tables import as_text

from ..listeners.listener import FinishedRound, Listener, Running
from .federation import normalised_names, sums_problem

FILE = "survey.json"
_SITES, _LINES = 8, 40  # in the table


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

    def cells(self, *, of_one: bool = True) -> dict[str, str]:
        """What a table says about it; how many values are missing is known of one site, as others may not say it."""
        found = {"examples": f"{self.examples:,}"}
        for name, (count, mean, deviation) in self.moments.items():
            missing = f" ({self.examples - count:,} missing)" if of_one and 0 < count < self.examples else ""
            found[name] = f"{mean:.4g} ± {deviation:.3g}{missing}" if count else "not said"
        for name, number in self.classes.items():
            found[f"share of {name}"] = "not said" if number is None else f"{number / self.examples:.1%}"
        found |= {layer: f"{mean:.2f}, {ratio:.2f}" for layer, (mean, _, ratio) in self.layers.items()}
        return found


@dataclass(frozen=True)
class Survey:
    union: Site  # all sites' data together
    sites: Mapping[int, Site]  # by client

    @classmethod
    def read(cls, folder: Path) -> Survey:
        """The survey in a run folder."""
        return TypeAdapter(cls).validate_json((folder / FILE).read_text(encoding="utf-8"))

    def labels_differ(self, site: Site) -> float:
        """The share of the site's examples whose class would have to change for the shares of all, beyond chance."""
        of_all = self.union.shares
        found = sum(abs(share - of_all[name]) for name, share in site.shares.items()) / 2
        chance = sum(math.sqrt(share * (1 - share) / (2 * math.pi * site.examples)) for share in of_all.values())
        return max(0.0, found - chance)

    def inputs_differ(self, site: Site) -> float:
        """The root mean square over the columns of the differences of the means, in standard deviations of all, and of
        the logarithms of the deviations, beyond what chance makes of as many examples."""
        squares = [0.0]
        for name, (_, of_all, deviation) in self.union.moments.items():
            count, mean, own = site.moments[name]
            distance = (mean - of_all) / deviation if count and deviation else 0.0
            scale = math.log(own / deviation) if count and own and deviation else 0.0
            squares.append(distance**2 + scale**2)
        return math.sqrt(max(0.0, sum(squares) / max(1, len(squares) - 1) - 1.5 / site.examples))

    def __str__(self) -> str:
        shown = dict(sorted(self.sites.items())[:_SITES])
        columns = [self.union.cells(of_one=False), *(site.cells() for site in shown.values())]
        rows = [["", "all", *(f"client {client}" for client in shown)]]
        rows += [[name, *(cells.get(name, "") for cells in columns)] for name in [*columns[1]][:_LINES]]
        for title, measure in (("labels apart", self.labels_differ), ("inputs apart", self.inputs_differ)):
            rows.append([title, "", *(f"{measure(site):.2f}" for site in shown.values())])
        counts = {"clients": len(self.sites) - len(shown), "lines": len(columns[1]) - _LINES}
        more = [f"{count} further {what} are in {FILE}" for what, count in counts.items() if count > 0]
        return "\n".join([as_text(rows), *more])


class Surveyor(Listener):
    """Asks all clients how their data are, in place of an evaluation, and writes survey.json."""

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        parts, layers = running.prepared, dict[int, Mapping[str, tuple[float, float, float]]]()
        problem = partial(_problem, parts.shape, blank_answer(parts.shape))
        answers = running.ask("the survey", protocol.SURVEY_QUERY, problem, records=())
        if running.run.model.weights is not None:
            model = unpack(finished.arrays)
            tracked = {key: model[key] for key, role in roles(model).items() if role is Role.STATISTICS}
            found = running.ask(
                "the survey",
                protocol.STATISTICS_QUERY,
                lambda reply: arrays_problem(reply.arrays, tracked),
                finished.arrays,
                records=(),
            )
            network = statistics_in(tracked)
            layers = {client: distances(statistics_in(own.arrays), network) for client, own in found.items()}
        sites = {client: _site(running, [said], layers.get(client, {})) for client, said in answers.items()}
        running.folder.write(FILE, asdict(Survey(_site(running, [*answers.values()], {}), sites)), indent=2)
        return finished


def _problem(data: DataForm, like: Arrays, reply: Reply) -> str | None:
    """Why a client's answer cannot be about any examples, or None."""
    if problem := sums_problem(like, reply):
        return problem
    total, counts = reply.metrics[protocol.NUM_EXAMPLES], reply.arrays["counts"]
    given = reply.arrays["sums"][0]
    if total % 1 or total < max(1, given.max(initial=0) if len(data.shape) == 1 else 1):
        return f"it has {total} examples, and up to {given.max(initial=0):g} values in a column"
    known = counts[counts != HIDDEN]
    hidden, rest = len(counts) - len(known), total - sum(known.tolist())
    is_whole = data.task.form != "classes" or not len(counts) or (rest >= hidden if hidden else rest == 0)
    if known.min(initial=0) < 0 or known.max(initial=0) > total or not is_whole:
        return f"its numbers of examples by class are {shown(counts.tolist())}; it has {total} examples"
    return None


def _site(running: Running, answers: Sequence[Reply], layers: Mapping[str, tuple[float, float, float]]) -> Site:
    sums = np.stack([found.arrays["sums"] for found in answers], -1).swapaxes(0, 1)
    counts = np.stack([found.arrays["counts"] for found in answers])
    total = int(sum(found.metrics[protocol.NUM_EXAMPLES] for found in answers))
    numbers = [None if (some == HIDDEN).any() else int(some.sum()) for some in counts.T]
    parts, of_sites = running.prepared, running.federation.schema
    classes = getattr(parts.dataset, "class_names", ()) or of_sites.get("classes", range(parts.shape.classes))
    moments = dict(zip([*normalised_names(running), *map(str, classes)], map(moments_of, sums), strict=False))
    return Site(total, moments, dict(zip(map(str, classes), numbers, strict=False)), layers)
