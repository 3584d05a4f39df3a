"""Reads and writes YAML with the scalars of YAML 1.2, in which `yes` and `012` are text.

Aliases raise an error: a file of ten lines could describe a structure that fits into no memory, and the `config.yaml`
of a run folder may come from someone else.
"""

from __future__ import annotations

import io
import math
import re
from contextlib import suppress
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from fedbn_flwr.errors import SettingsError

_TAG = "tag:yaml.org,2002:"
_DEPTH = 50  # levels
# The first characters of a plain scalar, and its form; anything else is text.
_SCALARS = {
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "null": (("", *"~nN"), r"~|null|Null|NULL|"),
    "int": ("-+0123456789", r"[-+]?(0|[1-9][0-9]*)"),
    "float": (
        "-+.0123456789",
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
    ),
}


class _Constructor(SafeConstructor, Resolver):
    yaml_implicit_resolvers: dict[str, Any] = {}  # as PyYAML declares it
    # None: the error for other tags.
    yaml_constructors = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (*(_TAG + kind for kind in ("str", "map", "seq", *_SCALARS)), None)
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):  # kept as written: keys of JSON are text
                name.tag = f"{_TAG}str"
            if (words := str(name.value)) in seen:
                raise ConstructorError(None, None, f"the key {words[:100]!r} is given twice", name.start_mark)
            seen.add(words)
        return super().construct_mapping(node, deep)


class _Loader(_Constructor, yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ConstructorError(None, None, "found an alias; expected the value itself", mark)
        return super().compose_node(parent, index)


class _Fast(_Constructor, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml's parser, which takes a tenth of the time; it doesn't ask for each node, so it can't find aliases."""


class Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader`, or a reader of YAML 1.1, would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


for _kind, (_first, _form) in _SCALARS.items():
    for _class in (_Constructor, Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_form})$"), list(_first))


def dump_yaml(content: object) -> str:
    """Text from which `parse_yaml` reads the same content."""
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _content(text: str) -> Any:
    if not {*"*!\t"} & {*text}:  # what the two read differently
        with suppress(Exception):  # of which PyYAML's own parser says more
            return _Fast(text).get_single_data()  # type: ignore[call-arg]
    return _Loader(io.StringIO(text)).get_single_data()  # its errors quote no lines of a stream


def parse_yaml(text: str, source: str = "") -> Any:
    """The content of a text; errors begin with its `source`, a file or a key."""
    try:
        content = _content(text)
        check_values(content)
        return content
    except SettingsError as error:
        reason = str(error)
    except RecursionError:
        reason = f"not readable as YAML: it is nested more than {_DEPTH} levels deep"
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML has other errors for a text that does not fit its tag: !!int abc
        words = " ".join(str(error).replace('in "<file>", ', "in ").split())
        words = words.replace(r"character '\t' that cannot start any token", "a tab instead of spaces")
        reason = f"not readable as YAML: {words[:500]}"
    raise SettingsError(f"{source}: {reason}" if source else reason)


def check_values(value: object, key: str = "", depth: int = 1) -> None:
    """Raise SettingsError for a value that a node cannot receive as JSON."""
    match value:
        case dict() | list() if depth > _DEPTH:
            key, wrong = f"{key[:100]}...", f"nested more than {_DEPTH} levels deep"
        case dict() | list():
            for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                check_values(part, f"{key}.{name}".removeprefix("."), depth + 1)
            return
        case float() if not math.isfinite(value):
            wrong = f"{value}; expected a finite number"
        case str() if bad := re.search(r"[\0\ud800-\udfff]", value):
            wrong = f"{value!r}; expected text without the character {bad[0]!r}"
        case _:
            return
    raise SettingsError(f"{key or 'the value'} is {wrong}")
