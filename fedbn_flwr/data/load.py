"""One loader for four sources: the embedded digits, a name of the catalogue, a folder, a Hugging Face hub name.

What is small ends up in memory as one uint8 tensor per split, what is large stays on disk (see images.py).
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError, did_you_mean

from . import IGNORED
from .catalogue import Entry, find
from .decoding import Files, Size
from .folders import Splits, open_splits
from .images import Asked, Images, Source, Stream

_TRIED = 16  # images of a streamed split that are looked at before training
_MEASURED = 512  # images of a streamed set whose mean and deviation stand for all


@dataclass(frozen=True)
class Groups:
    """What a column says of each image: its domain, or whose it is."""

    column: str
    names: tuple[str, ...]
    train: Tensor  # int64 [N], an index into names; on the CPU, wherever the images are
    test: Tensor | None  # None where the test images lack the column


@dataclass(frozen=True)
class DataSet:
    name: str
    train: Source
    test: Source
    class_names: tuple[str, ...]
    domains: Groups | None = None
    natural: Groups | None = None  # whose an image is, where a partition asks for it

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def dense(self) -> bool:
        """Whether each pixel has a label, rather than each image."""
        return self.train.dense

    @property
    def channels(self) -> int:
        return self.train.shape[0]

    @property
    def size(self) -> Size:
        return self.train.shape[1:]

    @cached_property
    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each channel over the training images, in units of 0 to 1.

        Of a streamed set, over 512 of them, evenly spread.
        """
        rows = torch.arange(len(self.train.labels))
        if isinstance(self.train, Stream):
            rows = _spread(len(rows), _MEASURED)
        # Through histograms: exact, and no float copy of the data.
        counts = torch.zeros(self.channels, 256, dtype=torch.int64, device=self.train.device)
        for images, _, _ in self.train.batches(Asked(some, None) for some in rows.split(1_024)):
            for count, channel in zip(counts, images.unbind(1), strict=True):
                count += torch.bincount(channel.reshape(-1), minlength=256)
        values = torch.arange(256, dtype=torch.float64) / 255
        means, deviations = [], []
        for count in counts.cpu():
            share = count.double() / count.sum()
            mean = float(share @ values)
            means.append(mean)
            deviations.append(max(float(share @ (values - mean) ** 2) ** 0.5, 1e-6))
        return tuple(means), tuple(deviations)

    def to(self, device: torch.device) -> DataSet:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def _spread(count: int, most: int) -> Tensor:
    """Up to `most` row numbers of `count`, the first and the last among them."""
    return torch.from_numpy(np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)))


def load(
    name: str,
    *,
    root: str | None = None,
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    domains: Sequence[str] = (),
    natural: str | None = None,
    train: str | None = None,
    test: str | None = None,
    size: int | Size | None = None,
    fit: Literal["stretch", "crop"] | None = None,
    classes: int | None = None,
    stream: bool | Literal["auto"] = "auto",
    memory: float = 8.0,
    readers: int = 2,
) -> DataSet:
    """The data set called `name`: `digits`, a name of the catalogue, a folder, or a name on the Hugging Face hub.

    `root` (by default $FEDBN_DATA) is a folder of local copies: what lies there as `root/name` is read from there.
    `image`, `label` and `domain` are columns, found by type (`domain` by name) where not given; a `label` that holds
    images is one of masks, with a label for each pixel. `domains` are those to be used; `natural` a column that says
    whose each image is; `train` and `test` names of splits.

    `size` is the side (or height and width) that all images are brought to (by default the catalogue's), by `fit`:
    `stretch`, or `crop`, which cuts the middle out. `classes` is how many labels of pixels there are.

    With `stream` images are decoded by `readers` threads when they are asked for; `auto` does so where all of them
    together take more than `memory` GiB.
    """
    if name == "digits":
        if size not in (None, 8, (8, 8)):
            raise DataError(f"data.size is {size}; the embedded digits are 8 by 8 and are not resized")
        if column := domain or natural or ", ".join(domains):
            raise DataError(f"the embedded digits have neither domains nor other columns, but {column!r} is asked for")
        if stream is True:
            raise DataError("data.stream is true, but the embedded digits are in memory; leave it out")
        return _digits()
    splits, entry = open_splits(name, find(name), root, train, test)
    first = next(iter(splits.values()))
    if entry is not None:
        # A copy may have columns of other names: then their types tell.
        image = image or (entry.image if entry.image in first.features else None)
        label = label or (entry.label if entry.label in first.features else None)
        size = size or entry.size
        fit = fit or entry.fit
    columns = {part: _columns(split, name, image, label, domain or "domain") for part, split in splits.items()}
    dense = _is_image(first, columns["train"][1])
    class_names = _class_numbers(name, entry, classes) if dense else _check_classes(splits, columns, name, entry)
    domain = _domain_column(first, name, domain, domains)
    keep = _rows_of_domains(splits, name, domain, domains) if domains and domain else {}
    files: dict[str, Files] = {}
    labels: dict[str, Tensor] = {}
    for part, split in splits.items():
        image_column, label_column = columns[part]
        if dense:
            labels[part] = torch.zeros(len(split), dtype=torch.int64)
        else:
            labels[part] = _labels(split, name, label_column, class_names)
        rows = torch.ones(len(labels[part]), dtype=torch.bool) if part not in keep else keep[part]
        rows &= labels[part] >= 0  # those of classes that are not among the ones to keep
        if not rows.any():
            raise DataError(f"{name!r} has no rows" + (f" of {', '.join(domains)} to {part}" if domains else ""))
        if not rows.all():
            split = splits[part] = split.select(rows.nonzero()[:, 0].numpy())
            labels[part] = labels[part][rows]
        files[part] = Files(
            split,
            image_column,
            name,
            (size, size) if isinstance(size, int) else size,
            fit or "stretch",
            label_column if dense else None,
            entry.ids if dense and entry else None,
            len(class_names),
        )
    if stream == "auto":
        stream = _decoded(files) > memory * 2**30
    parts: Mapping[str, Source]
    parts = _streams(files, labels, name, readers) if stream else _in_memory(files, labels, name)
    return DataSet(
        name,
        parts["train"],
        parts["test"],
        class_names,
        _groups(splits, name, domain, domains) if domain is not None else None,
        _groups(splits, name, natural, ()) if natural is not None else None,
    )


# --- in memory, or not -------------------------------------------------------


def _decoded(files: dict[str, Files]) -> int:
    """Bytes that all images take in memory, were they all like the first of their split."""
    total = 0
    for each in files.values():
        pixels, mask = each.pair(0) if each.masks is not None else (each.pixels(0), None)
        total += len(each) * (pixels.size + (0 if mask is None else mask.size))
    return total


def _in_memory(files: dict[str, Files], labels: dict[str, Tensor], name: str) -> dict[str, Images]:
    parts = {}
    for part, each in files.items():
        images, masks = each.decode(), each.decode_masks() if each.masks is not None else None
        if masks is not None and images.shape[2:] != masks.shape[1:]:
            raise DataError(
                f"{name!r} has images of {images.shape[2]}x{images.shape[3]} pixels, but labels for "
                f"{masks.shape[1]}x{masks.shape[2]}"
            )
        parts[part] = Images(images, labels[part], masks)
    return _same_shape(parts, name)


def _streams(files: dict[str, Files], labels: dict[str, Tensor], name: str, readers: int) -> dict[str, Stream]:
    """Splits that stay on disk. Some images of each are tried, which tells the channels and finds what is broken."""
    channels = 0
    sizes: dict[str, Size] = {}
    for part, each in files.items():
        rows = _spread(len(each), _TRIED).tolist()
        with ThreadPoolExecutor(readers) as pool:
            tried = list(pool.map(each.look, rows))
        channels = max(channels, *(len(pixels) for pixels in tried))
        found = {pixels.shape[1:]: row for row, pixels in zip(rows, tried, strict=True)}
        if len(found) > 1:
            few = ", ".join(f"{h}x{w} in row {row}" for (h, w), row in list(found.items())[:3])
            raise DataError(f"{name!r} has images of several sizes ({few}); set data.size to resize them")
        sizes[part] = next(iter(found))
    if sizes["train"] != sizes["test"]:
        raise _other_shape(name, (channels, *sizes["train"]), (channels, *sizes["test"]))
    return {part: Stream(each, labels[part], (channels, *sizes[part]), readers) for part, each in files.items()}


# --- the embedded digits ----------------------------------------------------


def _digits() -> DataSet:
    """1,797 handwritten digits of 8 by 8 pixels that come inside scikit-learn; every fifth is a test image."""
    # The file is read without importing scikit-learn, which takes longer than everything else here.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("data.name='digits' needs scikit-learn, which carries them: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",")
    pixels = torch.from_numpy(np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    is_test = torch.arange(len(labels)) % 5 == 4
    return DataSet(
        "digits",
        Images(pixels[~is_test], labels[~is_test]),
        Images(pixels[is_test], labels[is_test]),
        tuple(str(digit) for digit in range(10)),
    )


# --- columns -----------------------------------------------------------------


def _kinds(split: Any) -> str:
    return ", ".join(f"{key} ({type(feature).__name__})" for key, feature in split.features.items())


def _columns(split: Any, name: str, image: str | None, label: str | None, domain: str) -> tuple[str, str]:
    import datasets

    features, kinds = split.features, _kinds(split)
    chosen = []
    for key, given, wanted in (("image", image, datasets.Image), ("label", label, datasets.ClassLabel)):
        if given is not None and given not in features:
            raise DataError(f"data.{key}={given!r} is not a column of {name!r}; its columns: {kinds}")
        candidates = [c for c, feature in features.items() if isinstance(feature, wanted) and c != domain]
        if key == "image":  # labels of pixels are images too
            candidates = [c for c in candidates if c != label]
        if given is None and len(candidates) != 1:
            raise DataError(
                f"{name!r} has {len(candidates) or 'no'} columns of type {wanted.__name__}; name one by data.{key}. "
                f"Its columns: {kinds}"
            )
        chosen.append(given if given is not None else candidates[0])
    if not isinstance(features[chosen[0]], datasets.Image):
        raise DataError(f"data.image={chosen[0]!r} of {name!r} holds no images; its columns: {kinds}")
    return chosen[0], chosen[1]


def _is_image(split: Any, column: str) -> bool:
    import datasets

    return isinstance(split.features[column], datasets.Image)


def _class_numbers(name: str, entry: Entry | None, classes: int | None) -> tuple[str, ...]:
    """The names of the classes that pixels have."""
    if entry is not None and entry.names:
        return entry.names
    if classes is None:
        raise DataError(
            f"{name!r} has a label for each pixel; say how many classes there are by data.classes (pixels hold 0 to "
            f"classes - 1, or {IGNORED} where they do not count)"
        )
    return tuple(str(number) for number in range(classes))


def _check_classes(
    splits: Splits, columns: dict[str, tuple[str, str]], name: str, entry: Entry | None
) -> tuple[str, ...]:
    """The names of the classes, which must be those of both splits and as many as the catalogue says."""
    names = {part: _class_names(split, columns[part][1]) for part, split in splits.items()}
    if names["train"] != names["test"]:
        raise DataError(
            f"data.name={name!r}: the training split has {len(names['train'])} classes in {columns['train'][1]!r}, "
            f"the test split {len(names['test'])}; they must be the same"
        )
    found = names["train"]
    if entry is None:
        return found
    if entry.keep:
        if absent := [label for label in entry.keep if label not in found]:
            raise DataError(f"data.name={name!r} ({entry.title}): the data has no class {', '.join(absent)}")
        return entry.keep
    if len(found) != entry.classes:
        raise DataError(
            f"data.name={name!r} ({entry.title}) has {entry.classes} classes, the data {len(found)} in "
            f"{columns['train'][1]!r}; another column is named by data.label, other data by a folder or hub name"
        )
    return found


def _class_names(split: Any, column: str) -> tuple[str, ...]:
    feature = split.features[column]
    if hasattr(feature, "names"):
        return tuple(feature.names)
    return tuple(str(value) for value in sorted(split.unique(column)))


def _labels(split: Any, name: str, column: str, class_names: tuple[str, ...]) -> Tensor:
    """Numbers of classes; -1 for a class that is not to be kept."""
    values = split[column][:]  # at once: row by row it takes 0.2 ms each
    own = _class_names(split, column)
    if hasattr(split.features[column], "names"):
        labels = torch.tensor([int(value) for value in values], dtype=torch.int64)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(own):
            raise DataError(
                f"{name!r} has labels from {int(labels.min())} to {int(labels.max())} in {column!r}, "
                f"but names {len(own)} classes"
            )
    else:
        order = {value: i for i, value in enumerate(own)}
        labels = torch.tensor([order[str(value)] for value in values], dtype=torch.int64)
    if own == class_names:
        return labels
    number = {label: i for i, label in enumerate(class_names)}
    return torch.tensor([number.get(label, -1) for label in own])[labels]


# --- domains and other groups ------------------------------------------------


def _domain_column(split: Any, name: str, domain: str | None, domains: Sequence[str]) -> str | None:
    if domain is not None:
        if domain not in split.features:
            raise DataError(f"data.domain={domain!r} is not a column of {name!r}; its columns: {_kinds(split)}")
        return domain
    if "domain" in split.features:
        return "domain"
    if domains:
        raise DataError(
            f"data.domains is {list(domains)}, but {name!r} has no column 'domain'; name one by data.domain. "
            f"Its columns: {_kinds(split)}"
        )
    return None


def _values(split: Any, name: str, column: str) -> list[str]:
    feature = split.features[column]
    values = split[column][:]
    if hasattr(feature, "names"):
        return [feature.names[value] for value in values]
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"{name!r}: row {row} has nothing in {column!r}")
    return [str(value) for value in values]


def _rows_of_domains(splits: Splits, name: str, column: str, domains: Sequence[str]) -> dict[str, Tensor]:
    values = {part: _values(split, name, column) for part, split in splits.items() if column in split.features}
    known = {value for some in values.values() for value in some}
    for domain in domains:
        if domain not in known:
            raise DataError(f"data.domains: {domain!r} is not a domain of {name!r}; {did_you_mean(domain, known)}")
    return {part: torch.tensor([value in domains for value in some]) for part, some in values.items()}


def _groups(splits: Splits, name: str, column: str, order: Sequence[str]) -> Groups:
    if column not in splits["train"].features:
        raise DataError(
            f"data.partition.column={column!r} is not a column of {name!r}; its columns: {_kinds(splits['train'])}"
        )
    values = {part: _values(split, name, column) for part, split in splits.items() if column in split.features}
    names = tuple(order) or tuple(sorted({value for some in values.values() for value in some}))
    number = {value: i for i, value in enumerate(names)}
    found = {part: torch.tensor([number[value] for value in some]) for part, some in values.items()}
    return Groups(column, names, found["train"], found.get("test"))


def _same_shape(parts: dict[str, Images], name: str) -> dict[str, Images]:
    """Grey becomes RGB where the other split has colour; other differences are an error."""
    train, test = (parts[part].images.shape[1:] for part in ("train", "test"))
    if train[1:] == test[1:] and {train[0], test[0]} == {1, 3}:
        return {
            part: replace(images, images=images.images.expand(-1, 3, -1, -1).contiguous())
            for part, images in parts.items()
        }
    if train != test:
        raise _other_shape(name, tuple(train), tuple(test))
    return parts


def _other_shape(name: str, train: tuple[int, ...], test: tuple[int, ...]) -> DataError:
    return DataError(
        f"data.name={name!r}: training images are {train}, test images {test} (channels, height, width); set "
        "data.size to resize them"
    )
