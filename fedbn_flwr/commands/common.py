"""What several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

# Each command adds its parser to these.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    function: Callable[[argparse.Namespace], int | None],
    *,
    summary: str,
    description: str = "",
    **options: Any,
) -> argparse.ArgumentParser:
    """A parser whose help says `summary` in the list of commands and `description` (default: the same) on its page."""
    parser = commands.add_parser(name, help=summary, description=description or summary, **options)
    parser.set_defaults(command=function)
    return parser


def add_experiment(parser: argparse.ArgumentParser, changes: str) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="name of a shipped experiment, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"changes to it, such as {changes}")
