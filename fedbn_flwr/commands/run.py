"""Carries out an experiment: `fedbn run`, and without training `fedbn evaluate` and `fedbn survey`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .common import Commands, add_command, add_engine, add_experiment, continued_by, loading, overrides_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run",
        run,
        summary="run an experiment",
        description="Run an experiment: a shipped one by name (see `fedbn list experiments`) or a YAML file.",
        epilog="Example: fedbn run demo rounds=10 train.lr=0.05 --out runs/try",
    )
    _add_arguments(parser, "rounds=10 train.lr=0.05")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at the same time (one per core, if there are as many runs)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the interrupted runs in --out")
    parser = add_command(
        commands,
        "evaluate",
        run,
        summary="evaluate given models at all clients, without training",
        description=(
            "Let each client of an experiment evaluate one or more given models on its own test examples; nothing is "
            "trained. Further models are compared with the first one, in pairs by client."
        ),
        epilog="Example: fedbn evaluate mine.yaml --model runs/old/FedAvg --model runs/new/FedBN",
    )
    _add_arguments(parser, "clients=10", asks=["rounds=0"])
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="FILE",
        help="a run folder, or weights by safetensors or torch.save; give the option again for another model",
    )
    parser = add_command(
        commands,
        "survey",
        run,
        summary="ask all clients how their data differ, without training",
        description=(
            "Ask each client of an experiment for the moments of its columns and the shares of its classes, and say "
            "how the clients differ; nothing is trained."
        ),
        epilog="Example: fedbn survey mine.yaml",
    )
    _add_arguments(parser, "clients=10", asks=["rounds=0", "evaluate.survey=true"])
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FILE",
        help="a run folder or weights, to compare the inputs of its batch norms at each client with its statistics",
    )


def _add_arguments(parser: argparse.ArgumentParser, changes: str, asks: Sequence[str] = ()) -> None:
    """`asks` are the changes that make another command of `fedbn run`."""
    parser.set_defaults(asks=asks, jobs=None, resume=False)
    add_experiment(parser, changes)
    add_engine(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the run folders (runs/NAME-TIME)")


def run(arguments: argparse.Namespace) -> None:
    import logging

    from fedbn_flwr.data.located import located
    from fedbn_flwr.experiment.file.layers import load_experiment
    from fedbn_flwr.results.folder.places import from_here, out_folder

    models = [f"evaluate.models={json.dumps(arguments.model)}"] if arguments.asks else []
    overrides = [*overrides_of(arguments), *arguments.asks, *models]
    experiment = load_experiment(arguments.experiment, overrides)
    for each in experiment.runs:
        if each.evaluate.server:  # otherwise only the clients have data
            located(each.source)
    out = out_folder(experiment.name, arguments.out, resume=arguments.resume)
    if sys.stdout.isatty():
        print("loading PyTorch and Flower ...", flush=True)  # takes seconds
    with loading():
        from fedbn_flwr.engines.worker import keep_freed_memory
        from fedbn_flwr.experiment.run.launch import carry_out
    logging.getLogger("flwr").setLevel(logging.WARNING)
    keep_freed_memory()
    given = {"--out": arguments.out or from_here(out), "--jobs": arguments.jobs}
    options = [word for key, value in given.items() if value is not None for word in (key, f"{value}")]
    with continued_by(out, "run", arguments.experiment, *overrides, *options, "--resume"):
        done = carry_out(experiment, out, resume=arguments.resume, jobs=arguments.jobs)
        done.announce("" if arguments.asks else arguments.experiment)
