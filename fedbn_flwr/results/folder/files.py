"""Reads and writes the text files of a run folder; errors name the damaged file, and the line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from fedbn_flwr.declared import adapter
from fedbn_flwr.errors import UserError
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.results.text import shorten
from fedbn_flwr.storage import check_rights, open_regular, replacing
from fedbn_flwr.tasks import MAINS
from fedbn_flwr.trees import Draft, Tree

T = TypeVar("T", bound=BaseModel)
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]

# The types of the values by file and key; other keys may have any value.
_TYPES: Mapping[str, Draft] = {
    "history.jsonl": {"round": Whole, "seconds": float, **dict.fromkeys(vars(Traffic()), Whole)},
    "clients.jsonl": {"round": Whole, "clients": dict[str, dict[str, float]]},
    "norms.jsonl": {
        "round": Whole,
        "layers": dict[str, dict[str, float]],
        "clients": dict[str, dict[str, dict[str, float]]],
    },
    "environment.json": {"token": str, "modules": dict[str, str], "resumed": list[Draft]},
}


def damaged(file: Path, reason: str, line: int | None = None) -> UserError:
    where = repr(str(file)) + (f", line {line}" if line is not None else "")
    return UserError(f"{where}: {reason}; restore the file from a copy, or start again with another --out")


def own(file: Path) -> Path:
    """A file of a run folder, which may come from someone else; an error for a link to one of this user's files."""
    if file.is_symlink() and not file.resolve().is_relative_to(file.parent.resolve()):
        raise damaged(file, "it is a link to a file outside of the folder, which is not read")
    return file


def read_text(file: Path) -> str | None:
    """The content of a file; None if there is no file."""
    try:
        with open_regular(own(file)) as stream:
            return stream.read().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        check_rights(file)
        raise UserError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise damaged(file, f"byte {error.start} is not UTF-8") from None


def write_text(file: Path, text: str, *, durable: bool = False) -> None:
    """Write atomically: another process may be reading the file."""
    with replacing(file, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_declared(kind: type[T], file: Path) -> T:
    """The content of a JSON file that a type declares; an error if there is no file."""
    if (text := read_text(file)) is None:
        raise UserError(f"{str(file.parent)!r} has no {file.name}")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False)
        words = [*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")]
        raise damaged(file, shorten(": ".join(words), 300)) from None


def parse(text: str, file: Path, line: int | None = None) -> Tree:
    """The mapping in the text of a JSON file, or in a line of a .jsonl file."""
    types = _TYPES.get(file.name, {})
    try:
        content = json.loads(text, object_hook=with_nan if file.suffix == ".jsonl" else None)
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}; expected a mapping")
        if file.name == "history.jsonl":
            types = {key: float for key in content if any(main in key for main in MAINS)} | types
        # Later versions have added keys to environment.json.
        required = types if file.name != "environment.json" else ()
        check(content, types, required)
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise damaged(file, reason, line) from None
    return content


def with_nan(metrics: Tree) -> Tree:
    """Metrics that were not finite are null in a file."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def check(content: Tree, expected: Tree, required: Iterable[str] = ()) -> None:
    """ValueError if a value from JSON is missing, or of another type; whole numbers fit into 64 bits."""
    if missing := [key for key in required if key not in content]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for key in content.keys() & expected.keys():
        try:
            adapter(expected[key]).validate_python(content[key], strict=True)
        except ValidationError as error:
            (problem, *_) = error.errors()
            where = ".".join(map(str, (key, *problem["loc"])))
            reason = problem["msg"].removeprefix("Input should be ")
            raise ValueError(f"{where} is {shorten(repr(problem['input']), 100)}; expected {reason}") from None
