"""`fedbn explain`: what an experiment will do, before it runs."""

from __future__ import annotations

import argparse

from fedbn_flwr.commands.startup import loading

from .common import Commands, add_command, add_experiment, overrides_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "explain",
        explain,
        summary="what an experiment will do: settings, data, model, traffic",
        description=(
            "Explain an experiment without running it: its settings and where each was given, the examples of each "
            "client, the arrays that travel and their bytes."
        ),
        epilog="Example: fedbn explain demo clients=10 strategy=FedTAN only=FixBN",
    )
    add_experiment(parser, "rounds=10")
    parser.add_argument("--all", action="store_true", help="settings with default values too")


def explain(arguments: argparse.Namespace) -> None:
    import logging

    with loading():
        from fedbn_flwr.experiment.file.layers import load_experiment
        from fedbn_flwr.experiment.preview import count_partitions, explain, pages

    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment = load_experiment(arguments.experiment, overrides_of(arguments))
    runs = explain(experiment)
    partitions = count_partitions(experiment) if all(run.evaluate.server for run in experiment.runs) else []
    print("\n\n".join(pages(experiment, runs, partitions, every=arguments.all)))
