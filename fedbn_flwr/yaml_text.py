"""Reads the YAML of experiments: mappings, lists, text, numbers and truth values, of bounded size and depth.

An experiment may come from elsewhere. Aliases are counted as often as they are used, because a file of ten lines can
describe a structure that fits into no memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from fedbn_flwr.errors import SettingsError

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
LENGTH, VALUES, DEPTH, DIGITS = 2**18, 50_000, 50, 19  # bounds of a text: characters, values, levels, digits


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number and a date as text, and rejects a key that is given twice."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise SettingsError(f"the key {key!r} is given twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def dump_yaml(content: Any) -> str:
    """The text from which `parse_yaml` reads the content; it may be longer than that of an experiment."""
    return yaml.dump(content, Dumper=Dumper, sort_keys=False)


def parse_yaml(text: str, source: str = "") -> Any:
    """The content of a text; errors begin with its `source`, a file or a key."""
    try:
        if len(text) > LENGTH:
            raise SettingsError(f"the YAML text has {len(text)} characters; expected at most {LENGTH}")
        node = yaml.compose(text, _Loader)
        if node is None:
            return None
        _measure(node, {})
        content = _Loader("").construct_document(node)
        _check_plain(content, "")
        return content
    except SettingsError as error:
        reason = str(error)
    except RecursionError:
        reason = f"not readable as YAML: it is nested more than {DEPTH} levels deep"
    except yaml.YAMLError as error:
        words = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        reason = f"not readable as YAML: {words[:500]}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML's own, for a text that does not fit its tag: !!int abc
        reason = f"not readable as YAML: {type(error).__name__}: {str(error)[:200]}"
    raise SettingsError(f"{source}: {reason}" if source else reason)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of values and of levels of a node with its aliases expanded."""
    where = f"line {node.start_mark.line + 1}"
    if id(node) not in known:
        known[id(node)] = (0, 0)  # while its parts are measured
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            for key, _ in parts:
                if key.tag in _NUMBERS:  # as it is written: keys of JSON, in which nodes receive settings, are text
                    key.tag = "tag:yaml.org,2002:str"
            parts = [part for pair in parts for part in pair]
        sizes = [_measure(part, known) for part in parts]
        size, depth = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
        if size > VALUES:
            raise SettingsError(f"{where}: there are {size} values with aliases expanded; expected at most {VALUES}")
        if depth > DEPTH:
            raise SettingsError(f"{where}: it is nested more than {DEPTH} levels deep")
        known[id(node)] = size, depth
    elif known[id(node)] == (0, 0):
        raise SettingsError(f"{where}: the alias contains itself")
    return known[id(node)]


def _check_plain(value: Any, key: str) -> None:
    """Refuse what JSON would change, since nodes receive experiments as JSON: dates, binaries, infinities."""
    wrong = ""
    match value:
        case dict():
            for name, part in value.items():
                where = f"{key}.{name}" if key else str(name)
                if not isinstance(name, str):
                    raise SettingsError(
                        f"the key {where!r} is read as {type(name).__name__}; expected text: write it in quotes"
                    )
                _check_plain(name, where)
                _check_plain(part, where)
        case list():
            for number, part in enumerate(value):
                _check_plain(part, f"{key}[{number}]")
        case int() if abs(value) >= 10**DIGITS:
            wrong = f"a number of more than {DIGITS} digits"
        case float() if not math.isfinite(value):
            wrong = f"{value}; expected a finite number"
        case str() if bad := re.search(r"[\0\ud800-\udfff]", value):
            wrong = f"{value!r}; expected text without the character {bad[0]!r}"
        case int() | float() | str() | None:
            pass
        case _:
            wrong = f"a {type(value).__name__}; expected text, a number, true, false, a list or a mapping"
    if wrong:
        raise SettingsError(f"{key or 'the value'} is {wrong}")
