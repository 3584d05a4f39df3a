"""Diagnoses an experiment: runs of the strategy `Diagnose` on its clients and on the same examples dealt at random."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.errors import LOG, RunFailed, SettingsError, UserError
from fedbn_flwr.experiment.api import NodeConfig, Source, planned_of, run_all, survey
from fedbn_flwr.experiment.data import shares_of
from fedbn_flwr.experiment.settings import Settings, strategy_name
from fedbn_flwr.extensions import declared
from fedbn_flwr.results.folder.files import write_text
from fedbn_flwr.results.folder.places import from_here, out_folder
from fedbn_flwr.results.report.tables import as_text
from fedbn_flwr.results.text import file_name
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.storage import to_json
from fedbn_flwr.trees import Draft, Tree

from .candidates import answers, experiment_of, propose
from .strategy import FOUND

FILE = "diagnosis.json"
CLIENTS, DEALT = "the clients", "dealt at random"
_LAYERS = 40  # in the table
_KEPT = ("weights", "exchange_timeout", "direct", "node_timeout")  # of the experiment's strategy


@dataclass(frozen=True)
class Diagnosis:
    """How far the mean of the clients' gradients is from the gradient of their union, with batch norm.

    `clients` and `dealt` have the measurements by the rounds of training before them, as `summary.json` of their runs;
    `dealt` is empty where the server doesn't have the data.
    """

    label: str  # of the experiment's run
    seed: int
    model: str
    clients: Mapping[str, Tree]
    dealt: Mapping[str, Tree]
    labels: float | None  # how far labels and inputs are apart, the mean over the clients; None if one doesn't say
    inputs: float | None
    answers: Mapping[str, str]  # to the questions of docs/which-strategy.md
    candidates: Mapping[str, str]  # strategies, with what speaks against each
    file: str  # the experiment that decides between them

    def __str__(self) -> str:
        at_first = self.clients["0"]
        heads = [("at first" if place == "0" else f"round {place}", DEALT, "cosine") for place in self.clients]

        def row(name: str, part: Callable[[Tree], Tree]) -> tuple[str, ...]:
            cells = [
                (found["error"], part(self.dealt[place])["error"] if self.dealt else math.nan, found["cosine"])
                for place, found in zip(self.clients, map(part, self.clients.values()), strict=True)
            ]
            return name, *(f"{value:.2f}" if math.isfinite(value) else "-" for value in chain(*cells))

        layers = [row(name, lambda found, name=name: found["layers"][name]) for name in [*at_first["layers"]][:_LAYERS]]  # type: ignore[misc]
        one, batches = at_first["of_one_batch"], at_first["batches"]
        single = f"; of one batch {one['mean']:.2f} ± {one['deviation']:.2f}" if batches > 1 else ""
        return "\n".join(
            [
                f"{self.label}, seed {self.seed}: the error of the mean of the clients' gradients, against their union",
                as_text([("", *chain(*heads)), row(self.model, lambda found: found), *layers]),
                f"over {batches} batches{single}. Compare errors of one network only: docs/results/diagnose.md",
                "",
                *(f"{number}. {about}: {said}" for number, (about, said) in enumerate(self.answers.items(), 1)),
                "",
                "candidates, and what speaks against each",
                *(f"- {name}: {against}" for name, against in self.candidates.items()),
                f"decide by: fedbn run {shlex.quote(self.file)}",
            ]
        )


def diagnose(
    experiment: Source,
    *,
    rounds: int = 1,
    batches: int = 8,
    out: str | Path | None = None,
    own_models: bool = False,
    progress: bool = True,
    node_config: NodeConfig | Sequence[NodeConfig] | None = None,
    **changes: Any,
) -> Diagnosis:
    """Measures whether batch norm will hurt the clients of an experiment, before training.

    It takes the first run of the experiment that has several clients, with batch norm in its network.

    Parameters
    ----------
    rounds
        Rounds of training before a second measurement; with 0 there is none.
    batches
        Batches of each client that the gradients are means over.
    own_models
        Whether each client may have a model of its own.
    out, progress, node_config, changes
        As for `run_all`.
    """
    planned = planned_of(experiment, changes.pop("only", None), changes)
    run = next((run for run in planned.runs if run.clients > 1), None)
    if run is None:
        raise SettingsError(f"{planned.name} has one client, whose gradient is that of the union; expected several")
    if hiding := [name for name in declared("strategies") if name in strategy_name(run.strategy)]:
        raise SettingsError(
            f"strategy {hiding[0]} hides what single clients send, but a diagnosis shows the server each one's "
            "gradient and statistics of batches; if your clients allow that, diagnose with strategy=FedAvg"
        )
    folder = out_folder(planned.name, out, resume=False)
    content = content_of(run, rounds, batches)
    is_here = run.evaluate.server and node_config is None
    runs = {CLIENTS: {}, **({DEALT: {"data": dealt_as(run)}} if is_here else {})}
    results = run_all({**content, "runs": runs}, out=folder / "gradients", progress=progress, node_config=node_config)
    if failed := next((one.summary.error for one in results if one.summary.status == "failed"), None):
        raise RunFailed(failed)
    clients, *dealt = (one.summary.notes[FOUND] for one in results)
    apart = _apart({**content, "rounds": 0, "strategy": "FedAvg"}, folder / "survey", node_config)
    proposed = propose(run, own_models, apart[0])
    file = folder / f"{file_name(planned.name)}-candidates.yaml"
    write_text(file, dump_yaml(experiment_of(run, f"{planned.name}-candidates", proposed, central=is_here)))
    found = Diagnosis(
        run.label,
        run.seed,
        run.model.name,
        clients,
        dealt[0] if dealt else {},
        *apart,
        answers(run, own_models, clients["0"]["error"], dealt[0]["0"]["error"] if dealt else math.nan, *apart),
        {name: against for name, (_, against) in proposed.items()},
        str(from_here(file)),
    )
    write_text(folder / FILE, to_json(asdict(found), indent=2) + "\n")
    return found


def content_of(run: Settings, rounds: int, batches: int) -> Draft:
    """The experiment that measures a run's clients."""
    content = run.model_dump(mode="json", exclude={"label", "cell", "size"})
    length = 2 * batches + rounds if rounds else batches
    kept = {key: run.strategy[key] for key in _KEPT if key in run.strategy}
    kept["min_batch"] = 1  # the data are here, or sites have bounds of their own
    own: Draft = {"every": length, "patience": None, "dynamics": False, "models": [], "survey": False}
    return {
        **content,
        "rounds": length,
        "model": {**content["model"], "norm": "bn"},
        "train": {**content["train"], "schedule": "constant"},
        "strategy": {"name": f"{__package__}.strategy:Diagnose", "batches": batches, "warm_up": rounds, **kept},
        "evaluate": {**content["evaluate"], **own, "clients": not run.evaluate.server},
    }


def dealt_as(run: Settings) -> Draft:
    """The data of a run, with all examples dealt at random to clients of the same sizes."""
    sizes = [len(part) for part in shares_of(run.source, run.clients, run.seed, "cpu")[0]]
    normalise = {"normalise": "moments"} if run.data.normalise == "own" else {}
    return {"partition": {"kind": f"{__name__}:deal", "sizes": sizes}, **normalise}


def deal(labels: np.ndarray, clients: int, generator: np.random.Generator, sizes: Sequence[int]) -> list[np.ndarray]:
    """Rows drawn at random, `sizes` of them for the clients."""
    return np.split(generator.permutation(len(labels))[: sum(sizes)], np.cumsum(sizes)[:-1])


def _apart(
    content: Draft, out: Path, node_config: NodeConfig | Sequence[NodeConfig] | None
) -> tuple[float | None, float | None]:
    """How far labels and inputs are apart, by the survey; sites need not take part in one."""
    try:
        found = survey(content, out=out, node_config=node_config)
    except (RunFailed, UserError) as error:
        LOG.warning("without a survey of labels and inputs: %s", error)
        return None, None
    sites, weights = [*found.sites.values()], [each.examples for each in found.sites.values()]
    of_labels, of_inputs = (
        float(np.average([*map(measure, sites)], weights=weights))
        for measure in (found.labels_differ, found.inputs_differ)
    )
    return of_labels, of_inputs
