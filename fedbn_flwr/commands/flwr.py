"""`fedbn flwr run`: a Flower app in Flower's simulation."""

from __future__ import annotations

import argparse
import json
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.errors import OF_RUN_CONFIG, RunFailed, SettingsError, did_you_mean, options_as
from fedbn_flwr.trees import Draft, Tree, flat_settings

from .common import Commands, add_command, continued_by, parse_pairs

if TYPE_CHECKING:
    from fedbn_flwr.results.folder.writer import RunFolder


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "flwr",
        flwr,
        summary="run any Flower app without a SuperLink, and without Ray: fedbn flwr run . --engine local",
        description=(
            "Run a Flower app as `flwr run` does, without a SuperLink that stays in the background. The app uses the "
            "current environment, and the exit code is 0 only if the run succeeded. `--engine local` needs no Ray and "
            "repeats a run bit for bit. An experiment has one node per client; another app has 2, Flower's default, "
            "unless --federation-config num-supernodes=N is given."
        ),
        epilog="Example: fedbn flwr run . --engine local --run-config \"set='rounds=10'\"",
    )
    parser.add_argument("run", choices=["run"], help="the only subcommand")
    parser.add_argument("app", nargs="?", default=".", metavar="APP", help="the app's folder (.)")
    for *options, meaning in (
        ("-c", "--run-config", "changes to the app's run config, such as set='rounds=10'"),
        ("--federation-config", "changes to the simulation, such as num-supernodes=5"),
    ):
        parser.add_argument(*options, action="append", default=[], metavar="PAIRS", help=meaning)
    parser.add_argument(
        "--engine", choices=["ray", "local"], default="ray", help="Flower's simulation, or the local engine (ray)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of the local engine (one per core); with 0 a debugger can stop in a client's code",
    )
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)  # as of `flwr run`; it is so always


def _project(app: Path) -> Tree:
    file = app / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
        project["project"]["name"], project["tool"]["flwr"]["app"]["components"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(
            f"{str(app)!r} is not a Flower app: its pyproject.toml with [project] name and [tool.flwr.app.components] "
            f"is missing or incomplete ({type(error).__name__}: {error})"
        ) from None
    return project


def _pair(key: str, value: object) -> str:
    """A key with its value in TOML, as in --run-config."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    if value.isprintable() and "'" not in value:
        return f"{key}='{value}'"
    # Flower takes the next quotation mark for the end of the text, escaped or not.
    text = "\\u0022".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in value.split('"'))
    return f'{key}="{text}"'


def flwr(arguments: argparse.Namespace) -> int:
    from fedbn_flwr.results.folder.summary import time_stamp

    from .simulation import check_federation, run_app

    app = Path(arguments.app).expanduser().resolve()
    project = _project(app)
    run_config: Tree = parse_pairs(arguments.run_config, "--run-config")
    given = parse_pairs(arguments.federation_config, "--federation-config")
    federation: Tree = {key.replace("_", "-"): value for key, value in given.items()}  # Flower accepts both
    check_federation(federation)
    if arguments.engine == "local":
        if others := federation.keys() - {"num-supernodes"}:
            raise SettingsError(
                f"--federation-config: {min(others)} is a setting of Ray; the local engine has --workers"
            )
    elif arguments.workers is not None:
        raise SettingsError("--workers is an option of the local engine; add --engine local")
    defaults = flat_settings(project["tool"]["flwr"]["app"].get("config", {}))
    if unknown := [key for key in run_config if key not in defaults]:
        raise SettingsError(f"--run-config has no key {unknown[0]!r}; {did_you_mean(unknown[0], defaults)}")
    folders: list[RunFolder] = []
    if project["project"]["name"] == "fedbn-flwr":
        run_config, federation, folders = _of_experiment(run_config, federation, defaults)
    out = folders[0].path.parent if folders else None
    began = time_stamp()
    words = ["--engine", "local"] if arguments.engine == "local" else []
    words += [] if arguments.workers is None else ["--workers", str(arguments.workers)]
    words += [w for text in arguments.federation_config for w in ("--federation-config", text)]
    pairs = " ".join(_pair(key, value) for key, value in {**run_config, "resume": True}.items())
    with continued_by(out, "flwr", "run", arguments.app, *words, "--run-config", pairs), _ended_by_signals():
        try:
            if arguments.engine == "local":
                _run_locally(app, run_config, federation, arguments.workers)
            else:
                run_app(app, run_config, federation or {"client-resources-num-cpus": 1})
        except RunFailed as error:
            # Flower gives an error of its own instead of the server's if its nodes failed meanwhile.
            ended = ((folder.path.name, folder.readable_summary()) for folder in folders)
            errors = {name: summary.error for name, summary in ended if summary and summary.began >= began}
            lost = [f"{name}: {why}" for name, why in errors.items() if why and why not in str(error)]
            raise RunFailed("\n".join([str(error), *lost])) from None
    return 0


def _run_locally(app: Path, run_config: Tree, federation: Tree, workers: int | None) -> None:
    from fedbn_flwr.cores import cores

    from .flower_app import run_app
    from .simulation import number_of_nodes

    nodes = number_of_nodes(federation)
    run_app(app, nodes, workers=min(nodes, cores()) if workers is None else workers, run_config=run_config)


def _of_experiment(run_config: Tree, federation: Tree, defaults: Tree) -> tuple[Draft, Draft, list[RunFolder]]:
    """The run config of this project's app with its output folder, a node for each client, and the run folders."""
    from fedbn_flwr.experiment.file.layers import from_run_config
    from fedbn_flwr.experiment.prepare import prepare
    from fedbn_flwr.experiment.run.launch import open_folders
    from fedbn_flwr.results.folder.places import out_folder

    from .simulation import check_federation, federation_config

    for key, value in run_config.items():
        if type(value) is not type(defaults[key]):
            expected = "true or false" if key == "resume" else "text, in quotes"
            raise SettingsError(f"--run-config: {key} is {value!r}; expected {expected}")
    config = {**defaults, **run_config}
    experiment, resume = from_run_config(config), bool(config.get("resume"))
    clients = experiment.runs[0].clients
    check_federation(federation, clients)
    with options_as(*OF_RUN_CONFIG):
        out = out_folder(experiment.name, config.get("out"), resume=resume)
        prepare(experiment, own_data=True)
        folders = open_folders(experiment, out, resume=resume)
    nodes = {"num-supernodes": clients, **federation} if federation else federation_config(clients)
    return {**run_config, "out": str(out)}, nodes, folders  # Flower's processes run in another folder


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, so that the run's processes end too; nohup ignores SIGHUP."""
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, signal.default_int_handler) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
