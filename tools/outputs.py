"""The tables of pages on speed, memory, attacks and noise, from the output of the benchmarks in docs/results."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from results import RESULTS, Row, Table, runs_of

# --- benchmarks.speed --------------------------------------------------------------


class Figure(NamedTuple):
    """Of benchmarks.speed; `values` has the repetitions, which older files lack."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    goal: str
    met: bool | None
    values: Sequence[float] = ()

    @property
    def spread(self) -> str:
        return f"{short(self.value)} ({short(self.low)} to {short(self.high)})"

    @property
    def measured(self) -> str:
        return self.spread if self.unit == "x" else f"{self.spread} {self.unit}"

    @property
    def aim(self) -> str:
        goal = self.goal if not self.goal or self.unit == "x" else f"{self.goal} {self.unit}"
        return f"{goal} (missed)" if self.met is False else goal


@functools.cache
def figures(name: str) -> Mapping[str, Sequence[Figure]]:
    """The figures of a file by name, each in the order of the commands that measured it."""
    found: dict[str, list[Figure]] = {}
    for document in json.loads((RESULTS / "performance" / f"{name}.json").read_text(encoding="utf-8")):
        for each in itertools.chain(*document["figures"].values()):
            found.setdefault(each["name"], []).append(Figure(**each))
    return found


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".") if value >= 1 else f"{value:.2g}"


OVERHEAD = {
    "speed": "^(?!mean)",
    "aggregation": "mean",
    "performance": "10,000 registered",
    "start": "fedbn|importing",
}  # of each file these


def row(name: str, figure: Figure) -> Row:
    return (name, figure.measured, figure.aim)


def speed() -> Table:
    rows = [
        row(name, each[0])
        for file, wanted in OVERHEAD.items()
        for name, each in figures(file).items()
        if re.search(wanted, name)
    ]
    return ("measurement", "median (minimum to maximum)", "goal"), rows


SHARED = {  # a row of the table, and how the output names it before and after the division of the clients
    "train a ResNet-20, 2 workers": ("training", ""),
    "the same with FedBN and a momentum that is kept": ("training", ", FedBN with momentum"),
    "evaluate, 2 workers": ("evaluation by clients", ""),
    **{
        f"sleep, {workers} workers{', on two cores' if workers == 16 else ''}": ("sleeping", f", {workers} workers")
        for workers in (2, 16)
    },
}
DIVIDED = {"equal sizes": "equal clients", "Dirichlet 0.1": "Dirichlet 0.1", "unbalanced shards": "unbalanced shards"}


def sharing() -> Table:
    found, rows = figures("sharing"), list[Row]()
    for words, (work, more) in SHARED.items():
        each = [found[f"round / lower bound, {work}, {division}{more}"][0] for division in DIVIDED.values()]
        aim = f"{each[0].goal} (missed)" if False in [figure.met for figure in each] else each[0].goal
        rows.append((words, *(f"{figure.value:.2f}" for figure in each), aim))
    return ("clients", *DIVIDED, "goal"), rows


def memory() -> Table:
    rows = [row(name, each[0]) for name, each in figures("memory").items()]
    return ("measurement", "peak", "goal"), rows


TORCH = ("2.12.1", "2.15.0", "2.15.0, again")


def compiled() -> Table:
    rows: list[Row] = []
    for size, arithmetic in itertools.product((20, 128), ("float32", "bfloat16 and channels-last")):
        title = f"steps per second / bare loop, batch {size}, {arithmetic}"
        each = [*figures("compiled")[title], *figures("compiled-group-norm")[title]]
        missed = [version for version, figure in zip(TORCH, each, strict=True) if figure.met is False]
        which = "" if len(missed) == len(each) else f" with {', '.join(missed)}"
        aim = f"{each[0].goal} (missed{which})" if missed else each[0].goal
        rows.append((str(size), arithmetic, *(figure.spread for figure in each), aim))
    return ("batch size", "arithmetic", *(f"torch {version}" for version in TORCH), "goal"), rows


def layouts() -> Table:
    found: dict[str, dict[str, str]] = {}
    for title, (each,) in figures("channels_last").items():
        *case, norm, chosen = title.split(", ")
        found.setdefault(", ".join(case), {})[norm] = f"{each.value:.2f}" + (" (off)" if chosen != "auto" else "")
    norms = [*dict.fromkeys(norm for ratios in found.values() for norm in ratios)]
    return ("network", *norms), [(case, *(ratios.get(norm, "-") for norm in norms)) for case, ratios in found.items()]


def gpu() -> Table:
    """Ratios, rounds and steps, of the first command that measured each."""
    found = {name: each[0] for name, each in figures("gpu").items()}
    rows: list[Row] = [(name, f"{each.spread} times") for name, each in found.items() if each.unit == "x"]
    for name in (
        "plain",
        "recorded, one run",
        *(f"recorded, {count} runs at once" for count in ("two", "three", "four")),
    ):
        rows.append((f"round of fixbn/table4, batch norm, {name}", f"{found[f'rounds, {name}'].value:.2f} s"))
    for title, name in (
        ("step of ResNet-20, batch 20, plain", "step, plain"),
        ("the same, recorded", "step, recorded"),
    ):
        rows.append((title, f"{found[name].value:g} ms"))
    return ("measurement", "median (minimum to maximum)"), rows


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
        rows.append((str(number), *(f"{found[number, *each]:.2f} s" for each in columns.values()), f"{slope:.0f}"))
    return ("clients", *columns, "round trips"), rows


def nodes() -> Table:
    names = {"FedAvg": "FedAvg, ResNet-20", "FixBN": "FixBN, ResNet-20 (frozen after round 1)"}
    names |= {"FedTAN streams": "FedTAN on streams, ResNet-20", "FedTAN streams, cnn": "FedTAN on streams, `cnn`"}
    names |= {"FedTAN messages, cnn": "FedTAN over messages, `cnn`"}
    found = {each["run"]: each for each in lines("network/nodes.jsonl") if each["nodes"] == 2}
    rows: list[Row] = []
    for run, name in names.items():
        trips = found[run]["communication_rounds"]
        messages = trips if "messages" in run else 1
        rows.append((name, str(trips), str(messages), ", ".join(f"{each:.0f}" for each in found[run]["seconds"])))
    return ("run", "communication rounds", "messages per client", "seconds of each round"), rows


def apart() -> Table:
    """How far two clients' statistics are from their mean after the last round."""
    both = {each["run"]: each["clients"] for each in lines("fedwon/statistics/norms.jsonl")}
    rows: list[Row] = []
    for number, layer in enumerate(both["FedAvg"]["0"], 1):
        shown = [f"{clients['0'][layer]['mean_deviation']:.2f}" for clients in both.values()]
        shown += [f"{clients[key][layer]['variance_ratio']:.2f}" for clients in both.values() for key in clients]
        rows.append((str(number), *shown))
    variances = (f"{run}, variance of {domain}" for run in both for domain in ("MNIST", "MNIST-M"))
    return ("layer", *(f"{run}, means" for run in both), *variances), rows


CONNECT = 4  # round trips of a stream: TCP, TLS, HTTP/2, the token


def time_to_accuracy() -> Table:
    """When others reach 90 % before FedTAN, from the mean rounds in which MNIST's seeds first do.

    A round takes R with every strategy. FedTAN's takes a round trip for each exchange, and some to connect.
    """
    rounds = dict[str, float]()
    for name in ("FixBN", "FedAvg+GN", "FedTAN", "FedTAN-II M=10", "FedTAN-II M=50"):
        curves = [run.curve for run in runs_of(f"mnist/noniid-lr0.5:{name}") if run.seed < 5]  # the seeds of all
        reached = [next(point["round"] for point in curve if point["accuracy"] >= 0.9) for curve in curves]
        rounds[name] = statistics.fmean(reached)

    def limit(name: str, exchanges: int) -> str:
        exchanging = int(name.rpartition("=")[2]) if "=" in name else 0
        trips = (rounds["FedTAN"] - min(rounds[name], exchanging)) * (exchanges + CONNECT)
        later = rounds[name] - rounds["FedTAN"]
        return f"{later / trips:.3f} R" if later > 0 else "-"

    rows: list[Row] = [(name, f"{each:.0f}", limit(name, 2), limit(name, 38)) for name, each in rounds.items()]
    columns = ("strategy", "rounds to 90 %", "overtakes FedTAN above a round trip of (2 exchanges)")
    return (*columns, "with 38 exchanges"), rows


# --- secure aggregation, noise, malicious clients -----------------------------------


def secure() -> Table:
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in lines("secure/local.jsonl"):
        found.setdefault((line["model"], line["clients"]), []).append(line)
    rows: list[Row] = []
    for (model, clients), pair in found.items():
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


def robust(data: str) -> Table:
    """A row for each strategy with each defence, a column for each attack and number of malicious clients."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines("robust/runs.jsonl"):
        if line["set"] == data:
            case = "none" if line["attack"] is None else f"{line['attack']} {line['malicious']}"
            value = line["accuracy"]
            of_row = found.setdefault((line["rule"], line["options"]), {})
            of_row[case] = "failed" if value is None else f"{100 * value:.1f}"
    every = ("none", *(f"{attack} {count}" for attack in ATTACKS for count in (1, 2)))
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
        same = "yes" if found["same_model"] else "no"
        raw = f"[{name}.json](reliability/{name}.json)"
        rows.append((title, f"{last['round']:,}", failing, "; workers ".join(sizes), str(last["files"]), same, raw))
    columns = (
        "strategy",
        "rounds",
        "failing replies",
        "memory, first to last",
        "open files",
        "same model",
        "raw output",
    )
    return columns, rows


# --- what batch statistics reveal ---------------------------------------------------

NETWORKS = {"mnist/mlp": "perceptron", "mnist/lenet": "LeNet"}
SEEN = {
    "exchange": "FedTAN: one client's exchanges",
    "moments": "FedAvgGlobalStats: its moments only",
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
        ((f"{network}, {state}",), {"setting": setting, "model": state, "seen": "exchange"}, listed)
        for setting, network in NETWORKS.items()
        for state in ("trained", "untrained")
    ]
    chance = {"setting": "mnist/mlp", "model": "trained", "seen": "exchange"}
    rows.append((("guessing",), chance, lambda line: f"{100 * line['chance']:.0f} %"))
    return by_batch(("network, FedTAN's exchanges of one client",), "identify", rows)


def resnet() -> Table:
    rows = [
        ((seen, attack), {"setting": "cifar10/resnet20", "seen": key}, cell)
        for key, seen in (("exchange", "FedTAN's exchanges"), ("moments", "its moments only"))
        for attack, cell in (("AUC, ranked first", ranked), ("found in a complete list", listed))
    ]
    return by_batch(("seen of one client", "attack"), "identify", rows)


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


TABLES: dict[str, Callable[[], Table]] = {
    "results speed": speed,
    "results sharing": sharing,
    "results memory": memory,
    "results compiled": compiled,
    "results layouts": layouts,
    "results gpu": gpu,
    "results rivals": rivals,
    "results hostile": hostile,
    "results network latency": latency,
    "results network nodes": nodes,
    "results network accuracy": time_to_accuracy,
    "results fedwon statistics": apart,
    "results secure": secure,
    "results private": private,
    **{f"results robust {data}": functools.partial(robust, data) for data in ("digits", "cifar10", "digits-2")},
    "results soak": soak,
    "results identified": identified,
    "results found in a list": found_in_list,
    "results resnet": resnet,
    "results reconstructed": reconstructed,
}
