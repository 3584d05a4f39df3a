"""`fedbn list`: what an experiment can name."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbn_flwr.errors import SettingsError, did_you_mean

from .common import Commands, add_command

if TYPE_CHECKING:
    from fedbn_flwr.experiment.registry import Description

KINDS = ("strategies", "models", "norms", "datasets", "partitions", "experiments")

# The folders of the shipped experiments.
PAPERS = {
    "": "To start with",
    "fixbn": 'FixBN: Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning"',
    "fedtan": 'FedTAN: Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?"',
    "fedwon": 'FedWon: Zhuang, Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization"',
    "fedbs": 'FedBS: Idrissi, Berrada, Noubir, "FedBS: Learning on Non-IID Data in Federated Learning using Batch '
    'Normalization"',
    "ours": "All rules side by side",
}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "list",
        list_names,
        summary="strategies, models, norms, data sets, partitions or experiments",
        description="List what an experiment can name, each with a line that says what it is.",
        epilog=(
            "Examples: fedbn list strategies FedTAN shows its paper, its arguments and its cost; fedbn list "
            "experiments fixbn the experiments of one paper."
        ),
    )
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these; strategies with all details; experiments also by paper"
    )
    parser.add_argument("--size", metavar="NAME", help="experiments with the cost of this size (paper)")
    parser.add_argument("--json", action="store_true", help="as JSON; strategies with all details")


def list_names(arguments: argparse.Namespace) -> None:
    if arguments.what != "experiments" and arguments.size:
        raise SettingsError(f"--size is for experiments, but WHAT is {arguments.what}; leave it out")
    if arguments.what == "experiments":
        list_experiments(arguments.names, arguments.size, as_json=arguments.json)
        return
    lines = _lines(arguments.what)
    for name in arguments.names:
        if name not in lines:
            raise SettingsError(f"{arguments.what}: there is no {name!r}; {did_you_mean(name, lines)}")
    shown = {name: lines[name] for name in arguments.names or lines}
    if arguments.what == "strategies" and (arguments.names or arguments.json):
        from fedbn_flwr.experiment.registry import describe

        described = {name: describe(name) for name in shown}
        if arguments.json:
            print(json.dumps({name: _as_json(each) for name, each in described.items()}, indent=2))
        else:
            print("\n\n".join(_page(name, each) for name, each in described.items()))
    elif arguments.json:
        print(json.dumps(shown, indent=2))
    else:
        width = max(len(name) for name in shown)
        for name, line in shown.items():
            print(f"{name.ljust(width)}  {line}")


def _lines(what: str) -> Mapping[str, str]:
    match what:
        case "strategies":
            from fedbn_flwr.experiment.registry import FLOWER, STRATEGIES, describe

            return {name: describe(name).does for name in (*STRATEGIES, *FLOWER)}
        case "models":
            from fedbn_flwr.models.build import describe_models

            return describe_models()
        case "norms":
            from fedbn_flwr.norms.convert import NORMS

            own = {"MODULE:CALLABLE": "a normaliser of your own: a function of the number of channels"}
            return {name: line for name, (line, _) in NORMS.items()} | own
        case "datasets":
            from fedbn_flwr.data.catalogue import describe_datasets

            return describe_datasets()
        case _:
            from fedbn_flwr.data.partition.kinds import describe_partitions

            return describe_partitions()


def list_experiments(names: Sequence[str], size: str | None, *, as_json: bool) -> None:
    """The shipped experiments by paper, each with its cost."""
    from fedbn_flwr.experiment.file.content import read_content, shipped_experiments
    from fedbn_flwr.experiment.file.cost import cost_of
    from fedbn_flwr.experiment.file.layers import read_experiment

    shipped = list(shipped_experiments())
    papers = {name: name.rpartition("/")[0] for name in shipped}
    for name in names:
        if name not in shipped and name not in papers.values():
            known = [*shipped, *filter(None, dict.fromkeys(papers.values()))]
            raise SettingsError(f"experiments: there is no {name!r}; {did_you_mean(name, known)}")
    chosen = {}
    for name in (name for name in shipped if not names or {name, papers[name]} & set(names)):
        content, title = read_content(name)  # those to start with have one size, which is small
        sized = [f"size={size}"] if size and papers[name] else []
        chosen[name] = read_experiment(content, sized, name=title)
    costs = {name: cost_of(experiment) for name, experiment in chosen.items()}
    if as_json:
        found = {
            name: {"description": each.description, "paper": papers[name], **dataclasses.asdict(costs[name])}
            for name, each in chosen.items()
        }
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, chosen))
    for paper in dict.fromkeys(papers[name] for name in chosen):
        print(f"{PAPERS.get(paper, paper)}\n{' ' * width}  {'runs':>6} {'examples':>8}")
        for name in (name for name in chosen if papers[name] == paper):
            cost = costs[name]
            print(f"{name.ljust(width)}  {cost.runs:>6} {_count(cost.examples):>8}  {chosen[name].description}")
        print()
    print("examples: to train on in all runs; fedbn explain NAME has the time and bytes of each run")


def _count(examples: int | None) -> str:
    if examples is None:
        return "?"
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if examples >= factor:
            return f"{examples / factor:.3g} {unit}"
    return str(examples)


def _as_json(about: Description) -> dict[str, Any]:
    values = dataclasses.asdict(about)
    for argument in values["arguments"]:
        if argument["default"] is inspect.Parameter.empty:
            del argument["default"]
    values["traits"] |= {key: sorted(value) for key, value in values["traits"].items() if isinstance(value, frozenset)}
    return values


def _page(name: str, about: Description) -> str:
    """A strategy with its paper, its cost and its arguments."""
    rows = [("paper", about.source), *cost(about)]
    for argument in about.arguments:
        default = argument.default
        shown = "" if default is inspect.Parameter.empty else f" ({json.dumps(default)})"
        rows.append((f"{argument.name}{shown}", argument.meaning))
    if about.wraps:
        rows.append(('base ({"name": "FedAvg"})', "the strategy that it extends"))
    if name != "FedAvg":
        rows.append(("...", f"and the arguments of {'its base' if about.wraps else 'FedAvg'}"))
    width = max(len(left) for left, _ in rows)
    columns = max(40, shutil.get_terminal_size().columns - width - 4)
    lines = [f"{name}: {about.does}"]
    for left, right in rows:
        first, *more = textwrap.wrap(right, columns) or [""]
        lines += [f"  {left.ljust(width)}  {first}".rstrip(), *(" " * (width + 4) + line for line in more)]
    return "\n".join(lines)


def cost(about: Description) -> list[tuple[str, str]]:
    """What a strategy sends and what it asks clients to keep."""
    traits = about.traits
    if not traits.has_global_model:
        sent = "no arrays"
    elif not traits.kept:
        sent = "the whole model, down and up"
    else:
        sent = f"the model without {_words(traits.kept)} down"
        returned = traits.kept.keys() - traits.unsent
        sent += f"; with {_words(returned)} up" if returned else "; the same up"
    rows = [("sends", sent), ("sends too", traits.traffic), ("clients keep", traits.client_memory or "nothing")]
    return [(name, text) for name, text in rows if text]


def _words(roles: Collection[Any]) -> str:
    names = {"weights": "weights", "affine": "gamma and beta", "statistics": "statistics"}
    # Experiments never send counters; see the glossary.
    return ", ".join(text for role, text in names.items() if role in roles)
