"""`fedbn run`: carries out an experiment."""

from __future__ import annotations

import argparse
import sys
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
    add_experiment(parser, "rounds=10 train.lr=0.05")
    add_engine(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the run folders (runs/NAME-TIME)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at the same time (one per core, if there are as many runs)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the interrupted runs in --out")


def run(arguments: argparse.Namespace) -> None:
    import logging

    from fedbn_flwr.data.located import located
    from fedbn_flwr.experiment.file.layers import load_experiment
    from fedbn_flwr.results.folder.places import from_here, out_folder

    overrides = overrides_of(arguments)
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
        carry_out(experiment, out, resume=arguments.resume, jobs=arguments.jobs).announce(arguments.experiment)
