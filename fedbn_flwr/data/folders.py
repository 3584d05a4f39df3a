"""Opens data sets: from the Hugging Face hub, Parquet files, or image files in one of these layouts.

    SPLIT/CLASS/*.jpg                                       (ImageNet)
    DOMAIN/CLASS/*.jpg, with or without DOMAIN_SPLIT.txt    (DomainNet, Office-Caltech-10)
    leftImg8bit/SPLIT/CITY/*.png and gtFine/SPLIT/CITY/     (Cityscapes)

All become splits of `datasets` with columns. Image files are listed, not opened.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr import named
from fedbn_flwr.errors import DataError, did_you_mean

from .catalogue import CATALOGUE, Entry

_PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
_EACH = 5  # of each class of a domain without lists, every fifth image is a test image

Splits = dict[str, Any]  # "train" and "test"


def open_splits(
    name: str, entry: Entry | None, root: str | None, train: str | None, test: str | None, revision: str | None = None
) -> tuple[Splits, Entry | None]:
    """The splits of the data set `name`, and its catalogue entry, which may follow from a folder's layout."""
    key = "data.root" if root else "FEDBN_DATA"
    root = root or os.environ.get("FEDBN_DATA")
    if root and not name.startswith((".", "/", "~")):
        base = named.path_of(root)
        if not base.is_dir():
            raise DataError(
                f"{key}={root!r}: there is no such folder; give the folder that contains {name}/ with "
                "train*.parquet and test*.parquet"
            )
        if (base / name).is_dir():
            return _folder(_unrevised(base / name, revision), entry, train, test)
        if entry is not None:
            present = sorted(folder.name for folder in base.iterdir() if folder.is_dir())
            raise DataError(
                f"{key}={root!r} has no folder {name!r}; it contains {', '.join(present[:12]) or 'none'}. Put a copy "
                "there" + (f", or leave out {key} to load {entry.hub!r} from the Hugging Face hub" if entry.hub else "")
            )
    if entry is None and _is_path(name):
        return _folder(_unrevised(named.path_of(name), revision), entry, train, test)
    if entry is None and "/" not in name:  # the hub need not be asked, which takes half a minute without a network
        raise DataError(
            f"data.name={name!r}: there is no such data set; give a folder, OWNER/NAME of a data set on the Hugging "
            f"Face hub, or a name that `fedbn list datasets` shows; {did_you_mean(name, CATALOGUE)}"
        )
    if entry is None:
        return _hub(name, name, train or "train", test or "test", revision), None
    if entry.hub is None:
        raise DataError(
            f"data.name={name!r} ({entry.title}) is not on the Hugging Face hub; give data.root (or FEDBN_DATA), a "
            f"folder that contains {name}/ with {entry.files}"
        )
    return _hub(name, entry.hub, train or "train", test or entry.test, revision), entry


def _unrevised(folder: Path, revision: str | None) -> Path:
    if revision is not None:
        raise DataError(
            f"data.revision is {revision!r}, which is for data sets of the hub, but {str(folder)!r} is read"
        )
    return folder


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or named.path_of(name).is_dir()


def _folder(
    folder: Path, entry: Entry | None, train: str | None, test: str | None
) -> tuple[dict[str, Any], Entry | None]:
    """Parquet files whose names begin with the split's, here or one level below; or image files in a known layout."""
    if not folder.is_dir():
        raise DataError(
            f"data.name={str(folder)!r}: there is no such folder; give a folder with train*.parquet and "
            "test*.parquet, a name that `fedbn list datasets` shows, or the name of a data set on the Hugging Face hub"
        )
    _quiet()
    if (folder / "leftImg8bit").is_dir():
        splits = {"train": train or "train", "test": test or "val"}
        return {part: _cityscapes(folder, split) for part, split in splits.items()}, CATALOGUE["cityscapes"]
    if domains := _domains(folder, entry):
        return _of_domains(folder, domains, entry.keep if entry else (), train or "train", test or "test"), entry
    if (folder / "dataset_dict.json").is_file():  # of DatasetDict.save_to_disk
        return _saved(folder, train or "train", (test,) if test else ("test", "validation", "val")), entry
    found = {}
    classes: dict[str, tuple[list[str], list[str]]] = {}  # files and their classes
    # Several sets have no public test labels; papers test on their validation split.
    for part, names in (("train", (train or "train",)), ("test", (test,) if test else ("test", "val"))):
        for split in names:
            if parquet := sorted(folder.glob(f"{split}*.parquet")) or sorted(folder.glob(f"*/{split}*.parquet")):
                found[part] = _load(folder, "parquet", [str(path) for path in parquet])
                break
            if pictures := sorted(path for path in folder.glob(f"{split}*") if path.is_dir()):
                if any(pictures[0].glob("metadata.*")):  # `datasets` reads it; it defines the columns
                    found[part] = _load(folder, "imagefolder", [f"{pictures[0]}/**"])
                else:
                    classes[part] = _of_classes(folder, pictures[0])
                break
        else:
            present = sorted(file.name for file in folder.iterdir())[:8]
            raise DataError(
                f"data.name={str(folder)!r}: no {names[0]}*.parquet for data.{part}={names[0]!r}; "
                f"the folder contains {', '.join(present) or 'nothing'}. Images work too, as {names[0]}/CLASS/*.png"
            )
    known = sorted({label for _, labels in classes.values() for label in labels})
    found |= {part: _table(files, classes=known, label=labels) for part, (files, labels) in classes.items()}
    return {part: found[part] for part in ("train", "test")}, entry


def _saved(folder: Path, train: str, tests: Sequence[str]) -> Splits:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"data.name={str(folder)!r}: cannot read it: {_root(error)}") from error
    chosen = {"train": train, "test": next((name for name in tests if name in saved), tests[0])}
    for part, name in chosen.items():
        if name not in saved:
            raise DataError(f"data.name={str(folder)!r}: no split {name!r} for data.{part}; it has {', '.join(saved)}")
    return {part: saved[name] for part, name in chosen.items()}


def _load(folder: Path, kind: str, files: Sequence[str]) -> Any:
    import datasets

    try:
        return datasets.load_dataset(kind, data_files=list(files), split="train")
    except Exception as error:
        raise DataError(f"data.name={str(folder)!r}: cannot read {files[0]!r}: {_root(error)}") from error


def commit_of(split: Any) -> str | None:
    """The commit of the hub's repository that a split is from; None for files of this machine."""
    for url in getattr(split.info, "download_checksums", None) or ():
        if found := re.search(r"@([0-9a-f]{40})/", url):
            return found[1]
    return None


def _hub(name: str, hub: str, train: str, test: str, revision: str | None) -> dict[str, Any]:
    import datasets

    _quiet()
    found = {}
    for part, split in (("train", train), ("test", test)):
        try:
            found[part] = datasets.load_dataset(hub, split=split, revision=revision)
            revision = commit_of(found[part]) or revision  # both splits are of one commit
        except Exception as error:
            at = f" and data.revision={revision!r}" if revision else ""
            there, where = "", ""
            if hub != name:
                there, where = f" ({hub!r} there)", f", as data.root, where it is called {name}/"
            raise DataError(
                f"data.name={name!r} with data.{part}={split!r}{at} cannot be loaded from the Hugging Face hub{there}: "
                f"{_root(error)}. A local copy works too: give its folder, with train*.parquet and "
                f"test*.parquet{where}"
            ) from error
    return found


def _quiet() -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry


def _root(error: BaseException) -> str:
    """The root cause, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- image files -------------------------------------------------------------


def _table(
    files: Sequence[str],
    masks: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    **words: Sequence[str],
) -> Any:
    """A split of image files; `words` are further columns of strings, and `label` becomes an index of `classes`."""
    import datasets

    features: dict[str, Any] = {"image": datasets.Image()}
    columns: dict[str, Sequence[Any]] = {"image": files}
    if masks is not None:
        features["mask"], columns["mask"] = datasets.Image(), masks
    for column, values in words.items():
        features[column], columns[column] = datasets.Value("string"), values
        if column == "label":
            number = {name: i for i, name in enumerate(classes)}
            features[column] = datasets.ClassLabel(names=list(classes))
            columns[column] = [number[value] for value in values]
    # Part of the key of the cache of decoded images, to which the times and sizes of the files belong too.
    facts = hashlib.sha256("\n".join((*files, *(masks or ()))).encode())
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    return datasets.Dataset(made.data, made.info, made.split, fingerprint=facts.hexdigest()[:32])


def _pictures(folder: str | Path) -> list[str]:
    """The image files in a folder and its subfolders, sorted."""
    found = [
        os.path.join(where, file)
        for where, _, files in os.walk(folder, followlinks=True)
        for file in files
        if os.path.splitext(file)[1].lower() in _PICTURES
    ]
    return sorted(found)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _of_classes(folder: Path, split: Path) -> tuple[list[str], list[str]]:
    """The files of SPLIT/CLASS/*.jpg, and the class of each."""
    files: list[str] = []
    labels: list[str] = []
    for name in _subfolders(split):
        found = _pictures(split / name)
        files += found
        labels += [name] * len(found)
    if not files:
        loose = f"{len(_pictures(split))} images outside of class folders" if _pictures(split) else "no images"
        raise DataError(
            f"data.name={str(folder)!r}: {split.name}/ contains {loose}; expected a folder for each class, "
            f"{split.name}/CLASS/*.png"
        )
    return files, labels


def _domains(folder: Path, entry: Entry | None) -> list[str]:
    """The domains with a subfolder here, known from lists or from the catalogue; empty for other layouts."""
    lists = {file.name.removesuffix("_train.txt") for file in folder.glob("*_train.txt")}
    known = lists | set(entry.domains if entry else ())
    return [name for name in _subfolders(folder) if name in known]


def _of_domains(folder: Path, domains: Sequence[str], keep: Sequence[str], train: str, test: str) -> Splits:
    """DOMAIN/CLASS/*.jpg, split by lists `DOMAIN_train.txt` of lines `path number`, or every fifth for testing."""
    rows: dict[str, list[tuple[str, str, str]]] = {"train": [], "test": []}  # file, class, domain
    for domain in domains:
        lists = {part: folder / f"{domain}_{split}.txt" for part, split in (("train", train), ("test", test))}
        there = [file.is_file() for file in lists.values()]
        if any(there) and not all(there):
            absent = next(file.name for file, is_there in zip(lists.values(), there, strict=True) if not is_there)
            raise DataError(f"data.name={str(folder)!r}: {absent} is missing beside the other list of {domain!r}")
        if all(there):
            for part, file in lists.items():
                rows[part] += [(path, label, domain) for path, label in _listed(folder, file, keep)]
            continue
        for label in _subfolders(folder / domain):
            if keep and label not in keep:
                continue
            for number, path in enumerate(_pictures(folder / domain / label)):
                rows["test" if number % _EACH == _EACH - 1 else "train"].append((path, label, domain))
    found = {}
    classes = sorted({label for some in rows.values() for _, label, _ in some})
    for part, some in rows.items():
        if not some:
            kept = f" of the classes {', '.join(keep)}" if keep else ""
            raise DataError(f"data.name={str(folder)!r}: no {part} images{kept} in {', '.join(domains)}")
        files, labels, names = zip(*some, strict=True)
        found[part] = _table(files, classes=classes, label=labels, domain=names)
    return found


def _listed(folder: Path, file: Path, keep: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Path and class of each line; the class is the folder's name, and each number must belong to one class."""
    numbers: dict[str, str] = {}
    for count, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, number = line.strip().rpartition(" ")
        label = Path(path).parent.name
        if not label or not number.isdecimal():
            raise DataError(f"{str(file)!r}, line {count}: {line!r} is not of the form DOMAIN/CLASS/FILE NUMBER")
        if numbers.setdefault(number, label) != label:
            raise DataError(f"{str(file)!r}, line {count}: class {number} is {label!r} here, {numbers[number]!r} above")
        if keep and label not in keep:
            continue
        if not (folder / path).is_file():
            raise DataError(f"{str(file)!r}, line {count}: there is no file {path!r} in {str(folder)!r}")
        yield str(folder / path), label


def _cityscapes(folder: Path, split: str) -> Any:
    """Images and their masks of label ids, by city."""
    if not (folder / "leftImg8bit" / split).is_dir():
        present = ", ".join(_subfolders(folder / "leftImg8bit")) or "nothing"
        raise DataError(f"data.name={str(folder)!r}: no leftImg8bit/{split}/; leftImg8bit/ contains {present}")
    files: list[str] = []
    masks: list[str] = []
    cities: list[str] = []
    for city in _subfolders(folder / "leftImg8bit" / split):
        for path in sorted((folder / "leftImg8bit" / split / city).glob("*_leftImg8bit.png")):
            mask = folder / "gtFine" / split / city / path.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
            if not mask.is_file():
                raise DataError(
                    f"data.name={str(folder)!r}: {path.name} has no mask; there is no {mask.relative_to(folder)}"
                )
            files.append(str(path))
            masks.append(str(mask))
            cities.append(city)
    if not files:
        raise DataError(
            f"data.name={str(folder)!r}: no images in leftImg8bit/{split}/, expected CITY/NAME_leftImg8bit.png"
        )
    return _table(files, masks, city=cities)
