"""`fedbn explain`: what an experiment will do, before it runs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from .common import Commands, add_command, add_experiment, loading, overrides_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbn_flwr.experiment.file.layers import Setting
    from fedbn_flwr.experiment.preview import ExplainedRun
    from fedbn_flwr.experiment.settings import Experiment
    from fedbn_flwr.results.folder.clients import PartitionCounts


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
        from fedbn_flwr.experiment.preview import count_partitions, explain

    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment = load_experiment(arguments.experiment, overrides_of(arguments))
    runs = explain(experiment)
    partitions = count_partitions(experiment) if all(run.evaluate.server for run in experiment.runs) else []
    print("\n\n".join(_pages(experiment, runs, partitions, every=arguments.all)))


def _pages(
    experiment: Experiment, runs: Sequence[ExplainedRun], partitions: Sequence[PartitionCounts], *, every: bool
) -> list[str]:
    from fedbn_flwr.results.report.tables import as_text, partition_table
    from fedbn_flwr.results.text import columns_in_words

    first, *others = runs
    shared = [each for each in first.settings if all(each in other.settings for other in others)]
    pages = [f"{experiment.name}: {experiment.description}" if experiment.description else experiment.name]
    pages.append(_settings("settings", shared, every))
    if others:
        for run in runs:
            pages.append(_settings(f"run {run.label}", [each for each in run.settings if each not in shared], True))
    pages += [f"data {partition_table(each)}" for each in partitions]
    pages += dict.fromkeys("\n".join(columns_in_words(run.columns)) for run in runs if run.columns)
    pages += dict.fromkeys(as_text(_model(run)) for run in runs)
    return pages + [as_text(_traffic(run)) for run in runs]


def _settings(title: str, settings: Sequence[Setting], every: bool) -> str:
    from fedbn_flwr.results.report.tables import as_text

    shown = [each for each in settings if every or each.origin != "default"]
    rows = [(each.key, _value(each.value), each.origin) for each in shown]
    hidden = len(settings) - len(shown)
    rest = f"\n... and {hidden} with default values (--all)" if hidden else ""
    return as_text([(title, "value", "given in"), *rows]) + rest


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _model(run: ExplainedRun) -> list[tuple[str, ...]]:
    values = {each.key: each.value for each in run.settings}
    rows = [(role, str(part.arrays), f"{part.values:,}", decimal(part.bytes)) for role, part in run.model.items()]
    title = f"model {values['model.name']}, {values['model.norm']}"
    return [(title, "arrays", "values", "size"), *rows]


def _traffic(run: ExplainedRun) -> list[tuple[str, ...]]:
    """What a client receives and sends in a round, by role of the arrays."""
    rows: list[tuple[str, ...]] = [(f"run {run.label}, a round", "size", "arrays")]
    for title, sent in (("a client receives", run.down), ("a client sends", run.up)):
        size = sum(part.bytes for role, part in run.model.items() if role in sent)
        rows.append((title, decimal(size), ", ".join(sent) or "none"))
    return rows
