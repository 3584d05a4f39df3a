"""`fedbn explain`: what an experiment will do, before it runs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fedbn_flwr.results.text import size_text

from .common import Commands, add_command, add_experiment, loading, overrides_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbn_flwr.experiment.file.layers import Setting
    from fedbn_flwr.experiment.settings import Experiment
    from fedbn_flwr.experiment.trial import Costs, ExplainedRun, Explanation


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "explain",
        explain,
        summary="what an experiment will do: settings, data, model, traffic",
        description=(
            "Explain an experiment without running it: its settings and where each was given, the examples of each "
            "client, the arrays that travel and their bytes. For the last, two clients train one step of a few "
            "rounds on this machine."
        ),
        epilog="Example: fedbn explain demo clients=10 strategy=FedTAN only=FixBN",
    )
    add_experiment(parser, "rounds=10")
    parser.add_argument("--all", action="store_true", help="settings with default values too")
    parser.add_argument("--no-trial", action="store_true", help="train nothing: no bytes")


def explain(arguments: argparse.Namespace) -> None:
    import logging

    with loading():
        from fedbn_flwr.experiment.file.layers import load_experiment
        from fedbn_flwr.experiment.trial import explain

    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment = load_experiment(arguments.experiment, overrides_of(arguments))
    explanation = explain(experiment, trial=not arguments.no_trial)
    print("\n\n".join(_pages(experiment, explanation, every=arguments.all)))


def _pages(experiment: Experiment, explanation: Explanation, *, every: bool) -> list[str]:
    from fedbn_flwr.results.report.tables import partition_table

    first, *others = runs = explanation.runs
    shared = [each for each in first.settings if all(each in other.settings for other in others)]
    pages = [f"{experiment.name}: {experiment.description}" if experiment.description else experiment.name]
    pages.append(_settings("settings", shared, every))
    if others:
        for run in runs:
            pages.append(_settings(f"run {run.label}", [each for each in run.settings if each not in shared], True))
    pages += [f"data {partition_table(each)}" for each in explanation.partitions]
    pages += list(dict.fromkeys(_model(run) for run in runs))
    pages += [_costs(run, run.costs) for run in runs if run.costs is not None]
    if not explanation.partitions:
        pages.append("The data are at the sites (evaluate.server: false); bytes are not measured.")
    return pages


def _settings(title: str, settings: Sequence[Setting], every: bool) -> str:
    from fedbn_flwr.results.report.tables import as_text

    shown = [each for each in settings if every or each.origin != "default"]
    rows = [(each.key, _value(each.value), each.origin) for each in shown]
    hidden = len(settings) - len(shown)
    rest = f"\n... and {hidden} with default values (--all)" if hidden else ""
    return as_text([(title, "value", "given in"), *rows]) + rest


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _model(run: ExplainedRun) -> str:
    from fedbn_flwr.results.report.tables import as_text

    values = {each.key: each.value for each in run.settings}
    rows = [(role, str(part.arrays), f"{part.values:,}", size_text(part.bytes)) for role, part in run.model.items()]
    title = f"model {values['model.name']}, {values['model.norm']}"
    return as_text([(title, "arrays", "values", "size"), *rows])


def _costs(run: ExplainedRun, costs: Costs) -> str:
    from fedbn_flwr.results.report.tables import as_text

    rows: list[tuple[str, ...]] = [("run " + run.label, "down", "up", "what")]
    ends = [*(first - 1 for first, _ in costs.traffic[1:]), costs.rounds]
    for (first, traffic), last in zip(costs.traffic, ends, strict=True):
        when = "a round" if len(ends) == 1 else f"round {first}" if first == last else f"a round from {first} to {last}"
        of_each = (traffic.bytes_down, traffic.bytes_up)
        of_all = (size_text(costs.clients * size) for size in of_each)
        rows.append((f"{when}: each client", *map(size_text, of_each), _what(run, traffic.exchanges)))
        rows.append((f"{' ' * len(when)}  all {costs.clients} clients", *of_all, ""))
    seeds = "" if len(run.seeds) == 1 else f", for each of {len(run.seeds)} seeds"
    rows.append((f"all {costs.rounds} rounds", *map(size_text, costs.total()), "training only" + seeds))
    return as_text(rows)


def _what(run: ExplainedRun, exchanges: int) -> str:
    """What travels in a round, by role of the arrays."""
    down, up = (", ".join(sent) or "no arrays" for sent in (run.down, run.up))
    text = down if down == up else f"down: {down}; up: {up}"
    return text + (f"; {exchanges} exchanges of statistics" if exchanges else "")
