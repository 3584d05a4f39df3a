"""The tables of what was measured, from the raw files of docs/results: those of the papers' items and of the pages.

In docs/results: tables.yaml says what most tables have, index.yaml what was measured of each paper, claims.yaml what
the papers claim.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections import Counter
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
    def finished(self) -> bool:
        return bool(self.summary.get("status", "finished") == "finished")

    def after(self, server_round: int, key: str = "accuracy") -> float:
        return float(next(point[key] for point in self.curve if point["round"] == server_round))

    def between(self, first: int, last: int) -> float:
        """The mean accuracy of these rounds: single rounds vary more, with the clients chosen in them."""
        return statistics.mean(float(point["accuracy"]) for point in self.curve if first <= point["round"] <= last)


@functools.cache
def read(name: str) -> tuple[Run, ...]:
    """The runs of a set."""
    runs = json.loads((RESULTS / name / "report.json").read_text(encoding="utf-8"))
    return tuple(Run(run["settings"]["label"], run["settings"], run["summary"], run["curve"]) for run in runs)


def by_label(name: str) -> dict[str, list[Run]]:
    """The runs of a set by their labels, each with all seeds in order."""
    found: dict[str, list[Run]] = {}
    for run in read(name):
        found.setdefault(run.label, []).append(run)
    return {label: sorted(runs, key=lambda run: int(run.settings["seed"])) for label, runs in found.items()}


def runs_of(reference: str, of_set: str = "") -> list[Run]:
    """The runs that `label`, `set:label` or `set:label where key=value` names, with or without swept keys."""
    reference, _, where = reference.partition(" where ")
    name, colon, label = reference.rpartition(":")
    found = by_label(name if colon else of_set)
    whole = [label] if label in found else [each for each in found if each.startswith(f"{label}, ")]
    key, _, value = where.partition("=")
    several = [
        run for each in whole for run in found[each] if not where or str(flat_settings(run.settings)[key]) == value
    ]
    seeds = [run.settings["seed"] for run in several]
    if len({*seeds}) < len(seeds):
        raise ValueError(f"{reference} is several runs of a seed: {', '.join(whole)}")
    return several


# --- the papers' items ----------------------------------------------------------


class Measured(NamedTuple):
    label: str  # in the experiment
    seed: int
    settings: Mapping[str, Any]
    finished: bool


def measured(item: Mapping[str, Any]) -> list[Measured]:
    """The runs of an item's sets that count for it."""
    found = []
    for name, chosen in item.get("sets", {}).items():
        runs = read(name)
        labels = chosen or {run.label: run.label for run in runs}
        if missing := set(labels) - {run.label for run in runs}:
            raise ValueError(f"{name} has no run {', '.join(map(repr, missing))}")
        found += [
            Measured(labels[run.label], run.settings["seed"], run.settings, run.finished)
            for run in runs
            if run.label in labels
        ]
    return found


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


def items() -> list[tuple[str, str, Mapping[str, Any]]]:
    """Each table and figure with its paper and title."""
    index = specification("results/index.yaml")
    return [(paper, title, item) for paper, of_paper in index.items() for title, item in of_paper.items()]


def coverage() -> tuple[int, int, int]:
    """How many of the rows with published figures were measured as the paper has them, in part, and how many there are.

    A row of several experiments, which has the same figures of the same table, counts once.
    """
    rows: dict[str, set[str]] = {}
    for _, _, item in items():
        figures = read_content(item["experiment"])[0].get("published") or {}
        papers = {condition(each.cell): each for each in load_experiment(item["experiment"]).runs}
        for label, figure in figures.items():
            found = rows.setdefault(json.dumps(figure, sort_keys=True), set())
            for run in measured(item):
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
    if not (runs := measured(item)):
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
    used = {item["experiment"] for _, _, item in items()}
    shipped = {name for name in shipped_experiments() if "/" in name and (name in used or not name.startswith("ours/"))}
    if used != shipped:
        raise ValueError(f"index.yaml and the experiments differ: {sorted(used ^ shipped)}")
    rows: list[Row] = []
    for paper, title, item in items():
        done, seeds = status(item)
        page = f" ([results]({item['page']}.md))" if "page" in item else ""
        command = " ".join([item["experiment"], *(f"'{change}'" for change in item.get("changes", []))])
        rows.append((f"{paper}, {title}", f"`{command}`", done + page, seeds))
    return ("item", "experiment", "measured", "seeds"), rows


# --- the tables of the results pages --------------------------------------------


def mean(values: Sequence[float], digits: int = 1) -> str:
    text = f"{round(statistics.mean(values), digits) + 0.0:,.{digits}f}"  # no -0.0
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def value(run: Run, keys: Sequence[str]) -> float | None:
    """A fraction of the summary in percent, by the first of the keys that it has."""
    key = next((key for key in keys if key in run.summary), None)
    if key is None or (key.startswith("accuracy") and run.summary["accuracy_of"] != "the global model"):
        return None
    return 100 * float(run.summary[key])


def figure(published: Sequence[Any], names: Mapping[str, Any], label: str) -> Any:
    """What a paper prints for a run, under its label or another name or place; of a list the last, as an average is."""
    name = names.get(label, label)
    path = name if isinstance(name, list) else [*published, name]
    found = specification("published.yaml")
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, list):
        return found[-1][0] if isinstance(found[-1], list) else found[-1]
    return found


def bare(label: str) -> str:
    """A label without the values of swept keys."""
    return label.partition(", ")[0]


def cell(kind: Mapping[str, Any], runs: list[Run], label: str = "") -> str:
    """The text of a cell by its kind, described at the head of tables.yaml."""
    match kind:
        case {"published": table}:
            known = figure(table, kind.get("names", {}), label)
            return "-" if known is None else f"{known:.{kind.get('digits', 1)}f}"
        case {"values": values}:
            return str(values.get(label, "-"))
    done = [run for run in runs if run.finished]
    if not done:
        return f"diverged in round {runs[0].summary['rounds'] + 1}" if runs else "-"
    match kind:
        case {"trips": _}:
            return f"{statistics.mean(run.summary['communication_rounds'] for run in done):,.0f}"
        case {"seeds": _}:
            return str(len(done))
        case {"by seed": _}:
            return " / ".join(f"{100 * run.summary['accuracy']:.1f}" for run in done)
        case {"MiB": digits}:
            return mean([(done[0].summary["bytes_down"] + done[0].summary["bytes_up"]) / 2**20], digits)
        case {"after": number}:
            return mean([100 * run.after(number) for run in done])
        case {"rounds": [first, last]}:
            values = [100 * run.between(first, last) for run in done if len(run.curve) > last - first]
            return mean(values, kind["digits"]) if values else "-"
    keys = [kind["key"]] if isinstance(kind["key"], str) else kind["key"]
    found = [each for run in done if (each := value(run, keys)) is not None]
    if len(found) < len(done):
        return "-"
    text = mean(found, kind.get("digits", 1))
    if "beside" in kind:
        paper, table, key = kind["beside"]
        known = specification("published.yaml")[paper][table][label.partition(" ")[0]].get(key)
        text += f" ({known[0]:.1f} ± {known[1]:.1f})" if known else ""
    return f"{text} ({len(done)})" if kind.get("count") else text


def kind_of(short: Any) -> Mapping[str, Any]:
    if isinstance(short, dict):
        return short
    return {short: True} if short in ("trips", "seeds", "by seed") else {"key": short}


def grid(spec: Mapping[str, Any]) -> Table:
    """A table with a row for each strategy, or what else has runs of its own."""
    of_set, columns = spec.get("set", ""), {title: kind_of(short) for title, short in spec["columns"].items()}
    titles = spec.get("rows")
    if titles is None:
        every = by_label(of_set)
        same = len({bare(label) for label in every}) < len(every)  # the swept keys distinguish the rows
        titles = {label if same else bare(label): label for label in every}
    if key := spec.get("sort"):
        ends = {title: by_seed(runs_of(label, of_set), key).values() for title, label in titles.items()}
        titles = {title: titles[title] for title in sorted(ends, key=lambda each: -statistics.mean(ends[each] or [0]))}
    rows: list[Row] = []
    for title, label in titles.items():
        cells = []
        for kind in columns.values():
            own = {**kind, **({"key": spec["keys"][title]} if title in spec.get("keys", {}) else {})}
            reference = kind.get("run", label).format(row=bare(label))
            runs = runs_of(reference, of_set) if of_set or ":" in reference else []
            cells.append(cell(own, runs, bare(label)))
        rows.append((title, *cells))
    return (spec.get("first", "run"), *columns), rows


# --- differences -----------------------------------------------------------------

FEWEST = 3  # seeds for a test


def small(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.1g}"


class Difference(NamedTuple):
    title: str
    setup: str
    values: list[float]
    test: Paired
    p: float  # corrected
    published: float | None

    @property
    def significant(self) -> bool:
        return self.test.pairs >= FEWEST and self.p < 0.05

    def cells(self) -> tuple[str, str, str, str]:
        if not self.values:
            return "-", "", "", ""
        count = str(len(self.values))
        if self.test.pairs < FEWEST:
            return mean(self.values), count, "", ""
        return mean(self.values), count, f"{self.test.low:.1f} to {self.test.high:.1f}", small(self.p)


def corrected(tests: Sequence[Paired]) -> list[float]:
    """The p values of a table's tests, corrected for their number (Holm 1979); 1 with too few seeds."""
    order = sorted((test.p, place) for place, test in enumerate(tests) if test.pairs >= FEWEST)
    found, largest = [1.0] * len(tests), 0.0
    for rank, (p, place) in enumerate(order):
        found[place] = largest = min(1.0, max(largest, (len(order) - rank) * p))
    return found


def by_seed(runs: Iterable[Run], key: str = "accuracy") -> dict[int, float]:
    return {run.settings["seed"]: 100 * run.summary[key] for run in runs if run.finished}


def differences(name: str) -> list[Difference]:
    """The rows of a table of differences."""
    found: list[Difference] = []
    for entry in specification("results/tables.yaml")[name]["differences"]:
        pairs = entry["pairs"]
        pairs = pairs if isinstance(pairs, dict) else {f"{one} - {other}": [one, other] for one, other in pairs}
        seeds = [
            [
                {run.settings["seed"]: 100 * run.between(*rounds[0]) for run in runs}
                if rounds
                else by_seed(runs, entry.get("metric", "accuracy"))
                for runs in (runs_of(each, entry["set"]) for each in (one, other))
            ]
            for one, other, *rounds in pairs.values()
        ]
        tests = [paired(one, other) for one, other in seeds]
        setup = entry.get("setup", "")
        for (title, (first, second, *_)), (one, other), test, p in zip(
            pairs.items(), seeds, tests, corrected(tests), strict=True
        ):
            known = [figure(entry.get("published", []), entry.get("names", {}), label) for label in (first, second)]
            published = known[0] - known[1] if "published" in entry and None not in known else None
            values = [one[seed] - other[seed] for seed in one if seed in other]
            found.append(Difference(title, setup, values, test, p, published))
    return found


def compared(name: str) -> Table:
    found = differences(name)
    shown = {
        "set-up": len({each.setup for each in found}) > 1,
        "paper": any(each.published is not None for each in found),
    }
    rows: list[Row] = []
    for each in found:
        more = [each.setup] if shown["set-up"] else []
        more += ["-" if each.published is None else f"{each.published:.1f}"] if shown["paper"] else []
        rows.append((each.title, *more, *each.cells()))
    optional = [title for title, is_shown in shown.items() if is_shown]
    return ("difference", *optional, "ours, points", "seeds", "95 % interval", "p (Holm)"), rows


# --- claims -------------------------------------------------------------------------

MARGIN = 2.0  # points: an interval within it shows that two accuracies are equal
VERDICTS = ("supported", "contradicted", "not settled", "not measured")


def verdict(expects: str, found: Sequence[Difference]) -> str:
    """Whether differences are as a claim expects them, all of them or none of them significant with the other sign."""
    if not found:
        return "not measured"
    if any(each.test.pairs < FEWEST for each in found):
        return "not settled"
    if expects == "equal":
        return (
            "supported" if all(-MARGIN < each.test.low < each.test.high < MARGIN for each in found) else "not settled"
        )
    signs = {(each.test.difference > 0) == (expects == "above") for each in found if each.significant}
    if signs == {True} and all(each.significant for each in found):
        return "supported"
    return "contradicted" if signs == {False} else "not settled"


def claimed() -> list[tuple[str, str, str, str, str, str]]:
    """Each claim with its source, the published and the measured differences, the seeds and the verdict."""
    rows = []
    for paper, claims in specification("results/claims.yaml").items():
        for claim in claims:
            every = differences(claim["table"]) if "table" in claim else []
            setups = claim["setup"] if isinstance(claim.get("setup"), list) else [claim.get("setup")]
            chosen = [*itertools.product(claim.get("rows", []), setups)]
            found = [each for each in every if (each.title, each.setup) in chosen]
            if len(found) < len(chosen):
                raise ValueError(f"{claim['table']} has no rows {chosen}")
            known = dict.fromkeys(f"{each.published:.1f}" for each in found if each.published is not None)
            published = str(claim.get("published", ", ".join(known)))
            ours = ", ".join(each.cells()[0] for each in found)
            ours = (
                f"[{ours}]({claim['page']}.md) ({'; '.join(map(str, setups))})" if found else claim.get("counted", "")
            )
            seeds = (
                " to ".join(dict.fromkeys(str(each(d.test.pairs for d in found)) for each in (min, max)))
                if found
                else ""
            )
            done = "supported" if "counted" in claim else verdict(claim.get("expects", "above"), found)
            rows.append((claim["claim"], f"{paper}, {claim['source']}", published, ours, seeds, done))
    return rows


def claims() -> Table:
    return ("claim", "source", "published", "measured", "seeds", "verdict"), [*claimed()]


# --- tables that are like no other ------------------------------------------------------


def costs() -> Table:
    """FedTAN-II on MNIST; what the exchanges add is relative to the same messages without them."""
    rows: list[Row] = []
    figures = specification("published.yaml")["FedTAN"]["Table 5"].items()
    for (label, runs), (exact, paper) in zip(by_label("costs/table5").items(), figures, strict=True):
        assert label == "FedTAN" or label.endswith(f"M={exact}")
        summary, iterations = runs[0].summary, runs[0].settings["rounds"]
        plain = 4 * summary["elements_down_per_client"] * (1 + runs[0].settings["clients"]) * iterations
        sent, trips = summary["broadcast_bytes"], summary["communication_rounds"]
        shares = f"{paper['more rounds']:.2f}", f"{100 * (1 - iterations / trips):.2f}"
        bits = f"{paper['Gibit']:.4f}", f"{8 * sent / 2**30:.4f}"
        more = f"{paper['more bits']:.4f}", f"{100 * (1 - plain / sent):.4f}"
        accuracy = cell({"key": "accuracy", "digits": 2}, runs)
        rows.append((label, accuracy, f"{trips:,}", *shares, *bits, *more))
    pairs = ("more rounds, %, paper", "ours", "Gibit, paper", "ours", "more bits, %, paper", "ours")
    return ("run", "accuracy, %", "communication rounds", *pairs), rows


def common(values: Iterable[Any]) -> str:
    """The values that at least half as many runs have as the most frequent one."""
    counts = Counter(str(each) for each in values)
    most = max(counts.values())
    return " / ".join(each for each, count in counts.items() if 2 * count >= most)


def data_of(settings: Mapping[str, Any]) -> str:
    """The data set, the size of its images, and what a client has of it."""
    data = settings["data"]
    own = {key.partition("_")[0]: number for key, number in data["partition"].items() if isinstance(number, int)}
    kind = [] if data["partition"]["kind"] in own else [data["partition"]["kind"]]
    size = [f"{data['size']} pixels"] if data["size"] else []
    return ", ".join([data["name"], *size, *kind, *(f"{number} {key}" for key, number in own.items())])


def work_of(settings: Mapping[str, Any]) -> str:
    kind = "epochs" if settings["train"].get("epochs") else "steps"
    number = settings["train"][kind]
    return f"{number} {kind}" if number > 1 else f"1 {kind[:-1]}"


def rate_of(settings: Mapping[str, Any]) -> str:
    """The learning rate, and the shares of the rounds after which it falls."""
    train = settings["train"]
    schedule = train.get("schedule") or {}
    falls = [f"{100 * each:.0f} %" for each in schedule["milestones"]] if schedule.get("kind") == "step" else []
    return f"{train['lr']:g}" + (f", falls after {' and '.join(falls)}" if falls else "")


SETUP: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "data": data_of,
    "network": lambda settings: settings["model"]["name"],
    "clients": lambda settings: settings["clients"],
    "rounds": lambda settings: f"{settings['rounds']:,}",
    "local work": work_of,
    "batch": lambda settings: settings["train"]["batch_size"],
    "rate": rate_of,
}


def sets(page: str) -> Table:
    """The sets of a page: what most of their runs have, their seeds, and their files."""
    rows: list[Row] = []
    for folder in sorted(file.parent for file in (RESULTS / page).glob("*/report.json")):
        runs = read(folder.relative_to(RESULTS).as_posix())
        seeds = len({run.settings["seed"] for run in runs})
        kept = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".yaml", ".py", ".txt")]
        links = ", ".join(f"[{file.stem}]({file.relative_to(RESULTS)})" for file in kept)
        setup = (common(each(run.settings) for run in runs) for each in SETUP.values())
        rows.append((folder.name, *setup, str(seeds), links))
    return ("set", *SETUP, "seeds", "files"), rows


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


EVIDENCE = {  # rows of `evidence`: what clients have, page and anchor, set, metric
    "similar data: MNIST": ("mnist.md#accuracies", "mnist/iid-lr0.5"),
    "few classes: MNIST": ("mnist.md#accuracies", "mnist/falling"),
    "few classes: CIFAR-10": ("fixbn.md#accuracies", "fixbn/table4"),
    "few classes: CIFAR-10, 16 pixels": ("fixbn.md#accuracies", "fixbn/table4-16px"),
    "few classes: CIFAR-10, a LeNet": ("fixbn.md#accuracies", "fixbn/lenet"),
    "few classes: CIFAR-10, 16 pixels, 20 % of the rounds": ("fedtan.md", "fedtan/table2-16px"),
    "few classes, 5 of 100 clients a round: MNIST": ("clients.md", "clients/participation"),
    "other images, 743 each: digits": ("fedwon.md#digits-five", "fedwon/digits"),
    "other images, 62 each: objects": ("fedwon.md#office-caltech-10", "fedwon/office"),
}


def evidence() -> Table:
    """What `docs/which-strategy.md` decides by: accuracies of the strategies, on the clients that it tells apart."""
    labels = {"batch norm": ("FedAvg+BN", "FedAvg", "BN"), "group norm": ("FedAvg+GN", "GN"), "FixBN": ("FixBN",)}
    labels |= {"FedTAN": ("FedTAN",), "FedBN": ("FedBN",), "FedWon": ("FedWon",), "own data only": ("Standalone",)}
    rows: list[Row] = []
    for name, (link, of_set) in EVIDENCE.items():
        key = "clients_own_accuracy" if of_set.startswith("fedwon/") else "accuracy"
        runs = by_label(of_set) if of_set != "mnist/falling" else by_label("mnist/noniid-lr0.5") | by_label(of_set)
        runs = {bare(label): each for label, each in runs.items() if "_train=" not in label or "=0.05" in label}
        found = {
            column: next((runs[label] for label in names if label in runs), [])
            for column, names in labels.items()
            if key != "accuracy" or column not in ("FedBN", "own data only")  # with a model for each client
        }
        seeds = sorted({len(each) for each in found.values()} - {0})
        cells = (cell({"key": key}, found[column]) if found.get(column) else "" for column in labels)
        rows.append((f"[{name}](results/{link})", *cells, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))))
    return ("what clients have", *labels, "seeds"), rows


def from_specification(name: str) -> Callable[[], Table]:
    spec = specification("results/tables.yaml")[name]
    return lambda: compared(name) if "differences" in spec else grid(spec)


PAGES_WITH_SETS = sorted({file.parents[1].name for file in RESULTS.glob("*/*/report.json")})
TABLES: dict[str, Callable[[], Table]] = {
    "papers": papers,
    "evidence": evidence,
    "claims": claims,
    "results costs": costs,
    **{name: from_specification(name) for name in specification("results/tables.yaml")},
    **{f"sets {page}": functools.partial(sets, page) for page in PAGES_WITH_SETS},
}
