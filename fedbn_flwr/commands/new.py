"""`fedbn new`: writes a commented experiment file."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedbn_flwr.errors import SettingsError

from .common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new",
        new,
        summary="write an experiment file to start from",
        description=(
            "Write a commented experiment file: the settings of a shipped experiment, and the keys that one changes "
            "most with their defaults. An existing file is not overwritten."
        ),
        epilog="Example: fedbn new mine --from demo, then: fedbn explain mine.yaml; fedbn run mine.yaml",
    )
    parser.add_argument("name", metavar="NAME", help="name of the experiment and of the file, NAME.yaml")
    parser.add_argument(
        "--from", dest="source", default="quick", metavar="EXPERIMENT", help="what to start from (quick)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="another file, ending in .yaml")


def new(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.experiment.file.content import read_content
    from fedbn_flwr.experiment.file.layers import load_experiment
    from fedbn_flwr.experiment.file.template import template

    name = arguments.name.removesuffix(".yaml").removesuffix(".yml")
    file: Path = arguments.out or Path(f"{name}.yaml")
    if file.suffix not in (".yaml", ".yml") or not str(file).isprintable():
        raise SettingsError(f"the file is {str(file)!r}; expected a name of printable characters that ends in .yaml")
    load_experiment(arguments.source)  # names what is wrong in it
    content, _ = read_content(arguments.source)
    text = template({key: value for key, value in content.items() if key != "name"}, shlex.quote(str(file)))
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise SettingsError(f"{str(file)!r} exists already; give another name, or another file by --out") from None
    except OSError as error:
        raise SettingsError(f"cannot write {str(file)!r}: {error.strerror}") from None
    print(f"{file}\n\n  fedbn explain {shlex.quote(str(file))}\n  fedbn run {shlex.quote(str(file))}")
