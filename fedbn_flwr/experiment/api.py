"""Runs experiments from Python: `run` for one run, `run_all` for several."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from fedbn_flwr.errors import SettingsError, UserError, locate_errors
from fedbn_flwr.results.folder.places import options_as, out_folder
from fedbn_flwr.results.naming import give_name, names_in
from fedbn_flwr.results.result import Result
from fedbn_flwr.results.several import Results
from fedbn_flwr.results.text import shorten
from fedbn_flwr.results.yaml_text import check_values
from fedbn_flwr.trees import Tree

from .data import forget_data
from .file.content import check_mapping, follow_extends, nested, read_content
from .file.layers import read_experiment
from .node import free_models
from .run.launch import carry_out, check_failures, is_begun, run_folders
from .run.survey import Survey
from .settings import Experiment, Settings

Source = str | Path | Tree | Settings
_JSON = TypeAdapter[Any](Any, config=ConfigDict(ser_json_inf_nan="constants"))  # else infinity were null
NodeConfig = Mapping[str, str | int | float | bool]


def run(
    experiment: Source,
    *,
    only: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    node_config: NodeConfig | Sequence[NodeConfig] | None = None,
    **changes: Any,
) -> Result:
    """Trains an experiment with a single run.

    Parameters
    ----------
    experiment
        The name of a shipped experiment, the path of a YAML file, its content as text or as a dict, or `Settings`.
    only
        The label of a run, to carry out only this one of the experiment's `runs`.
    out
        The folder for the run folder; by default a new one, `runs/NAME-TIME` (`$FEDBN_OUT` replaces `runs`).
    resume
        Continue the run in `out` if it was interrupted, read it if it is finished, begin it if there is none.
    progress
        Whether to show the progress.
    node_config
        The config of each node, or one for all, as SuperNodes get it by `--node-config`, to rehearse a deployment on
        the local engine: `[{"data-path": "site-a"}, {"data-path": "site-b"}]`.
    **changes
        Changes to the settings, by the keys of an experiment file: `rounds=5, train={"lr": 0.05}`. A section is a dict
        with the keys to change, an object of its class, such as `Train(lr=0.05)`, or where it has a name, that name:
        `strategy="FedTAN"`.

    Returns
    -------
    Result
        The finished run.

    Raises
    ------
    SettingsError
        The settings are wrong, or have several runs; nothing was trained.
    RunFailed
        The run could not continue. Its folder has the rounds up to then.
    """
    planned = planned_of(experiment, [only] if only is not None else None, changes)
    if len(planned.runs) > 1:
        labels, seeds = ({getattr(run, key): None for run in planned.runs} for key in ("label", "seed"))
        raise SettingsError(
            f"{planned.name} has {len(planned.runs)} runs (labels: {', '.join(labels)}; seeds: "
            f"{', '.join(map(str, seeds))}); run_all() carries out all of them, only=LABEL and seed=NUMBER select one"
        )
    return _carry_out(planned, out, resume, progress, node_config)[0]


def run_all(
    experiment: Source,
    *,
    only: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    jobs: int | None = None,
    node_config: NodeConfig | Sequence[NodeConfig] | None = None,
    **changes: Any,
) -> Results:
    """Trains all runs of an experiment, with the arguments of `run`.

    If one of several runs fails, the others are still carried out; the failed one has `summary.status` "failed".

    Parameters
    ----------
    only
        A label, or several, to carry out only these of the experiment's `runs`.
    jobs
        Runs at the same time, each in a process of its own; 1: they follow one another. By default one per core if
        there are as many runs, else the cores share the clients of one run at a time.

    Returns
    -------
    Results
        All runs, in the order of the experiment.
    """
    return _carry_out(planned_of(experiment, only, changes), out, resume, progress, node_config, jobs)


def evaluate(
    experiment: Source,
    *models: str | Path | Result,
    only: str | None = None,
    out: str | Path | None = None,
    node_config: NodeConfig | Sequence[NodeConfig] | None = None,
    **changes: Any,
) -> Results:
    """Lets all clients of an experiment evaluate given models on their own test examples, without training.

    Parameters
    ----------
    models
        Results, run folders, or files of weights by safetensors or `torch.save`.

    Returns
    -------
    Results
        A run without rounds for each model; `result.clients["own_accuracy"]` has the accuracy of each client.
    """
    files = [str(model.folder if isinstance(model, Result) else model) for model in models]
    planned = planned_of(experiment, only, {**changes, "rounds": 0, "evaluate.models": files})
    return _carry_out(planned, out, False, False, node_config)


def survey(
    experiment: Source,
    model: str | Path | Result | None = None,
    *,
    only: str | None = None,
    out: str | Path | None = None,
    node_config: NodeConfig | Sequence[NodeConfig] | None = None,
    **changes: Any,
) -> Survey:
    """Asks all clients of an experiment how their data are, without training.

    Parameters
    ----------
    model
        A network, as for `evaluate`: clients then also say how far the inputs of its batch norms are from its
        statistics.
    """
    models, asked = () if model is None else (model,), {**changes, "evaluate.survey": True}
    (made,) = evaluate(experiment, *models, only=only, out=out, node_config=node_config, **asked)
    return Survey.read(made.folder)


def planned_of(source: Source, only: str | Sequence[str] | None, changes: Tree) -> Experiment:
    if isinstance(source, Settings):
        source = source.model_dump(mode="json")
    if isinstance(source, Mapping):
        content, name = follow_extends(check_mapping(_plain("", source), "experiment"), Path()), "experiment"
    else:
        content, name = read_content(str(source))
    plain: dict[str, object] = {key: _plain(key, value) for key, value in changes.items()}
    if "runs" in plain:
        content = {**content, "runs": plain.pop("runs")}
    if only is not None:
        plain["only"] = _plain("only", only)
    return read_experiment(content, nested(plain.items()), name=name)


def _plain(key: str, value: object) -> object:
    """A value of the settings in JSON's types; an object of a section becomes a dict of the keys that it sets."""

    def other(value: object) -> object:
        if isinstance(value, np.generic | np.ndarray | range):
            return list(value) if isinstance(value, range) else value.tolist()
        if not callable(value) or not hasattr(getattr(value, "func", value), "__qualname__"):
            raise SettingsError(
                f"{key} has a {type(value).__name__} ({shorten(repr(value), 100)}); expected numbers, texts, lists, "
                "dicts, or functions and classes"
            )
        with locate_errors(key or "the experiment"):
            return give_name(value)

    plain = _JSON.dump_python(value, mode="json", exclude_unset=True, fallback=other)
    check_values(plain, key)
    return plain


@options_as("out", "resume=True")
def _carry_out(
    planned: Experiment,
    out: str | Path | None,
    resume: bool,
    progress: bool,
    node_config: NodeConfig | Sequence[NodeConfig] | None,
    jobs: int | None = None,
) -> Results:
    first = planned.runs[0]
    if node_config is not None and not isinstance(node_config, Mapping) and len(node_config) != first.clients:
        raise SettingsError(f"node_config has {len(node_config)} entries, but there are {first.clients} clients")
    folder = out_folder(planned.name, out, resume=resume)
    resume = resume and is_begun(folder)
    with _settings_of_the_process():
        forget_data()  # files may have changed since the last run, model.weights among them
        free_models.cache_clear()
        try:
            outcome = carry_out(planned, folder, resume=resume, jobs=jobs, quiet=not progress, node_config=node_config)
        except KeyboardInterrupt:
            print(f"stopped; resume with out={str(folder)!r}, resume=True", file=sys.stderr, flush=True)
            raise
    try:
        runs = zip(planned.runs, run_folders(planned, folder), strict=True)
        # The caller's own code, by names that came from the caller, not from the folder.
        return Results([Result.read(at.path, allow=names_in(run.model_dump(mode="json"))) for run, at in runs])
    except UserError:
        check_failures(outcome.failures)  # runs that wrote nothing
        raise


@contextmanager
def _settings_of_the_process() -> Iterator[None]:
    """Restore what a run changes in the process of its caller."""
    import torch

    logger, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.WARNING)  # in every round Flower logs metrics that the progress shows
    try:
        with warnings.catch_warnings():
            # In a notebook, tqdm warns on import if ipywidgets is missing; the progress here does not need it.
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
