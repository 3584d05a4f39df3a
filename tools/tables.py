"""Writes the generated tables of the documentation; `--check` only reports pages and pictures that are not current.

A table is between `<!-- table: NAME -->` and `<!-- end -->`, and words that count things after `<!-- text: NAME -->`.
Names, defaults and descriptions come from the settings, registries and docstrings, measured figures from the raw files
of docs/results. Cells that neither contains, such as the default of a key that depends on the data, are kept from the
page; a row without a text in its last column is an error.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import concepts
import measured
import outputs
import pictures
import results
import weight
from described import describe
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from results import Row, Table

from fedbn_flwr.client.rule import ClientRule, known_keys
from fedbn_flwr.commands.cli import parser
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.kinds import KINDS
from fedbn_flwr.experiment import settings
from fedbn_flwr.experiment.file.content import KEYS_OF_A_FILE
from fedbn_flwr.experiment.registry import STRATEGIES, class_of
from fedbn_flwr.experiment.sources import describe_models
from fedbn_flwr.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.strategies import Rule

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- (?:table|text): ([^>]+) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)


def literal(value: Any) -> str:
    """A default value as it is written in an experiment file."""
    match value:
        case bool():
            text = str(value).lower()
        case str() | int() | float():
            text = str(value)
        case BaseModel():
            pairs = (f"{name}: {getattr(value, name)}" for name in type(value).model_fields)
            text = f"{{{', '.join(pairs)}}}"
        case Mapping():
            text = f"{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}"
        case _:
            text = f"[{', '.join(map(str, value))}]"
    return f"`{text}`"


def default_of(field: FieldInfo) -> str | None:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return None if value is None or value == "" or value == () else literal(value)


def section(prefix: str, model: type[BaseModel], whole: tuple[type[BaseModel], ...] = ()) -> Iterator[Row]:
    """A row for each key of a section and of the sections inside it."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner.model_fields and inner not in whole:
            yield from section(f"{prefix}{name}.", inner)
        elif name != "partition":
            yield f"`{prefix}{name}`", default_of(field), from_folder(field.description or "")


def from_folder(text: str) -> str:
    """Links to pages of docs, on a page of a folder there."""
    return re.sub(r"\]\((?=[\w/-]+\.md)", "](../", text)


def run_keys() -> Table:
    own = {name: field for name, field in settings.Settings.model_fields.items() if _plain(field)}
    rows: list[Row] = [
        (f"`{name}`", default_of(field), from_folder(field.description or ""))
        for name, field in own.items()
        if name not in settings.DERIVED
    ]
    return ("key", "default", "meaning"), [
        *rows,
        *((f"`{name}`", None, from_folder(meaning)) for name, meaning in KEYS_OF_A_FILE.items()),
    ]


def _plain(field: FieldInfo) -> bool:
    return not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))


def keys_of(name: str) -> Table:
    model = settings.Settings.model_fields[name].annotation
    assert isinstance(model, type)
    return ("key", "default", "meaning"), list(section(f"{name}.", model, (settings.Renorm,)))


def partitions() -> Table:
    rows: list[Row] = []
    for kind, registered in KINDS.items():
        keys = []
        for name, field in registered.model_fields.items():
            if name != "kind":
                default = default_of(field)
                keys.append(f"`{name}`" + (f" ({default})" if default not in (None, "required") else ""))
        rows.append((f"`{kind}`", ", ".join(keys), " ".join(str(registered.__doc__).split())))
    return ("kind", "keys (defaults)", "what a client has"), rows


def strategies() -> Table:
    """The arguments of each strategy by name; its page, whose title has its name, describes them."""
    rows: list[Row] = []
    for name in STRATEGIES:
        own = ", ".join(f"`{argument.name}`" for argument in describe(name).arguments)
        rows.append((f"[`{name}`](../strategies/{concepts.page_of(name)}.md)", own))
    return ("strategy", "arguments of its own"), rows


def arguments_of(name: str) -> Table:
    rows: list[Row] = []
    for argument in describe(name).arguments:
        default = argument.default
        shown = "required" if default is inspect.Parameter.empty else "" if default is None else literal(default)
        meaning = re.sub(r"`?docs/([\w-]+)\.md`?", lambda m: f"[{m[1].title()}](../{m[1]}.md)", argument.meaning)
        rows.append((f"`{argument.name}`", shown, meaning))
    return ("argument", "default", "meaning"), rows


def leaves() -> Table:
    """What a client sends in each round of training, by role, and what is stored; equal strategies share a row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in STRATEGIES:
        traits = describe(name).traits
        sends = "in a sum" if name == "Secure" else "yes"
        sent = [
            sends if role not in traits.local else "by default" if traits.sent_back else "no" for role in _TRAVELLING
        ]
        if getattr(class_of(name), "without_statistics", None):
            sent[_TRAVELLING.index(Role.STATISTICS)] = "none"
        besides = "; ".join([*traits.also_sent, *_queried(name)])
        found.setdefault((*sent, besides, " and ".join(traits.client_memory)), []).append(f"`{name}`")
    rows: list[Row] = [(", ".join(names), *row) for row, names in found.items()]
    return ("strategy", "weights", "gamma, beta", "running statistics", "also sends", "stored for each client"), rows


def _queried(name: str) -> Iterator[str]:
    """What clients answer in each evaluated round, if the server queries statistics."""
    for argument in describe(name).arguments:
        if argument.name == "statistics" and '"query"' in argument.meaning:
            option = "" if argument.default == "query" else "with `statistics: query` "
            yield f"{option}statistics of all its examples, in each evaluated round"


_TRAVELLING = (Role.WEIGHTS, Role.AFFINE, Role.STATISTICS)


def models() -> Table:
    found = describe_models()
    return ("network", "description"), [(f"`{name}`", found[name].rstrip(".")) for name in MODELS]


def norms() -> Table:
    return ("normaliser", "description"), [(f"`{name}`", text) for name, text in NORMS.items()]


def datasets() -> Table:
    columns = ("`data.name`", "data set", "classes", "pixels", "on the hub", "`data.augment`")
    rows: list[Row] = []
    for name, entry in CATALOGUE.items():
        domains = f"; domains {', '.join(f'`{domain}`' for domain in entry.domains)}" if entry.domains else ""
        hub = f"`{entry.hub}`" if entry.hub else ""
        augment = f"`[{', '.join(entry.augment)}]`" if entry.augment else ""
        rows.append(
            (
                f"`{name}`",
                entry.title + domains,
                str(entry.classes),
                str(entry.size or (f"crops of {entry.crop}" if entry.crop else "")),  # a table has no pixels
                hub,
                augment,
            )
        )
    return columns, rows


def keys() -> Table:
    rows: list[Row] = [(f"`{name}`", key.value, key.meaning) for name, key in sorted(known_keys().items())]
    return ("key", "value", "meaning"), rows


def hooks(cls: type, *columns: str) -> Table:
    """The public methods of a class with their arguments; the page describes them."""
    rows: list[Row] = []
    for name in weight.names()[cls.__name__]:
        if inspect.isfunction(method := getattr(cls, name, None)):
            _, *arguments = inspect.signature(method).parameters
            rows.append((f"`{name}({', '.join(arguments)})`", *(None for _ in columns)))
    return ("hook", *columns), rows


def names_of(kind: str) -> Table:
    """The names of a class; the page describes them."""
    return ("name", "what it is"), [(f"`{name}`", None) for name in weight.names()[kind]]


def api() -> Table:
    """The names whose docstrings the page of the API shows, with their first lines; the page has the examples."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (\S+)$", page.partition("## Messages")[0], re.MULTILINE)
    rows: list[Row] = [(f"`{path.rpartition('.')[2]}`", _summary(pkgutil.resolve_name(path)), None) for path in paths]
    return ("name", "what it is", "example"), rows


def _summary(named: object) -> str:
    return " ".join((inspect.getdoc(named) or "").partition("\n\n")[0].split())


COMMANDS = (
    "new", "explain", "run", "evaluate", "survey", "diagnose", "status", "report", "partition", "list", "check",
    "model", "predict", "export", "adapt", "flwr",
)  # fmt: skip


def arguments(name: str) -> list[tuple[str, str]]:
    """The arguments of a command with their meanings."""
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    rows: list[tuple[str, str]] = []
    for action in commands.choices[name]._actions:
        value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
        shown = " ".join([*action.option_strings[-1:], *([str(value)] if action.nargs != 0 else [])])
        meaning = f"{action.help or ''}{' (required)' if action.required and action.option_strings else ''}"
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            rows.append((f"`{shown.replace('|', chr(92) + '|')}`", meaning))
    return rows


@functools.cache
def shared() -> list[tuple[str, str]]:
    """The arguments that at least three commands have with the same meaning."""
    found = Counter(itertools.chain.from_iterable(map(arguments, COMMANDS)))
    return [row for row, count in found.items() if count >= 3]


def command(name: str) -> Table:
    rows: list[Row] = [row for row in arguments(name) if row not in shared()]
    if several := [shown.partition(" ")[0].strip("`") for shown, _ in filter(shared().__contains__, arguments(name))]:
        names = ", ".join(f"`{each}`" for each in several)
        rows.append((names, "as [above](#arguments-of-several-commands)"))
    return ("argument", "meaning"), rows


TABLES: dict[str, Callable[[], Table]] = {
    "run": run_keys,
    **{name: partial(keys_of, name) for name in ("data", "model", "train", "evaluate", "engine")},
    "partitions": partitions,
    "strategies": strategies,
    "leaves": leaves,
    "models": models,
    "norms": norms,
    "datasets": datasets,
    "keys": keys,
    "api": api,
    "hooks of the server": partial(hooks, Rule, "what it does", "default", "for instance"),
    "hooks of the client": partial(hooks, ClientRule, "when", "for instance"),
    "traits": partial(names_of, "Traits"),
    "local round": partial(names_of, "LocalRound"),
    **{f"command {name}": partial(command, name) for name in COMMANDS},
    "shared arguments": lambda: (("argument", "meaning"), [*shared()]),
    "coverage": measured.covered,
    **results.TABLES,
    **concepts.TABLES,
    **outputs.TABLES,
    **{f"arguments {name}": partial(arguments_of, name) for name in STRATEGIES},
}
TEXTS: dict[str, Callable[[], str]] = {
    "count of claims": results.claims_counted,
    "count of results": measured.coverage_counted,
}


FILES = {  # what is too long for a page
    results.RESULTS / "differences.csv": results.comparisons,
    results.RESULTS / "papers.csv": measured.papers,
    results.RESULTS / "sets.csv": results.sets,
    results.RESULTS / "heart" / "hospitals.csv": results.hospitals,
    results.RESULTS / "diagnose" / "cells.csv": outputs.diagnosed,
}


class Undescribed(Exception):
    """A row has no text in a column that only the page contains."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def render(name: str, old: str) -> str:
    if name in TEXTS:
        return TEXTS[name]()
    columns, rows = TABLES[name]()
    kept = {row[0]: row for row in map(cells, old.strip().splitlines()[2:]) if row}
    others = "---:|" if name.startswith(("results ", "concept ")) else "---|"  # numbers
    lines = [f"| {' | '.join(columns)} |", f"|---|{others * (len(columns) - 1)}"]
    for row in rows:
        before = kept.get(str(row[0]), [])
        full = []
        for column, cell in enumerate(row):
            if cell is None:
                cell = before[column] if column < len(before) else ""
                if not cell and column == len(row) - 1:
                    raise Undescribed(f"table {name}: describe {row[0]} in the column {columns[column]!r}")
            full.append(cell)
        lines.append(f"| {' | '.join(full)} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def renew(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + render(match[2], match[3]) + match[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wrong = False
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *FILES]:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        try:
            new = FILES[page]() if page in FILES else renew(text)
        except Undescribed as error:
            print(f"{page.relative_to(ROOT)}: {error}")
            wrong = True
            continue
        if new != text and check:
            print(f"{page.relative_to(ROOT)}: a table is not current; run python tools/tables.py")
            wrong = True
        elif new != text:
            page.write_text(new, encoding="utf-8")
    for picture in pictures.stale():
        print(f"{picture.relative_to(ROOT)}: not of the raw files' numbers; run python tools/pictures.py")
        wrong = True
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
