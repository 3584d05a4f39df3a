"""Writes a commented experiment file, for `fedbn new`.

Keys, meanings, defaults and the values that an enumeration allows come from the settings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedbn_flwr.results.yaml_text import Dumper as YamlDumper

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
    lines = [_HEAD.format(file=file)]
    if "description" in chosen:
        lines.append(f"description: {_flow(chosen.pop('description'))}")
    runs, others = chosen.pop("runs", None), {}
    if "seeds" in chosen:
        others["seeds"] = chosen.pop("seeds")
    lines += [*_keys("", Settings, chosen), *(f"{key}: {_flow(value)}" for key, value in {**chosen, **others}.items())]
    if not runs:
        return "\n".join([*lines, _RUNS])
    lines += ["", "runs:  # what is compared: a label, and the settings that differ"]
    lines += [f"  {_flow(label)}: {_flow(changes or {})}" for label, changes in runs.items()]
    return "\n".join(lines) + "\n"


def _keys(prefix: str, model: type[BaseModel], given: dict[str, Any]) -> Iterator[str]:
    """The lines of a section; what it writes of `given` is removed there."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if not prefix and isinstance(inner, type) and issubclass(inner, BaseModel) and name not in DERIVED:
            part = dict(given.pop(name, None) or {})
            lines = [*_keys(f"{name}.", inner, part), *(f"{key}: {_flow(value)}" for key, value in part.items())]
            mark = "# " * all(line.startswith("#") for line in lines)  # YAML has no section without keys
            yield f"\n{mark}{name}:"
            yield from (f"{mark}  {line.removeprefix(mark)}" for line in lines)
        elif name in given or prefix + name in KEYS:
            value = given.pop(name) if (is_given := name in given) else _default(field)
            meaning = f"  # {text}" if (text := meaning_of(field)) else ""
            yield f"{'' if is_given else '# '}{name}: {_flow(value)}".rstrip() + meaning


def meaning_of(field: FieldInfo) -> str:
    """The first part of a description, without what is in brackets and without the marks and links of Markdown."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", field.description or "").replace("`", "")
    text = re.sub(r" \([^)]*\)", "", text)
    return re.split(r"; |, see ", text)[0]


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


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
