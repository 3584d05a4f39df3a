"""The tables of the results pages, from the raw files of docs/results.

There tables.yaml says what the tables have, and claims.yaml what the papers claim; tools/measured.py reads index.yaml.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fedbn_flwr.results.report.tables import FEWEST, Paired, paired
from fedbn_flwr.trees import flat_settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

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

    def metric(self, keys: str | Sequence[str], rounds: Sequence[int] = ()) -> float | None:
        """In percent: the first of the keys that the summary has, or the mean accuracy of rounds, which varies less."""
        if rounds:
            found = [each["accuracy"] for each in self.curve if rounds[0] <= each["round"] <= rounds[-1]]
            return 100 * statistics.mean(found) if len(found) > rounds[-1] - rounds[0] else None
        key = next((key for key in ([keys] if isinstance(keys, str) else keys) if key in self.summary), "")
        no_model = key.startswith(("accuracy", "best_test")) and self.summary["accuracy_of"] != "the global model"
        return None if no_model or not key else 100 * float(self.summary[key])


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


def by_seed(
    runs: Iterable[Run], keys: str | Sequence[str] = "accuracy", rounds: Sequence[int] = ()
) -> dict[int, float]:
    """A metric of the finished runs; of none of them where a run lacks it."""
    found = {run.seed: run.metric(keys, rounds) for run in runs if run.finished}
    return {} if None in found.values() else {seed: each for seed, each in found.items() if each is not None}


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
    """What a paper prints for a run, under its label or another name or place; of a list the last, as an average is."""
    name = names.get(label, label)
    found = specification("published.yaml") if published else None
    for key in name if isinstance(name, list) else [*published, name]:
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, list):
        found = found[-1]
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
    if "setting" in kind:
        return "-" if (found := flat_settings(done[0].settings).get(kind["setting"])) is None else str(found)
    match kind.get("key"):
        case "seeds":
            return str(len(done))
        case "by seed":
            return " / ".join(f"{each:.1f}" for each in by_seed(done).values())
        case "trips":
            return f"{statistics.mean(run.summary['communication_rounds'] for run in done):,.0f}"
        case "MiB":
            return mean([(done[0].summary["bytes_down"] + done[0].summary["bytes_up"]) / 2**20], digits)
    if not (values := [*by_seed(done, kind.get("key", ""), kind.get("rounds", ())).values()]):
        return "-"
    text = mean(values, digits)
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
    rows: list[Row] = []
    for title, label in titles.items():
        cells = []
        for short in spec["columns"].values():
            kind = dict(short) if isinstance(short, dict) else {"key": short}
            row, _, _ = label.partition(", ")  # without the values of swept keys
            reference = kind.get("run", label).format(row=row)
            runs = runs_of(reference, of_set) if of_set or ":" in reference else []
            kind |= {"key": keys[title]} if title in keys else {}
            cells.append(cell(kind, runs, row))
        rows.append((title, *cells))
    return (spec.get("first", "run"), *spec["columns"]), rows


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


class Difference(NamedTuple):
    title: str
    setup: str
    values: list[float]
    test: Paired
    p: float  # corrected; 1 with too few seeds
    published: float | None

    def cells(self) -> tuple[str, str, str, str]:
        if not self.values:
            return "-", "", "", ""
        tested = "", ""
        if self.test.pairs >= FEWEST:
            p = "< 0.001" if self.p < 0.001 else f"{self.p:.1g}"
            low, high = (round(end, 1) + 0.0 for end in (self.test.low, self.test.high))  # no -0.0
            tested = f"{low:.1f} to {high:.1f}", p
        return mean(self.values), str(len(self.values)), *tested


def corrected(tests: Sequence[Paired]) -> list[float]:
    """The p values of a table's tests, corrected for their number (Holm 1979); 1 with too few seeds."""
    order = sorted((test.p, place) for place, test in enumerate(tests) if test.pairs >= FEWEST)
    found, largest = [1.0] * len(tests), 0.0
    for rank, (p, place) in enumerate(order):
        found[place] = largest = min(1.0, max(largest, (len(order) - rank) * p))
    return found


def differences(name: str) -> list[Difference]:
    """The rows of a table of differences."""
    found: list[Difference] = []
    for entry in specification("results/tables.yaml")[name]["differences"]:
        pairs = entry["pairs"]
        pairs = pairs if isinstance(pairs, dict) else {f"{one} - {other}": [one, other] for one, other in pairs}
        tests, values = list[Paired](), list[list[float]]()
        for first, second, *rounds in pairs.values():
            metric = entry.get("metric", "accuracy")
            one = by_seed(runs_of(first, entry["set"]), metric, *rounds[:1])
            other = by_seed(runs_of(second, entry["set"]), metric, *rounds[-1:])
            tests.append(paired(one, other))
            values.append([one[seed] - other[seed] for seed in one if seed in other])
        for title, of_seeds, test, p in zip(pairs, values, tests, corrected(tests), strict=True):
            known = [figure(entry.get("published", ()), entry.get("names", {}), label) for label in pairs[title][:2]]
            published = None if None in known else known[0] - known[1]
            found.append(Difference(title, entry.get("setup", ""), of_seeds, test, p, published))
    return found


def compared(name: str) -> Table:
    found = differences(name)
    columns = {"difference": [each.title for each in found]}
    if len({each.setup for each in found}) > 1:
        columns["set-up"] = [each.setup for each in found]
    if any(each.published is not None for each in found):
        columns["paper"] = ["-" if each.published is None else f"{each.published:.1f}" for each in found]
    rows: list[Row] = [(*row, *each.cells()) for *row, each in zip(*columns.values(), found, strict=True)]
    return (*columns, "ours, points", "seeds", "95 % interval", "p (Holm)"), rows


# --- claims -------------------------------------------------------------------------

MARGIN = 2.0  # points: an interval within it shows that two accuracies are equal
VERDICTS = {
    "supported": "all differences have the claimed sign and are significant",
    "supported on other data": "the same, but on other images than the paper's: this isn't the paper's claim",
    "contradicted": "a difference is significant with the other sign, and none with the claimed one",
    "not settled": "otherwise, and always with fewer than three seeds",
    "not measured": "no run of ours",
}


def verdict(expects: str, found: Sequence[Difference]) -> str:
    """Whether differences are as a claim expects them, all of them or none of them significant with the other sign."""
    if not found:
        return "not measured"
    if any(each.test.pairs < FEWEST for each in found):
        return "not settled"
    if expects == "equal":
        equal = all(-MARGIN < each.test.low < each.test.high < MARGIN for each in found)
        return "supported" if equal else "not settled"
    as_expected = [(each.test.difference > 0) == (expects == "above") for each in found]
    significant = [each.p < 0.05 for each in found]
    signs = {*itertools.compress(as_expected, significant)}
    if expects == "mixed":
        return "supported" if signs == {True, False} else "not settled"
    if signs == {True} and all(significant):
        return "supported"
    return "contradicted" if signs == {False} else "not settled"


def claims() -> Table:
    """Each claim with its source, the published and the measured differences, the seeds and the verdict."""
    rows: list[Row] = []
    for paper, of_paper in specification("results/claims.yaml").items():
        for claim in of_paper:
            setups = claim["setup"] if isinstance(claim.get("setup"), list) else [claim.get("setup", "")]
            chosen = [*itertools.product(claim.get("rows", []), setups)]
            every = {(each.title, each.setup): each for each in differences(claim["table"])} if chosen else {}
            found = [every[comparison] for comparison in chosen]
            known = dict.fromkeys(f"{each.published:.1f}" for each in found if each.published is not None)
            done = "supported" if "counted" in claim else verdict(claim.get("expects", "above"), found)
            if "instead" in claim:  # other data or another network can't decide on its claim
                done = "supported on other data" if done == "supported" else "not settled"
            ours, seeds = claim.get("counted", ""), ""
            if found:
                bracket = "; ".join(filter(None, (claim.get("instead"), *setups)))
                ours = f"[{', '.join(each.cells()[0] for each in found)}]({claim['page']}.md) ({bracket})"
                seeds = span(each.test.pairs for each in found)
            published = str(claim.get("published", ", ".join(known)))
            rows.append((claim["claim"], f"{paper}, {claim['source']}", published, ours, seeds, done))
    return ("claim", "source", "published", "measured", "seeds", "verdict"), rows


def verdicts() -> Table:
    """How many claims have each verdict, and when a claim has it."""
    counts = Counter(row[-1] for row in claims()[1])
    rows: list[Row] = [(kind, str(counts[kind]), meaning) for kind, meaning in VERDICTS.items()]
    return ("verdict", "claims", "when"), rows


# --- tables that are like no other ------------------------------------------------------


def costs() -> Table:
    """FedTAN-II on MNIST; what the exchanges add is relative to the same messages without them."""
    rows: list[Row] = []
    published = specification("published.yaml")["FedTAN"]["Table 5"].values()
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


def setup(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the table of a page's sets has of a run."""
    data, train = settings["data"], settings["train"]
    own = {key.partition("_")[0]: number for key, number in data["partition"].items() if isinstance(number, int)}
    size = [f"{data['size']} pixels"] if data["size"] else []
    kind = [] if data["partition"]["kind"] in own else [data["partition"]["kind"]]
    work = "epochs" if train.get("epochs") else "steps"
    schedule = train.get("schedule") or {}
    falls = [f"{100 * each:.0f} %" for each in schedule["milestones"]] if schedule.get("kind") == "step" else []
    return {
        "data": ", ".join([data["name"], *size, *kind, *(f"{number} {key}" for key, number in own.items())]),
        "network": settings["model"]["name"],
        "clients": str(settings["clients"]),
        "rounds": f"{settings['rounds']:,}",
        "local work": f"{train[work]} {work if train[work] > 1 else work[:-1]}",
        "batch": str(train["batch_size"]),
        "rate": f"{train['lr']:g}" + (f", falls after {' and '.join(falls)}" if falls else ""),
    }


def common(values: Iterable[str]) -> str:
    """The values that at least a third as many runs have as the most frequent one, and how they begin only once."""
    counts = Counter(values)
    first, *others = (each for each, count in counts.items() if 3 * count >= max(counts.values()))
    start = "".join(first.rpartition(", ")[:2])
    return " / ".join([first, *(each.removeprefix(start) for each in others)])


def sets(page: str, chosen: Collection[str] = ()) -> Table:
    """The sets of a page or some of them: what most of their runs have, their seeds, and their files."""
    rows, columns = list[Row](), dict[str, str]()
    for folder in sorted(file.parent for file in (RESULTS / page).glob("*/report.json")):
        if chosen and folder.name not in chosen:
            continue
        runs = read(folder.relative_to(RESULTS).as_posix())
        kept = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".yaml", ".py", ".txt")]
        links = ", ".join(f"[{file.stem}]({file.relative_to(RESULTS)})" for file in kept)
        setups = [setup(run.settings) for run in runs]
        columns = {key: common(each[key] for each in setups) for key in setups[0]}
        rows.append((folder.name, *columns.values(), str(len({run.seed for run in runs})), links))
    return ("set", *columns, "seeds", "files"), rows


TABLES: dict[str, Callable[[], Table]] = {
    **{
        name: functools.partial(compared if "differences" in spec else grid, name)
        for name, spec in specification("results/tables.yaml").items()
    },
    **{
        f"sets {page}": functools.partial(sets, page)
        for page in {file.parents[1].name for file in RESULTS.glob("*/*/report.json")}
    },
    "sets later": functools.partial(sets, "mnist", ("pooled", "fbn-hbn", "personal", "constant")),
    "evidence": evidence,
    "claims": claims,
    "verdicts": verdicts,
    "results costs": costs,
}
