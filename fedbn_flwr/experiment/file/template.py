"""Writes a commented experiment file, for `fedbn new`.

Keys, meanings, defaults and the values that an enumeration allows come from the settings.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedbn_flwr.yaml_text import Dumper as YamlDumper

from ..settings import DERIVED, Settings

# The keys that one changes most.
KEYS = frozenset(
    {
        "rounds",
        "clients",
        "seed",
        "strategy",
        "data.name",
        "data.partition",
        "data.size",
        "data.normalise",
        "data.augment",
        "model.name",
        "model.norm",
        "train.lr",
        "train.optimizer",
        "train.momentum",
        "train.weight_decay",
        "train.batch_size",
        "train.epochs",
        "train.steps",
        "train.schedule",
        "evaluate.every",
        "evaluate.clients",
        "engine.workers",
        "engine.device",
    }
)
_HEAD = """\
# An experiment of fedbn-flwr, written by `fedbn new`.
#   fedbn explain {file}      what it sends, who has which examples, how long it takes
#   fedbn run {file}          changes on the command line: rounds=3 train.lr=0.01
# A key that is commented out has its default. The page "Experiments" of the documentation describes all keys.
"""
_RUNS = """
# To compare strategies or settings, name the runs and what differs in each:
# runs:
#   FedAvg: {strategy: {name: FedAvg}}
#   FixBN: {strategy: {name: FixBN, freeze_round: 0.5}}
# seeds: [0, 1, 2]  # repeats each run; the report has means and deviations
"""


def template(content: Mapping[str, Any], file: str) -> str:
    """The text of an experiment with this content, and with the other keys of KEYS as comments."""
    chosen = dict(content)
    parts = [_HEAD.format(file=file)]
    if "description" in chosen:
        parts.append(f"description: {_flow(chosen.pop('description'))}\n")
    runs, seeds = chosen.pop("runs", None), chosen.pop("seeds", None)
    for key, field in Settings.model_fields.items():
        inner = field.annotation
        if key in DERIVED:
            continue
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            given = dict(chosen.pop(key, None) or {})
            lines = list(_section(f"{key}.", inner, given))
            if all(line.lstrip().startswith("#") for line in lines):  # YAML has no section without keys
                lines = [f"# {key}:", *(f"#   {line.lstrip('# ')}" for line in lines)]
            else:
                lines = [f"{key}:", *lines]
            parts.append("\n" + "\n".join(lines) + "\n")
        elif key in KEYS or key in chosen:
            parts.append(("\n" if key == "strategy" else "") + _line("", key, field, chosen) + "\n")
    parts += [f"\n{key}: {_flow(value)}\n" for key, value in chosen.items()]
    if seeds is not None:
        parts.append(f"\nseeds: {_flow(seeds)}\n")
    if runs:
        parts.append("\nruns:  # what is compared: a label, and the settings that differ\n")
        parts += [f"  {_flow(label)}: {_flow(changes or {})}\n" for label, changes in runs.items()]
    else:
        parts.append(_RUNS)
    return "".join(parts)


def _section(prefix: str, model: type[BaseModel], given: dict[str, Any]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if prefix + name in KEYS or name in given:
            yield _line(prefix, name, field, given)
    yield from (f"  {name}: {_flow(value)}" for name, value in given.items())


def _line(prefix: str, name: str, field: FieldInfo, given: dict[str, Any]) -> str:
    """A key with its value from `given`, which is removed there, or commented out with its default."""
    indent, mark = "  " if prefix else "", "" if name in given else "# "
    value = given.pop(name) if name in given else _default(field)
    text = f"{indent}{mark}{name}: {_flow(value)}".rstrip()
    meaning = meaning_of(field)
    if (allowed := choices(field.annotation)) and not all(choice in meaning for choice in allowed):
        meaning = f"{meaning} ({', '.join(allowed)})".lstrip()
    return f"{text}  # {meaning}" if meaning else text


def meaning_of(field: FieldInfo) -> str:
    """The first part of a description, without what is in brackets and without the marks and links of Markdown."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", field.description or "").replace("`", "")
    text = re.sub(r" \([^)]*\)", "", text)
    return re.split(r"; |, see ", text)[0]


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of an enumeration as they are written in a file; empty for other types."""
    if get_origin(annotation) is Literal:
        return tuple(each if isinstance(each, str) else json.dumps(each) for each in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(each for part in get_args(annotation) for each in choices(part))
    return ("true", "false") if annotation is bool else ()


class _Dumper(YamlDumper):
    """Escapes line breaks: a key has to be on one line."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def _flow(value: Any) -> str:
    """A value in a line of YAML, as a person writes it."""
    if value is None:
        return ""
    plain = json.loads(json.dumps(value))  # tuples as lists
    text = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
