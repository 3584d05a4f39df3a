"""`fedbn list`: what an experiment can name."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shutil
import textwrap
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fedbn_flwr.errors import SettingsError, did_you_mean

from .common import Commands, add_command

if TYPE_CHECKING:
    from fedbn_flwr.experiment.registry import Description

KINDS = ("strategies", "models", "norms", "datasets", "partitions", "experiments")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        list_names,
        summary="strategies, models, norms, data sets, partitions or experiments",
        description="List what an experiment can name, each with a line that says what it is.",
        epilog=(
            "Examples: fedbn list strategies FedTAN shows its paper, its arguments and its cost; fedbn list "
            "experiments fixbn the experiments of one paper."
        ),
    )
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these; strategies with all details; experiments also by paper"
    )
    parser.add_argument("--json", action="store_true", help="as JSON; strategies with all details")


def list_names(arguments: argparse.Namespace) -> None:
    lines = _lines(arguments.what)
    shown: dict[str, Any] = {}
    for given in arguments.names or lines:
        found = {name: line for name, line in lines.items() if given in (name, name.rpartition("/")[0])}
        if not found:
            raise SettingsError(f"{arguments.what}: there is no {given!r}; {did_you_mean(given, lines)}")
        shown |= found
    if arguments.what == "strategies" and (arguments.names or arguments.json):
        from fedbn_flwr.experiment.registry import describe

        described = {name: describe(name) for name in shown}
        if not arguments.json:
            print("\n\n".join(_page(name, each) for name, each in described.items()))
            return
        shown = {name: _as_json(each) for name, each in described.items()}
    if arguments.json:
        print(json.dumps(shown, indent=2))
        return
    width = max(map(len, shown))
    for name, line in shown.items():
        print(f"{name.ljust(width)}  {line}")


def _lines(what: str) -> Mapping[str, str]:
    match what:
        case "strategies":
            from fedbn_flwr.experiment.registry import FLOWER, STRATEGIES, describe

            return {name: describe(name).does for name in (*STRATEGIES, *FLOWER)}
        case "models":
            from fedbn_flwr.models.build import describe_models

            return describe_models()
        case "norms":
            from fedbn_flwr.norms.convert import NORMS

            own = {"MODULE:CALLABLE": "a normaliser of your own: a function of the number of channels"}
            return {name: line for name, (line, _) in NORMS.items()} | own
        case "datasets":
            from fedbn_flwr.data.catalogue import describe_datasets

            return describe_datasets()
        case "partitions":
            from fedbn_flwr.data.partition.kinds import describe_partitions

            return describe_partitions()
        case _:
            from fedbn_flwr.experiment.file.content import read_content, shipped_experiments

            return {name: read_content(name)[0]["description"] for name in shipped_experiments()}


def _as_json(about: Description) -> dict[str, Any]:
    values = dataclasses.asdict(about)
    for argument in values["arguments"]:
        if argument["default"] is inspect.Parameter.empty:
            del argument["default"]
    values["traits"] |= {key: sorted(value) for key, value in values["traits"].items() if isinstance(value, frozenset)}
    return values


def _page(name: str, about: Description) -> str:
    """A strategy with its paper, its cost and its arguments."""
    rows = [("paper", about.source), *cost(about)]
    for argument in about.arguments:
        default = argument.default
        shown = "" if default is inspect.Parameter.empty else f" ({json.dumps(default)})"
        rows.append((f"{argument.name}{shown}", argument.meaning))
    if about.wraps:
        rows.append(('base ({"name": "FedAvg"})', "the strategy that it extends"))
    if name != "FedAvg":
        rows.append(("...", f"and the arguments of {'its base' if about.wraps else 'FedAvg'}"))
    width = max(len(left) for left, _ in rows)
    columns = max(40, shutil.get_terminal_size().columns - width - 4)
    lines = [f"{name}: {about.does}"]
    for left, right in rows:
        first, *more = textwrap.wrap(right, columns) or [""]
        lines += [f"  {left.ljust(width)}  {first}".rstrip(), *(" " * (width + 4) + line for line in more)]
    return "\n".join(lines)


def cost(about: Description) -> list[tuple[str, str]]:
    """What a strategy sends and what it asks clients to keep."""
    traits = about.traits
    if not traits.has_global_model:
        sent = "no arrays"
    elif not traits.kept:
        sent = "the whole model, down and up"
    else:
        sent = f"the model without {_words(traits.kept)} down"
        returned = traits.kept.keys() - traits.unsent
        sent += f"; with {_words(returned)} up" if returned else "; the same up"
    rows = [("sends", sent), ("sends too", traits.traffic), ("clients keep", traits.client_memory or "nothing")]
    return [(name, text) for name, text in rows if text]


def _words(roles: Collection[Any]) -> str:
    names = {"weights": "weights", "affine": "gamma and beta", "statistics": "statistics"}
    # Experiments never send counters; see the glossary.
    return ", ".join(text for role, text in names.items() if role in roles)
