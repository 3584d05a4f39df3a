"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends.

For the last, the run's own strategy, clients and messages are tried on the local engine: rounds of a single step, in
which only a few of the clients take part. All clients send and receive messages of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedbn_flwr.client.app import client_app
from fedbn_flwr.data.partitions import Options
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays, sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.folder.ledger import MeteredGrid

from .data import examples_of, load_data, partition_of
from .file.layers import Setting, settings_of
from .listeners.listener import Round, Running
from .node import Clients
from .parts import Parts, counts_of
from .prepare import prepare
from .run.cohort import TrainedNodes
from .run.loop import train_round
from .settings import Experiment, Settings

_LR = 1e-12  # of the trial: without the schedule of the rounds between, the model could diverge


@dataclass(frozen=True)
class Part:
    """The arrays of one role in a model."""

    arrays: int
    values: int
    bytes: int


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of arrays that one client receives and sends in a round of training."""

    bytes_down: int
    bytes_up: int
    exchanges: int  # of FedTAN, and queries of extensions, besides the messages with the model


@dataclass(frozen=True)
class Costs:
    """What a run sends."""

    clients: int  # that train in a round
    traffic: tuple[tuple[int, RoundTraffic], ...]  # each with the first of the rounds that have it
    rounds: int

    def total(self) -> tuple[int, int]:
        """Bytes down and up of all clients in all rounds."""
        ends = [*(first for first, _ in self.traffic[1:]), self.rounds + 1]
        parts = [(end - first, each) for (first, each), end in zip(self.traffic, ends, strict=True)]
        down = sum(count * each.bytes_down for count, each in parts)
        return self.clients * down, self.clients * sum(count * each.bytes_up for count, each in parts)


@dataclass(frozen=True)
class ExplainedRun:
    label: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    model: dict[str, Part]  # by role
    down: tuple[str, ...]  # the roles of the arrays that a client receives, and what else
    up: tuple[str, ...]
    costs: Costs | None  # None: not measured


@dataclass(frozen=True)
class Explanation:
    partitions: tuple[PartitionCounts, ...]  # empty if the server has no data
    runs: tuple[ExplainedRun, ...]  # those of further seeds are not repeated


def explain(experiment: Experiment, *, trial: bool = True) -> Explanation:
    """Prepare all runs as `fedbn run` does, and try them out: a few rounds of one step on some of the clients."""
    first: dict[str, Parts] = {}
    for prepared in prepare(experiment):
        first.setdefault(prepared.run.label, prepared)
    has_data = all(prepared.dataset is not None for prepared in first.values())
    explained = []
    for label in list(first):
        prepared = first.pop(label)  # with its model, so that it is not in memory with those of the next runs
        traits, model = prepared.rule.traits, _parts_of(prepared)
        more = (traits.traffic,) if traits.traffic else ()
        explained.append(
            ExplainedRun(
                label,
                tuple(run.seed for run in experiment.runs if run.label == label),
                tuple(settings_of(experiment, prepared.run)),
                model,
                (*(role for role in model if role not in {Role.COUNTER, *traits.kept}), *more),
                (*(role for role in model if role not in {Role.COUNTER, *traits.unsent}), *more),
                try_out(prepared) if trial and prepared.dataset is not None else None,
            )
        )
    return Explanation(tuple(count_partitions(experiment) if has_data else ()), tuple(explained))


def count_partitions(experiment: Experiment) -> list[PartitionCounts]:
    """The numbers of examples of each different partition of the runs, with the first seed that uses it."""
    users: dict[tuple[str, Options, int], list[Settings]] = {}
    for run in experiment.runs:
        users.setdefault((examples_of(run.data), run.data.partition, run.clients), []).append(run)
    counted = []
    for runs in users.values():
        parts = partition_of(runs[0].data, runs[0].clients, runs[0].seed, "cpu")
        found = counts_of(runs[0], load_data(runs[0].data, "cpu"), parts)
        if len(users) > 1:
            names = list(dict.fromkeys(run.label for run in runs))
            title = f"{found.title} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            found = replace(found, title=title)
        counted.append(found)
    return counted


def _parts_of(prepared: Parts) -> dict[str, Part]:
    tensors, by_role = prepared.model.state_dict(), dict[str, list[Tensor]]()
    for key, role in roles(prepared.model).items():
        by_role.setdefault(str(role), []).append(tensors[key])
    return {
        role: Part(
            len(found),
            sum(tensor.numel() for tensor in found),
            sum(tensor.numel() * sent_dtype(tensor.dtype).itemsize for tensor in found),
        )
        for role, found in by_role.items()
    }


def try_out(prepared: Parts) -> Costs:
    """Train rounds of one step on the clients with most examples: others may have smaller batches.

    Tried are the first two rounds, of which the second may have the state of the first, and those from which a strategy
    is another one (FixBN, FedTANII).
    """
    run, rule = prepared.run, prepared.rule
    largest = sorted(range(run.trained), key=lambda client: -len(prepared.partition[client]))
    leaf = getattr(rule.chain[-1], "strategy", rule.chain[-1])  # Flower's own, if it is one
    needed = max(2, *(int(getattr(leaf, key, 1)) for key in ("min_train_nodes", "min_available_nodes")))
    chosen = {client + 1 for client in largest[:needed]}
    train = run.train.model_copy(update={"steps": 1, "epochs": None, "lr": _LR})
    short = Experiment(name=run.name, runs=(run.model_copy(update={"train": train}),), run_config={})
    arrays, traffic = pack(initial_arrays(prepared.model)), list[tuple[int, RoundTraffic]]()
    with LocalGrid(client_app(Clients(short)), run.clients, threads=run.engine.threads) as grid:
        ledger = MeteredGrid(TrainedNodes(grid, {*grid.get_node_ids()} - chosen))
        running = Running(prepared, ledger, {protocol.RUN: next(iter(short.named)), protocol.TOKEN: "trial"})
        rule.begin(run.rounds, arrays)
        rounds = {1, 2, *(each.memory.switch_round or 1 for each in rule.chain)}
        for number in sorted(number for number in rounds if number <= run.rounds):
            at = train_round(running, Round(number - 1, arrays, arrays))
            arrays, counted = at.arrays, ledger.take()
            clients = len(at.trained) or 1  # a strategy may train none
            exchanges = max(0, counted.communication_rounds - 1)
            found = RoundTraffic(counted.bytes_down // clients, counted.bytes_up // clients, exchanges)
            if not traffic or found != traffic[-1][1]:
                traffic.append((number, found))
    share, least = getattr(leaf, "fraction_train", 1.0), getattr(leaf, "min_train_nodes", 1)
    return Costs(min(run.trained, max(int(run.trained * share), least)), tuple(traffic), run.rounds)
