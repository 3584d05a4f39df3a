"""What several commands share."""

from __future__ import annotations

import argparse
import gc
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from fedbn_flwr.errors import FedbnError, RunFailed, SettingsError, StorageError
from fedbn_flwr.trees import Draft

# Each command adds its parser to these.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # Flower's, of --run-config


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
    # With a default, argparse doesn't list them among the required arguments.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help=f"changes to the experiment, such as {changes}"
    )
    parser.add_argument("--size", metavar="NAME", help="a size that the file defines; `paper`: the file as it is")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", dest="engine.name", choices=("local", "ray"), help="local: this machine; ray: a Ray cluster"
    )
    parser.add_argument(
        "--device",
        dest="engine.device",
        choices=("auto", "cpu", "cuda"),
        help="device for training (auto: a GPU if there is one)",
    )


_SETTINGS = ("size", "engine.name", "engine.device")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The changes to the experiment, from words and from options."""
    options = [f"{key}={value}" for key, value in vars(arguments).items() if key in _SETTINGS and value]
    return [*arguments.overrides, *options]


@contextmanager
def continued_by(out: Path | None, *words: str) -> Iterator[None]:
    """If the runs in `out` are stopped or fail, report on their rounds, and add the command that continues them."""
    on_with = f"continue with: {shlex.join(['fedbn', *words])}"
    try:
        yield
    except (KeyboardInterrupt, RunFailed, StorageError) as error:
        from fedbn_flwr.results.read.runs import stopped_runs
        from fedbn_flwr.results.report.write import write_report

        if out is not None and (stopped := stopped_runs(out)):
            error.add_note(f"{stopped}; {on_with}")
            with suppress(FedbnError):
                write_report([out], out, whole=False)
        raise


@contextmanager
def loading() -> Iterator[None]:
    """Import PyTorch and Flower without Python's garbage collector, which would take a sixth of the time.

    A command first judges whatever it can without them. Their objects live until the process ends, so the collector
    never visits them afterwards. It then doesn't write to the memory that workers share with this process.
    """
    if "torch" in sys.modules:  # called from Python
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def parse_pairs(values: Sequence[str], option: str) -> Draft:
    """The pairs key=value of an option, as Flower reads them."""
    from fedbn_flwr.internals import parse_config_args

    for value in values:  # Flower leaves out what is not of this form
        if not value.endswith(".toml") and (rest := _PAIR.sub("", value).split()):
            raise SettingsError(
                f"{option} {value!r}: {rest[0]!r} is not of the form key=value; expected pairs separated by blanks, "
                "with text in quotes, or one file ending in .toml"
            )
    try:
        return dict(parse_config_args(list(values)))
    except Exception as error:  # any error of Flower's TOML parser
        raise SettingsError(
            f"{option} {' '.join(values)!r} cannot be read: {error}; texts need quotes, such as name='text'"
        ) from None
