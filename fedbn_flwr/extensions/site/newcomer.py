"""A run's model at a site that joins afterwards: which batch norm it should have, and how far its inputs are."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import UserError
from fedbn_flwr.experiment.parts import make_model
from fedbn_flwr.experiment.settings import check_settings
from fedbn_flwr.norms.distances import distances, statistics_in
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.results.folder.files import read_text, write_text
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.report.tables import as_measured, as_text
from fedbn_flwr.results.result import Result
from fedbn_flwr.tasks import goodness

from .predict import Opened, classes_of, measured

# What a newcomer's batch norm can be, as in `evaluate.unseen.statistics`.
WAYS = {"mean": "mean of the sites", "batch": "statistics of this site", "own": "as a new site begins"}
_FILES = ("config.yaml", "environment.json", "model.json", "partition.json")
_OTHER_CLASSES = 0.25  # a distance between the shares of classes that is worth a warning, if examples are many


@dataclass(frozen=True)
class Adapted:
    """The model with each of the batch norms, and how far the site's statistics are from the federation's."""

    main: MetricKey
    models: Mapping[str, nn.Module]
    measured: Mapping[str, float]  # the main metric of the task; empty without labels
    changed: Mapping[str, float]  # the share of predictions that differ from those with `mean`; of classes only
    drift: Mapping[str, tuple[float, float, float]]  # by layer, see norms.distances
    warnings: Sequence[str]

    def __str__(self) -> str:
        """A table of the ways, and one of the layers."""
        ways = [("batch norm", "--use", *([self.main.title] if self.measured else []), "predictions changed")]
        for way, words in WAYS.items():
            value = [as_measured(self.main, [self.measured[way]])] if self.measured else []
            ways.append((words, way, *value, f"{self.changed[way]:.1%}" if self.changed else "-"))
        layers: list[tuple[str, ...]] = [("drift of layer", "mean distance", "variance distance", "variance ratio")]
        layers += [(name, *(f"{value:.3f}" for value in values)) for name, values in self.drift.items()]
        return f"{as_text(ways)}\n\n{as_text(layers)}"


def adapted(result: Result, new: Opened, tested: Opened) -> Adapted:
    """Measure the statistics on the inputs of `new`, and compare the models on the examples of `tested`."""
    if len(new.there) < 2:
        raise UserError(f"there are {len(new.there)} examples; expected at least two, since one has no variance")
    model, main = result.model(), MetricKey(tested.task.main)
    state = model.state_dict()
    if Role.STATISTICS not in roles(state).values():
        raise UserError("the model tracks no statistics of batch norm, so there is nothing to adapt")
    traits = result.files.model_description().traits
    if Role.STATISTICS in traits.never_sent:
        raise UserError(
            "the run's clients never send their batch norm (global_norm: initial), so the run's model has none of the "
            "federation, and there is nothing to adapt"
        )
    statistics, _ = reestimate(model, new.batches, torch.device("cpu"), pooled=True)
    models = {way: copy.deepcopy(model) for way in WAYS}
    models["batch"].load_state_dict(statistics, strict=False)
    if kept := traits.local_keys(state):  # a new client begins with them newly built: with FedBN those in batch norm
        initial = make_model(check_settings(result.config), new.data).state_dict()
        models["own"].load_state_dict({key: initial[key] for key in kept}, strict=False)
    known, changed = tested.labelled, dict[str, float]()
    values = {way: measured(each, tested)[main.name] for way, each in models.items() if known.num_examples}
    if tested.task.form == "classes":
        predicted = {way: classes_of(each, tested) for way, each in models.items()}
        changed = {way: float((found != predicted["mean"]).double().mean()) for way, found in predicted.items()}
    before, after = (
        statistics_in({key: value.numpy() for key, value in each.items()}) for each in (state, {**state, **statistics})
    )
    warnings = list[str]()
    if changed and predicted["mean"].ndim == 1:
        seen = tested.data.train.labels[known.indices] if known.num_examples else predicted["mean"]
        warnings += _other_classes(result, seen)
    if values and goodness(main.name, values["batch"]) < goodness(main.name, values["mean"]):
        found, mean = (as_measured(main, [values[way]]) for way in ("batch", "mean"))
        warnings.append(
            f"adapting doesn't help on these labels: the {main.title} is {found} with the site's statistics and {mean} "
            "with the mean of the sites; --use mean writes the model with the mean"
        )
    return Adapted(main, models, values, changed, distances(after, before), warnings)


def _other_classes(result: Result, seen: Tensor) -> list[str]:
    """A warning if the shares of the classes here are far from those of the run's training examples, if known."""
    run = result.files.partition()
    if run is None or not len(seen) or not run.counts or int(seen.max()) >= len(run.classes):
        return []
    there = torch.tensor(run.counts, dtype=torch.float64).sum(0)
    here = torch.bincount(seen, minlength=len(there)).double()
    distance = float((here / len(seen) - there / there.sum()).abs().sum()) / 2
    if distance < _OTHER_CLASSES + 0.4 * math.sqrt(len(there) / len(seen)):  # what a draw from equal shares has
        return []
    return [
        f"the shares of the classes differ by {distance:.0%} from those of the run's training examples. Statistics "
        "shift with the classes too, and taking the site's can then hurt: compare on labelled examples (--labels)"
    ]


def write(result: Result, model: nn.Module, way: str, out: Path) -> None:
    """A run folder with this model, which `predict` and `export` take, without the history of another model."""
    out.mkdir(parents=True, mode=0o700)
    for name in _FILES:
        if (text := read_text(result.folder / name)) is not None:
            write_text(out / name, text)
    folder, state = RunFolder(out), model.state_dict()
    folder.write_summary(replace(result.summary.of(()), label=f"{result.label} ({WAYS[way]})", personal=None))
    kinds = roles(state)
    folder.write_model(
        {key: value.numpy() for key, value in state.items() if kinds[key] is not Role.COUNTER}, result.summary.rounds
    )
