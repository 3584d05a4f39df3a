"""`fedbn new`: writes an experiment file to start from, a copy of a shipped one or for one's own data."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fedbn_flwr.errors import SettingsError

from .common import Commands, add_command, loading


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new",
        new,
        summary="write an experiment file to start from",
        description=(
            "Write an experiment file to start from: a copy of a shipped experiment or of another file, with its "
            "comments; or for your own data: their inputs, categories, classes and clients. An existing file is not "
            "overwritten."
        ),
        epilog=(
            "Examples: fedbn new mine --from demo, then: fedbn explain mine.yaml; fedbn run mine.yaml. For a table: "
            "fedbn new mine --data patients.csv --label diagnosis --group hospital"
        ),
    )
    parser.add_argument("name", metavar="NAME", help="name of the experiment and of the file, NAME.yaml")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from", dest="source", default="quick", metavar="EXPERIMENT", help="what to start from (quick)"
    )
    start.add_argument("--data", type=Path, metavar="PATH", help="a table or a folder of images of your own")
    parser.add_argument("--label", metavar="COLUMN", help="with --data: what is predicted")
    parser.add_argument("--group", metavar="COLUMN", help="with --data: each of its values is a client")
    parser.add_argument("--series", metavar="COLUMN", help="with --data, for a row per time: the series of a row")
    parser.add_argument("--time", metavar="COLUMN", help="with --series: by what its rows are ordered")
    parser.add_argument("--window", type=int, metavar="N", help="with --series: N rows are an example")
    parser.add_argument("--out", type=Path, metavar="FILE", help="another file, ending in .yaml")


_HEAD = """\
# An experiment of fedbn-flwr, {source}.
#   fedbn explain {file}      what it sends, who has which examples; with --all all keys and their defaults
#   fedbn run {file}          changes on the command line: rounds=3 train.lr=0.01
# The page "Settings" of the documentation describes all keys.
"""


def new(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.experiment.file.content import check_mapping, follow_extends, text_of
    from fedbn_flwr.experiment.file.layers import read_experiment
    from fedbn_flwr.results.yaml_text import parse_yaml

    name = arguments.name.removesuffix(".yaml").removesuffix(".yml")
    file: Path = arguments.out or Path(f"{name}.yaml")
    if file.suffix not in (".yaml", ".yml") or not str(file).isprintable():
        raise SettingsError(f"the file is {str(file)!r}; expected a name of printable characters that ends in .yaml")
    options = ("label", "group", "series", "time", "window")
    given = {key: value for key in options if (value := getattr(arguments, key)) is not None}
    if arguments.data is not None:
        with loading():
            from fedbn_flwr.experiment.own_data import experiment_for
        text, source = experiment_for(arguments.data, given), f"for {arguments.data}"
    elif given:
        raise SettingsError(
            f"--{next(iter(given))} is for data of your own; give their file or folder too: --data PATH"
        )
    else:
        text, source = text_of(arguments.source), f"a copy of {arguments.source}"
    content = check_mapping(parse_yaml(text), arguments.source)
    read_experiment(follow_extends(content, file.parent), name=arguments.source)  # names what is wrong in it
    text = _HEAD.format(source=source, file=shlex.quote(str(file))) + text
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise SettingsError(f"{str(file)!r} exists already; give another name, or another file by --out") from None
    except OSError as error:
        raise SettingsError(f"cannot write {str(file)!r}: {error.strerror}") from None
    print(f"{file}\n\n  fedbn explain {shlex.quote(str(file))}\n  fedbn run {shlex.quote(str(file))}")
