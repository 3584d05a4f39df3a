"""The tables of pages on speed, memory, attacks and noise, from the output of the benchmarks in docs/results."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from results import RESULTS, Row, Table, as_csv
from scipy.stats import rankdata


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def rivals() -> Table:
    """The table of benchmarks.rivals, which its test computes from the turns in the same file."""
    found = json.loads((RESULTS / "performance" / "rivals.json").read_text(encoding="utf-8"))["table"]
    return tuple(found["columns"]), [tuple(row) for row in found["rows"]]


# --- FedTAN over a network ------------------------------------------------------------


def latency() -> Table:
    found = {
        (each["clients"], each["run"], each["milliseconds"]): each["median"] for each in lines("network/latency.jsonl")
    }
    columns = {"FedAvg, pipes": ("FedAvg", 0), "FedTAN, pipes": ("FedTAN pipes", 0)}
    columns |= {("streams, " if ms == 0 else "") + f"{ms} ms": ("FedTAN streams", ms) for ms in (0, 10, 50, 100)}
    rows: list[Row] = []
    for number in (2, 5, 10):
        slope = (found[number, "FedTAN streams", 100] - found[number, "FedTAN streams", 0]) / 0.2  # 100 ms each way
        rows.append((str(number), *(f"{found[number, *each]:.2f}" for each in columns.values()), f"{slope:.0f}"))
    return ("clients", *columns, "round trips"), rows


# --- secure aggregation, noise, malicious clients -----------------------------------


def secure() -> Table:
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in lines("secure/local.jsonl"):
        found.setdefault((line["model"], line["clients"]), []).append(line)
    rows: list[Row] = []
    for (model, clients), pair in found.items():
        if clients in (5, 20):
            continue  # between the others
        sent = (f"{line['bytes_up_per_client'] / 1e6:.2f}" for line in pair)
        rows.append((model, str(clients), *sent, *(f"{line['processor_seconds']:.2f}" for line in pair)))
    return ("network", "clients", "MB up", "with Secure", "seconds", "with Secure"), rows


def private() -> Table:
    names = {
        "noise": "noisy statistics",
        "freeze": "frozen",
        "group norm": "group norm",
        "re-estimated": "noisy, re-estimated",
        "keep": "kept, re-estimated",
    }
    rows: dict[str, dict[str, str]] = {}
    for line in itertools.chain.from_iterable(lines(f"private/{name}.jsonl")[1:] for name in ("digits", "reestimated")):
        epsilon = "no noise" if line["epsilon"] is None else f"{line['epsilon']:g}"
        rows.setdefault(epsilon, {})[line["way"]] = f"{line['mean']:.1f} ± {line['deviation']:.1f}"
    return ("epsilon", *names.values()), [(epsilon, *map(row.__getitem__, names)) for epsilon, row in rows.items()]


ATTACKS = ("scaled", "statistics", "flipped", "noise")


def robust(data: str, *alone: str) -> Table:
    """A row for each strategy with each defence, a column for each attack by two clients, and for these by one."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines("robust/runs.jsonl"):
        if line["set"] == data:
            case = "none" if line["attack"] is None else f"{line['attack']} {line['malicious']}"
            value = line["accuracy"]
            of_row = found.setdefault((line["rule"], line["options"]), {})
            of_row[case] = "failed" if value is None else f"{100 * value:.1f}"
    every = ("none", *(f"{attack} {count}" for attack in ATTACKS for count in (1, 2) if count == 2 or attack in alone))
    columns = [case for case in every if any(case in each for each in found.values())]
    order = itertools.product(("FedAvg", "FixBN", "FedTAN"), ("off", "bounds", "trimmed", "krum", "median"))
    rows: list[Row] = [
        (f"{rule}, {name}", *(found[rule, name].get(case, "") for case in columns))
        for rule, name in order
        if (rule, name) in found
    ]
    return (data, *columns), rows


def attacks() -> dict[str, dict[str, int]]:
    """What became of the replies of a hostile client, by strategy."""
    measured = lines("reliability/attacks.jsonl")[1:]
    return {line["strategy"]: line["fates"] | {"unfit": line["unfit"]} for line in measured}


def hostile() -> Table:
    """The runs with a hostile client by what became of the reply, of all strategies together."""
    names = {"refused": "rejected with an error", "harmless": "changed nothing", "lie": "counted like any reply"}
    names |= {"the run ended with its own error": "ended the run"}
    found = {title: sum(fates.get(fate, 0) for fates in attacks().values()) for fate, title in names.items()}
    row = str(len(attacks())), f"{sum(found.values()):,}", *(f"{count:,}" for count in found.values())
    return ("strategies", "runs", *names.values()), [row]


def soak() -> Table:
    rows: list[Row] = []
    for name, title in (("fedavg", "FedAvg, arithmetic"), ("fedtan", "FedTAN"), ("fedbn", "FedBN, two workers")):
        found = json.loads((RESULTS / "reliability" / f"{name}.json").read_text(encoding="utf-8"))
        words = {"garbage": "unreadable", "death": "killed workers"}
        failing = ", ".join(f"{count} {words.get(kind, kind)}" for kind, count in found["failing"].items())
        first, last = (dict(zip(found["columns"], found["rows"][place], strict=True)) for place in (0, -1))
        sizes = [f"{first[key]} to {last[key]} MB" for key in ("RSS_MB", "workers_MB") if last[key]]
        assert found["same_model"]  # as the page says
        row = f"[{title}](reliability/{name}.json)", f"{last['round']:,}", failing, "; workers ".join(sizes)
        rows.append((*row, str(last["files"])))
    return ("strategy", "rounds", "failing replies", "memory, first to last", "open files"), rows


# --- what batch statistics reveal ---------------------------------------------------

NETWORKS = {"mnist/mlp": "perceptron", "mnist/lenet": "LeNet"}
SEEN = {
    "exchange": "FedTAN: one client's exchanges",
    "agreement": "FedTAN: only the mean of 5 clients",
    "one step": "FedAvg: running statistics after 1 step",
    "epoch": "FedAvg: after an epoch of 8 steps",
}
Line = Mapping[str, Any]


def ranked(line: Line) -> str:
    return f"{line['auc']:.2f}, {100 * line['top1']:.0f} %"


def listed(line: Line) -> str:
    return f"{100 * line['solved']:.0f} %"


def alike(line: Line) -> str:
    return f"{line['psnr']:.1f}, {line['ssim']:.2f}"


def by_batch(
    first: tuple[str, ...],
    file: str,
    rows: Iterable[tuple[tuple[str, ...], Mapping[str, Any], Callable[[Line], str]]],
) -> Table:
    """Rows with their titles, what their lines have, and the text of a cell; a column for each size of batch."""
    found, made = lines(f"privacy/{file}.jsonl"), list[Row]()
    batches = sorted({line["batch"] for line in found})
    for titles, has, cell in rows:
        some = {line["batch"]: cell(line) for line in found if line.items() >= has.items()}
        made.append((*titles, *(some.get(batch, "-") for batch in batches)))
    return (*first, *(f"batch {batch}" for batch in batches)), made


def identified() -> Table:
    rows = [
        ((network, seen), {"setting": setting, "model": "trained", "seen": key}, ranked)
        for setting, network in NETWORKS.items()
        for key, seen in SEEN.items()
    ]
    return by_batch(("network", "seen by the server"), "identify", rows)


def found_in_list() -> Table:
    rows: list[Any] = [
        ((network,), {"setting": setting, "model": "trained", "seen": "exchange"}, listed)
        for setting, network in NETWORKS.items()
    ]
    chance = {"setting": "mnist/mlp", "model": "trained", "seen": "exchange"}
    rows.append((("guessing",), chance, lambda line: f"{100 * line['chance']:.0f} %"))
    return by_batch(("network, FedTAN's exchanges of one client",), "identify", rows)


def resnet() -> Table:
    rows = [
        ((seen,), {"setting": "cifar10/resnet20", "seen": key}, ranked)
        for key, seen in (("exchange", "FedTAN's exchanges"), ("moments", "its moments only"))
    ]
    return by_batch(("seen of one client",), "identify", rows)


def reconstructed() -> Table:
    seen = {
        "moments": "moments of one client",
        "exchange": "exchanges of one client",
        "agreement": "mean exchange of 5 clients",
        "frozen gradient": "gradient of one step, statistics frozen",
    }
    guesses = {
        "mean": "*without an attack:* mean of public images",
        "others": "as many public images, matched",
        "nearest": "the most similar of 2,000 public images",
    }
    rows: list[Any] = [((name,), {"model": "trained", "seen": key}, alike) for key, name in seen.items()]

    def guess(key: str) -> Callable[[Line], str]:
        return lambda line: f"{line[f'{key}_psnr']:.1f}, {line[f'{key}_ssim']:.2f}"

    rows += [((name,), {"model": "trained", "seen": "moments"}, guess(key)) for key, name in guesses.items()]
    return by_batch(("from",), "reconstruct", rows)


# --- what diagnoses predict: the cells of benchmarks/diagnose.py ----------------------

_LOST = 2.0  # points, for a threshold
_FEWEST = 5  # cells for a correlation


@functools.cache
def cells() -> list[dict[str, Any]]:
    """The cells, with the set, the network, the error less its random part, and the points that batch norm loses."""
    found: list[dict[str, Any]] = json.loads((RESULTS / "diagnose" / "cells.json").read_text(encoding="utf-8"))
    for each in found:
        data, clients, network, steps, seed = each["cell"].split(", ")
        each |= {"data": data, "clients": clients, "network": network, "steps": steps.split()[0], "seed": seed}
        each["excess"], each["later"] = (each["error"][place] - each["dealt"][place] for place in "01")
        each["to group norm"], each["to central"] = (100 * (each[other] - each["bn"]) for other in ("gn", "central"))
    return sorted(found, key=lambda each: (each["network"], each["data"], float(each["excess"])))


def by_network() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in cells():
        found.setdefault(each["network"], []).append(each)
    return found


def diagnosed() -> str:
    """Every cell, as docs/results/diagnose/cells.csv has it."""
    names = ("network", "data", "clients", "steps", "seed")
    rows = list[tuple[str, ...]]()
    for each in cells():
        errors = (each["error"]["0"], each["dealt"]["0"], each["labels"], each["inputs"])
        lost = (f"{each[kind]:+.1f}" for kind in ("to group norm", "to central"))
        rows.append((*(each[name] for name in names), *(f"{value:.2f}" for value in errors), *lost))
    measures = ("error", "dealt", "labels apart", "inputs apart")
    return as_csv((*names, *measures, "lost to group norm", "lost to central"), rows)


def predicted() -> Table:
    """Rank correlations of what is known before training with the points that batch norm loses, and 95 % intervals."""
    groups = {"all": cells()}
    for each in cells():
        groups.setdefault(f"{each['network']}, {each['data']}", []).append(each)
    measures = {"error, less dealt": "excess", "the same after a round": "later"}
    measures |= {"labels apart": "labels", "inputs apart": "inputs"}
    rows: list[Row] = []
    for group, some in groups.items():
        for kind in ("to group norm", "to central") if len(some) >= _FEWEST else ():
            shown = [_interval(key, kind, some) for key in measures.values()]
            rows.append((group, str(len(some)), f"lost {kind}", *shown))
    return ("network, data", "cells", "points", *measures), rows


def _interval(key: str, kind: str, some: list[dict[str, Any]]) -> str:
    """Spearman's correlation, with an interval from 2,000 samples of clients, each with all of its cells."""
    known, lost = (np.array([each[name] for each in some]) for name in (key, kind))
    _, owner = np.unique([f"{each['network']} {each['data']} {each['clients']}" for each in some], return_inverse=True)
    random, found = np.random.default_rng(0), []
    for _ in range(2000):
        rows = np.concatenate(
            [np.flatnonzero(owner == one) for one in random.integers(0, max(owner) + 1, max(owner) + 1)]
        )
        if len({*known[rows]}) > 1 < len({*lost[rows]}):
            found.append(_spearman(known[rows], lost[rows]))
    low, high = np.quantile(found, [0.025, 0.975])
    return f"{_spearman(known, lost):.2f} ({low:.2f} to {high:.2f})"


def _spearman(known: np.ndarray, lost: np.ndarray) -> float:
    return float(np.corrcoef(rankdata(known), rankdata(lost))[0, 1])


def thresholds() -> Table:
    """For each set, the threshold that separates the cells of all others best, and how it does on this one."""
    rows: list[Row] = []
    for left in dict.fromkeys((each["network"], each["data"]) for each in cells()):
        here = [each for each in cells() if (each["network"], each["data"]) == left]
        others = [each for each in cells() if each not in here]

        def wrong(limit: float, some: list[dict[str, Any]]) -> tuple[int, int]:
            lost = [(each["excess"] > limit, each["to group norm"] > _LOST) for each in some]
            return sum(said and not is_so for said, is_so in lost), sum(is_so and not said for said, is_so in lost)

        tried = sorted(each["excess"] for each in others)
        limits = [(one + two) / 2 for one, two in itertools.pairwise(tried)]
        best = min(limits, key=lambda limit: sum(wrong(limit, others)))
        alarms, misses = wrong(best, here)
        rows.append((", ".join(left), str(len(here)), f"{best:.2f}", str(alarms), str(misses)))
    wrong_ones = [row for row in rows if {*row[-2:]} != {"0"}]  # the page says that the others have none
    return ("left out", "cells", "threshold of the others", "false alarms", "misses"), wrong_ones


TABLES: dict[str, Callable[[], Table]] = {
    "results predicted": predicted,
    "results thresholds": thresholds,
    "results rivals": rivals,
    "results hostile": hostile,
    "results network latency": latency,
    "results secure": secure,
    "results private": private,
    "results robust digits": functools.partial(robust, "digits", "scaled", "statistics"),
    "results robust cifar10": functools.partial(robust, "cifar10"),
    "results robust digits-2": functools.partial(robust, "digits-2"),
    "results soak": soak,
    "results identified": identified,
    "results found in a list": found_in_list,
    "results resnet": resnet,
    "results reconstructed": reconstructed,
}
