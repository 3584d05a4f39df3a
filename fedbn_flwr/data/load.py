"""Loads a data set: one of this package, an entry of the catalogue, a file, a folder, a name on the Hugging Face hub,
or what a callable of the user returns.

A callable returns a mapping with `train` and `test` (`train` is enough if `data.test` is a share), and perhaps
`classes`, the names of the classes. Splits of `datasets` are read like splits of the hub. Other splits are kept in
memory:

- a pair (inputs, labels), or a mapping of arrays or tensors by name, usually `inputs`, `labels`, `domains`, `groups`
- a torch `Dataset` of pairs (inputs, label), or of triples with a domain
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr import named, seeding
from fedbn_flwr.errors import DataError, MissingPackage, SettingsError, error_if, log_once, needs
from fedbn_flwr.trees import Draft, Tree

from .catalogue import CATALOGUE, Entry
from .columns import read
from .dataset import DataSet
from .folders import open_splits
from .located import located
from .source import PARTS, Source
from .table import Table, joined, table_of

KEY = "data.name"
_SHARE = 0.25  # of a recording of `watch`: its end, for testing


def load(source: Source) -> DataSet:
    """The data set that `source` describes, checked against what it says of classes and channels."""
    entry, name = CATALOGUE.get(source.name), source.name
    with needs("data", f"{KEY}={name!r}"):
        dataset = random_images(source, entry) if source.random else _read(source, entry)
    if not source.random and source.class_names not in ((), names := dataset.class_names):
        raise SettingsError(
            f"data.class_names is {list(source.class_names)}, but {name!r} has others", f": {list(names)}"
        )
    if dataset.is_image and source.pixels not in (None, dataset.size):
        raise SettingsError(
            f"data.size is {source.size}, but {name!r} has arrays of {'x'.join(map(str, dataset.size))} pixels, and "
            "only image files are resized"
        )
    for key in ("classes", "channels"):
        if (wanted := getattr(source, key)) not in (None, found := getattr(dataset, key)):
            raise SettingsError(f"data.{key} is {wanted}, but {name!r} has {found} {key}")
    return dataset


def _read(source: Source, entry: Entry | None) -> DataSet:
    is_own, is_embedded = named.is_name(source.name), entry is not None and bool(entry.embedded)
    folder = located(source)
    error_if(
        source.revision is not None and (is_own or is_embedded or folder),
        f"data.revision is {source.revision!r}, which is for data sets of the hub, but "
        f"{str(folder or source.name)!r} is read",
    )
    if not (is_own or is_embedded):
        return read(source, *open_splits(source, folder, entry))
    if is_embedded and named.path_of(source.name).exists():
        words = "is the data set of this package; for the file or folder of this name write"
        log_once(f"{KEY}={source.name} {words} ./{source.name}")
    parts = PARTS[:1] if source.held_out else PARTS
    given = _returned(source, parts) if is_own else embedded(source.name)
    if isinstance(given["train"], Mapping):
        for key in ("train", "test", "fit"):
            if (value := getattr(source, key)) not in (None, "stretch") and not (key == "test" and source.held_out):
                raise DataError(
                    f"data.{key} is {value!r}, which is for files, but the examples of {source.name!r} are arrays in "
                    "memory; leave it out"
                )
    table = joined(source.name, *(table_of(source.name, given[part], source.inputs) for part in parts))
    return read(source, table, known=given.get("classes") or ())


def _returned(source: Source, parts: Sequence[str]) -> Tree:
    """What the callable returns, checked to have both splits. Random draws in it are the same in every process."""
    name = source.name
    offered = {} if source.root is None or "root" in source.options else {"root": source.root}
    with seeding.streams(seeding.seed_for(0, "own data")):
        taken = named.accepted(named.load(KEY, name), offered)
        error_if(
            offered.keys() > taken.keys(),
            f"{KEY}={name!r} has no parameter 'root', by which it gets data.root, at a site the folder data-path",
        )
        found = named.call(KEY, name, **taken, **source.options)
        if not isinstance(found, Mapping) or not all(part in found for part in parts):
            keys = f" with {', '.join(map(repr, found))}" if isinstance(found, Mapping) else ""
            raise DataError(
                f"{KEY}={name!r} returned a {type(found).__name__}{keys}; expected a mapping with 'train' and 'test', "
                "such as a datasets.DatasetDict, or with 'train' only if data.test is a share"
            )
        if all(hasattr(found[part], "features") for part in parts):  # splits of `datasets`
            return found
        # Read here, where its draws are seeded.
        return {**found, **{part: _columns(f"{KEY}={name!r}: {part}", found[part]) for part in parts}}


_USUAL = ("inputs", "labels", "domains")  # in a torch `Dataset`, in this order


def _columns(where: str, split: Any) -> Draft:
    """A split as a mapping of arrays by name."""
    if isinstance(split, Mapping):
        return {key: values for key, values in split.items() if values is not None}
    if isinstance(split, list | tuple) and len(split) == 2:
        return dict(zip(_USUAL, split, strict=False))
    count = len(split) if hasattr(split, "__getitem__") and hasattr(split, "__len__") else 0
    first = split[0] if count else ()
    if not isinstance(first, list | tuple) or len(first) not in (2, 3):
        what = f"items of type {type(first).__name__}" if count else "no items"
        raise DataError(
            f"{where} is a {type(split).__name__} with {what}; expected a pair (inputs, labels), a mapping of arrays, "
            "or a Dataset of pairs (inputs, label)"
        )
    items = itertools.chain([first], map(split.__getitem__, range(1, count)))
    return dict(zip(_USUAL, map(list, zip(*items, strict=True)), strict=False))


def embedded(name: str) -> Tree:
    """A data set of a package; the files of this one have their source and licence too."""
    if name == "watch":
        return recordings()
    found: Tree = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return found


def recordings() -> Tree:
    """Smartwatches of ten persons during seven shoulder exercises (Burns et al. 2018, https://arxiv.org/abs/1802.01489).

    The recordings are a file of the package seglearn (BSD): acceleration and rotation on three axes each, at 50 Hz.
    Here they are long tables with the columns recording, person, exercise, and those of the sensors.
    """
    package = CATALOGUE["watch"].embedded
    found = importlib.util.find_spec(package)  # not imported, which takes seconds
    if found is None or found.origin is None:
        raise MissingPackage(f"data.name='watch' is in the package {package!r}: pip install {package}==1.2.5")
    # Its pickle is trusted as the code of the package is.
    given = np.load(named.path_of(found.origin).parent / "data" / "watch_dataset.npy", allow_pickle=True).item()
    lengths = np.array([len(values) for values in given["X"]])
    rows = np.concatenate([np.arange(length) for length in lengths])
    is_test = rows >= np.repeat(np.round(lengths * (1 - _SHARE)), lengths)
    exercises = np.array(given["y_labels"])[given["y"]]
    of_recordings = {"recording": np.arange(len(lengths)), "person": given["subject"], "exercise": exercises}
    columns = {name: np.repeat(values, lengths) for name, values in of_recordings.items()}
    columns |= dict(zip(given["X_labels"], np.concatenate(given["X"]).T, strict=True))
    return {
        part: {name: values[chosen] for name, values in columns.items()}
        for part, chosen in (("train", ~is_test), ("test", is_test))
    }


def random_images(source: Source, entry: Entry | None) -> DataSet:
    """Images of uniform noise, to try an experiment without its data; accuracies on them mean nothing.

    They have the classes, channels, size and domains of a data set. Classes and domains have equal numbers of images,
    up to one. Segmentation data have random masks.
    """
    name = source.name
    if entry is None and source.classes and source.channels:
        entry = Entry(name, source.classes, source.channels, size=None, domains=source.domains)
    if entry is None or (size := source.pixels or entry.pixels) is None:
        raise DataError(
            f"data.random is true, but the form of {name!r} is not known; give data.classes, data.channels and "
            "data.size"
        )
    if wrong := [domain for domain in source.domains if domain not in entry.domains]:
        known = ", ".join(entry.domains) or "none"
        raise DataError(f"data.domains has {wrong[0]!r}; the domains of {name!r} are {known}")
    domains = source.domains or entry.domains
    tables: list[Table] = []
    for part, count in (("train", source.examples or 1_000), ("test", source.test_examples or 200)):
        # Not torch's generator, which takes twice as long.
        draw = np.random.default_rng(seeding.seed_for(0, f"random images, {part}"))
        pixels, rows = draw.integers(0, 256, (count, entry.channels, *size), dtype=np.uint8), np.arange(count)
        labels = rows // max(1, len(domains)) % entry.classes
        masks = entry.crop and draw.integers(0, entry.classes, (count, *size), dtype=np.uint8)
        split = {"inputs": pixels, "labels": labels if masks is None else masks}
        some = {"domains": np.array(domains)[rows % len(domains)]} if domains else {}
        tables.append(table_of(name, split | some))
    classes = entry.names or entry.keep or range(entry.classes)
    return read(Source(name=name, domains=domains, memory=source.memory), joined(name, *tables), known=classes)
