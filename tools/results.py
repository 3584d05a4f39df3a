"""The tables of what was measured, from the raw files of docs/results: those of the papers' items and of the pages."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from described import describe

from fedbn_flwr.experiment.file.content import read_content, shipped_experiments
from fedbn_flwr.experiment.file.expansion import condition
from fedbn_flwr.experiment.file.layers import FREE, FREE_KEYS, load_experiment
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.folder import flat_settings
from fedbn_flwr.results.report.tables import Paired, paired

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
INDEX = RESULTS / "index.yaml"
PUBLISHED = ROOT / "docs" / "published.yaml"

Row = tuple[str | None, ...]  # None: the page's own text
Table = tuple[tuple[str, ...], list[Row]]


class Run(NamedTuple):
    label: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    curve: Sequence[Mapping[str, Any]]

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("status", "finished") == "finished")

    def after(self, server_round: int, key: str = "accuracy") -> float:
        return float(next(point[key] for point in self.curve if point["round"] == server_round))


@functools.cache
def read(name: str) -> tuple[Run, ...]:
    """The runs of a report.json."""
    runs = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return tuple(Run(run["settings"]["label"], run["settings"], run["summary"], run["curve"]) for run in runs)


def by_label(*names: str) -> dict[str, list[Run]]:
    """The runs of files by their labels, each with all seeds."""
    found: dict[str, list[Run]] = {}
    for name in names:
        for run in read(name):
            found.setdefault(run.label, []).append(run)
    return found


def published(paper: str, table: str) -> Any:
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))[paper][table]


# --- the papers' items ----------------------------------------------------------


class Measured(NamedTuple):
    label: str  # in the experiment
    seed: int
    settings: Mapping[str, Any]
    finished: bool


def measured(entry: Mapping[str, Any]) -> list[Measured]:
    """The runs of an entry's file that count for its item."""
    found = [Measured(run.label, run.settings["seed"], run.settings, run.finished) for run in read(entry["file"])]
    labels = entry.get("labels") or {run.label: run.label for run in found}
    if missing := set(labels) - {run.label for run in found}:
        raise ValueError(f"{entry['file']} has no run {', '.join(map(repr, missing))}")
    return [run._replace(label=labels[run.label]) for run in found if run.label in labels]


# Elsewhere None is the default of the time of the run, which a raw file may have as a value.
NONE_COUNTS = ("data.examples", "data.test_examples", "train.steps", "train.epochs", "train.schedule.switch")
GONE = {"data.partition.assignment": "consecutive", "data.partition.by": "class"}  # options, and what holds since then
WITHOUT_DEFAULTS = ("strategy.", "data.partition.")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key, with the defaults of the strategy's arguments."""
    arguments = {f"strategy.{each.name}": each.default for each in describe(settings["strategy"]["name"]).arguments}
    values = {**GONE, **arguments, **flat_settings(settings)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def differing(paper: Settings, run: Mapping[str, Any]) -> set[str]:
    """The settings of a run that are not the experiment's; raw files may lack an option, or have one that is gone."""
    expected, found = flat(paper.model_dump(mode="json")), flat(run)
    different = set()
    for key in {*expected, *found}:
        free = key.partition(".")[0] in FREE or key in (*FREE_KEYS, "rounds")
        if free or expected.get(key) == found.get(key):
            continue
        if key.startswith(WITHOUT_DEFAULTS) or key in NONE_COUNTS or None not in (expected.get(key), found.get(key)):
            different.add(key)
    return different


def coverage() -> tuple[int, int, int]:
    """How many of the rows with published figures were measured as the paper has them, in part, and how many there are.

    A row of several experiments, which has the same figures of the same table, counts once.
    """
    rows: dict[str, set[str]] = {}
    for paper in yaml.safe_load(INDEX.read_text(encoding="utf-8")).values():
        for item in paper.values():
            figures = read_content(item["experiment"])[0].get("published") or {}
            papers = {condition(each.cell): each for each in load_experiment(item["experiment"]).runs}
            for label, figure in figures.items():
                found = rows.setdefault(json.dumps(figure, sort_keys=True), set())
                for run in itertools.chain.from_iterable(map(measured, item.get("files", []))):
                    if run.label == label and run.finished:
                        same = not differing(papers[label], run.settings) and "inferred" not in item
                        found.add("whole" if same and run.settings["rounds"] == papers[label].rounds else "part")
    whole = sum("whole" in found for found in rows.values())
    return whole, sum(found == {"part"} for found in rows.values()), len(rows)


def status(item: Mapping[str, Any]) -> tuple[str, str]:
    """What was measured of an item, and with how many seeds of the experiment's."""
    name = item["experiment"]
    needs = f"; needs {item['needs']}" if "needs" in item else ""
    if "impossible" in item:
        return f"not possible: {item['impossible']}", ""
    if "test" in item:
        if not (ROOT / item["test"]).is_file():
            raise ValueError(f"{item['test']} does not exist")
        return f"counted by `{item['test']}`", ""
    runs = [run for entry in item.get("files", []) for run in measured(entry)]
    if not runs:
        return f"not measured{needs}", ""
    rows: dict[str, Settings] = {}
    seeds: dict[str, set[int]] = {}
    for paper in load_experiment(name, item.get("changes", [])).runs:
        rows.setdefault(condition(paper.cell), paper)
        seeds.setdefault(condition(paper.cell), set()).add(paper.seed)
    done: dict[str, set[int]] = {}
    failed, other, shares = set(), set(), set()
    for run in runs:
        if run.label not in rows:
            raise ValueError(f"{name} has no run {run.label!r}")
        done.setdefault(run.label, set()).add(run.seed)
        shares.add(100 * run.settings["rounds"] / rows[run.label].rounds)
        other |= differing(rows[run.label], run.settings)
        if not run.finished:
            failed.add(run.label)
    ends = (f"{share:.{3 if share >= 10 else 2}g}" for share in (min(shares), max(shares)))
    budget = " to ".join(dict.fromkeys(ends))
    if "inferred" in item:
        words = [
            f"{'all' if shares == {100} else f'{budget} % of the'} rounds of {item['inferred']}, which is inferred"
        ]
    else:
        words = ["whole budget" if shares == {100} else f"{budget} % of the rounds"]
    words += [] if done.keys() == rows.keys() else [f"{len(done)} of {len(rows)} runs"]
    words += [f"{len(failed)} failed"] if failed else []
    words += [f"other {', '.join(f'`{key}`' for key in sorted(other))}"] if other else []
    words += [item["differs"]] if "differs" in item else []
    counts = sorted({len(each) for each in done.values()})
    return "; ".join(
        words
    ), f"{' to '.join(map(str, (counts[0], counts[-1])[: len(counts)]))} of {len(seeds[run.label])}"


def papers() -> Table:
    """Each table and figure, its experiment, and what was measured of it."""
    index = yaml.safe_load(INDEX.read_text(encoding="utf-8"))
    used = {item["experiment"] for items in index.values() for item in items.values()}
    shipped = {name for name in shipped_experiments() if "/" in name and (name in used or not name.startswith("ours/"))}
    if used != shipped:
        raise ValueError(f"{INDEX.name} and the experiments differ: {sorted(used ^ shipped)}")
    rows: list[Row] = []
    for paper, items in index.items():
        for title, item in items.items():
            done, seeds = status(item)
            page = f" ([results]({item['page']}.md))" if "page" in item else ""
            command = " ".join([item["experiment"], *(f"'{change}'" for change in item.get("changes", []))])
            rows.append((f"{paper}, {title}", f"`{command}`", done + page, seeds))
    return ("item", "experiment", "measured", "seeds"), rows


# --- the tables of the results pages --------------------------------------------

Column = Callable[[list[Run]], str]


def mean(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    text = f"{statistics.mean(values):,.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "") + unit


def percent(values: Iterable[float], digits: int = 1, unit: str = "") -> str:
    return mean([100 * value for value in values], digits, unit)


def share(*keys: str, digits: int = 1, unit: str = "") -> Column:
    """A fraction of the summary in percent, by the first of the keys that it has."""

    def column(runs: list[Run]) -> str:
        values = [
            next(run.summary[key] for key in keys if key in run.summary) for run in runs if {*keys} & {*run.summary}
        ]
        return percent(values, digits, unit) if len(values) == len(runs) else "-"

    return column


def diverged_in(runs: list[Run]) -> str:
    rounds = {run.summary["rounds"] + 1 for run in runs}
    return f"diverged in round {rounds.pop()}" if len(rounds) == 1 else "diverged"


def trips(runs: list[Run]) -> str:
    return f"{statistics.mean(run.summary['communication_rounds'] for run in runs):,.0f}"


def mib(digits: int) -> Column:
    return lambda runs: mean(
        [(run.summary["bytes_down"] + run.summary["bytes_up"]) / 2**20 for run in runs][:1], digits
    )


def table(first: str, rows: Mapping[str, list[Run]], columns: Mapping[str, Column]) -> Table:
    return (first, *columns), [(name, *(column(runs) for column in columns.values())) for name, runs in rows.items()]


def demo() -> Table:
    columns = {"accuracy, %": share("accuracy", digits=2), "best, %": share("best_test_accuracy", digits=2)}
    return table("run", by_label("demo/report.json"), {**columns, "communication rounds": trips, "MiB": mib(1)})


def mnist(file: str) -> Callable[[], Table]:
    def accuracy(runs: list[Run]) -> str:
        values = [run.summary["accuracy"] for run in runs if run.finished]
        if not values:
            return diverged_in(runs)
        lost = len(runs) - len(values)
        return percent(values, 2) + (f", {lost} of {len(runs)} seeds diverged" if lost else "")

    columns: dict[str, Column] = {
        "accuracy, %": accuracy,
        "best, %": share("best_test_accuracy", "best_accuracy", digits=2),
        "mean of the clients' models, %": share("clients_accuracy", digits=2),
    }
    if file.startswith("noniid"):
        columns |= {"communication rounds": trips, "MiB": mib(1)}

    def whole() -> Table:
        runs = by_label(f"mnist/{file}.json").items()
        return table("run", {label.partition(", data.")[0]: of_label for label, of_label in runs}, columns)

    return whole


def corrected(tests: Sequence[Paired]) -> list[float]:
    """The p values of a table's tests, corrected for their number (Holm 1979); 1 where there is none."""
    order = sorted((test.p, place) for place, test in enumerate(tests) if test.pairs > 1)
    found, largest = [1.0] * len(tests), 0.0
    for rank, (p, place) in enumerate(order):
        found[place] = largest = min(1.0, max(largest, (len(order) - rank) * p))
    return found


def pairs(runs: Callable[[], Mapping[str, list[Run]]], *rows: tuple[str, str]) -> Callable[[], Table]:
    """Differences of the accuracies of two runs over the seeds that both have."""

    def whole() -> Table:
        found = {label: by_seed(each) for label, each in runs().items()}
        tests = [paired(found[one], found[other]) for one, other in rows]
        lines: list[Row] = []
        for (one, other), test, p in zip(rows, tests, corrected(tests), strict=True):
            interval = f"{test.low:.1f} to {test.high:.1f}"
            lines.append((f"{one} - {other}", str(test.pairs), f"{test.difference:.1f}", interval, f"{p:.1g}"))
        return ("difference", "seeds", "mean, points", "95 % interval", "p (paired t, Holm)"), lines

    return whole


FALLS = "(rate falls)"


def mnist_runs() -> dict[str, list[Run]]:
    """At 0.5: those of the experiment, and of three rules whose rate falls where FixBN's does."""
    falling = {f"{label} {FALLS}": runs for label, runs in by_label("mnist/falling-lr0.5.json").items()}
    return {**by_label("mnist/noniid-lr0.5.json"), **falling}


def mnist_falling() -> Table:
    runs, rules = mnist_runs(), ("FedAvg+BN", "FedAvg+GN", "FedTAN")
    column = share("accuracy", digits=2)
    rows: list[Row] = [(rule, column(runs[rule]), column(runs[f"{rule} {FALLS}"])) for rule in rules]
    return ("run", "rate stays at 0.5, %", "rate falls after round 250, %"), [
        *rows,
        ("FixBN", "-", column(runs["FixBN"])),
    ]


MNIST_PAIRS = (
    *(("FixBN", f"{rule} {FALLS}") for rule in ("FedAvg+BN", "FedAvg+GN", "FedTAN")),
    *((f"{rule} {FALLS}", rule) for rule in ("FedAvg+BN", "FedTAN")),
    ("FedTAN", "FedAvg+GN"),
    ("FedTAN-II M=100", "FedTAN"),
    ("FedTAN-II M=10", "FedTAN"),
)


def clients() -> Table:
    runs = by_label("clients/clients.json", "clients/participation.json")
    columns = {"5 clients, all": "clients=5", "20, all": "clients=20", "100, all": "clients=100"}
    columns |= {"100, 20 % a round": "fraction_train=0.2", "100, 10 %": "fraction_train=0.1"}
    columns |= {"100, 5 %": "fraction_train=0.05"}
    rules = ["FedAvg+BN", "FedAvg+GN", "FixBN", "FedTAN-II", "FedTAN", "Scaffold", "FedBN"]
    rows = {"FedBN, global model" if rule == "FedBN" else rule: (rule, "accuracy") for rule in rules}
    rows["FedBN, own"] = ("FedBN", "clients_own_accuracy")
    return ("strategy", *columns), [
        (name, *(share(key)(runs[f"{rule}, {cell}"]) for cell in columns.values()))
        for name, (rule, key) in rows.items()
    ]


def domains() -> Table:
    names = {"Algorithm 2": "FedAvg+Algorithm 2"}
    runs = {label.partition(",")[0]: each for label, each in by_label("domains/seeds.json").items()}
    runs = {names.get(label, label): each for label, each in runs.items()}

    def of_global(key: str) -> Column:
        return lambda runs: "-" if runs[0].summary["accuracy_of"] != "the global model" else share(key)(runs)

    columns = {"global model": of_global("accuracy"), "MNIST": of_global("accuracy_mnist")}
    columns |= {"USPS": of_global("accuracy_usps"), "MNIST-M": of_global("accuracy_mnist_m")}
    own = share("clients_own_accuracy", "accuracy")
    return table("run", runs, {**columns, "own images": own, "trips": trips, "MiB": mib(0)})


HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Switzerland", "va": "Long Beach"}


def heart(*names: str) -> Callable[[], Table]:
    """Ours by hospital, and FLamby's in brackets, also beside a run that is changed to be like FLamby's."""

    def build() -> Table:
        figures = published("FLamby", "Heart Disease")

        def cell(label: str, runs: list[Run], hospital: str) -> str:
            ours = share(f"clients_own_accuracy_{hospital}" if label == "Local" else f"accuracy_{hospital}")(runs)
            known = figures[label.partition(" ")[0]].get(hospital)
            return ours if known is None else f"{ours} ({known[0]:.1f} ± {known[1]:.1f})"

        rows: list[Row] = [
            (label, *(cell(label, runs, hospital) for hospital in HOSPITALS), str(len(runs)))
            for label, runs in by_label(*names).items()
        ]
        return ("strategy", *HOSPITALS.values(), "seeds"), rows

    return build


def domains_batches() -> Table:
    runs = by_label("domains/batches.json")

    def cell(label: str) -> str:
        (run,) = runs[label]
        if not run.finished:
            return diverged_in([run])
        own = f"({percent([run.summary['clients_own_accuracy']])})" if run.settings["clients"] > 1 else ""
        whole = run.summary["accuracy_of"] == "the global model"
        return f"{percent([run.summary['accuracy']])} {own}".strip() if whole else own

    cells = [f"batch_size={size}, lr={lr}" for size in (32, 2) for lr in (0.01, 0.1)]
    rules = dict.fromkeys(label.partition(",")[0] for label in runs if "BRN" not in label)
    columns = [each.replace("batch_size=", "batch ").replace("=", " ") for each in cells]
    return ("run", *columns), [(rule, *(cell(f"{rule}, {each}") for each in cells)) for rule in rules]


def fedbs(levels: tuple[float, ...], *files: str) -> Callable[[], Table]:
    def rounds_to(level: float) -> Column:
        def column(runs: list[Run]) -> str:
            (run,) = runs
            reached = (point["round"] for point in run.curve if point["accuracy"] >= level)
            return str(next(reached, f"not in {run.settings['rounds']}"))

        return column

    def late(runs: list[Run]) -> str:
        values = [point["accuracy"] for point in runs[0].curve if point["round"] > 40]
        return percent([statistics.mean(values)], 2, " %") if len(values) == 20 else "-"

    def whole() -> Table:
        runs = by_label(*files)
        rows = {name: runs[name.partition(",")[0]] for name in ("FedAvg", "FedProx", "FedBS", "FedBN, global model")}
        first, *others = levels
        columns: dict[str, Column] = {f"rounds to {100 * first:.0f} %": rounds_to(first)}
        columns |= {f"{100 * level:.0f} %": rounds_to(level) for level in others}
        columns["best"] = share("best_test_accuracy", digits=2, unit=" %")
        columns["mean of rounds 41 to 60"] = late
        return table("run", rows, {**columns, "after 60 rounds": share("accuracy", digits=2, unit=" %")})

    return whole


def fedtan() -> Table:
    runs = by_label("fedtan/report.json")
    figures = {label: each[-1][0] for label, each in published("FedTAN", "Table 1").items()}
    figures["FixBN"] = published("FixBN", "Table 5")["FedAvg+FixBN"][-1]
    names = {"FixBN": "FixBN, freeze at round 120", "FedTAN-II": "FedTAN-II, 20 FedTAN rounds"}
    order = ("Centralised", "FedTAN", "FixBN", "FedAvg+Algorithm 2", "FedAvg+BN", "FedAvg+GN", "FedTAN-II")
    rows: list[Row] = []
    for label in order:
        (run,) = runs[label]
        after = percent([run.summary["accuracy"]], 1, " %") if run.finished else diverged_in([run])
        before = percent([run.after(120)], 1, " %") if run.finished else "-"
        figure = f"{figures[label]:.2f} %" if label in figures else "-"
        rows.append((names.get(label, label), after, before, figure, trips([run]), mib(0)([run])))
    columns = ("measured, 200 rounds", "before the rate falls (round 120)", "published, 10,000 rounds")
    return ("run", *columns, "communication rounds", "MiB"), rows


def fedtan_sixteen() -> Table:
    """All rules without momentum, at 16 pixels; the paper's table has two of them."""
    figures = {label: each[-1][0] for label, each in published("FedTAN", "Table 2").items()}
    rows: list[Row] = []
    for label, runs in without_sweep(by_label(*SIXTEEN)).items():
        before = percent([run.after(1200) for run in runs], unit=" %")
        figure = f"{figures[label]:.2f} %" if label in figures else "-"
        rows.append((label, share("accuracy", unit=" %")(runs), before, figure, str(len(runs)), trips(runs)))
    columns = ("measured, 2,000 rounds", "before the rate falls (round 1,200)", "published, 10,000 rounds")
    return ("run", *columns, "seeds", "communication rounds"), rows


def without_sweep(runs: Mapping[str, list[Run]]) -> dict[str, list[Run]]:
    """By the names of the experiment's rows."""
    return {label.partition(",")[0]: each for label, each in runs.items()}


def costs() -> Table:
    """FedTAN-II on MNIST; what the exchanges add is relative to the same messages without them."""
    figures = published("FedTAN", "Table 5")
    rows: list[Row] = []
    for (label, runs), (exact, paper) in zip(by_label("costs/report.json").items(), figures.items(), strict=True):
        assert label == "FedTAN" or label.endswith(f"M={exact}")
        summary, iterations = runs[0].summary, runs[0].settings["rounds"]
        plain = 4 * summary["elements_down_per_client"] * (1 + runs[0].settings["clients"]) * iterations
        sent = summary["broadcast_bytes"]
        more = 100 * (1 - iterations / summary["communication_rounds"])
        rows.append(
            (
                label,
                share("accuracy", digits=2)(runs),
                trips(runs),
                f"{more:.2f}, {paper['more rounds']:.2f}",
                f"{8 * sent / 2**30:.4f}, {paper['Gibit']:.4f}",
                f"{100 * (1 - plain / sent):.4f}, {paper['more bits']:.4f}",
            )
        )
    columns = ("accuracy, %", "communication rounds", "more rounds, %", "Gibit", "more bits, %")
    return ("run", *columns), rows


def fedwon_rates() -> Table:
    columns: dict[str, Column] = {"held-out images, %": share("best_validation_accuracy")}
    columns |= {name: share(f"clients_own_accuracy_{key}") for name, key in DIGITS.items()}
    return table("run", by_label("fedwon/digits/rates.json"), {**columns, "average": share("clients_own_accuracy")})


def fedwon_averages(item: str) -> dict[str, float]:
    """The paper's averages of the domains."""
    figures = published("FedWon", item)
    return {rule: figure[-1] if isinstance(figure, list) else figure for rule, figure in figures.items()}


def fedwon_whole(item: str, averaged: str = "published") -> Callable[[], Table]:
    """The accuracies of all runs, the best average on own images first."""

    def whole() -> Table:
        runs, figures = by_label(*FEDWON[item][0]), fedwon_averages(item)
        order = sorted(runs, key=lambda rule: -statistics.mean(by_seed(runs[rule], "clients_own_accuracy").values()))
        columns = {**fedwon_columns(item), averaged: lambda each: str(figures[each[0].label])}
        if item == "Digits-Five":
            columns["published, these three"] = lambda each: str(THREE_DOMAINS.get(each[0].label, "-"))
        return table("run", {label: runs[label] for label in order}, columns)

    return whole


# The means over MNIST, USPS and MNIST-M, from the accuracies by domain in the paper's Table 1. docs/published.yaml has
# the averages over all five domains only.
THREE_DOMAINS = {"FedAvg+GN": 92.2, "FedAvg+LN": 91.7, "FedBN": 92.7, "FedWon": 92.6}


def fedwon_columns(item: str) -> dict[str, Column]:
    return {
        "global model": lambda each: "-" if each[0].label == "Standalone" else share("accuracy")(each),
        **{name: share(f"clients_own_accuracy_{key}") for name, key in FEDWON[item][1].items()},
        "average": share("clients_own_accuracy"),
        "seeds": lambda each: str(len(each)),
    }


OFFICE_RATE = "fedwon/office/rate.json"


def fedwon_office_rates() -> Table:
    """FedWon and its rivals at 0.01 and at 0.08, the paper's rate for FedWon."""
    item = "Office-Caltech-10, AlexNet"
    low, high = by_label(*FEDWON[item][0]), by_label(OFFICE_RATE)
    rows = {f"{rule}, {rate}": runs[rule] for rule in high for rate, runs in ((0.01, low), (0.08, high))}
    return table("run", rows, fedwon_columns(item))


OFFICE_FALLING = "fedwon/office/falling.json"


def fedwon_office_falling() -> Table:
    """FedAvg with FixBN's rate, which falls at the freeze, on the seeds that ran with it."""
    item = "Office-Caltech-10, AlexNet"
    runs, falling = by_label(*FEDWON[item][0]), by_label(OFFICE_FALLING)["FedAvg"]
    seeds = {run.settings["seed"] for run in falling}
    stays, frozen = ([run for run in runs[rule] if run.settings["seed"] in seeds] for rule in ("FedAvg", "FixBN"))
    rows = {"FedAvg, rate stays": stays, "FedAvg, rate falls": falling, "FixBN, rate falls": frozen}
    return table("run", rows, fedwon_columns(item))


FALLING = ("fedwon/digits/falling.json", "fedwon/digits/falling-fedavg.json")


def fedwon_falling() -> Table:
    """FedAvg and FedWon with FixBN's rate, which falls at the freeze."""
    runs, falling = by_label("fedwon/digits/report.json"), by_label(*FALLING)
    rows = {
        f"{rule}, rate {how}": found[rule]
        for rule in ("FedAvg", "FedWon")
        for how, found in (("stays", runs), ("falls", falling))
    }
    rows["FixBN, rate falls"] = runs["FixBN"]
    columns = {"global model, %": share("accuracy"), "own images, %": share("clients_own_accuracy")}
    return table("run", rows, columns)


DIGITS = {"MNIST": "mnist", "USPS": "usps", "MNIST-M": "mnist_m"}
OFFICE = {"Amazon": "amazon", "Caltech": "caltech", "DSLR": "dslr", "Webcam": "webcam"}
FEDWON = {
    "Digits-Five": (("fedwon/digits/report.json",), DIGITS),
    "Office-Caltech-10, AlexNet": (tuple(f"fedwon/office/{file}.json" for file in ("report", "gpu", "seeds")), OFFICE),
}


def fedwon(file: str, figures: Mapping[str, float]) -> Table:
    rows: list[Row] = []
    own = "clients_own_accuracy"
    for run in sorted(read(file), key=lambda run: (-run.finished, -run.summary[own])):
        if run.finished:
            after = ["-" if run.label == "Standalone" else percent([run.summary["accuracy"]])]
            after += [percent([run.summary[f"{own}_{domain}"]]) for domain in OFFICE.values()]
            after += [percent([run.summary[own]])]
        else:
            after = [diverged_in([run]), *[""] * (len(OFFICE) + 1)]
        rows.append((run.label, *after, str(figures.get(run.label, "-"))))
    return ("run", "global model", *OFFICE, "average", "published average"), rows


def fedwon_office() -> Table:
    return fedwon("fedwon/report.json", fedwon_averages("Office-Caltech-10, AlexNet"))


def fedwon_batch2() -> Table:
    return fedwon("fedwon/batch2/report.json", published("FedWon", "Office-Caltech-10, small batches")[2])


def fixbn_table1() -> Table:
    runs, figures = by_label(*TABLE1), published("FixBN", "Table 1")
    rows: list[Row] = []
    for place, norm in itertools.product(("Central", "Federated"), ("GN", "BN")):
        own = [share("accuracy", unit=" %")(runs[f"{place}, {norm}, lr={rate}"]) for rate in (0.02, 0.2)]
        rows.append((f"{place}, {norm}", *own, f"{figures[norm][place]:.2f} %"))
    return ("run", "learning rate 0.02", "0.2", "published, 64,000 rounds"), rows


def fixbn_one_step() -> Table:
    runs = {label: by_seed(each) for label, each in by_label(*TABLE1).items()}
    rows = {}
    for norm, rate in itertools.product(("BN", "GN"), (0.02, 0.2)):
        figures = published("FixBN", "Table 1")[norm]
        one, other = (runs[f"{place}, {norm}, lr={rate}"] for place in ("Federated", "Central"))
        rows[f"Federated - Central, {norm}, {rate}"] = one, other, figures["Federated"] - figures["Central"]
    return verdict("12.5 %", rows)


TABLE1 = ("fixbn/table1.json", "fixbn/table1-seed1.json", "fixbn/table1-seeds.json")
LENET = ("fixbn/lenet.json", "fixbn/lenet-seeds.json")
WHOLE = tuple(f"fixbn/table4-16px{part}.json" for part in ("", "-seed2", "-seed3", "-seed4", "-GN"))
FULL = ("fixbn/table4.json", "fixbn/table4-seed1.json", "fixbn/table4-GN.json")
SIXTEEN = ("fedtan/table2-16px.json",)
QUARTER = ("fixbn/report.json", "fixbn/seeds/report.json")


def table4() -> dict[str, float]:
    """The paper's figures by our names."""
    figures = published("FixBN", "Table 4")
    return {**figures, "GN+WS": figures["GN+WN"]}


def fixbn_accuracy(rounds: int, files: Sequence[str], figures: Mapping[str, float]) -> Table:
    """Accuracies by seed, beside the figures of the paper where it has them."""
    rows: list[Row] = []
    for label, runs in by_label(*files).items():
        if figures and label not in figures:
            continue  # of another table
        singles = " / ".join(f"{value:.1f}" for _, value in sorted(by_seed(runs).items()))
        own = [share(key, unit=" %")(runs) for key in ("accuracy", "best_test_accuracy")]
        rows.append((label, own[0], singles, own[1], *([f"{figures[label]:.2f} %"] if figures else [])))
    columns = ("run", f"accuracy after {rounds} rounds", "by seed", "best on the way")
    return (*columns, *(["published, 640 rounds"] if figures else [])), rows


def raw_files(page: str) -> Callable[[], Table]:
    """The raw files in a page's folder, their runs, and the environments whose names begin with that of the file."""

    def table() -> Table:
        files = sorted((RESULTS / page).rglob("*.json"))
        environments = [file for file in files if file.name.endswith(ENVIRONMENT)]
        data = [file for file in files if file not in environments]
        of: dict[Path, list[str]] = {file: [] for file in data}
        for file in environments:
            name, beside = file.name.removesuffix(ENVIRONMENT), [each for each in data if each.parent == file.parent]
            named = [each for each in beside if name.startswith(each.stem)]
            raw = max(named, key=lambda each: len(each.stem), default=file.with_name("report.json"))
            part = name.removeprefix(raw.stem).strip("-") or "environment"
            commit = json.loads(file.read_text(encoding="utf-8"))["commit"]
            of[raw].append(f"[{part}]({file.relative_to(RESULTS)}), {commit[:8]}{commit[40:]}")  # with `-changed`
        rows: list[Row] = []
        for file, found in of.items():
            name = str(file.relative_to(RESULTS))
            labels: dict[str, list[str]] = {}  # by seeds
            for label, runs in by_label(name).items():
                seeds = ", ".join(map(str, sorted({run.settings["seed"] for run in runs})))
                labels.setdefault(seeds, []).append(label)
            # The labels of many rows would fill the table, and contain commas.
            listed = "; ".join(
                f"{', '.join(each) if len(each) < 8 else f'all {len(each)} rows'}: {seeds}"
                for seeds, each in labels.items()
            )
            rows.append((f"[{file.relative_to(RESULTS / page)}]({name})", listed, "; ".join(found) or "-"))
        return ("raw file", "runs and their seeds", "environments and commits"), rows

    return table


ENVIRONMENT = "environment.json"


def fixbn_lenet_rate() -> Table:
    """FixBN continued from its last models, at its last learning rate and at a tenth of it."""
    last = by_seed(by_label(*LENET)["FixBN"])
    further_runs = (*read("fixbn/lenet-rate.json"), *read("fixbn/lenet-rate-seeds.json"))
    further = {(run.settings["seed"], run.settings["train"]["lr"]): run for run in further_runs}
    rows: list[Row] = []
    for number in sorted({number for number, _ in further}):
        after = [further[number, rate].after(rounds) for rate in (0.0002, 0.00002) for rounds in (5, 20)]
        rows.append((f"seed {number}", f"{last[number]:.1f} %", *(percent([each], unit=" %") for each in after)))
    columns = ("learning rate 0.0002, 5 rounds more", "20 more", "0.00002, 5 more", "20 more")
    return ("FixBN", "after 640 rounds", *columns), rows


FASHION = tuple(f"fedbs/fashion-mnist{seeds}.json" for seeds in ("", "-seeds", "-seeds-3-4"))


def fedbs_means(after: int = 40) -> dict[str, dict[int, float]]:
    """The means of the rounds after this one, in percent: single rounds vary more, with the clients chosen in them."""

    def mean_of(run: Run) -> float:
        return statistics.mean(100.0 * float(point["accuracy"]) for point in run.curve if point["round"] > after)

    runs = by_label(*FASHION)
    return {rule: {run.settings["seed"]: mean_of(run) for run in each} for rule, each in runs.items() if len(each) > 1}


def fedbs_seeds() -> Table:
    found = fedbs_means()
    rows: list[Row] = []

    def row(name: str, seeds: Mapping[int, float], more: str = "") -> None:
        cells = [f"{seeds[number]:.2f}" for number in sorted(seeds)]
        rows.append((name, *cells, mean(list(seeds.values()), 2) + more))

    for rule, seeds in found.items():
        row(rule, seeds)
    for rule in ("FedAvg", "FedProx"):
        test = paired(found["FedBS"], found[rule])
        difference = {number: found["FedBS"][number] - value for number, value in found[rule].items()}
        row(f"FedBS - {rule}", difference, f", 95 % interval {test.low:.2f} to {test.high:.2f}, p = {test.p:.1g}")
    return ("mean of rounds 41 to 60, %", *(f"seed {number}" for number in sorted(found["FedBS"])), "mean"), rows


def verdict(budget: str, rows: Mapping[str, tuple[Mapping[int, float], Mapping[int, float], float]]) -> Table:
    """Differences of accuracies by seed, in percent, beside those of a paper; `budget` is our share of its rounds."""
    lines: list[Row] = []
    tests = [paired(one, other) for one, other, _ in rows.values()]
    for (name, (one, other, figure)), test, p in zip(rows.items(), tests, corrected(tests), strict=True):
        differences = [one[number] - other[number] for number in one if number in other]
        is_tested, sign = test.pairs > 1, "agrees" if test.difference * figure > 0 else "**differs**"
        if not is_tested:
            sign += ", one seed"
        elif p > 0.05:
            sign = "no difference in either" if abs(figure) < NO_DIFFERENCE else f"{sign}, not significant"
        interval = f"{test.low:.1f} to {test.high:.1f}, p = {p:.1g}" if is_tested else "-"
        lines.append((name, mean(differences), str(test.pairs), interval, budget, f"{figure:.1f}", sign))
    columns = (
        "measured, points",
        "seeds",
        "95 % interval; paired t, Holm",
        "of the paper's rounds",
        "published",
        "sign",
    )
    return ("difference", *columns), lines


NO_DIFFERENCE = 0.15  # points: published figures that are within the rounding of one another


def by_seed(runs: Iterable[Run], key: str = "accuracy") -> dict[int, float]:
    return {run.settings["seed"]: 100 * run.summary[key] for run in runs if run.finished}


def fixbn_verdict() -> Table:
    figures = table4()
    pairs = [("FixBN", "BN"), ("FixBN", "GN"), ("GN", "BN")]

    def compared(budget: str, files: Sequence[str], pairs: Iterable[tuple[str, str]], more: str = "") -> Table:
        found = {label: by_seed(runs) for label, runs in by_label(*files).items()}
        return verdict(budget, {f"{a} - {b}{more}": (found[a], found[b], figures[a] - figures[b]) for a, b in pairs})

    columns, full = compared("100 %", FULL, pairs)
    _, whole = compared("100 %", WHOLE, pairs, ", 16 pixels")
    others = [(rule, "BN") for rule in ("GN+WS", "IN", "LN", "Fixup")]
    _, quarter = compared("25 %", QUARTER, pairs + others)
    return columns, full + whole + quarter


def fedtan_verdict() -> Table:
    figures = {label: each[-1][0] for label, each in published("FedTAN", "Table 1").items()}
    found = {label: by_seed(runs) for label, runs in by_label("fedtan/report.json").items()}
    names = [(rule, "FedAvg+BN") for rule in ("FedTAN", "FedAvg+Algorithm 2", "FedAvg+GN")]
    names += [("FedTAN", "FedAvg+Algorithm 2"), ("FedTAN", "FedAvg+GN")]
    return verdict("2 %", {f"{a} - {b}": (found[a], found[b], figures[a] - figures[b]) for a, b in names})


def fedwon_verdict(item: str) -> Callable[[], Table]:
    def whole() -> Table:
        runs, figures = by_label(*FEDWON[item][0]), fedwon_averages(item)
        found = {rule: by_seed(each, "clients_own_accuracy") for rule, each in runs.items()}
        compared = [("FedWon", rule) for rule in runs if rule != "FedWon"]
        compared += [("FedBN", "FedAvg")] if item.startswith("Office") else []
        rows = {f"{a} - {b}": (found[a], found[b], figures[a] - figures[b]) for a, b in compared}
        return verdict("all of FedBN's", rows)

    return whole


OFFICE_IMAGES = {"Amazon": 180, "Caltech": 220, "DSLR": 27, "Webcam": 56}  # of the test sets


def office_differences(one: str, other: str) -> dict[str, list[float]]:
    """By domain, as mean over the domains, over those but DSLR, and over the images; a value for each seed."""
    runs, own = by_label(*FEDWON["Office-Caltech-10, AlexNet"][0]), "clients_own_accuracy"
    by_domain = {
        name: {rule: by_seed(runs[rule], f"{own}_{key}") for rule in (one, other)} for name, key in OFFICE.items()
    }
    found = {
        name: [accuracy - each[other][seed] for seed, accuracy in each[one].items()] for name, each in by_domain.items()
    }
    several = [name for name in OFFICE if name != "DSLR"]
    images = sum(OFFICE_IMAGES.values())
    return {
        **found,
        "mean": [statistics.mean(each) for each in zip(*found.values(), strict=True)],
        "without DSLR": [statistics.mean(each) for each in zip(*(found[name] for name in several), strict=True)],
        "by image": [
            sum(OFFICE_IMAGES[name] * value / images for name, value in zip(OFFICE, each, strict=True))
            for each in zip(*found.values(), strict=True)
        ],
    }


def fedwon_domains() -> Table:
    rows: list[Row] = []
    for one, other in (("FedWon", "FedAvg"), ("FixBN", "FedAvg"), ("FedBN", "FedAvg"), ("FedBN", "FedWon")):
        found = office_differences(one, other)
        rows.append((f"{one} - {other}", *(mean(values) for values in found.values())))
    return ("difference, points", *found), rows


def fixbn_frozen() -> Table:
    labels = {"Nothing": "BN", "Statistics": "FixBN"}  # of the others the names are the labels
    runs = by_label("fixbn/seeds/report.json")
    rows: list[Row] = []
    for name, figure in published("FixBN", "Table H").items():
        accuracy = by_seed(runs[labels.get(name, name)])[1]
        rows.append((name.lower(), f"{accuracy:.1f} %", f"{figure:.2f} %"))
    return ("frozen", "measured, 160 rounds", "published, 640 rounds"), rows


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def latency() -> Table:
    found = {
        (each["clients"], each["run"], each["milliseconds"]): each["median"] for each in lines("network/latency.jsonl")
    }
    columns = {"FedAvg, pipes": ("FedAvg", 0), "FedTAN, pipes": ("FedTAN pipes", 0)}
    columns |= {("streams, " if ms == 0 else "") + f"{ms} ms": ("FedTAN streams", ms) for ms in (0, 10, 50, 100)}
    rows: list[Row] = [
        (str(number), *(f"{found[number, *each]:.2f} s" for each in columns.values())) for number in (2, 5, 10)
    ]
    return ("clients", *columns), rows


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


ROUND_TRIPS = 42  # of an iteration of ResNet-20: 38 exchanges, and four to connect


def slower() -> Table:
    rows: list[Row] = []
    for seconds, when in (
        (6, " (a quiet machine, short local work)"),
        (12, ""),
        (60, " (more local work, or a busy site)"),
    ):
        limits = (seconds * part / ROUND_TRIPS for part in (0.1, 1))
        rows.append((f"{seconds} s{when}", *(f"{s:.1f} s" if s > 1 else f"{1000 * s:.0f} ms" for s in limits)))
    return ("R", "FedTAN takes 1.1 times as long at a round trip of", "2 times"), rows


def time_to_accuracy() -> Table:
    """From the output of benchmarks/time_to_accuracy.py: a part for one batch norm, and one for 19."""
    parts = (RESULTS / "network/time_to_accuracy.txt").read_text(encoding="utf-8").strip().split("\n\n")

    def section_of(part: str, level: str) -> str:
        return re.split(r"^  \d+ %:.*$", part.partition(f"\n  {level}: ")[2], maxsplit=1, flags=re.MULTILINE)[0]

    def rounds(rule: str, level: str) -> str:
        found = re.search(rf"^ +{re.escape(rule)} +(\d+|never)", section_of(parts[0], level), re.MULTILINE)
        return found[1].replace("never", "not with all seeds") if found else ""

    def limit(part: str, rule: str, level: str) -> str:
        found = re.search(
            rf"{re.escape(rule)} is (at least|faster .* ([\d.]+ R)$)", section_of(part, level), re.MULTILINE
        )
        return (found[2] or "0") if found else "never"

    names = {"FedAvg+BN": "FedAvg with batch norm", "FedAvg+GN": "FedAvg with group norm", "FixBN": "FixBN"}
    names |= {"FedTAN-II M=50": "FedTAN-II, M = 50", "FedTAN-II M=10": "FedTAN-II, M = 10"}
    shown = [("75 %", "FedAvg+BN"), ("75 %", "FedAvg+GN"), *(("90 %", rule) for rule in reversed(names))]
    rows: list[Row] = [
        (
            level,
            rounds("FedTAN", level),
            f"{names[rule]}: {rounds(rule, level)}",
            *(limit(p, rule, level) for p in parts),
        )
        for level, rule in shown
    ]
    columns = ("accuracy", "rounds: FedTAN", "other strategy: rounds", "FedTAN is slower with a round trip above")
    return (*columns, "with 38 exchanges"), rows


def evidence() -> Table:
    """What `docs/which-strategy.md` decides by: accuracies of the strategies, on the clients that it tells apart."""
    labels = {"batch norm": ("FedAvg+BN", "FedAvg", "BN"), "group norm": ("FedAvg+GN", "GN"), "FixBN": ("FixBN",)}
    labels |= {"FedTAN": ("FedTAN",), "FedBN": ("FedBN",), "FedWon": ("FedWon",), "own data only": ("Standalone",)}
    digits, office = (FEDWON[item][0] for item in FEDWON)
    one_model, own = "accuracy", "clients_own_accuracy"
    sets: dict[str, tuple[str, tuple[str, ...], str]] = {
        "similar data: MNIST": ("mnist.md#iid-lr-05", ("mnist/iid-lr0.5.json",), one_model),
        "few classes: MNIST": ("mnist.md#two-classes-per-client-lr-05", (), one_model),
        "few classes: CIFAR-10": ("fixbn.md#all-rounds-images-of-32-pixels", FULL, one_model),
        "few classes: CIFAR-10, 16 pixels": ("fixbn.md#all-rounds-images-of-16-pixels", WHOLE, one_model),
        "few classes: CIFAR-10, a LeNet": ("fixbn.md#a-lenet-like-network-all-rounds", LENET, one_model),
        "few classes: CIFAR-10, 16 pixels, 20 % of the rounds": ("fedtan.md", SIXTEEN, one_model),
        "few classes, 5 of 100 clients a round: MNIST": ("clients.md", ("clients/participation.json",), one_model),
        "other images, 743 each: digits": ("fedwon.md#at-one-rate", digits, own),
        "other images, 62 each: objects": ("fedwon.md#office-caltech-10-in-fedbns-protocol", office, own),
    }
    rows: list[Row] = []
    for name, (link, files, key) in sets.items():
        runs = by_label(*files) or {**by_label("mnist/noniid-lr0.5.json"), **by_label("mnist/falling-lr0.5.json")}
        runs = without_sweep(
            {label: each for label, each in runs.items() if "_train=" not in label or "=0.05" in label}
        )
        found = {
            column: next((runs[label] for label in names if label in runs), [])
            for column, names in labels.items()
            if key == own or column not in ("FedBN", "own data only")  # with a model for each client
        }
        seeds = sorted({len(each) for each in found.values()} - {0})
        cells = (share(key)(found[column]) if found.get(column) else "" for column in labels)
        rows.append((f"[{name}](results/{link})", *cells, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))))
    return ("what clients have", *labels, "seeds"), rows


TABLES: dict[str, Callable[[], Table]] = {
    "papers": papers,
    "evidence": evidence,
    "results demo": demo,
    **{f"results mnist {file}": mnist(file) for file in ("noniid-lr0.5", "noniid-lr0.1", "iid-lr0.5")},
    "results mnist falling": mnist_falling,
    "results mnist pairs": pairs(mnist_runs, *MNIST_PAIRS),
    "results clients": clients,
    "results domains": domains,
    "results heart": heart("heart/report.json"),
    "results heart differences": heart("heart/differences.json"),
    "results domains batches": domains_batches,
    "results fedbs mnist": fedbs((0.90, 0.95, 0.97), "fedbs/mnist.json", "fedbs/mnist-fedbn.json"),
    "results fedbs seeds": fedbs_seeds,
    "results fedbs fashion-mnist": fedbs((0.75, 0.80, 0.85), "fedbs/fashion-mnist.json"),
    "results fedtan": fedtan,
    "results fedtan 16px": fedtan_sixteen,
    "results costs": costs,
    "results fedwon": fedwon_office,
    "results fedwon rates": fedwon_rates,
    "results fedwon digits": fedwon_whole("Digits-Five", "published, five domains"),
    "results fedwon office": fedwon_whole("Office-Caltech-10, AlexNet"),
    "results fedwon falling": fedwon_falling,
    "results fedwon batch2": fedwon_batch2,
    "results fixbn": lambda: fixbn_accuracy(160, QUARTER, table4()),
    "results fixbn answer": fixbn_verdict,
    "results fixbn full": lambda: fixbn_accuracy(640, FULL, table4()),
    "results fixbn 16px": lambda: fixbn_accuracy(640, WHOLE, table4()),
    "results fixbn table1": fixbn_table1,
    "results fixbn one step": fixbn_one_step,
    "results fixbn lenet": lambda: fixbn_accuracy(640, LENET, {}),
    "results fixbn lenet rate": fixbn_lenet_rate,
    "results fixbn lenet pairs": pairs(lambda: by_label(*LENET), ("FixBN", "BN"), ("FixBN", "GN"), ("GN", "BN")),
    "results fedtan answer": fedtan_verdict,
    "results fedwon answer": fedwon_verdict("Digits-Five"),
    "results fedwon office domains": fedwon_domains,
    "results fedwon office answer": fedwon_verdict("Office-Caltech-10, AlexNet"),
    "results fedwon office rates": fedwon_office_rates,
    "results fedwon office falling": fedwon_office_falling,
    "results fixbn frozen": fixbn_frozen,
    **{f"files {page}": raw_files(page) for page in ("fedwon", "fixbn")},
    "results network latency": latency,
    "results network nodes": nodes,
    "results network slower": slower,
    "results network accuracy": time_to_accuracy,
}
