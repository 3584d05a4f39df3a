"""Reads the YAML of experiments: mappings, lists, text, numbers and truth values, of bounded size and depth.

An experiment may come from elsewhere. Aliases are counted as often as they are used, because a file of ten lines can
describe a structure that fits into no memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from fedbn_flwr.errors import SettingsError

_MAPPING, _LIST, _TEXT, _INT, _FLOAT, _MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "merge")
)
LENGTH, VALUES, DEPTH, DIGITS = 2**18, 50_000, 50, 19  # bounds of a text: characters, values, levels, digits


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number and a date as text."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def dump_yaml(content: Any) -> str:
    """The text from which `parse_yaml` reads the content; it may be longer than that of an experiment."""
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse_yaml(text: str, source: str = "") -> Any:
    """The content of a text; errors begin with its `source`, a file or a key."""
    try:
        if len(text) > LENGTH:
            raise SettingsError(f"the YAML text has {len(text)} characters; expected at most {LENGTH}")
        node = yaml.compose(text, _Loader)
        if node is None:
            return None
        _check(_Loader(""), node, "", 1, itertools.count(1))
        return _Loader("").construct_document(node)
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


def _check(loader: _Loader, node: yaml.Node, key: str, depth: int, counted: Iterator[int]) -> None:
    """Refuse keys that are given twice, more values than a file may have with its aliases expanded, and other types.

    Nodes receive experiments as JSON, which would change dates, binaries and infinities.
    """
    line = f"line {node.start_mark.line + 1}"
    if (count := next(counted)) > VALUES:
        raise SettingsError(f"{line}: there are {count} values with aliases expanded; expected at most {VALUES}")
    if depth > DEPTH:
        raise SettingsError(f"{line}: it is nested more than {DEPTH} levels deep, or an alias contains itself")
    if node.tag == _LIST:
        for number, part in enumerate(node.value):
            _check(loader, part, f"{key}[{number}]", depth + 1, counted)
        return
    if node.tag == _MAPPING:
        seen: set[str] = set()
        for name_node, part in node.value:
            if name_node.tag in (_INT, _FLOAT):  # as it is written: keys of JSON are text
                name_node.tag = _TEXT
            if name_node.tag == _MERGE:
                _check(loader, part, key, depth + 1, counted)
                continue
            name = loader.construct_object(name_node) if isinstance(name_node, yaml.ScalarNode) else name_node.value
            where = f"{key}.{name}" if key else str(name)
            if not isinstance(name, str):
                raise SettingsError(
                    f"the key {where!r} is read as {type(name).__name__}; expected text: write it in quotes"
                )
            if name in seen:
                raise SettingsError(f"the key {name!r} is given twice (line {name_node.start_mark.line + 1})")
            seen.add(name)
            for each in (name_node, part):
                _check(loader, each, where, depth + 1, counted)
        return
    match loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else node:
        case int(value) if abs(value) >= 10**DIGITS:
            wrong = f"a number of more than {DIGITS} digits"
        case float(value) if not math.isfinite(value):
            wrong = f"{value}; expected a finite number"
        case str(value) if bad := re.search(r"[\0\ud800-\udfff]", value):
            wrong = f"{value!r}; expected text without the character {bad[0]!r}"
        case int() | float() | str() | None:
            return
        case value:
            wrong = f"a {type(value).__name__}; expected text, a number, true, false, a list or a mapping"
    raise SettingsError(f"{key or 'the value'} is {wrong}")
