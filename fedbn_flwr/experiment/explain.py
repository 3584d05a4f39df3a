"""What an experiment will do, for `fedbn explain`: settings, data, model, what it sends and how long it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.models.tensors import sent_dtype
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.results.folder.counts import PartitionCounts

from .check import Faults
from .data import partition_of
from .origins import Setting, settings_of
from .partition import count_partitions
from .prepare import Prepared, prepare
from .run import gpus_of, open_folders, workers_of
from .settings import Experiment, Settings
from .side_by_side import jobs_of
from .trial import Measured, try_out

_LINE, _LINE_OF_CLIENT, _OTHER_FILES = 700, 70, 10_000  # bytes: a round in the history, a client in it, the settings


@dataclass(frozen=True)
class Part:
    """The arrays of one role in a model."""

    arrays: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """Seconds on the local engine of this machine."""

    workers: int  # processes that train at the same time
    steps: int  # of all clients of a round; of an average choice if not all take part
    train: float  # a round of training
    evaluate: float  # an evaluation on the server's test images
    run: float  # the whole run
    disk: int  # bytes of its folder


@dataclass(frozen=True)
class ExplainedRun:
    label: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    model: dict[str, Part]  # by role
    measured: Measured | None  # None: not measured
    estimate: Estimate | None


@dataclass(frozen=True)
class Explanation:
    experiment: Experiment
    partitions: tuple[PartitionCounts, ...]  # empty if the server has no data
    runs: tuple[ExplainedRun, ...]  # those without a fault; those of further seeds are not repeated


def explain(experiment: Experiment, *, trial: bool = True, faults: Faults | None = None) -> Explanation:
    """Prepare all runs as `fedbn run` does, and try them out: a few rounds of a few steps on some of the clients.

    What is wrong with some of the runs is raised, or added to `faults`; the explanation is then of the others.
    """
    first: dict[str, Prepared] = {}
    for prepared in prepare(experiment, faults=faults):
        if faults is None or not faults.has(prepared.run.label):
            first.setdefault(prepared.run.label, prepared)
    if not first and faults is not None:
        faults.refuse()
    sound = experiment.model_copy(update={"runs": tuple(run for run in experiment.runs if run.label in first)})
    seeds = {label: tuple(run.seed for run in experiment.runs if run.label == label) for label in first}
    by_label = {run.label: run for run in reversed(experiment.runs)}
    explained = []
    has_data = all(prepared.dataset is not None for prepared in first.values())
    for label in list(first):
        prepared = first.pop(label)  # with its model, so that it is not in the memory that the next run needs
        measured = try_out(prepared) if trial and prepared.dataset is not None else None
        explained.append(
            ExplainedRun(
                label,
                seeds[label],
                tuple(settings_of(experiment, by_label[label])),
                _parts_of(prepared),
                measured,
                None if measured is None else _estimate(prepared, measured),
            )
        )
    counts = count_partitions(sound) if has_data else []
    return Explanation(experiment, tuple(counts), tuple(explained))


@dataclass(frozen=True)
class Plan:
    """What is left to do of an experiment that was checked."""

    runs: tuple[tuple[ExplainedRun, int], ...]  # with the number of seeds that are left
    seconds: float  # of all, on this machine
    disk: int  # bytes


def plan(experiment: Experiment, out: Path, *, resume: bool, jobs: int | None) -> Plan:
    """Check an experiment as `carry_out` does, and estimate what it takes."""
    folders = open_folders(experiment, out, resume=resume)
    done = [resume and folder.is_finished() for folder in folders]
    left = Counter(run.label for run, is_done in zip(experiment.runs, done, strict=True) if not is_done)
    jobs = jobs_of(experiment.runs, left.total(), jobs)
    runs = explain(experiment).runs
    seconds, disk = 0.0, 0
    for run in runs:
        if (estimate := run.estimate) is not None:
            # Runs side by side have no workers.
            seconds += left[run.label] * estimate.run * (estimate.workers / jobs if jobs > 1 else 1)
            disk += left[run.label] * estimate.disk
    return Plan(tuple((run, left[run.label]) for run in runs), seconds, disk)


def _parts_of(prepared: Prepared) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    tensors = prepared.model.state_dict()
    for key, role in roles(prepared.model).items():
        before, tensor = parts.get(str(role), Part(0, 0, 0)), tensors[key]
        size = tensor.numel() * sent_dtype(tensor.dtype).itemsize
        parts[str(role)] = Part(before.arrays + 1, before.values + tensor.numel(), before.bytes + size)
    return parts


def _estimate(prepared: Prepared, measured: Measured) -> Estimate:
    run, dataset = prepared.run, prepared.dataset
    assert dataset is not None
    # Workers that share a GPU take its time from each other; how much they gain is not known.
    workers = min(gpus_of(run) or workers_of(run) or 1, measured.clients)
    parts = partition_of(run.data, run.clients, run.seed, str(prepared.device))
    held_out = run.evaluate.validation
    sizes = [len(part) - round(held_out * len(part)) for part in parts[: run.clients - run.evaluate.unseen]]
    steps = round(_steps(run, sizes) * measured.clients / len(sizes))
    train = (steps * measured.step + measured.clients * measured.message) / workers
    evaluate = _evaluation(prepared, dataset, measured, workers)
    evaluations = math.ceil(run.rounds / run.evaluate.every)
    model = sum(part.bytes for part in _parts_of(prepared).values())
    files = (3 if held_out else 2) * model + measured.states  # model, the best one, and the checkpoint
    lines = run.rounds * (_LINE + _LINE_OF_CLIENT * measured.clients)
    whole = run.rounds * train + evaluations * evaluate
    return Estimate(workers, steps, train, evaluate, whole, files + lines + _OTHER_FILES)


def _steps(run: Settings, sizes: Sequence[int]) -> int:
    """The steps of all clients in a round."""
    if run.train.steps is not None:
        return run.train.steps * len(sizes)
    return (run.train.epochs or 1) * sum(math.ceil(size / run.train.batch_size) for size in sizes)


def _evaluation(prepared: Prepared, dataset: DataSet, measured: Measured, workers: int) -> float:
    """The seconds of an evaluation on the server and by clients, each of which tests on all images and on its own."""
    run, images = prepared.run, len(dataset.test.labels)
    personal = prepared.rule.traits.personal
    by_clients = personal if run.evaluate.clients is None else run.evaluate.clients
    per_image = measured.test_image or 0.0
    domains = 2 if dataset.domains is not None and dataset.domains.test is not None else 1
    server = domains * images * per_image
    return server + (run.clients * images + images) * per_image / workers * by_clients
