"""Reads the YAML of experiments: mappings, lists, text, numbers and truth values, of bounded size and depth.

An experiment may come from someone else. Aliases raise an error, because with them a file of ten lines can describe a
structure that fits into no memory.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from fedbn_flwr.errors import SettingsError

_TEXT, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float"))
_TAGS = (_TEXT, _INT, _FLOAT, *(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "bool", "null")))
LENGTH, DEPTH, DIGITS = 2**18, 50, 19  # bounds of a text: characters, levels, digits


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number and a date as text."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] in _TAGS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # None: the error for other tags.
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_TAGS, None)}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ConstructorError(None, None, "found an alias; expected the value itself", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if name.tag in (_INT, _FLOAT):  # kept as written: keys of JSON are text
                name.tag = _TEXT
            words = f"the key {str(name.value)[:100]!r} is "
            if name.tag != _TEXT:
                raise ConstructorError(None, None, words + "not text; write it in quotes", name.start_mark)
            if name.value in seen:
                raise ConstructorError(None, None, words + "given twice", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True


for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def dump_yaml(content: object) -> str:
    """Text from which `parse_yaml` reads the same content; it may be longer than an experiment may be."""
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse_yaml(text: str, source: str = "", most: float = LENGTH) -> Any:
    """The content of a text of at most `most` characters; errors begin with its `source`, a file or a key."""
    try:
        if len(text) > most:
            raise SettingsError(f"the YAML text has {len(text)} characters; expected at most {most}")
        content = _Loader(io.StringIO(text)).get_single_data()  # its errors quote no lines of a stream
        check_values(content)
        return content
    except SettingsError as error:
        reason = str(error)
    except RecursionError:
        reason = f"not readable as YAML: it is nested more than {DEPTH} levels deep"
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML has other errors for a text that does not fit its tag: !!int abc
        words = " ".join(str(error).replace('in "<file>", ', "in ").split())
        words = words.replace(r"character '\t' that cannot start any token", "a tab instead of spaces")
        reason = f"not readable as YAML: {words[:500]}"
    raise SettingsError(f"{source}: {reason}" if source else reason)


def check_values(value: object, key: str = "", depth: int = 1) -> None:
    """Raise SettingsError for a value that a node cannot receive as JSON."""
    match value:
        case dict() | list() if depth > DEPTH:
            key, wrong = f"{key[:100]}...", f"nested more than {DEPTH} levels deep"
        case dict() | list():
            for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                check_values(part, f"{key}.{name}".removeprefix("."), depth + 1)
            return
        case int() if abs(value) >= 10**DIGITS:
            wrong = f"a number of more than {DIGITS} digits"
        case float() if not math.isfinite(value):
            wrong = f"{value}; expected a finite number"
        case str() if bad := re.search(r"[\0\ud800-\udfff]", value):
            wrong = f"{value!r}; expected text without the character {bad[0]!r}"
        case _:
            return
    raise SettingsError(f"{key or 'the value'} is {wrong}")
