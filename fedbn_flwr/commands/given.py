"""Without training: `fedbn evaluate`, given models at all clients, and `fedbn survey`, how their data differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .common import Commands, add_command, add_engine, add_experiment, loading, overrides_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "evaluate",
        evaluate,
        summary="evaluate given models at all clients, without training",
        description=(
            "Let each client of an experiment evaluate one or more given models on its own test examples; nothing is "
            "trained. Further models are compared with the first one, in pairs by client."
        ),
        epilog="Example: fedbn evaluate mine.yaml --model runs/old/FedAvg --model runs/new/FedBN",
    )
    _add_arguments(
        parser,
        [],
        required=True,
        help="a run folder, or weights by safetensors or torch.save; give the option again for another model",
    )
    parser = add_command(
        commands,
        "survey",
        evaluate,
        summary="ask all clients how their data differ, without training",
        description=(
            "Ask each client of an experiment for the moments of its columns and the shares of its classes, and say "
            "how the clients differ; nothing is trained."
        ),
        epilog="Example: fedbn survey mine.yaml",
    )
    _add_arguments(
        parser,
        ["evaluate.survey=true"],
        default=[],
        help="a run folder or weights, to compare the inputs of its batch norms at each client with its statistics",
    )


def _add_arguments(parser: argparse.ArgumentParser, asks: Sequence[str], **of_model: Any) -> None:
    parser.set_defaults(asks=asks)
    add_experiment(parser, "clients=10")
    parser.add_argument("--model", action="append", metavar="FILE", **of_model)
    add_engine(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the run folders (runs/NAME-TIME)")


def evaluate(arguments: argparse.Namespace) -> None:
    import logging

    from fedbn_flwr.experiment.file.layers import load_experiment
    from fedbn_flwr.results.folder.places import out_folder

    models = f"evaluate.models={json.dumps(arguments.model)}"
    judged = [*overrides_of(arguments), "rounds=0", models, *arguments.asks]
    experiment = load_experiment(arguments.experiment, judged)
    out = out_folder(experiment.name, arguments.out, resume=False)
    with loading():
        from fedbn_flwr.experiment.run.launch import carry_out

    logging.getLogger("flwr").setLevel(logging.WARNING)
    carry_out(experiment, out, resume=False).announce()
