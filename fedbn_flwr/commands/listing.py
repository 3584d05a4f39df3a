"""`fedbn list`: what an experiment can name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from .common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "list", list_names, summary="strategies, models, norms, data sets, partitions or experiments"
    )
    parser.add_argument("what", choices=("strategies", "models", "norms", "datasets", "partitions", "experiments"))
    parser.add_argument("--json", action="store_true", help="as JSON")


def list_names(arguments: argparse.Namespace) -> None:
    lines: Mapping[str, str]
    match arguments.what:
        case "strategies":
            from fedbn_flwr.strategies import describe_strategies

            lines = describe_strategies()
        case "models":
            from fedbn_flwr.models.build import describe_models

            lines = describe_models()
        case "norms":
            from fedbn_flwr.norms.convert import NORMS

            lines = {name: line for name, (line, _) in NORMS.items()}
        case "datasets":
            from fedbn_flwr.data.catalogue import describe_datasets

            lines = describe_datasets()
        case "partitions":
            from fedbn_flwr.data.partition.kinds import describe_partitions

            lines = describe_partitions()
        case _:
            from fedbn_flwr.experiment.find import load_experiment, shipped_experiments

            lines = {name: load_experiment(name).description for name in shipped_experiments()}
    if arguments.json:
        print(json.dumps(lines, indent=2))
    else:
        width = max(len(name) for name in lines)
        for name, line in lines.items():
            print(f"{name.ljust(width)}  {line}")
