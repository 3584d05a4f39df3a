"""The values of each client in a round, from its replies, and their means and spread for the history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from flwr.app import Message

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import metrics_in
from fedbn_flwr.messages.gate import number_of
from fedbn_flwr.results.folder.clients import is_count, spread

ByClient = dict[int, dict[str, float]]  # metrics by the number of the client

_IDENTIFIERS = (protocol.PARTITION, protocol.BATCH_EXAMPLES)


def values_of(replies: Iterable[Message], examples: str) -> ByClient:
    """The numbers in the metrics of each reply, under the names of `clients.jsonl`; num-examples is `examples`."""
    found: ByClient = {}
    for reply in replies:
        for metrics in metrics_in(reply.content).values() if reply.has_content() else ():
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            found.setdefault(number_of(reply), {}).update(
                (examples if key == protocol.NUM_EXAMPLES else name_of(key), value)
                for key, value in numbers.items()
                if key not in _IDENTIFIERS
            )
    return found


def name_of(key: str) -> str:
    """`own-accuracy` as `own_accuracy`; `own@sea-accuracy`, on own examples of one domain, as `own_accuracy_sea`."""
    test_set, _, measure = key.partition("-")
    owner, at, domain = test_set.partition("@")
    name = (f"{owner}-{measure}-{domain}" if at else key).replace("-", "_")
    return name.replace("num_examples", "examples")


def own_means(clients: ByClient) -> dict[str, float]:
    """Means over the clients' own test examples, with equal weights, over the clients that have some (of a domain)."""
    metrics = {name: each for name, each in by_metric(clients).items() if name.startswith("own_")}
    return {name: statistics.fmean(each) for name, each in metrics.items() if not is_count(name)}


def validation_means(clients: ByClient, main: str) -> dict[str, float]:
    """Validation loss and main figure over the examples that all clients hold out; empty if none reports any."""
    names = dict.fromkeys(("validation_loss", f"validation_{main}"))
    held = [each for each in clients.values() if each.get("validation_examples") and each.keys() >= {*names}]
    total = math.fsum(metrics["validation_examples"] for metrics in held)
    return {
        name: math.fsum(metrics[name] * metrics["validation_examples"] for metrics in held) / total
        for name in names
        if held
    }


def spreads(clients: ByClient) -> dict[str, float]:
    """Deviation and worst tenth of each metric over the clients, with equal weights; not of single domains."""
    metrics = by_metric(clients)
    found: dict[str, float] = {}
    for name, each in metrics.items():
        # A metric of a single domain exists only on own test examples.
        if name.removeprefix("own_") in metrics and not is_count(name):
            measured = spread(each, name)
            found |= {f"{name}_std": measured.deviation, f"{name}_worst_tenth": measured.worst_tenth}
    return found


def by_metric(clients: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for metrics in clients.values():
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return found
