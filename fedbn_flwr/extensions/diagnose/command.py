"""`fedbn diagnose`: whether batch norm will hurt, before training."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbn_flwr.commands.common import Commands, add_command, add_engine, add_experiment, loading, overrides_of

_OPTIONS = ("rounds", "batches", "own_models", "out")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "diagnose",
        run,
        summary="measure whether batch norm will hurt, before training",
        description=(
            "Measure how far the mean of the clients' gradients is from the gradient of the union of their batches, "
            "which batch norm causes if clients differ: at the initial model, and after a round of training."
        ),
        epilog="Example: fedbn diagnose mine.yaml",
    )
    add_experiment(parser, "clients=10")
    add_engine(parser)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="training before the second measurement (1)")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="batches of each client (8)")
    parser.add_argument("--own-models", action="store_true", help="each client may have a model of its own")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for diagnosis.json (runs/NAME-TIME)")


def run(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.experiment.file.layers import parse_overrides

    changes = parse_overrides(overrides_of(arguments))
    with loading():
        from .measure import diagnose
    print(diagnose(arguments.experiment, **{key: getattr(arguments, key) for key in _OPTIONS}, **changes))
