"""Opens data sets: from the Hugging Face hub, a table (CSV, Parquet, NumPy) or several, or image files in one of these
layouts.

    SPLIT/CLASS/*.jpg                                       (ImageNet)
    DOMAIN/CLASS/*.jpg, with or without DOMAIN_SPLIT.txt    (DomainNet, Office-Caltech-10)
    CLASS/*.jpg, or DOMAIN/CLASS/*.jpg                      (if a share of them is held out)
    leftImg8bit/SPLIT/CITY/*.png and gtFine/SPLIT/CITY/     (Cityscapes)

All become tables. Image files are listed, not opened.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from fedbn_flwr import named
from fedbn_flwr.errors import DataError, error_if, few, log_once
from fedbn_flwr.storage import check_rights
from fedbn_flwr.trees import Draft

from .catalogue import CATALOGUE, Entry
from .located import content_of
from .source import FOLDER, PARTS, Source
from .table import FILE, PICTURES, Table, joined, table_of

_EACH = 5  # of each class of a domain without lists, every fifth image is a test image
_TESTS = ("test", "val")  # several sets have no public test labels; papers test on their validation split
_CLASS = r"(?P<label>[^./][^/]*)/.+"  # the path of an image file below its folder

Rows = Any  # a `datasets.Dataset`, an Arrow table, a mapping of arrays, or a list of image files
Row = dict[str, Any]  # an image file, and the values of other columns
Splits = dict[str, Rows]  # "train" and "test"
Readers = Mapping[str, Callable[[Path, Sequence[Path]], Rows]]  # of the files of a split, by suffix


def open_splits(source: Source, folder: Path | None, entry: Entry | None) -> tuple[Table, Entry | None]:
    """The table of a data set in `folder` or on the hub, and its catalogue entry, which may follow from the layout."""
    if folder is not None:
        splits, entry = _folder(folder, source, entry)
        base = folder if folder.is_dir() else folder.parent
        return joined(
            source.name, *(table_of(source.name, each, source.inputs, base) for each in splits.values())
        ), entry
    return _hub(source, entry), entry


def _datasets() -> Any:
    """The package of the hub, which is imported for the hub and, if it is installed, for Parquet files."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    return datasets


def _hub(source: Source, entry: Entry | None) -> Table:
    name, hub = source.name, source.name if entry is None else entry.hub
    revision, found, datasets = source.revision, list[Table](), _datasets()
    print(f"{name}: asking the Hugging Face hub for {hub}; a download may take minutes", file=sys.stderr, flush=True)
    names = [source.train or "train"]
    if not source.held_out:
        names.append(str(source.test or ("test" if entry is None else entry.test)))
    for part, split in zip(PARTS, names, strict=False):
        try:
            found.append(table_of(name, datasets.load_dataset(hub, split=split, revision=revision), source.inputs))
        except Exception as error:
            at = f" and data.revision={revision!r}" if revision else ""
            there = "" if hub == name else f" ({hub!r} there)"
            raise DataError(
                f"data.name={name!r} with data.{part}={split!r}{at} cannot be loaded from the Hugging Face hub{there}. "
                "A local copy works too: give its folder, with train*.parquet and test*.parquet"
                + (f", as data.root, where it is called {name}/" if there else ""),
                f". {_root(error)}",
            ) from error
        revision = found[-1].commit or revision  # both splits are of one commit
    return joined(name, *found)


def _folder(folder: Path, source: Source, entry: Entry | None) -> tuple[Splits, Entry | None]:
    """A table; tables whose names begin with the split's, here or one level below; or image files in a known layout."""
    # The names of the splits; None stands for the usual ones.
    given: Draft = {"train": source.train, **({} if source.held_out else {"test": source.test})}
    if folder.is_file():
        table = _file(folder)
        error_if(
            not source.held_out,
            f"data.name={str(folder)!r} is one file, which has no test split; set data.test: 0.2, which holds out "
            "this share of its rows, or give a folder with train* and test* files",
        )
        return {"train": table}, entry
    if (folder / "leftImg8bit").is_dir():
        return _images({part: _cityscapes(folder, part, name) for part, name in given.items()}), CATALOGUE["cityscapes"]
    if found := _of_domains(folder, entry, {part: name or part for part, name in given.items()}):
        return _images(found), entry
    found = {part: _split(folder, part, name, source, _READERS) for part, name in given.items()}
    tables = [split.schema for split in found.values() if isinstance(split, pa.Table)]
    codes = [*source.label, source.domain or "domain", *filter(None, [source.group])]
    kinds = {code: {str(table.field(code).type) for table in tables if code in table.names} for code in codes}
    if texts := [code for code, kind in kinds.items() if kind == {"string", "int64"}]:
        # The texts of one split happen to be numbers.
        as_texts = functools.partial(_csv, texts=texts)
        readers = {suffix: as_texts if read is _csv else read for suffix, read in _READERS.items()}
        found = {part: _split(folder, part, name, source, readers) for part, name in given.items()}
    return _images(found), entry


def open_new(source: Source, path: Path) -> Table:
    """All rows of a table, or all images of a folder, which are labelled if their folder has the name of a class."""
    check_rights(path)
    if not path.is_dir():
        return table_of(source.name, _file(path), source.inputs, path.parent)
    image, label = (*source.inputs, "image")[0], source.label[0]
    files = _pictures(path)
    error_if(
        not files,
        f"{str(path)!r} contains no images ({', '.join(sorted(PICTURES))})",
    )
    named_by = {file: os.path.basename(os.path.dirname(file)) for file in files}
    rows = [
        {image: {"path": str(path / file)}, label: name if name in source.class_names else None}
        for file, name in named_by.items()
    ]
    return Table(_listed(rows, [image]), (len(rows),))


def _file(path: Path) -> Rows:
    error_if(
        path.suffix not in _READERS,
        f"data.name={str(path)!r}: expected a file that ends in {', '.join(_READERS)}, or a folder of these or "
        "of images",
    )
    return _READERS[path.suffix](path.parent, [path])


def _split(folder: Path, part: str, given: str | None, source: Source, readers: Readers) -> Rows:
    """The tables, or the image files, of a split: all files and folders whose names begin with its name.

    If a share is held out, everything in the folder may be for training.
    """
    usual = _TESTS if part == "test" else ("train", "") if source.held_out else ("train",)
    names = (given,) if given else usual
    for name in names:
        tables = _tables(folder, name)
        kinds, there = [*tables], sorted(folder.glob(f"{name}*/")) if name else []
        left = sorted(path.name for key in _TESTS for path in folder.glob(f"{key}*")) if source.held_out else []
        if name and left and (kinds or there):
            why = f"since data.test holds out a part of {name}*; leave data.test out to test on it"
            log_once(f"data.name={str(folder)!r}: {few(left, 4)} will not be used, {why}")
        error_if(
            len(kinds) > 1,
            f"data.name={str(folder)!r}: the files of {name or 'the data'!r} are {', '.join(kinds)}; expected one kind",
            f", found {', '.join(tables[suffix][0].name for suffix in kinds)}",
        )
        if kinds:
            check_rights(folder, *tables[kinds[0]])
            return readers[kinds[0]](folder, tables[kinds[0]])
        rows = _labelled(there) if name else _whole(folder)
        if there and not rows:
            raise DataError(
                f"data.name={str(folder)!r}: the folder of {name!r} contains no images in folders of classes; expected "
                "a folder for each class",
                f", {there[0].name}/CLASS/*.png",
            )
        if rows:
            return rows
    raise DataError(
        f"data.name={str(folder)!r}: no {names[0]}*.parquet (or .csv, .npz) for data.{part}={names[0]!r}; "
        f"images work too, as {names[0]}/CLASS/*.png, or CLASS/*.png or DOMAIN/CLASS/*.png with data.test: 0.2"
        + ("; without test files, set data.test: 0.2 to hold out a share" if part == "test" else ""),
        f". The folder contains {content_of(folder, '*') or 'nothing'}",
    )


def _tables(folder: Path, name: str) -> dict[str, list[Path]]:
    """The files of a split by their suffix, in the folder or else one level below it."""
    found = {end: sorted(folder.glob(f"{name}*{end}")) or sorted(folder.glob(f"*/{name}*{end}")) for end in _READERS}
    return {suffix: files for suffix, files in found.items() if files}


def _labelled(folders: Iterable[Path]) -> list[Row]:
    return [row for path in folders for row in _matching(path, _pictures(path), _CLASS)]


def has_splits(source: Source, path: Path) -> bool:
    """Whether this is a folder that a site trains on; one of new images may have one called train_0.png."""
    name = source.train or "train"
    return path.is_dir() and bool(_tables(path, name) or _labelled(path.glob(f"{name}*/")))


def _load(folder: Path, files: Sequence[Path]) -> Rows:
    """With `datasets` the files may be larger than the memory."""
    paths = list(map(str, files))
    try:
        load = functools.partial(_datasets().load_dataset, "parquet", data_files=paths, split="train")
    except ImportError:
        load = functools.partial(parquet.read_table, paths)
    return _read(folder, repr(paths[0]), load)


def _csv(folder: Path, files: Sequence[Path], texts: Sequence[str] = ()) -> Rows:
    """Columns are texts if their values are not numbers, or if they are among `texts`.

    An empty field, NA, NaN or null without quotes is a missing value. The first line shows whether columns are
    separated by commas, semicolons, tabs or bars, and it may be `sep=;`. Beside semicolons, numbers may have decimal
    commas. Spreadsheets write UTF-8 or UTF-16. Files one level below have a column with the name of their folder.
    """

    def table(file: Path) -> Any:
        with file.open("rb") as stream:
            coding = "utf-16" if stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
        with file.open(encoding=coding, errors="replace") as lines:
            first = lines.readline()
        said = re.match(r'\ufeff?"?sep=(.)"?$', first)
        mark = said[1] if said else max(",;\t|", key=first.count)
        found = [
            csv.read_csv(
                file,
                read_options=csv.ReadOptions(encoding=coding, skip_rows=int(said is not None)),
                parse_options=csv.ParseOptions(delimiter=mark),
                convert_options=csv.ConvertOptions(
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    column_types=dict.fromkeys(texts, pa.string()),
                    decimal_point=point,
                ),
            )
            for point in (".," if mark == ";" else ".")
        ]
        found = [each.rename_columns([name.strip() for name in each.column_names]) for each in found]
        ((column, number),) = Counter(found[0].column_names).most_common(1)
        error_if(
            number > 1,
            f"data.name={str(folder)!r}: {file.name} has {number} columns {column!r}; rename all but one",
        )
        # Columns that are no numbers with points may be numbers with commas.
        words = [field.name for field in found[0].schema if pa.types.is_string(field.type)]
        return pa.table({name: found[-(name in words)].column(name) for name in found[0].column_names})

    tables = [_read(folder, repr(str(file)), table, file) for file in files]
    for place, (file, each) in enumerate(zip(files, tables, strict=True)):
        if file.parent != folder and FOLDER not in each.column_names:
            tables[place] = each.append_column(FOLDER, pa.array([file.parent.name] * len(each)))
    whole = _read(folder, "the tables", pa.concat_tables, tables, promote_options="permissive")
    for field in whole.schema:
        problem = f"the column {field.name!r} contains text that isn't UTF-8; save the file as UTF-8"
        error_if(pa.types.is_binary(field.type), f"data.name={str(folder)!r}: {problem}")
    return whole


def _npz(folder: Path, files: Sequence[Path]) -> Rows:
    """The arrays of a file by their names."""
    error_if(
        len(files) > 1,
        f"data.name={str(folder)!r} has {len(files)} .npz files of a split; expected one",
        f", such as {files[0].name}",
    )
    return _read(folder, repr(str(files[0])), lambda file: dict(np.load(file)), files[0])


_READERS: Readers = {".parquet": _load, ".csv": _csv, ".tsv": _csv, ".npz": _npz}


def _read(folder: Path, what: str, function: Callable[..., Rows], *arguments: object, **options: object) -> Rows:
    try:
        return function(*arguments, **options)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"data.name={str(folder)!r}: cannot read its files", f": {what}: {_root(error)}") from error


def _root(error: BaseException) -> str:
    """The root cause, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return named.in_a_line(error)


# --- image files -------------------------------------------------------------


def _images(splits: Splits) -> Splits:
    """Lists of image files become tables, which share the names of the classes; others stay as they are."""
    lists = {part: rows for part, rows in splits.items() if isinstance(rows, list)}
    classes = tuple(sorted({row["label"] for rows in lists.values() for row in rows if "label" in row}))
    made = {
        part: Table(_listed(rows), (len(rows),), {"label": classes} if classes else {}) for part, rows in lists.items()
    }
    return {**splits, **made}


def _listed(rows: Sequence[Row], images: Sequence[str] = ("image", "mask")) -> pa.Table:
    columns = rows[0] if rows else ()
    return pa.Table.from_pylist(rows, pa.schema([(name, FILE if name in images else pa.string()) for name in columns]))


def _pictures(folder: Path) -> list[str]:
    """The paths of the image files below a folder, sorted."""
    found = [
        f"{os.path.relpath(where, folder)}/{file}".removeprefix("./")
        for where, _, files in os.walk(folder, followlinks=True, onerror=_no_right)
        for file in files
        if os.path.splitext(file)[1].lower() in PICTURES
    ]
    return sorted(found, key=lambda path: path.split("/"))


def _no_right(error: OSError) -> None:
    """Raise an error where os.walk would leave out a folder that it may not list."""
    if isinstance(error, PermissionError):
        raise DataError(
            f"the data have a folder that the user of this process, uid {os.geteuid()}, may not list; give this user "
            "the right to read it and all in it",
            f": {str(error.filename)!r}",
        )


def _matching(folder: Path, files: Sequence[str], pattern: str) -> list[Row]:
    """The files whose paths have this form, with the values of its groups."""
    found = [(file, re.fullmatch(pattern, file)) for file in files]
    return [{"image": {"path": os.path.join(folder, file)}, **match.groupdict()} for file, match in found if match]


def _whole(folder: Path) -> list[Row]:
    """The images of CLASS/*.jpg or DOMAIN/CLASS/*.jpg, a share of which is held out."""
    files = _pictures(folder)
    for pattern in (r"(?P<label>[^/]+)/[^/]+", r"(?P<domain>[^/]+)/(?P<label>[^/]+)/[^/]+"):
        rows = _matching(folder, files, pattern)
        domains, labels = {row.get("domain") for row in rows}, {row["label"] for row in rows}
        places = {os.path.dirname(file) for file in files}
        # Domains that share no class are probably classes, with a folder for each patient.
        if len(rows) == len(files) and not len(domains) > 1 < len(labels) == len(places):
            return rows
    raise DataError(
        f"data.name={str(folder)!r} has no split 'train', and its images are not all in CLASS/*.png, or "
        "DOMAIN/CLASS/*.png with classes that several domains have; expected one of these, or train/CLASS, which "
        "may have folders in it",
        f". Images are in {', '.join(sorted(place or '.' for place in places)[:8])}",
    )


def _of_domains(folder: Path, entry: Entry | None, names: Mapping[str, str]) -> dict[str, list[Row]]:
    """DOMAIN/CLASS/*.jpg, split by lists `DOMAIN_train.txt` of lines `path number`, or every fifth for testing.

    The domains have lists, or are in the catalogue; other layouts have none.
    """
    lists = {file.name.removesuffix("_train.txt") for file in folder.glob("*_train.txt")}
    there = sorted(path.name for path in folder.glob("[!.]*/"))
    there = [name for name in there if entry is None or name in {*entry.domains, *lists}]
    listed = [name for name in there if name in lists]
    images = {name: _pictures(folder / name) for name in there if name not in lists and (entry or listed)}
    error_if(
        listed and any(images.values()),
        f"data.name={str(folder)!r}: some domains have lists DOMAIN_train.txt and DOMAIN_test.txt, others have "
        "none; expected them for all, or for none",
        f": {', '.join(name for name, files in images.items() if files)} have none",
    )
    found: dict[str, list[Row]] = {part: [] for part in names}
    for domain, (part, name) in itertools.product(listed, names.items()):
        file = folder / f"{domain}_{name}.txt"
        lines = _read(folder, repr(str(file)), file.read_text, encoding="utf-8").strip().splitlines()
        for number, line in enumerate(lines, start=1):
            rows = _matching(folder, [line.strip().rpartition(" ")[0]], r"(.*/)?(?P<label>[^/]+)/[^/]+")
            error_if(
                not rows or not line.strip().rpartition(" ")[2].isdecimal(),
                f"data.name={str(folder)!r}: cannot read its files",
                f": {str(file)!r}: line {number}, {line!r}, is not of the form DOMAIN/CLASS/FILE NUMBER",
            )
            found[part] += [{**row, "domain": domain} for row in rows]
    for domain, files in images.items():
        classes = itertools.groupby(_matching(folder / domain, files, _CLASS), lambda row: row["label"])
        for number, row in itertools.chain.from_iterable(enumerate(rows) for _, rows in classes):
            is_test = "test" in names and number % _EACH == _EACH - 1
            found["test" if is_test else "train"].append({**row, "domain": domain})
    keep = entry.keep if entry else ()
    kept = {part: [row for row in rows if not keep or row["label"] in keep] for part, rows in found.items()}
    return kept if any(kept.values()) else {}


def _cityscapes(folder: Path, part: str, name: str | None) -> list[Row]:
    """Images and their masks of label ids, by city."""
    split = name or {"test": "val"}.get(part, part)
    images = folder / "leftImg8bit" / split
    rows = _matching(images, _pictures(images), r"(?P<mask>(?P<city>[^/]+)/.+)_leftImg8bit\.png")
    if not rows:
        raise DataError(
            f"data.name={str(folder)!r}: no leftImg8bit/{split}/CITY/NAME_leftImg8bit.png",
            f"; leftImg8bit/ contains {content_of(images.parent, '[!.]*/') or 'nothing'}",
        )
    for row in rows:
        mask = folder / "gtFine" / split / f"{row['mask']}_gtFine_labelIds.png"
        row["mask"] = {"path": str(mask)}
        if not mask.is_file():
            raise DataError(
                f"data.name={str(folder)!r}: an image has no mask",
                f": {os.path.basename(row['image']['path'])}; there is no {mask.relative_to(folder)}",
            )
    return rows
