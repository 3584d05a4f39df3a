"""Loads a run's data, splits it among the clients, and normalises it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr import named
from fedbn_flwr.batch import Value, tensors
from fedbn_flwr.data import Moments
from fedbn_flwr.data.batches import ClientBatches, Normalise, own_augmentation
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataForm, DataSet
from fedbn_flwr.data.examples import MASK
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import hold_out, partition, share_test
from fedbn_flwr.data.schema import Problem
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, TASKS, Task

from .settings import AUGMENTATIONS, Data, Settings, name_in, options_in

_kept: dict[tuple[str, str, str], DataSet] = {}  # by settings, device and working directory
received: dict[str, DataSet] = {}  # of another process, used instead of loading them; by `examples_of`


def examples_of(data: Data) -> str:
    """The settings that say which examples are loaded: runs that share them share one copy of the examples."""
    own = {"normalise"} if data.normalise == "own" else set()
    return data.model_dump_json(include={*Source.model_fields, *own})


def load_data(data: Data, device: str) -> DataSet:
    """Load a data set, or return the one that the process keeps.

    It keeps the last two, and more while together they take at most `data.memory`: each node with data of its own has
    its own data set. Relative names start at the working directory.
    """
    examples = examples_of(data)
    key = examples, device, os.getcwd()
    if (found := _kept.get(key)) is None:
        if (loaded := received.get(examples)) is None:
            loaded = load(data).standardised() if data.normalise == "own" else load(data)
        rows_by_domain(loaded)  # checks the names
        found = _kept[key] = loaded.to(torch.device(device), most := data.memory * 2**30)
        while len(_kept) > 2 and sum(dataset.nbytes for dataset in list(_kept.values())) > most:
            _kept.pop(next(iter(_kept)), None)
    return found


def forget_data() -> None:
    """Load data sets again when they are next needed: their files may have changed."""
    _kept.clear()
    _shares.cache_clear()
    _splits.cache_clear()


def at_site(data: Data, path: str) -> Data:
    """How a site reads its own data, all of which are for one client; a reader of the user gets the folder."""
    place = {"root": str(named.path_of(path))} if named.is_name(data.name) else {"name": named.as_path(path)}
    whole = dict.fromkeys(("revision", "root", "examples", "test_examples"))
    return data.model_copy(update={**whole, "random": False, "domains": (), **place})


def shares_of(data: Data, clients: int, seed: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Indices of each client's training examples, and of its own test examples."""
    return _shares(os.getcwd(), data, clients, seed, device)


@functools.lru_cache(maxsize=8)  # the working directory is where a relative `data.name` starts
def _shares(_: str, data: Data, clients: int, seed: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    dataset = load_data(data, device)
    options = data.partition.model_dump()
    kind, strata = options.pop("kind"), dataset.strata()
    if dataset.dense and data.partition.by_class:
        raise SettingsError(
            f"data.partition.kind is {kind!r}, which splits examples by class, but {data.name!r} has labels per "
            "pixel; use iid, domain or natural"
        )
    groups = dataset.groups if kind == "natural" else dataset.domains
    if dataset.groups is None and (kind == "natural" or data.group is not None):
        if data.random:
            raise SettingsError(
                "data.random is true, and random examples have no column for a natural partition; give "
                "data.partition={kind: iid} and data.group=null too"
            )
        raise SettingsError(
            f"data.group is {data.group!r}; expected the column whose values are the clients of a natural partition. "
            f"The columns of {data.name!r}: {', '.join(dataset.columns)}"
        )
    parts = partition(strata.train, len(strata.names), clients, seed, kind, groups, **options)
    if kind == "natural" and groups is not None:
        # A site is tested on all of its own rows; groups that are only in the test split belong to no client.
        if groups.test is not None and torch.isin(groups.test, groups.train).any():
            return parts, [torch.isin(groups.test, groups.train[part]).nonzero()[:, 0] for part in parts]
        groups = dataset.domains
    train, test = strata.train, strata.test
    assert test is not None
    if groups is not None and groups.test is not None:
        # The classes of each group are split separately: a client is tested on the groups that it trains on.
        train, test = train + len(strata.names) * groups.train, test + len(strata.names) * groups.test
    return parts, share_test(parts, train, test, seed)


def splits_of(run: Settings, device: str) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Indices of the examples that each client trains on, and of those that it holds out."""
    return _splits(os.getcwd(), run.source, run.clients, run.seed, device, run.evaluate.validation)


@functools.lru_cache(maxsize=8)
def _splits(
    _: str, data: Data, clients: int, seed: int, device: str, share: float
) -> Mapping[int, tuple[Tensor, Tensor]]:
    parts = dict(enumerate(shares_of(data, clients, seed, device)[0]))
    return hold_out(load_data(data, device), parts, share, seed)


def rows_by_domain(dataset: DataSet) -> dict[str, Tensor]:
    """Indices of each domain's test examples, by names valid in metrics; DataError if two names agree."""
    domains = dataset.domains
    if domains is None or domains.test is None:
        return {}
    rows: dict[str, Tensor] = {}
    for number, name in enumerate(domains.names):
        if len(indices := (domains.test == number).nonzero()[:, 0]):
            key = re.sub(r"\W+", "_", name)
            metric = MetricKey("accuracy", domain=key)
            if key in (*rows, "of") or MetricKey.parse(str(metric)) != metric:
                raise DataError(
                    f"{dataset.name!r} has a domain whose accuracy would have the name of another metric; expected "
                    "another name than those before it and 'of', without 'std' or 'worst_tenth' as the last word; "
                    "rename it, or leave it out with data.domains",
                    f": {name!r}",
                )
            rows[key] = indices
    return rows


def normalisation_of(run: Settings, dataset: DataSet | Shape, listed: str | None = None) -> Moments:
    """Mean and standard deviation per feature or channel for normalising examples.

    `data.normalise: moments` needs the data. `listed` is the experiment's data set, whose `official` values also apply
    to a site that has its own files of it.
    """
    if run.data.normalise in ("unit", "own"):
        return (0.0,) * dataset.channels, (1.0,) * dataset.channels
    entry = CATALOGUE.get(listed or run.data.name)
    if run.data.normalise == "official" and entry is not None and entry.moments is not None:
        if len(entry.moments[0]) != dataset.channels:
            raise SettingsError(
                f"data.normalise is 'official' with {len(entry.moments[0])} channels for {entry.title!r}, but these "
                f"examples have {dataset.channels}; use moments or unit"
            )
        return entry.moments
    assert isinstance(dataset, DataSet), "moments of the data need the data"
    return dataset.moments


def split_moments(agreed: Moments, data: DataSet | Shape) -> tuple[Moments, Moments]:
    """The moments of the inputs and of the regression targets, from those on which sites agreed."""
    (means, deviations), n = agreed, data.normalised
    return (means[:n], deviations[:n]), (means[n:], deviations[n:])


def client_batches(
    run: Settings,
    dataset: DataSet,
    indices: Tensor,
    client: int,
    normalise: Normalise,
    units: Moments | None = None,
) -> ClientBatches:
    """A client's training batches, with the augmentations of the settings; `units` are the moments of its targets."""
    parts = run.data.augment or ()
    return ClientBatches(
        dataset.train,
        indices,
        normalise,
        targets=units,
        batch_size=run.train.batch_size,
        client=client,
        seed=run.seed,
        augment=[name_in(part) for part in parts if not named.is_name(name_in(part))],
        pad=run.data.pad,
        cut=run.data.crop if dataset.dense else None,
        own=[own_augmentation(name_in(part), **options_in(part)) for part in parts if named.is_name(name_in(part))],
    )


def try_data(run: Settings, dataset: DataSet, indices: Tensor) -> None:
    """Take a batch twice before training, to report augmentations of the user that fail or aren't reproducible."""
    if not (own := [name for name in map(name_in, run.data.augment or ()) if named.is_name(name)]):
        return
    batches = client_batches(run, dataset, indices[:2], 0, normalisation_of(run, dataset))
    (first, _), (second, _) = (next(iter(batches.epoch(1, 0))) for _ in range(2))
    if any(not a.equal(b) for a, b in zip(tensors(first), tensors(second), strict=True)):
        raise SettingsError(
            f"{' and '.join(own)} returned different examples for the same batch, so a resumed run would differ; draw "
            "from the argument `generator`, which an augmentation receives if its signature names it"
        )


@dataclass(frozen=True)
class Shape(DataForm):
    """The properties of examples that a model depends on, without the examples."""

    classes: int
    shape: tuple[int, ...]
    task: Task
    tokens: int | None = None
    is_padded: bool = False  # inputs of several lengths, with a mask

    def blank(self, number: int) -> Value:
        zeros = torch.zeros(number, *self.shape, dtype=torch.float32 if self.tokens is None else torch.int64)
        mask = torch.ones(number, self.shape[-1], dtype=torch.bool)
        return {"inputs": zeros, MASK: mask} if self.is_padded else zeros


def shape_without_data(run: Settings) -> Shape:
    """The shape given in the settings, for a server without data."""
    data = run.data
    task = TASKS[data.task] if data.task else SEGMENTATION if data.crop is not None else CLASSIFICATION
    classes = data.classes or (len(data.label) if task in (REGRESSION, MULTILABEL) else None)
    shape = data.shape
    if not shape and data.channels is not None and data.pixels is not None:
        shape = (data.channels, *data.pixels)
    if not shape and data.channels is None and data.tokens is None and data.inputs:
        shape = (sum(len(data.categories.get(column, "1")) for column in data.inputs),)
    if classes is None or not shape:
        missing = [key for key, value in (("data.classes", classes), ("data.shape", shape)) if not value]
        raise SettingsError(
            f"evaluate.server is false, so the server reads no data, and {' and '.join(missing)} must be given, for "
            "instance data: {classes: 10, channels: 3, size: 32} for images, data: {classes: 2, inputs: [age, weight]} "
            "for a table, data: {classes: 6, shape: [9, 128]} for series of 9 channels"
        )
    is_padded = shape[-1] is None
    return Shape(classes, tuple(_ANY_LENGTH if side is None else side for side in shape), task, data.tokens, is_padded)


_ANY_LENGTH = 32  # stands for an unknown length when a model is tried


def label_problems(run: Settings, dataset: DataSet | Shape) -> Iterator[Problem]:
    """Why crops or augmentations don't suit the inputs, or the labels (one per example or per pixel)."""
    name, data, cut, size = run.data.name, run.data, run.data.crop, dataset.size
    drawn = [kind for kind in data.augment or () if kind in AUGMENTATIONS]
    of_images = {"augment": drawn, "size": data.size, "crop": cut, "channels": data.channels}
    for key, value in of_images.items() if not dataset.is_image else ():
        yield (
            value,
            f"data.{key} is {value!r}, which is for images, but {name!r} has inputs of shape {list(dataset.shape)}; "
            "leave it out",
        )
    for key, given in (("targets", data.targets), ("missing", data.missing == "mean" and "mean")):
        yield (
            given and data.normalise != "moments",
            f"data.{key} is {given!r}, which needs data.normalise: moments, but data.normalise is {data.normalise!r}",
        )
    yield (
        data.targets and dataset.task is not REGRESSION,
        f"data.targets is {data.targets!r}, which is for regression targets, but {name!r} has labels for "
        f"{dataset.task.name}; leave it out",
    )
    yield (
        cut is not None and not dataset.dense,
        f"data.crop is {cut}, but {name!r} has one label per example; data.crop is for segmentation data "
        "(data.augment has crops for classification: crop, resized_crop)",
    )
    for part in map(name_in, data.augment or ()) if dataset.dense else ():
        said = f"data.augment: {part!r} would not transform the masks of segmentation data ({name!r}); use flip, and "
        yield part != "flip", f"{said}data.crop"
    yield (
        cut is not None and cut > min(size),
        f"data.crop is {cut}, but the images of {name!r} have {'x'.join(map(str, size))} pixels",
    )
