"""The strategies in words, for the tables of the documentation."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.experiment.registry import arguments, build_strategy, class_of, in_a_line
from fedbn_flwr.strategies import Traits, as_rule


@dataclass(frozen=True)
class Argument:
    name: str
    default: Any  # inspect.Parameter.empty: it has none
    meaning: str  # the first sentence of its description


@dataclass(frozen=True)
class Description:
    """A strategy in words, from its docstrings, its arguments and the traits that it has by default."""

    does: str
    arguments: tuple[Argument, ...]  # without those of FedAvg
    traits: Traits


def describe(name: str) -> Description:
    cls = class_of(name)
    common = arguments(class_of("FedAvg"))
    meanings = _documented(getattr(cls, "inner", None) or object) | _documented(cls)
    own = [
        Argument(key, parameter.default, meanings.get(key, ""))
        for key, parameter in arguments(cls).items()
        if parameter != common.get(key) or name == "FedAvg"
    ]
    return Description(
        does=in_a_line(name),
        arguments=tuple(own),
        traits=as_rule(build_strategy({"name": name}, client_learning_rate=0.1)).traits,
    )


def _documented(cls: type) -> dict[str, str]:
    """The parameters in the docstrings of a class and its bases, each with its first sentence."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        doc = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, parameters = doc.partition("Parameters\n----------\n")
        for match in re.finditer(r"^([\w, ]+) : .*\n((?:(?:    .*)?\n?)+)", parameters, re.MULTILINE):
            text = " ".join(match[2].split())
            for name in match[1].split(", "):
                found.setdefault(name, re.split(r"(?<=\.) (?=[A-Z])", text)[0])
    return found
