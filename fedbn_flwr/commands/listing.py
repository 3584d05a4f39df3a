"""`fedbn list`: what an experiment can name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from fedbn_flwr.errors import SettingsError, did_you_mean

from .common import Commands, add_command

KINDS = {
    "strategies": "what the server does with the clients' models",
    "models": "networks",
    "norms": "what replaces batch norm in a network",
    "datasets": "where examples come from",
    "partitions": "which client has which examples",
    "experiments": "experiments that are shipped, such as demo",
}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        list_names,
        summary="strategies, models, norms, data sets, partitions or experiments",
        description="List what an experiment can name, each with a line that says what it is.",
        epilog=(
            "Examples: fedbn list strategies FedTAN shows its paper and its arguments; fedbn list "
            "experiments fixbn the experiments of one paper."
        ),
    )
    parser.add_argument("what", nargs="?", choices=KINDS, metavar="WHAT", help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these; strategies with all details; experiments also by paper"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def list_names(arguments: argparse.Namespace) -> None:
    lines = KINDS if arguments.what is None else _lines(arguments.what)
    shown: dict[str, str] = {}
    for given in arguments.names or lines:
        found = {name: line for name, line in lines.items() if given in (name, name.rpartition("/")[0])}
        if not found:
            raise SettingsError(f"{arguments.what}: there is no {given!r}; {did_you_mean(given, lines)}")
        shown |= found
    if arguments.json:
        print(json.dumps(shown, indent=2))
    elif arguments.what == "strategies" and arguments.names:
        from fedbn_flwr.experiment.registry import in_words

        print("\n\n".join(map(in_words, shown)))
    elif arguments.what == "strategies":
        from fedbn_flwr.experiment.registry import FAMILIES

        groups = {title: {name: shown[name] for name in names} for title, names in FAMILIES.items() if names}
        pages = (f"{title}\n{_table(group, '  ')}" for title, group in groups.items())
        print("\n\n".join(pages))
    else:
        print(_table(shown))
    if arguments.what is None and not arguments.json:
        print("\nfedbn list strategies lists them, and fedbn list strategies FixBN describes one.")


def _table(lines: Mapping[str, str], indent: str = "") -> str:
    width = max(map(len, lines))
    return "\n".join(f"{indent}{name.ljust(width)}  {line}" for name, line in lines.items())


def _lines(what: str) -> Mapping[str, str]:
    match what:
        case "strategies":
            from fedbn_flwr.experiment.registry import FAMILIES, in_a_line

            return {name: in_a_line(name) for names in FAMILIES.values() for name in names}
        case "models":
            from fedbn_flwr.experiment.sources import describe_models

            return describe_models()
        case "norms":
            from fedbn_flwr.norms import NORMS

            return NORMS | {"MODULE:CALLABLE": "a normaliser of your own: a function of the number of channels"}
        case "datasets":
            from fedbn_flwr.data.catalogue import describe_datasets

            return describe_datasets()
        case "partitions":
            from fedbn_flwr.data.kinds import describe_partitions

            return describe_partitions()
        case _:
            from fedbn_flwr.experiment.file.content import read_content, shipped_experiments

            return {name: read_content(name)[0]["description"] for name in shipped_experiments()}
