"""`fedbn flwr run`: any Flower app, on the local engine or a Ray cluster."""

from __future__ import annotations

import argparse
import json
import signal
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.trees import Draft, Tree, flat_settings

from .common import Commands, add_command, continued_by, parse_pairs


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "flwr",
        flwr,
        summary="run any Flower app without a SuperLink: fedbn flwr run .",
        description=(
            "Run a Flower app as `flwr run` does, without a SuperLink that stays in the background. The app uses the "
            "current environment, and the exit code is 0 only if the run succeeded. Two runs are equal bit for bit, on "
            "either engine. An experiment has one node per client; another app has 2, Flower's default, unless "
            "--federation-config num-supernodes=N is given."
        ),
        epilog="Example: fedbn flwr run . --run-config \"set='rounds=10'\"",
    )
    parser.add_argument("run", choices=["run"], help="the only subcommand")
    parser.add_argument("app", nargs="?", default=".", metavar="APP", help="the app's folder (.)")
    parser.add_argument(
        "federation", nargs="?", metavar="FEDERATION", help="one of [tool.flwr.federations] in the app's pyproject.toml"
    )
    for *options, meaning in (
        ("-c", "--run-config", "changes to the app's run config, such as set='rounds=10'"),
        ("--federation-config", "num-supernodes=5; on Ray also client-resources-num-cpus and -num-gpus of each actor"),
    ):
        parser.add_argument(*options, action="append", default=[], metavar="PAIRS", help=meaning)
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="local: this machine (default); ray: a Ray cluster"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes (one per core) or actors (as many as fit); with 0 a debugger can stop in a client's code",
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


# The settings of a federation that are used, as Flower names them.
_NODES, _CPUS, _GPUS = "num-supernodes", "client-resources-num-cpus", "client-resources-num-gpus"


def _federation(project: Tree, name: str | None) -> Draft:
    """The settings of a federation in pyproject.toml, where older versions of Flower had them, in today's words."""
    given = project["tool"]["flwr"].get("federations", {})
    federations = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if name is not None and name not in federations:
        raise SettingsError(f"pyproject.toml has no federation {name!r}; {did_you_mean(name, federations)}")
    options = federations.get(name or given.get("default"), {}).get("options", {})
    return {key.removeprefix("backend.").replace(".", "-"): value for key, value in flat_settings(options).items()}


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
    from fedbn_flwr.cores import cores

    from .flower_app import run_app

    app = Path(arguments.app).expanduser().resolve()
    project = _project(app)
    run_config: Tree = parse_pairs(arguments.run_config, "--run-config")
    given = parse_pairs(arguments.federation_config, "--federation-config")
    federation: Tree = {key.replace("_", "-"): value for key, value in given.items()}  # Flower accepts both
    is_ray, workers = arguments.engine == "ray", arguments.workers
    used = [_NODES, _CPUS, _GPUS] if is_ray else [_NODES]
    if wrong := [key for key in federation if key not in used]:
        raise SettingsError(
            f"--federation-config has no key {wrong[0]!r} on the engine {arguments.engine!r}; "
            f"{did_you_mean(wrong[0], used)}"
        )
    of_file = _federation(project, arguments.federation)
    federation = {**{key: value for key, value in of_file.items() if key in used}, **federation}
    defaults = flat_settings(project["tool"]["flwr"]["app"].get("config", {}))
    if unknown := [key for key in run_config if key not in defaults]:
        raise SettingsError(f"--run-config has no key {unknown[0]!r}; {did_you_mean(unknown[0], defaults)}")
    out, clients = None, 0
    if project["project"]["name"] == "fedbn-flwr":
        run_config, out, clients = _of_experiment(run_config, defaults)
    elif _NODES not in federation:
        print(f"2 nodes, Flower's default; for another number: --federation-config {_NODES}=N", flush=True)
    nodes, least = federation.get(_NODES, clients or 2), clients or 1
    if type(nodes) is not int or nodes < least:
        raise SettingsError(f"--federation-config: {_NODES} is {nodes!r}; expected a number from {least} on")
    words = [arguments.app, *filter(None, [arguments.federation])]
    words += ["--engine", "ray"] if is_ray else []
    words += [] if workers is None else ["--workers", str(workers)]
    words += [w for text in arguments.federation_config for w in ("--federation-config", text)]
    pairs = " ".join(_pair(key, value) for key, value in {**run_config, "resume": True}.items())
    actors = {"cpus": federation.get(_CPUS, 1), "gpus": federation.get(_GPUS, 0)} if is_ray and workers != 0 else None
    workers = min(nodes, cores()) if workers is None and not is_ray else workers
    with continued_by(out, "flwr", "run", *words, "--run-config", pairs), _ended_by_signals():
        if not workers:  # clients are in this process
            from fedbn_flwr.engines.worker import forks_have_default_signals

            forks_have_default_signals()
        run_app(app, nodes, workers=workers, run_config=run_config, actors=actors)
    return 0


def _of_experiment(run_config: Tree, defaults: Tree) -> tuple[Draft, Path, int]:
    """The run config of this project's app with its output folder, that folder, and the number of clients."""
    from fedbn_flwr.experiment.file.layers import from_run_config
    from fedbn_flwr.experiment.prepare import prepare
    from fedbn_flwr.experiment.run.launch import open_folders
    from fedbn_flwr.results.folder.places import OF_RUN_CONFIG, options_as, out_folder

    for key, value in run_config.items():
        if type(value) is not type(defaults[key]):
            expected = "true or false" if key == "resume" else "text, in quotes"
            raise SettingsError(f"--run-config: {key} is {value!r}; expected {expected}")
    config = {**defaults, **run_config}
    experiment, resume = from_run_config(config), bool(config.get("resume"))
    with options_as(*OF_RUN_CONFIG):
        out = out_folder(experiment.name, config.get("out"), resume=resume)
        prepare(experiment, own_data=True)
        open_folders(experiment, out, resume=resume)
    return {**run_config, "out": str(out)}, out, experiment.runs[0].clients


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
