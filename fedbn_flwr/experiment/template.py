"""Writes a commented experiment file, for `fedbn new`.

Keys, defaults and the values that an enumeration allows come from the settings; only the meanings are written here.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedbn_flwr.yaml_text import Dumper as YamlDumper

from .settings import DERIVED, Settings

# The keys that one changes most, in the order of the file.
MEANINGS: Mapping[str, str] = {
    "rounds": "rounds of training",
    "clients": "number of clients, each with one part of the training images",
    "seed": "all random draws are derived from it",
    "strategy": "see `fedbn list strategies`; `fedbn list strategies NAME` shows the arguments",
    "data.name": "a name of `fedbn list datasets`, a folder of images, or a name on the Hugging Face hub",
    "data.partition": "who has which images: see `fedbn list partitions`",
    "data.size": "resize the images to this many pixels per side",
    "data.normalise": "moments, unit or official; default: official where published, else moments",
    "data.augment": "flip, crop, resized_crop, rotate, drawn per image; default: of the data set",
    "model.name": "see `fedbn list models`, or module:callable for a network of your own",
    "model.norm": "replaces every batch norm: see `fedbn list norms`",
    "train.lr": "learning rate",
    "train.optimizer": "of torch.optim, or module:callable",
    "train.momentum": "of SGD",
    "train.weight_decay": "default: that of the optimiser",
    "train.batch_size": "images in a step",
    "train.epochs": "passes over a client's images in a round (1 if steps is not given either)",
    "train.steps": "or: steps in a round",
    "train.schedule": "learning rate by round: constant, step (milestones, gamma) or cosine",
    "evaluate.every": "rounds between evaluations",
    "evaluate.clients": "clients evaluate their models too; default: where the strategy trains a model per client",
    "engine.workers": "processes; auto: one per core, 0: none",
    "engine.device": "auto: a GPU if there is one",
}
_HEAD = """\
# An experiment of fedbn-flwr, written by `fedbn new`.
#   fedbn explain {file}      what it sends, who has which images, how long it takes
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
    """The text of an experiment with this content, and with the other keys of MEANINGS as comments."""
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
        elif key in MEANINGS or key in chosen:
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
        if prefix + name in MEANINGS or name in given:
            yield _line(prefix, name, field, given)
    yield from (f"  {name}: {_flow(value)}" for name, value in given.items())


def _line(prefix: str, name: str, field: FieldInfo, given: dict[str, Any]) -> str:
    """A key with its value from `given`, which is removed there, or commented out with its default."""
    indent, mark = "  " if prefix else "", "" if name in given else "# "
    value = given.pop(name) if name in given else _default(field)
    text = f"{indent}{mark}{name}: {_flow(value)}".rstrip()
    meaning = MEANINGS.get(prefix + name, "")
    if (allowed := choices(field.annotation)) and not all(choice in meaning for choice in allowed):
        meaning = f"{meaning} ({', '.join(allowed)})".lstrip()
    return f"{text}  # {meaning}" if meaning else text


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


def setting_choices(prefix: str = "", model: type[BaseModel] = Settings) -> dict[str, tuple[str, ...]]:
    """Every key of the settings, with its values if it is an enumeration."""
    found: dict[str, tuple[str, ...]] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if model is Settings and name in DERIVED:
            continue
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= setting_choices(f"{prefix}{name}.", inner)
        else:
            found[prefix + name] = choices(inner)
    return found
