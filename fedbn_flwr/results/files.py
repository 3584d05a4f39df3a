"""Reads and writes the text files of a run folder; a damaged file is refused by its name, and by its line.

checksums.txt has the CRC-32 and the name of the file for each line of the .jsonl files, in the order in which the lines
were written. The lines themselves have no checksum, so that other programs read them as they are.
"""

from __future__ import annotations

import json
import math
import types
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fedbn_flwr.errors import UserError
from fedbn_flwr.storage import open_regular, replacing, to_json, writing

from .ledger import Traffic
from .text import shorten

_SUMS = "checksums.txt"

# The types of the values by file and key; other keys may have any value.
_REQUIRED: dict[str, dict[str, Any]] = {
    "history.jsonl": {"round": int, "seconds": float, **dict.fromkeys(vars(Traffic()), int)},
    "clients.jsonl": {"round": int, "clients": dict[str, dict[str, float]]},
    "norms.jsonl": {
        "round": int,
        "layers": dict[str, dict[str, float]],
        "clients": dict[str, dict[str, dict[str, float]]],
    },
    "partition.json": {"title": str, "classes": list[str], "counts": list[list[int]], "clients": list[str]},
    "matrix.json": {"clients": list[str], "accuracy": list[list[float | None]]},
    "model.json": {
        "build": dict[str, Any],
        "normalise": str | dict[str, list[float]] | None,
        "classes": list[str] | None,
        "global": bool,
    },
}
_OPTIONAL: dict[str, dict[str, Any]] = {
    "environment.json": {"token": str, "modules": dict[str, str], "resumed": list[dict[str, Any]]},
}


def damaged(file: Path, reason: str, line: int | None = None) -> UserError:
    where = repr(str(file)) + (f", line {line}" if line is not None else "")
    return UserError(f"{where}: {reason}; restore the file from a copy, or start again with another --out")


def read_text(file: Path) -> str | None:
    """The content of a file; None if there is no file."""
    content = _read(file)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"byte {error.start} is not UTF-8") from None


def _read(file: Path) -> bytes | None:
    try:
        with open_regular(file) as stream:
            return stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read: {error.strerror}") from None


def read_object(file: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file; None if there is no file."""
    text = read_text(file)
    return None if text is None else _parse(text, file)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The mappings in a .jsonl file, one for each line; empty if there is no file."""
    sums = _sums_of(file)  # first: a running process writes the checksum of a line before the line
    *lines, _ = (_read(file) or b"").split(b"\n")  # what follows the last line break was cut off by a crash
    found: list[dict[str, Any]] = []
    for number, data in enumerate(lines, start=1):
        if number <= len(sums) and zlib.crc32(data) != sums[number - 1]:
            raise damaged(file, "it does not have its checksum in checksums.txt, so it was changed", number)
        try:
            line = _parse(data.decode(), file, number)
        except UnicodeDecodeError as error:
            raise damaged(file, f"byte {error.start} is not UTF-8", number) from None
        if found and line["round"] <= found[-1]["round"]:
            raise damaged(file, f"round {line['round']} follows round {found[-1]['round']}", number)
        found.append(line)
    if len(found) + 1 < len(sums):
        raise damaged(file, f"it has {len(found)} lines, but checksums.txt has {len(sums)} of them")
    return found


def add_line(file: Path, line: Mapping[str, Any]) -> None:
    text = to_json(line)
    with writing(file):
        with file.with_name(_SUMS).open("a", encoding="ascii") as sums:
            sums.write(_sum_line(file, text))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(text + "\n")


def write_lines(folder: Path, files: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Replace all .jsonl files of a folder; those without lines are deleted, except history.jsonl."""
    texts = {folder / name: [to_json(line) for line in lines] for name, lines in files.items()}
    write_text(folder / _SUMS, "".join(_sum_line(file, text) for file, lines in texts.items() for text in lines))
    for file, lines in texts.items():
        if lines or file.name == "history.jsonl":
            write_text(file, "".join(f"{text}\n" for text in lines))
        else:
            file.unlink(missing_ok=True)


def write_text(file: Path, text: str, *, durable: bool = False) -> None:
    """Write atomically: another process may be reading the file."""
    with replacing(file, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _sum_line(file: Path, text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}  {file.name}\n"


def _sums_of(file: Path) -> list[int]:
    """The checksums of the lines of a file."""
    sums = file.with_name(_SUMS)
    *lines, _ = (read_text(sums) or "").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        digits, _, name = line.partition("  ")
        try:
            value = int(digits, 16) if len(digits) == 8 else None
        except ValueError:
            value = None
        if value is None or not name:
            raise damaged(sums, "expected a checksum and the name of a file", number)
        if name == file.name:
            found.append(value)
    return found


def _parse(text: str, file: Path, line: int | None = None) -> dict[str, Any]:
    try:
        content = json.loads(text, object_hook=with_nan if file.suffix == ".jsonl" else None)
    except RecursionError:
        raise damaged(file, "it is nested too deeply", line) from None
    except ValueError as error:
        raise damaged(file, f"it is no JSON: {error}", line) from None
    if not isinstance(content, dict):
        raise damaged(file, f"it is a {type(content).__name__}; expected a mapping", line)
    required = _REQUIRED.get(file.name, {})
    if missing := [key for key in required if key not in content]:
        raise damaged(file, f"it lacks {', '.join(missing)}", line)
    try:
        check_types(content, required | _OPTIONAL.get(file.name, {}))
        if file.name == "history.jsonl":
            check_types(content, {key: float | None for key in content if "accuracy" in key or "loss" in key})
    except ValueError as error:
        raise damaged(file, str(error), line) from None
    return content


def with_nan(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures that were not finite are null in a file."""
    return {key: math.nan if value is None else value for key, value in figures.items()}


def check_types(content: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key in expected and not fits(value, expected[key]):
            raise ValueError(f"{key} is {shorten(repr(value), 100)}; expected {_in_words(expected[key])}")


def fits(value: Any, expected: Any) -> bool:
    """Whether a value from JSON is of a type: int and float are numbers that fit into 64 bits, and no booleans."""
    if expected is Any or expected is None or expected is types.NoneType:
        return expected is Any or value is None
    if expected in (int, float):  # most values: before anything that takes longer
        return (type(value) is int and abs(value) < 2**63) or (expected is float and type(value) is float)
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    return type(value) is expected


def _in_words(expected: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(expected) or str(expected).replace("dict[str, ", "mapping[")
