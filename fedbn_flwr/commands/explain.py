"""`fedbn explain` and `fedbn partition`: what an experiment will do, before it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbn_flwr.errors import SettingsError

from .common import Commands, add_command, add_experiment, loading, overrides_of


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
    parser = add_command(
        commands,
        "partition",
        partition,
        summary="the examples of each client, as a table and a plot",
        description="Show how an experiment's data is partitioned: the examples of each class that each client has.",
        epilog="Example: fedbn partition demo clients=10 data.partition='{kind: dirichlet, alpha: 0.1}'",
    )
    add_experiment(parser, "clients=10")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="file for the plot (partition.png)")


def explain(arguments: argparse.Namespace) -> None:
    import logging

    from fedbn_flwr.experiment.file.layers import load_experiment

    experiment = load_experiment(arguments.experiment, overrides_of(arguments))
    with loading():
        from fedbn_flwr.experiment.preview import count_partitions, explain, pages

    logging.getLogger("flwr").setLevel(logging.ERROR)
    runs = explain(experiment)
    partitions = count_partitions(experiment) if all(run.evaluate.server for run in experiment.runs) else []
    print("\n\n".join(pages(experiment, runs, partitions, every=arguments.all)))


def partition(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.experiment.file.layers import load_experiment

    out = arguments.out or Path("partition.png")
    if out.is_dir() or not out.suffix:
        raise SettingsError(f"--out is {str(out)!r}; expected a file, such as partition.png")
    experiment = load_experiment(arguments.experiment, overrides_of(arguments))
    with loading():
        from fedbn_flwr.experiment.preview import count_partitions
        from fedbn_flwr.results.report.pictures import partitions_plot
        from fedbn_flwr.results.report.tables import partition_table

    counts = count_partitions(experiment)
    print("\n\n".join(map(partition_table, counts)), flush=True)  # also if there is no matplotlib
    partitions_plot(counts).write(out)
    print(f"\nplot: {out}")
