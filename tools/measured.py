"""What was measured of each table and figure of the papers, which docs/results/index.yaml lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from described import describe
from results import Row, Run, Table, as_csv, by_label, read, span, specification

from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment, values_in_words
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.trees import flat_settings

# Settings that a published result doesn't depend on, or that papers don't mention.
FREE = ("name", "label", "cell", "size", "seed", "seeds", "track", "published", "engine", "evaluate")
FREE_KEYS = ("data.root", "data.revision", "data.memory", "train.channels_last", "train.compile")

# Elsewhere None is the default of the time of the run, which a raw file may have as a value.
NONE_COUNTS = (
    "data.examples", "data.test_examples", "data.partition.examples", "train.steps", "train.epochs",
    "train.schedule.switch",
)  # fmt: skip


def items() -> list[tuple[str, str, Mapping[str, Any]]]:
    """Each table and figure with its paper and title."""
    index = specification("results/index.yaml")
    return [(paper, title, item) for paper, of_paper in index.items() for title, item in of_paper.items()]


def rows_of(experiment: str, changes: Sequence[str] = ()) -> dict[str, list[Settings]]:
    """The settings of an experiment by the label of a row, once for each seed."""
    rows: dict[str, list[Settings]] = {}
    for paper in load_experiment(experiment, changes).runs:
        label = ", ".join([paper.cell.row, *values_in_words(paper.cell)[: len(paper.cell.sweep)]])  # not of `tune`
        row = rows.setdefault(label, [])
        row += [paper] if paper.seed not in {each.seed for each in row} else []
    return rows


def runs_for(item: Mapping[str, Any]) -> list[Run]:
    """The runs of an item's sets that count for it, by their labels in the experiment."""
    found = []
    for name, chosen in item.get("sets", {}).items():
        labels = chosen or {run.label: run.label for run in read(name)}
        if missing := labels.keys() - by_label(name).keys():
            raise ValueError(f"{name} has no run {', '.join(map(repr, missing))}")
        found += [run._replace(label=labels[run.label]) for run in read(name) if run.label in labels]
    return found


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key, with the defaults of the strategy's arguments."""
    own = ":" in (name := settings["strategy"]["name"])  # a strategy of a results page
    arguments = {} if own else {f"strategy.{each.name}": each.default for each in describe(name).arguments}
    values = {**arguments, **flat_settings(settings)}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if augment := found.get("data.augment"):
        found["data.augment"] = sorted(augment, key=str)  # a flip and a crop are the same in any order
    return found


def differing(paper: Settings, run: Mapping[str, Any]) -> set[str]:
    """The settings of a run that are not the experiment's; raw files may lack an option, or have one that is gone."""
    expected, found = flat(paper.model_dump(mode="json")), flat(run)
    return {
        key
        for key in {*expected, *found}
        if key.partition(".")[0] not in FREE
        and key not in (*FREE_KEYS, "rounds")
        and expected.get(key) != found.get(key)
        and (key.startswith("strategy.") or key in NONE_COUNTS or None not in (expected.get(key), found.get(key)))
    }


def outcomes(item: Mapping[str, Any], rows: Mapping[str, list[Settings]]) -> Iterator[tuple[Run, float, set[str]]]:
    """The runs that count for an item, each with its percentage of the paper's rounds, and its other settings."""
    for run in runs_for(item):
        if run.label not in rows:
            raise ValueError(f"{item['experiment']} has no run {run.label!r}")
        paper = rows[run.label][0]
        yield run, 100 * run.settings["rounds"] / paper.rounds, differing(paper, run.settings)


FEWEST_SEEDS = 3  # of a result that is measured in full, if the experiment asks for as many


def printed(table: Mapping[str, Any], labels: Collection[set[str]], above: Sequence[str] = ()) -> Iterator[set[str]]:
    """The results of a table, by the words of their labels; `labels` are those of its experiment, in words."""
    for key, value in table.items():
        words = [*above, *key.split(", ")]
        if not any(label >= {*words} for label in labels):
            raise ValueError(f"no run of the experiment is called {', '.join(words)}")
        is_divided = isinstance(value, dict) and any(next(iter(value)) in label for label in labels)
        yield from printed(value, labels, words) if is_divided else [{*words}]


def coverage() -> dict[str, Counter[str]]:
    """By paper: how many costs and accuracies were measured as it has them, how many results in part, and how many not.

    A result is what a paper prints for one method in one setting.
    """
    counts: dict[str, Counter[str]] = {}
    for paper, title, first in items():
        if (table := specification("published.yaml")[paper].get(title)) is None:
            continue
        rows = rows_of(first["experiment"])
        same = [item for _, _, item in items() if item["experiment"] == first["experiment"]]
        runs = [(item, *each) for item in same for each in outcomes(item, rows) if each[0].finished]
        for words in printed(table, [{*label.split(", ")} for label in rows]):
            of_result = [each for each in runs if words <= {*each[1].label.split(", ")}]
            full = dict[str, set[int]]()
            for item, run, share, other in of_result:
                if share == 100 and not other and "inferred" not in item:
                    full.setdefault(run.label, set()).add(run.seed)
            is_full = any(len(seeds) >= min(FEWEST_SEEDS, len(rows[name])) for name, seeds in full.items())
            in_full = "costs" if first.get("costs") else "accuracies"
            counts.setdefault(paper, Counter())[in_full if is_full else "in part" if of_result else "not measured"] += 1
    return counts


def of_papers(found: Mapping[str, Counter[str]]) -> Counter[str]:
    """The same of the papers together."""
    return sum((each for paper, each in found.items() if paper != "FLamby"), Counter[str]())


def coverage_counted() -> str:
    found = of_papers(coverage())
    return (
        f"{found.total()} results in three papers' tables, we have [measured](docs/results/papers.md) "
        f"{found['costs'] + found['accuracies']} in full, with the paper's rounds and settings ({found['costs']} costs "
        f"and {found['accuracies']} accuracies on a JPEG copy of CIFAR-10), and {found['in part']} in part; "
        f"{found['not measured']} are still open"
    )


def covered() -> Table:
    found = coverage()
    found |= {"together": of_papers(found)}
    rows: list[Row] = [
        (paper, str(each.total()), *(str(each[kind]) for kind in ("costs", "accuracies", "in part", "not measured")))
        for paper, each in sorted(found.items(), key=lambda each: each[0] == "FLamby")
    ]
    columns = "published results", "costs measured in full", "accuracies measured in full", "in part", "not measured"
    return ("paper", *columns), rows


def status(item: Mapping[str, Any]) -> tuple[str, str]:
    """What was measured of an item, and with how many seeds of the experiment's."""
    rows = rows_of(item["experiment"], item.get("changes", ()))
    if not (found := [*outcomes(item, rows)]):
        return item.get("instead", "not measured") + (f"; needs {item['needs']}" if "needs" in item else ""), ""
    done = Counter(label for label, _ in {(run.label, run.seed) for run, *_ in found})  # seeds
    failed = {run.label for run, *_ in found if not run.finished}
    shares, other = {share for _, share, _ in found}, set[str]().union(*(keys for *_, keys in found))
    budget = "all" if shares == {100} else f"{span(shares)} % of the"
    whole = "whole budget" if shares == {100} else f"{budget} rounds"
    words = (
        f"{budget} rounds of {item['inferred']}, which is inferred" if "inferred" in item else whole,
        f"{len(done)} of {len(rows)} runs" if len(done) < len(rows) else "",
        f"{len(failed)} failed" if failed else "",
        f"other {', '.join(f'`{key}`' for key in sorted(other))}" if other else "",
        item.get("differs", ""),
    )
    return "; ".join(filter(None, words)), f"{span(done.values())} of {len(rows[found[-1][0].label])}"


def papers() -> str:
    """Each table and figure, its experiment, and what was measured of it, as docs/results/papers.csv has it."""
    used = {item["experiment"] for _, _, item in items()}
    shipped = {name for name in shipped_experiments() if "/" in name and (name in used or not name.startswith("ours/"))}
    if used != shipped:
        raise ValueError(f"index.yaml and the experiments differ: {sorted(used ^ shipped)}")
    rows = (
        (paper, title, " ".join([item["experiment"], *item.get("changes", [])]), *status(item), item.get("page", ""))
        for paper, title, item in items()
    )
    return as_csv(("paper", "item", "experiment", "measured", "seeds", "page"), rows)
