"""The tables of the results pages, from the raw files of docs/results.

There tables.yaml says what the tables have, and claims.yaml what the papers claim; tools/measured.py reads index.yaml.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from scipy.special import stdtr, stdtrit

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.results.report.tables import FEWEST, Paired, holm, paired
from fedbn_flwr.trees import flat_settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

Endpoint = Callable[["Run"], float | None]
Row = tuple[str | None, ...]  # None: the page's own text
Table = tuple[tuple[str, ...], list[Row]]


@functools.cache
def specification(name: str) -> Any:
    """A YAML file below docs."""
    return yaml.safe_load((ROOT / "docs" / name).read_text(encoding="utf-8"))


class Run(NamedTuple):
    label: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    curve: Sequence[Mapping[str, Any]]

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("status", "finished") == "finished")

    def of_rounds(self, first: int, last: int) -> float | None:
        """The mean accuracy in percent of rounds that were all evaluated."""
        found = [each["accuracy"] for each in self.curve if first <= each["round"] <= last]
        return 100 * statistics.mean(found) if len(found) > last - first else None

    def key(self, keys: str | Sequence[str]) -> str:
        """The first of the keys that the summary has, if it is of a model that the run has."""
        key = next((key for key in ([keys] if isinstance(keys, str) else keys) if key in self.summary), "")
        no_model = key.startswith(("accuracy", "best_test")) and self.summary["accuracy_of"] != "the global model"
        return "" if no_model else key

    # In percent, each of the first key that the run has.

    def metric(self, keys: str | Sequence[str]) -> float | None:
        """After the last round."""
        return 100 * float(self.summary[key]) if (key := self.key(keys)) else None

    def late(self, keys: str | Sequence[str]) -> float | None:
        """The primary endpoint: the mean of the last tenth of the evaluations."""
        found = self._evaluations(keys)
        return statistics.mean(found[-math.ceil(len(found) / 10) :]) if found else None

    def best(self, keys: str | Sequence[str]) -> float | None:
        return max(self._evaluations(keys), default=None)

    def _evaluations(self, keys: str | Sequence[str]) -> list[float]:
        """Empty if the curve lacks the key."""
        key = self.key(keys)
        return [100 * each[key] for each in self.curve if key in each]


@functools.cache
def read(name: str) -> tuple[Run, ...]:
    """The runs of a set."""
    runs = json.loads((RESULTS / name / "report.json").read_text(encoding="utf-8"))
    return tuple(Run(run["settings"]["label"], run["settings"], run["summary"], run["curve"]) for run in runs)


def by_label(name: str) -> dict[str, list[Run]]:
    """The runs of a set by their labels, each with all seeds in order."""
    found: dict[str, list[Run]] = {}
    for run in sorted(read(name), key=lambda run: run.seed):
        found.setdefault(run.label, []).append(run)
    return found


def runs_of(reference: str, of_set: str = "") -> list[Run]:
    """The runs that `label`, `set:label` or `set:label where key=value` names, with or without swept keys."""
    reference, _, where = reference.partition(" where ")
    name, colon, label = reference.rpartition(":")
    found = by_label(name if colon else of_set)
    whole = [label] if label in found else [each for each in found if each.startswith(f"{label}, ")]
    key, _, value = where.partition("=")
    runs = [run for each in whole for run in found[each] if not key or str(flat_settings(run.settings)[key]) == value]
    if len({run.seed for run in runs}) < len(runs):
        raise ValueError(f"{reference} is several runs of a seed: {', '.join(whole)}")
    return runs


def by_seed(runs: Iterable[Run], value: str | Sequence[str] | Endpoint = "accuracy") -> dict[int, float]:
    """A metric, or what an endpoint makes of a run, of the finished runs; of none of them where a run lacks it."""
    found = {run.seed: value(run) if callable(value) else run.metric(value) for run in runs if run.finished}
    return {} if None in found.values() else {seed: each for seed, each in found.items() if each is not None}


def in_rounds(rounds: Sequence[int]) -> Endpoint:
    return lambda run: run.of_rounds(rounds[0], rounds[-1])


def span(numbers: Iterable[float]) -> str:
    """The smallest and the largest, or the number that all are."""
    several = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{each:.{3 if each >= 10 else 2}g}" for each in (several[0], several[-1])))


# --- tables ----------------------------------------------------------------------


def mean(values: Sequence[float], digits: int = 1) -> str:
    """With the deviation; two values as they are, since a deviation of two says little."""
    shown = values if len(values) == 2 else [statistics.mean(values)]
    text = " / ".join(f"{round(each, digits) + 0.0:,.{digits}f}" for each in shown)  # no -0.0
    off = f"{statistics.stdev(values):.{digits}f}" if len({*values}) > 1 else "0"
    return text + (f" ± {off}" if len(values) > 2 else "")


def figure(published: Sequence[Any], names: Mapping[str, Any], label: str) -> Any:
    """What a paper prints for a run, under its label or another name; of several figures the last, as an average is."""
    name = names.get(label, label)
    found = specification("published.yaml") if published else None
    for word in name if isinstance(name, list) else [*published, *name.split(", ")]:
        found = found.get(word, {}) if isinstance(found, dict) else found  # of other words there is one figure
    if isinstance(found, dict):
        found = [*found.values()][-1] if found else None
    return found[0] if isinstance(found, list) else found


def cell(kind: Mapping[str, Any], runs: Sequence[Run], label: str = "") -> str:
    """The text of a cell by its kind, described at the head of tables.yaml."""
    digits = kind.get("digits", 1)
    if "published" in kind:
        known = figure(kind["published"], kind.get("names", {}), label)
        return "-" if known is None else f"{known:.{digits}f}"
    done = [run for run in runs if run.finished]
    if not done:
        return f"diverged in round {runs[0].summary['rounds'] + 1}" if runs else "-"
    match kind.get("key"):
        case "seeds":
            return str(len(done))
        case "trips":
            return f"{statistics.mean(run.summary['communication_rounds'] for run in done):,.0f}"
        case "MiB":
            return mean([(done[0].summary["bytes_down"] + done[0].summary["bytes_up"]) / 2**20], digits)
    value: str | Endpoint = in_rounds(kind["rounds"]) if "rounds" in kind else kind.get("key", "")
    if value == "late":
        value = methodcaller("late", "accuracy")
    if not (values := [*by_seed(done, value).values()]):
        return "-"
    text = mean([statistics.mean(values)] if kind.get("rank") else values, digits)
    if "beside" in kind:
        paper, table, place = kind["beside"]
        known = specification("published.yaml")[paper][table][label.partition(" ")[0]].get(place)
        text += f" ({known[0]:.1f} ± {known[1]:.1f})" if known else ""
    return f"{text} ({len(done)})" if kind.get("count") else text


def grid(name: str) -> Table:
    """A table with a row for each strategy, or what else has runs of its own."""
    spec = specification("results/tables.yaml")[name]
    of_set, keys = spec.get("set", ""), spec.get("keys", {})
    if (titles := spec.get("rows")) is None:
        titles = {label.partition(", ")[0]: label.partition(", ")[0] for label in by_label(of_set)}
    if key := spec.get("sort"):
        ends = {label: by_seed(runs_of(label, of_set), key).values() or [0] for label in titles.values()}
        titles = dict(sorted(titles.items(), key=lambda row: -statistics.mean(ends[row[1]])))
    columns: list[list[str]] = [[*titles]]
    for short in spec["columns"].values():
        kind = dict(short) if isinstance(short, dict) else {"key": short}
        column, values = list[str](), list[dict[int, float]]()
        for title, label in titles.items():
            row, _, _ = label.partition(", ")  # without the values of swept keys
            reference = kind.get("run", label).format(row=row)
            runs = runs_of(reference, of_set) if of_set or ":" in reference else []
            own = kind | ({"key": keys[title]} if title in keys else {})
            column.append(cell(own, runs, label))
            values.append(by_seed(runs, own.get("key", "")) if kind.get("rank") else {})
        columns.append([f"{text} ({rank})" if rank else text for text, rank in zip(column, ranks(values), strict=True)])
    return (spec.get("first", "run"), *spec["columns"]), [*zip(*columns, strict=True)]


def ranks(rows: Sequence[Mapping[int, float]]) -> list[int]:
    """One more than the number of rows significantly above, and no better than a higher row's; 0 without values."""
    found = [1 if row else 0 for row in rows]
    measured = [place for place, row in enumerate(rows) if row]
    pairs = [*itertools.combinations(measured, 2)]
    tests = [paired(rows[one], rows[other]) for one, other in pairs]
    corrected = holm([1.0 if math.isnan(test.p) else test.p for test in tests])
    for (one, other), test, p in zip(pairs, tests, corrected, strict=True):
        if p < 0.05:
            found[other if test.difference > 0 else one] += 1
    by_mean = sorted(measured, key=lambda place: -statistics.mean(rows[place].values()))
    for above, below in itertools.pairwise(by_mean):
        found[below] = max(found[below], found[above])
    return found


def evidence() -> Table:
    """What docs/which-strategy.md decides by: a row has the run of a column in its set."""
    spec = specification("results/tables.yaml")["evidence"]
    rows: list[Row] = []
    for title, row in spec["rows"].items():
        found = {column: runs_of(row[column], row["set"]) for column in spec["columns"] if column in row}
        kind = {"key": row.get("key", "accuracy")}
        cells = (cell(kind, found[column]) if column in found else "" for column in spec["columns"])
        rows.append((title, *cells, span(map(len, found.values()))))
    return (spec["first"], *spec["columns"], "seeds"), rows


# --- differences -----------------------------------------------------------------


MARGIN, OF_ERROR = 2.0, 0.2  # points, and a share of the baseline's error: the smaller one is the margin of equality


class Difference(NamedTuple):
    title: str
    setup: str
    values: list[float]
    test: Paired
    margin: float
    published: float | None
    of_set: str = ""
    p: float = 1.0  # corrected for the table's entry

    def __str__(self) -> str:
        """The mean with its interval, or the difference of each seed if these are one or two."""
        if self.test.pairs < FEWEST:
            return mean(self.values) if self.values else "-"
        centre, low, high = (round(each, 1) + 0.0 for each in (self.test.difference, self.test.low, self.test.high))
        return f"{centre:.1f} ({low:.1f} to {high:.1f})"  # no -0.0

    # Two-sided p values, 1 without an interval.

    @property
    def p_differs(self) -> float:
        return 1.0 if math.isnan(self.test.p) else self.test.p

    @property
    def p_not_below(self) -> float:
        """Against a difference of minus the margin."""
        return self._beyond(self.margin + self.test.difference)

    @property
    def p_within(self) -> float:
        """Against a difference of the margin, in either direction."""
        return max(self.p_not_below, self._beyond(self.margin - self.test.difference))

    @property
    def p_outside(self) -> float:
        """The same from the other side."""
        return self._beyond(abs(self.test.difference) - self.margin)

    def _beyond(self, distance: float) -> float:
        if math.isnan(self.test.p):
            return 1.0
        freedom = self.test.pairs - 1
        error = (self.test.high - self.test.low) / 2 / float(stdtrit(freedom, 0.975))
        return min(1.0, 2 * float(stdtr(freedom, -distance / error)))


def differences(name: str) -> list[Difference]:
    """The rows of a table of differences, the p values of each entry corrected together."""
    found: list[Difference] = []
    for entry in specification("results/tables.yaml")[name]["differences"]:
        pairs = entry["pairs"]
        pairs = pairs if isinstance(pairs, dict) else {f"{one} - {other}": [one, other] for one, other in pairs}
        rows = [_difference(title, entry, *pair) for title, pair in pairs.items()]
        tested = [row for row in rows if row.test.pairs >= FEWEST]
        every_p = dict(zip([row.title for row in tested], holm([row.p_differs for row in tested]), strict=True))
        found += [row._replace(p=every_p.get(row.title, 1.0)) for row in rows]
    return found


def _difference(title: str, entry: Mapping[str, Any], first: str, second: str, *rounds: Sequence[int]) -> Difference:
    keys, names = entry.get("metric", "accuracy"), entry.get("names", {})
    runs = [
        [run for run in runs_of(label, entry["set"]) if run.seed < entry.get("seeds", math.inf)]
        for label in (first, second)
    ]

    def at(*ends: Endpoint) -> list[dict[int, float]]:
        return [by_seed(each, end) for each, end in zip(runs, (ends[0], ends[-1]), strict=True)]

    late = at(methodcaller("late", keys))
    one, other = at(*map(in_rounds, rounds)) if rounds else late if all(late) else at(methodcaller("metric", keys))
    margin = min(MARGIN, OF_ERROR * (100 - statistics.mean(other.values()))) if other else MARGIN
    known = [figure(entry.get("published", ()), names, label) for label in (first, second)]
    published = None if None in known else known[0] - known[1]
    values = [one[seed] - other[seed] for seed in one if seed in other]
    return Difference(title, entry.get("setup", ""), values, paired(one, other), margin, published, entry["set"])


def comparisons() -> str:
    """Every difference as docs/results/differences.csv has it, in points; without an interval below three seeds."""
    rows = list[tuple[str, ...]]()
    for name, spec in specification("results/tables.yaml").items():
        for each in differences(name) if "differences" in spec else ():
            tested = (each.test.low, each.test.high, each.p) if each.test.pairs >= FEWEST else (None, None, None)
            deviation = statistics.stdev(each.values) if len(each.values) > 1 else None
            numbers = (each.published, statistics.mean(each.values), deviation, len(each.values), *tested)
            cells = ("" if number is None else f"{number:.4g}" for number in numbers)
            rows.append((each.title, each.setup, each.of_set, *cells))
    return as_csv(
        ("difference", "set-up", "set", "published", "mean", "deviation", "seeds", "low", "high", "p (Holm)"), rows
    )


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


# --- claims -------------------------------------------------------------------------

VERDICTS = {
    "supported": "every comparison is significant with the claimed sign, or equal if claimed",
    "supported on other data": "the same, on other images or another network than the paper's",
    "contradicted": "a comparison is significant with the other sign, or differs if *equal* is claimed",
    "equal": "a comparison is within the margin though a difference is claimed",
    "open": "too few seeds, too wide an interval, too few rounds, or not the paper's data",
    "not measured": "no comparison of ours",
}


def verdict(expects: str, found: Sequence[Difference]) -> str:
    """What the differences say about a claim, with the reason if it is open.

    All comparisons must support a claim, which needs no correction; any of them can refute it, which does (Holm).
    One that is shown to be within the margin is neither above nor below.
    """
    if not found:
        return "not measured"
    ups = [(each.test.difference > 0) == (expects != "below") for each in found]
    downs, within = [not up for up in ups], [each.p_within < 0.05 for each in found]

    def some(p: str, of: Iterable[bool]) -> bool:
        return any(itertools.compress((each < 0.05 for each in holm([getattr(row, p) for row in found])), of))

    def apart(of: Sequence[bool]) -> list[bool]:
        return [side and not equal for side, equal in zip(of, within, strict=True)]

    refuted = {"contradicted": False, "equal": False}
    match expects:
        case "equal":
            supported, refuted["contradicted"] = all(within), some("p_outside", [True] * len(found))
        case "level":
            supported, refuted["contradicted"] = (
                all(each.p_not_below < 0.05 for each in found),
                some("p_outside", downs),
            )
        case "mixed":
            supported = some("p_differs", apart(ups)) and some("p_differs", apart(downs))
        case _:
            supported = all(apart(ups)) and all(each.p_differs < 0.05 for each in found)
            refuted = {"contradicted": some("p_differs", apart(downs)), "equal": some("p_within", [True] * len(found))}
    few = [each.test.pairs for each in found if each.test.pairs < FEWEST]
    reason = f"{span(few)} {'seed' if max(few) == 1 else 'seeds'}" if few else "one never leads clearly"
    reason = reason if few or expects == "mixed" else "too wide an interval"
    return next((kind for kind, holds in {"supported": supported, **refuted}.items() if holds), f"open: {reason}")


def claims() -> Table:
    """Each claim with its source, the published and the measured differences, and the verdict."""
    rows: list[Row] = []
    every = [
        (paper, claim, _compared(claim))
        for paper, found in specification("results/claims.yaml").items()
        for claim in found
    ]
    tested = [
        (str(claim["claim"]), max(each.p_differs for each in found if each.setup == claim.get("primary", each.setup)))
        for _, claim, found in every
        if claim.get("expects", "above") in ("above", "below")
        and min((each.test.pairs for each in found), default=0) >= FEWEST
    ]
    corrected = dict(zip([name for name, _ in tested], holm([p for _, p in tested]), strict=True))
    for paper, claim, found in every:
        known = dict.fromkeys((each.title, f"{each.published:.1f}") for each in found if each.published is not None)
        done = claim.get("verdict") or verdict(claim.get("expects", "above"), found)
        if done == "supported" and corrected.get(claim["claim"], 0) >= 0.05:
            done = "open: p is too large for so many claims"
        if "instead" in claim and not done.startswith("open"):  # other data or another network can't decide
            done = "supported on other data" if done == "supported" else f"open: {done}, but on other data"
        smaller = any("pixels" in each for each in _setups(claim))  # says so itself
        bracket = "; ".join(filter(None, (None if smaller else claim.get("instead"), *_setups(claim))))
        measured = f"[{', '.join(map(str, found))}]({claim.get('page')})" + (f"; {bracket}" if bracket else "")
        ours = measured if found else claim.get("counted", "")
        published = str(claim.get("published", ", ".join(text for _, text in known)))
        rows.append((claim["claim"], f"{paper}, {claim['source']}", published, ours, done))
    return ("claim", "source", "published", "measured", "verdict"), rows


def _setups(claim: Mapping[str, Any]) -> list[str]:
    return setups if isinstance(setups := claim.get("setup", ""), list) else [setups]


def _compared(claim: Mapping[str, Any]) -> list[Difference]:
    """The comparisons that measure a claim."""
    every = {(each.title, each.setup): each for each in differences(claim["table"])} if "table" in claim else {}
    return [every[comparison] for comparison in itertools.product(claim.get("rows", []), _setups(claim))]


def advice() -> Table:
    """What the table of docs/which-strategy.md rests on, each comparison with its set and interval."""
    rows: list[Row] = []
    for title, row in specification("results/tables.yaml")["advice"].items():
        shown = [
            f"[{each.title}]({each.of_set}/report.json), {each.setup}: {each}"
            for comparison in row["comparisons"]
            for each in _compared(comparison)
        ]
        rows.append((title, "; ".join(shown) or "not measured", row["overturned by"]))
    return ("advice", "differences in points, with 95 % intervals", "what would overturn it"), rows


def verdicts() -> Table:
    """How many claims have each verdict, and when a claim has it."""
    counts = Counter(str(row[-1]).partition(":")[0] for row in claims()[1])
    rows: list[Row] = [(kind, str(counts[kind]), meaning) for kind, meaning in VERDICTS.items()]
    return ("verdict", "claims", "when"), rows


def claims_counted() -> str:
    found = [row[-1] for row in claims()[1]]
    return f"{len(found)} claims, {found.count('supported')} are supported here"


# --- tables that are like no other ------------------------------------------------------


def costs() -> Table:
    """FedTAN-II on MNIST; what the exchanges add is relative to the same messages without them."""
    rows: list[Row] = []
    published = specification("published.yaml")["FedTAN"]["Table 5 and Figure 14"].values()
    for (label, runs), paper in zip(by_label("costs/table5").items(), published, strict=True):
        summary, settings = runs[0].summary, runs[0].settings
        plain = 4 * summary["elements_down_per_client"] * (1 + settings["clients"]) * settings["rounds"]
        sent, trips = summary["broadcast_bytes"], summary["communication_rounds"]
        rounds = f"{paper['more rounds']:.2f}", f"{100 * (1 - settings['rounds'] / trips):.2f}"
        mark = "*" if label == "FedTAN" else ""  # the paper prints another number: published.yaml
        bits = f"{paper['Gibit']:.4f}{mark}", f"{8 * sent / 2**30:.4f}"
        more = f"{paper['more bits']:.4f}", f"{100 * (1 - plain / sent):.4f}"
        rows.append((label, cell({"key": "accuracy", "digits": 2}, runs), f"{trips:,}", *rounds, *bits, *more))
    kinds = ("more rounds, %", "Gibit", "more bits, %")
    pairs = [f"{kind}, {whose}" for kind in kinds for whose in ("paper", "ours")]
    return ("run", "accuracy, %", "communication rounds", *pairs), rows


COLUMNS = ("data", "network", "clients", "rounds", "local work", "batch", "rate")
MAIN = COLUMNS[:-2]  # on a page


def setup(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the list of sets has of a run."""
    data, train = settings["data"], settings["train"]
    own = {key.partition("_")[0]: number for key, number in data["partition"].items() if isinstance(number, int)}
    other_size = data["size"] and data["size"] != CATALOGUE[data["name"]].size
    size = [f"{data['size']} pixels"] if other_size else []
    kind = [] if data["partition"]["kind"] in own else [data["partition"]["kind"]]
    work = "epochs" if train.get("epochs") else "steps"
    return {
        "data": ", ".join([data["name"], *size, *kind, *(f"{number} {key}" for key, number in own.items())]),
        "network": settings["model"]["name"],
        "clients": str(settings["clients"]),
        "rounds": f"{settings['rounds']:,}",
        "local work": f"{train[work]} {work if train[work] > 1 else work[:-1]}",
        "batch": str(train["batch_size"]),
        "rate": f"{train['lr']:g}",
    }


def common(values: Iterable[str]) -> str:
    """The values that at least a third as many runs have as the most frequent one, and how they begin only once."""
    counts = Counter(values)
    first, *others = (each for each, count in counts.items() if 3 * count >= max(counts.values()))
    start = "".join(first.rpartition(", ")[:2])
    return " / ".join([first, *(each.removeprefix(start) for each in others)])


def ran(of_set: str, columns: Sequence[str] = COLUMNS) -> tuple[str, ...]:
    """What most runs of a set have, and their seeds."""
    setups = [setup(run.settings) for run in read(of_set)]
    return *(common(each[key] for each in setups) for key in columns), str(len({run.seed for run in read(of_set)}))


def main_sets(name: str) -> Table:
    """What a page is about mainly, by its section."""
    rows: list[Row] = [
        (title, *ran(of_set, MAIN)) for title, of_set in specification("results/tables.yaml")[name].items()
    ]
    return ("section", *MAIN, "seeds"), rows


def sets() -> str:
    """Every set with the commands that repeat it, from the clone's folder, as docs/results/sets.csv has them."""
    rows = list[tuple[str, ...]]()
    for file in sorted(RESULTS.glob("*/*/report.json")):
        name = file.parent.relative_to(RESULTS).as_posix()
        own = specification("results/sets.yaml").get(name, {})
        files = sorted(file.parent.glob("settings*.yaml"))
        commands = own.get("commands") or [f"fedbn run {each.relative_to(ROOT).as_posix()}" for each in files]
        rows.append((name, *ran(name), " ; ".join(commands), own.get("note", "")))
    return as_csv(("set", *COLUMNS, "seeds", "commands", "note"), rows)


def hospitals() -> str:
    """Each strategy at each hospital, in brackets as published, as docs/results/heart/hospitals.csv has it."""
    columns, rows = grid("hospitals.csv")
    return as_csv(columns, [[*map(str, row)] for row in rows])


TABLES: dict[str, Callable[[], Table]] = {
    **{
        name: functools.partial(main_sets if name.startswith("main sets") else grid, name)
        for name, spec in specification("results/tables.yaml").items()
        if "differences" not in spec and name != "hospitals.csv"
    },
    "evidence": evidence,
    "claims": claims,
    "advice": advice,
    "verdicts": verdicts,
    "results costs": costs,
}
