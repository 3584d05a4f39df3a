"""The results pages say what their raw files say: tools/tables.py makes the tables, sentences are checked here."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import outputs
import pytest
import results
import yaml
from scipy.optimize import brentq

from fedbn_flwr.experiment.file.expansion import condition
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.extensions.private.noise import epsilon_of
from fedbn_flwr.results.report.tables import Paired, paired
from tests.support.command import ROOT

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def test_each_table_of_a_results_page_is_generated() -> None:
    names = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names += re.findall(r"<!-- table: (.*?) -->", text)
        by_hand = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
        assert not re.search(r"(?:^|\n\n)\|", by_hand), f"{page.name} has a table that its raw files cannot change"
    assert sorted({*names} - {"experiments"}) == sorted({*results.TABLES, *outputs.TABLES} - {"evidence"})


def test_each_raw_file_of_the_index_exists() -> None:
    index = yaml.safe_load(results.INDEX.read_text(encoding="utf-8"))
    entries = [entry for items in index.values() for item in items.values() for entry in item.get("files", [])]
    assert entries
    for entry in entries:
        assert results.measured(entry)


def test_each_run_that_has_all_settings_of_a_paper_s_row_counts_for_its_item() -> None:
    """Several tables share a row: a run of one is a result of the others too."""
    index = yaml.safe_load(results.INDEX.read_text(encoding="utf-8"))
    items = [item for of_paper in index.values() for item in of_paper.values()]
    counted = {
        (item["experiment"], run.label, entry["file"])
        for item in items
        for entry in item.get("files", [])
        for run in results.measured(entry)
    }
    rows = {
        (name, condition(paper.cell)): paper
        for name in {item["experiment"] for item in items}
        for paper in load_experiment(name).runs
    }
    similar: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for row, paper in rows.items():
        similar.setdefault(in_short(paper.model_dump(mode="json")), []).append(row)
    files = [file.relative_to(results.RESULTS).as_posix() for file in sorted(results.RESULTS.rglob("*.json"))]
    equal = {
        (*row, name)
        for name in files
        if not name.endswith((results.ENVIRONMENT, "train-loss.json"))
        for (run, *_) in results.by_label(name).values()
        for row in similar.get(in_short(run.settings), ())
        if run.finished and not results.differing(rows[row], run.settings)
    }
    assert ("fixbn/tableI", "GN, groups=2", "fixbn/table4-GN.json") in equal
    assert equal <= counted


def in_short(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """A part of the settings: all of them are compared only where this is equal, which saves time."""
    names = (
        settings["strategy"]["name"],
        settings["data"]["name"],
        settings["model"]["name"],
        settings["model"]["norm"],
    )
    return (*names, settings["rounds"], settings["clients"], settings["train"]["lr"])


def test_the_baseline_of_the_demo_sees_as_many_images_as_the_clients() -> None:
    seen: dict[str, set[int]] = {}
    for run in (*results.read("demo/report.json"), *results.read(BASELINE)):
        train = run.settings["train"]
        seen.setdefault(run.label, set()).add(run.settings["clients"] * train["steps"] * train["batch_size"])
    assert {*map(frozenset, seen.values())} == {frozenset({800})}


@pytest.mark.parametrize(
    ("experiment", "file"),
    [
        ("demo", "demo/report.json"),
        ("ours/clients", "clients/clients.json"),
        ("ours/participation", "clients/participation.json"),
        ("ours/heart", "heart/report.json"),
    ],
)
def test_a_page_s_command_carries_out_its_runs(experiment: str, file: str) -> None:
    """The table of the papers says where a paper's experiment differs from its runs; these have no such table."""
    runs = {run.label: run for run in load_experiment(experiment).runs}
    for run in results.read(file):
        assert results.differing(runs[run.label], run.settings) == set()


# --- what the table of the papers may claim ------------------------------------------


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes report.json: runs of fedtan/table3 with changes of their settings."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    paper = {run.label: run.model_dump(mode="json") for run in load_experiment("fedtan/table3").runs}

    def write(*runs: tuple[str, dict[str, Any]], status: str = "finished") -> None:
        report = [
            {"settings": {**paper[label], **changes}, "summary": {"status": status}, "curve": []}
            for label, changes in runs
        ]
        (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
        results.read.cache_clear()

    yield write
    results.read.cache_clear()


ITEM: dict[str, Any] = {"experiment": "fedtan/table3", "files": [{"file": "report.json"}]}
EVERY: tuple[tuple[str, dict[str, Any]], ...] = (("FedAvg+GN", {}), ("FedAvg+BN", {}), ("FedTAN", {}))


def test_an_item_without_a_raw_file_is_not_measured() -> None:
    assert results.status({"experiment": "fedtan/table3"}) == ("not measured", "")
    assert results.status({"experiment": "fedtan/table3", "needs": "a GPU"}) == ("not measured; needs a GPU", "")
    assert results.status({"experiment": "fedtan/table3", "impossible": "no data"}) == ("not possible: no data", "")


def test_the_whole_budget_is_all_runs_with_the_settings_of_the_experiment(raw: Callable[..., None]) -> None:
    raw(*EVERY)
    assert results.status(ITEM) == ("whole budget", "1 of 1")
    raw(*EVERY[:2])
    assert results.status(ITEM) == ("whole budget; 2 of 3 runs", "1 of 1")
    raw(*EVERY, status="failed")
    assert results.status(ITEM) == ("whole budget; 3 failed", "1 of 1")
    strategy = {"name": "FedTAN", "exchange": "joined"}
    raw(*EVERY[:2], ("FedTAN", {"strategy": strategy, "engine": {"name": "ray"}}))
    assert results.status(ITEM) == ("whole budget; other `strategy.exchange`", "1 of 1")


def test_rounds_that_the_paper_does_not_state_are_not_its_whole_budget(raw: Callable[..., None]) -> None:
    raw(*EVERY)
    inferred = {**ITEM, "inferred": "FedBN's protocol"}
    assert results.status(inferred) == ("all rounds of FedBN's protocol, which is inferred", "1 of 1")
    rounds = load_experiment("fedtan/table3").runs[0].rounds
    raw(*((label, {"rounds": rounds / 4}) for label, _ in EVERY))
    assert results.status(inferred)[0] == "25 % of the rounds of FedBN's protocol, which is inferred"


def test_a_run_is_compared_with_the_experiment_as_its_command_changes_it(raw: Callable[..., None]) -> None:
    raw(*((label, {"clients": 3}) for label, _ in EVERY))
    assert results.status(ITEM) == ("whole budget; other `clients`", "1 of 1")
    assert results.status({**ITEM, "changes": ["clients=3"]}) == ("whole budget", "1 of 1")


def test_fewer_rounds_are_a_share_and_other_images_are_named(raw: Callable[..., None]) -> None:
    raw(("FedAvg+GN", {"rounds": 2, "data": {"examples": 500}}), ("FedTAN", {"clients": 3}))
    text, _ = results.status(ITEM)
    assert text.startswith("100 to 200 % of the rounds; 2 of 3 runs; other `clients`, `data.examples`")


def test_an_index_that_claims_more_than_there_is_is_refused(raw: Callable[..., None]) -> None:
    raw(*EVERY)
    with pytest.raises(ValueError, match=r"report\.json has no run 'FixBN'"):
        results.status({**ITEM, "files": [{"file": "report.json", "labels": {"FixBN": "FedTAN"}}]})
    with pytest.raises(ValueError, match=r"fedtan/table3 has no run 'SiloBN'"):
        results.status({**ITEM, "files": [{"file": "report.json", "labels": {"FedTAN": "SiloBN"}}]})


def test_p_values_are_corrected_for_the_number_of_tests() -> None:
    """Holm's example: the smallest of m times m, the next times m - 1, and none below the one before."""
    tests = [Paired(3, p=each) for each in (0.01, 0.04, 0.03)]
    assert results.corrected([*tests, Paired(1)]) == pytest.approx([0.03, 0.06, 0.06, 1.0])
    assert results.corrected([Paired(3, p=0.7), Paired(3, p=0.8)]) == [1.0, 1.0]


def test_a_sign_is_of_a_difference_that_both_have() -> None:
    def seeds(*values: float) -> dict[int, float]:
        return dict(enumerate(values))

    far, near, zero = seeds(5.0, 5.1, 5.2), seeds(0.1, -0.2, 0.2), seeds(0.0, 0.0, 0.0)
    rows = {"far": (far, zero, 3.0), "not": (far, zero, -3.0), "near": (near, zero, -0.1), "one": (seeds(1), zero, 1.0)}
    signs = [row[-1] for row in results.verdict("100 %", rows)[1]]
    assert signs == ["agrees", "**differs**", "no difference in either", "agrees, one seed"]


# --- sentences with figures ----------------------------------------------------------


def final(rule: str) -> list[float]:
    return list(results.by_seed(results.by_label(*results.QUARTER)[rule]).values())


def listed(values: list[float], digits: int = 1) -> str:
    *first, last = (f"{value:.{digits}f}" for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def fixbn() -> Iterator[str]:
    table4 = results.published("FixBN", "Table 4")
    more = [one - other for one, other in zip(final("FixBN"), final("BN"), strict=True)]
    yield f"FixBN is {listed(more)} points above BN"
    above = [final(rule)[0] - final("BN")[0] for rule in ("GN+WS", "IN")]
    yield f"instance norm are {above[0]:.0f} and {above[1]:.0f} points above batch norm, LN and Fixup below it"
    assert all(final(rule)[0] < final("BN")[0] for rule in ("LN", "Fixup"))
    quarter = results.by_label(*results.QUARTER)
    assert all(one.after(80) == other.after(80) for one, other in zip(quarter["FixBN"], quarter["BN"], strict=True))
    early = [one.after(90) > other.after(90) for one, other in zip(quarter["FixBN"], quarter["BN"], strict=True)]
    assert early == [False, False, True]
    yield "Ten rounds after the freeze it is below BN with two seeds and above it with the third"
    one, other = (quarter[rule][1] for rule in ("FixBN", "BN"))
    assert all(one.after(number) < other.after(number) + 0.03 for number in range(90, 121, 10))
    assert one.after(130) > other.after(130) + 0.1
    late = [100 * (run.after(130) - run.after(160)) for run in quarter["FixBN"]]
    assert [f"{each:.0f}" for each in late] == ["-1", "5", "-0"]
    yield "is divided by ten again, and loses five points from round 130 to 160"
    frozen = {label: each[0] for label, each in quarter.items() if label in ("Affine", "Statistics and affine")}
    ends = [results.by_seed(quarter[rule])[1] for rule in ("BN", "FixBN")]
    gains = [100 * run.summary["accuracy"] - end for run, end in zip(frozen.values(), ends, strict=True)]
    there = results.published("FixBN", "Table H")
    yield f"only these {gains[0]:+.1f} points (published {there['Affine'] - there['Nothing']:+.1f})"
    yield f"{gains[1]:+.1f} points (published {there['Statistics and affine'] - there['Statistics']:+.1f})"
    one_step = {label: results.by_seed(runs) for label, runs in results.by_label(*results.TABLE1).items()}
    lost = {
        (norm, rate): [one_step[f"Central, {norm}, lr={rate}"][seed] - accuracy for seed, accuracy in each.items()]
        for norm, rate in itertools.product(("GN", "BN"), (0.02, 0.2))
        for each in [one_step[f"Federated, {norm}, lr={rate}"]]
    }
    gn_low, gn_high, bn_low, bn_high = map(statistics.mean, lost.values())
    yield f"With group norm both places end within {max(abs(gn_low), abs(gn_high)):.1f} points of each other"
    yield f"ends {bn_low:.0f} and {bn_high:.0f} points below the centralised one (published: 46), with each seed"
    assert min(lost["BN", 0.02] + lost["BN", 0.2]) > 37
    full, small = (
        {
            rule: {run.settings["seed"]: [100 * run.after(number) for number in range(320, 641, 10)] for run in runs}
            for rule, runs in results.by_label(*files).items()
        }
        for files in (results.FULL, results.WHOLE)
    )
    ahead, ahead_small = (
        {
            number: [one - other for one, other in zip(frozen, curves["BN"][number], strict=True)]
            for number, frozen in curves["FixBN"].items()
        }
        for curves in (full, small)
    )
    normed = list(full["BN"].values())
    ends = [each[-1] for each in ahead.values()]
    yield f"FixBN ends [{statistics.mean(ends):.1f} points above batch norm](#all-rounds-images-of-32-pixels)"
    yield f"({listed(ends)} with two seeds; published"
    assert [each[0] for each in ahead.values()] == [0, 0]
    yield f"when both have {listed([each[0] for each in normed])} %. It is above BN in each evaluation after that"
    assert min(value for each in ahead.values() for value in each[1:]) > 0
    late = [value for each in ahead.values() for value in each[(490 - 320) // 10 :]]
    yield f"from round 490 on, at the smallest rate, by {min(late):.0f} to {max(late):.0f} points"
    falls = [each[1] - each[-1] for each in normed]
    yield f"Batch norm ends {listed(falls)} points below its accuracy of round 330"
    assert max(each[-1] for each in normed) < table4["BN"]
    apart = [full[rule][0][-1] - full[rule][1][-1] for rule in ("BN", "FixBN")]
    yield f"With seed 1 both end lower, batch norm by {apart[0]:.1f} and FixBN by {apart[1]:.1f} points"
    first, second = full["FixBN"].values()
    assert max(second) == second[(510 - 320) // 10]
    yield f"FixBN falls from {max(second):.1f} % in round 510 to {second[-1]:.1f} %; with seed 0 it ends"
    yield f"with seed 0 it ends {max(first) - first[-1]:.1f} points below its best"
    (group,) = results.by_label(*results.FULL)["GN"]
    ended = 100 * group.summary["accuracy"]
    yield f"Group norm, with seed 0 only, ends at {ended:.1f} % (published {table4['GN']:.1f})"
    yield f"{ended - normed[0][-1]:.1f} points above batch norm and {first[-1] - ended:.1f} below FixBN"
    assert normed[1][-1] < ended < second[-1]
    best = max(range(10, 641, 10), key=group.after)
    yield f"and {100 * group.after(best) - ended:.1f} below its best, of round {best}"
    yield f"also with recorded passes, {group.summary['seconds'] / 60:.0f} minutes"
    ahead = ahead_small
    assert {each[0] for each in ahead.values()} == {0}
    ends = [{number: curve[-1] for number, curve in small[rule].items()} for rule in ("FixBN", "BN")]
    test = paired(*ends)
    yield f"with images of 16 pixels [{test.difference:.1f} points above](#all-rounds-images-of-16-pixels) (five seeds"
    assert test.pairs == 5
    assert not all(each[1] > 0 for each in ahead.values())
    assert all(each[2] > 0 for each in ahead.values())
    yield "Ten rounds later it is not yet above BN with each seed, twenty rounds later it is"
    yield f"when both have {listed([small['BN'][number][0] for number in ahead])} %"
    late = slice((490 - 320) // 10, None)
    above = [value for each in ahead.values() for value in each[late]]
    yield f"From round 490 on, at the smallest rate, FixBN is {min(above):.0f} to {max(above):.0f} points above"
    frozen = [value for each in small["FixBN"].values() for value in each[late]]
    yield f"it stays between {min(frozen):.0f} and {max(frozen):.0f} %"
    free = [value for each in small["BN"].values() for value in each[late]]
    yield f"and batch norm between {min(free):.0f} and {max(free):.0f} %, below its accuracy of round 330 with each"
    assert all(max(each[late]) < each[1] for each in small["BN"].values())
    last = {rule: {number: curve[-1] for number, curve in each.items()} for rule, each in small.items()}
    lower, upper = (paired(last["GN"], last[rule]) for rule in ("BN", "FixBN"))
    assert lower.pairs == upper.pairs == 5
    interval = f"95 % interval {test.low:.1f} to {test.high:.1f})"
    yield f"(five seeds, {interval} and {-upper.difference:.1f} above group norm. With"
    chances = results.corrected([test, lower, upper])
    yield f"Group norm ends {lower.difference:.1f} points above batch norm (p = {chances[1]:.1g}) and"
    yield f"and {-upper.difference:.1f} below FixBN (p = {chances[2]:.1g}): both signs"
    assert all(last["BN"][number] < each < last["FixBN"][number] for number, each in last["GN"].items())
    there = [table4["GN"] - table4["BN"], table4["FixBN"] - table4["GN"]]
    yield f"both signs are the paper's ({there[0]:.1f} and {there[1]:.1f}), with each seed"
    lenet = results.by_label(*results.LENET)
    ends = {rule: results.by_seed(runs) for rule, runs in lenet.items()}
    free, group = (paired(ends["FixBN"], ends[rule]) for rule in ("BN", "GN"))
    assert free.pairs == group.pairs == 5
    yield f"it ends {free.difference:.1f} points above batch norm (five seeds) and is not distinguished from group norm"
    others = [free, group, paired(ends["GN"], ends["BN"])]
    assert [p < 0.05 for p in results.corrected(others)] == [True, False, True]
    ahead = [value - ends["BN"][number] for number, value in ends["FixBN"].items()]
    yield f"FixBN ends above batch norm with each seed, by {min(ahead):.0f} to {max(ahead):.0f} points"
    pairs = list(zip(lenet["FixBN"], lenet["GN"], strict=True))
    above = [100 * (one.after(number) - other.after(number)) for one, other in pairs for number in range(490, 580, 10)]
    yield f"From round 490 to 570, at the last rate, it is {min(above):.0f} to {max(above):.0f} points above group norm"
    before = paired(*({run.settings["seed"]: 100 * run.after(570) for run in lenet[rule]} for rule in ("FixBN", "GN")))
    yield f"in round 570 by {before.difference:.1f} points (p = {before.p:.1g}, not corrected)"
    *fall, still = sorted((100 * (one.after(570) - one.after(640)) for one, _ in pairs), reverse=True)
    yield f"Until the end it falls by {min(fall):.0f} to {max(fall):.0f} points with four of the seeds"
    yield f"with the fifth by {still:.1f}"
    moved = [100 * abs(one.after(570) - one.after(640)) for rule in ("BN", "GN") for one in lenet[rule]]
    yield f"batch norm and group norm change by less than {math.ceil(max(moved))} point"
    slow = [[float(cell[:-2]) for cell in row[4:]] for row in results.fixbn_lenet_rate()[1]]
    yield f"FixBN returns to {min(each[0] for each in slow):.1f} % or more within five rounds and stays there"


def gain_of_fedbs(rule: str = "FedAvg", after: int = 40) -> Paired:
    means = results.fedbs_means(after)
    test = paired(means["FedBS"], means[rule])
    assert test.pairs == 5
    return test


def fedbs() -> Iterator[str]:
    for file, others in (("mnist", "mnist-fedbn"), ("fashion-mnist", "fashion-mnist")):
        runs = results.by_label(f"fedbs/{file}.json")
        (fedbn,) = results.by_label(f"fedbs/{others}.json")["FedBN"]
        own = fedbn.summary
        mean = f"{100 * own['clients_accuracy']:.1f} % on all test examples"
        yield mean if file == "mnist" else f"{mean} after 60 rounds"
        spread = f" ± {100 * own['clients_own_accuracy_std']:.1f}" if file == "fashion-mnist" else ""
        yield f"{100 * own['clients_own_accuracy']:.1f}{spread} % on"
    before, after, changed = [], [], []
    for files in (["fedbs/mnist.json"], results.FASHION):
        runs = results.by_label(*files)
        for one, other in zip(runs["FedBS"], runs["FedAvg"], strict=True):
            ahead = [100 * (one.after(number) - other.after(number)) for number in range(1, 61)]
            changed.append(one.summary["switch_round"])
            before.append(-statistics.mean(ahead[: changed[-1]]))
            after.append(ahead[changed[-1] :])
    yield f"in round {changed[0]} on MNIST and in rounds {listed(changed[1:], 0)} on Fashion-MNIST"
    yield f"by {before[0]:.0f} points on average on MNIST, and by {listed(before[1:], 0)} on Fashion-MNIST"
    counts = [f"{sum(each > 0 for each in seed)} of {len(seed)}" for seed in after]
    gains = [statistics.mean(seed) for seed in after]
    yield f"in {counts[0]} rounds of MNIST, by {gains[0]:.1f} points on average"
    yield f"in {', '.join(counts[1:-1])} and {counts[-1]} rounds of Fashion-MNIST, by {listed(gains[1:])}"
    fashion = results.by_label(*results.FASHION)
    curves = {
        rule: [[100 * run.after(number) for number in range(1, 61)] for run in fashion[rule]]
        for rule in ("FedBS", "FedAvg", "FedProx")
    }
    jumps = [abs(b - a) for seeds in curves.values() for curve in seeds for a, b in itertools.pairwise(curve[11:])]
    yield f"by up to {max(jumps):.0f} points from one round to the next"
    yield f"It is {min(before[1:]):.0f} to {max(before[1:]):.0f} points below FedAvg until it switches"
    whole, last = (gain_of_fedbs(after=number) for number in (0, 59))
    yield f"FedBS is {-whole.difference:.1f} points below FedAvg (p = {whole.p:.1g}) on Fashion-MNIST, and after round"
    yield f"after round 60 {last.difference:.1f} above it (p = {last.p:.1g}; five seeds)"
    first = {
        rule: [next((number for number, value in enumerate(curve, 1) if value >= 85), None) for curve in seeds]
        for rule, seeds in curves.items()
    }
    assert first["FedAvg"] == first["FedProx"]
    assert first["FedAvg"].pop() is None
    yield f"it is {listed(first['FedBS'], 0)} for FedBS"
    yield f"and {', '.join(map(str, first['FedAvg']))} and none for FedAvg and FedProx"
    late, other = map(gain_of_fedbs, ("FedAvg", "FedProx"))
    above_fedprox = f"{other.difference:.1f} above FedProx (p = {other.p:.1g})"
    yield f"{late.difference:.1f} points above FedAvg (p = {late.p:.1g}) and {above_fedprox}"


def fedtan() -> Iterator[str]:
    runs = results.without_sweep(results.by_label(*results.SIXTEEN))
    end = {rule: results.by_seed(each) for rule, each in runs.items()}
    one = {"FedAvg+Algorithm 2": [0], "FedAvg+GN": [0]}
    assert {rule: [*seeds] for rule, seeds in end.items()} == {"FedTAN": [0, 1], "FedAvg+BN": [0, 1]} | one
    free = listed([end["FedTAN"][seed] - accuracy for seed, accuracy in end["FedAvg+BN"].items()])
    ends = results.share("accuracy", unit=" %")(runs["FedTAN"])
    yield f"FedTAN ends at {ends} (two seeds), {free} points above batch norm, and with"
    figures = results.published("FedTAN", "Table 2")
    known = figures["FedTAN"][-1][0] - figures["FedAvg+GN"][-1][0]
    group = end["FedTAN"][0] - end["FedAvg+GN"][0]
    first = end["FedTAN"][0] - end["FedAvg+Algorithm 2"][0]
    yield f"and with one seed {first:.1f} points above Algorithm 2, which exchanges"
    yield f"and {group:.1f} points above group norm (published: {known:.1f}, after all rounds)"
    (forward,) = runs["FedAvg+Algorithm 2"]
    rise = [100 * forward.after(at) for at in (1200, 1250, 2000)]
    yield f"Algorithm 2 rises from {rise[0]:.1f} to {rise[1]:.1f} %, its best, and ends at {rise[2]:.1f} %"
    assert forward.after(1250) == max(point["accuracy"] for point in forward.curve)
    gain = end["FedTAN"][0] - end["FedAvg+BN"][0]
    yield f"with this seed the gradients of the statistics add {first:.1f} of FedTAN's {gain:.1f} points above batch"
    (before, low), (last, high) = (
        [listed([100 * run.after(at) for run in runs[rule]]) for rule in ("FedTAN", "FedAvg+GN")] for at in (1200, 1250)
    )
    yield f"from {before} % in round 1,200 to {last} % in round 1,250 with the two seeds, and"
    yield f"group norm from {low} to {high} %"
    first = [100 * run.after(at) for run in runs["FedAvg+BN"] for at in range(1250, 2001, 50)]
    yield f"batch norm stays between {min(first):.1f} and {max(first):.1f} % from there on with both"
    minutes = [run.summary["seconds"] / 60 for each in runs.values() for run in each]
    yield f"{min(minutes):.0f} to {max(minutes):.0f} minutes a run"


def fedwon() -> Iterator[str]:
    def on_own_images(by_rule: Mapping[str, list[results.Run]]) -> dict[str, dict[int, float]]:
        return {rule: results.by_seed(seeds, "clients_own_accuracy") for rule, seeds in by_rule.items()}

    def minutes_of(by_rule: Mapping[str, list[results.Run]]) -> list[float]:
        return sorted(run.summary["seconds"] / 60 for seeds in by_rule.values() for run in seeds)

    runs = results.by_label("fedwon/digits/report.json")
    switches = {rule: {run.settings["train"]["schedule"]["switch"] for run in seeds} for rule, seeds in runs.items()}
    assert {rule for rule, found in switches.items() if found != {None}} == {"FixBN"}
    final = on_own_images(runs)
    tests = {rule: paired(final["FedWon"], final[rule]) for rule in final if rule != "FedWon"}
    above = [-tests[rule].difference for rule in ("FedAvg+LN", "FedAvg+GN")]
    yield f"group norm and layer norm are {min(above):.1f} to {max(above):.1f} points above FedWon"
    same, everywhere = results.THREE_DOMAINS, results.fedwon_averages("Digits-Five")
    assert max(everywhere, key=everywhere.__getitem__) == "FedWon"
    ahead = [same["FedWon"] - same[rule] for rule in ("FedAvg+GN", "FedAvg+LN")]
    yield f"In the paper FedWon is first over all five domains, and {listed(ahead)} points above them over these three"
    yield "FedBN at {FedBN}, FedWon at {FedWon}, group norm at {FedAvg+GN} and layer norm at {FedAvg+LN} %".format(
        **same
    )
    here = [statistics.fmean(final[rule].values()) for rule in ("FedBN", "FedWon", "FedAvg+GN", "FedAvg+LN")]
    yield f"Here they have {listed(here)} %"
    yield f"by {same['FedBN'] - same['FedWon']:.1f} points in the paper and by {here[0] - here[1]:.1f} here"
    assert {rule for rule, test in tests.items() if test.p < 0.05} == {"FedAvg+GN", "FedAvg+LN", "FixBN"}
    yield f"FixBN is {-tests['FixBN'].difference:.1f} above it (each p < 0.05 without correction for the eight"
    assert {rule for rule, test in tests.items() if 8 * test.p < 0.05} == {"FedAvg+LN"}
    assert 7 * sorted(test.p for test in tests.values())[1] > 0.05  # Holm's second step
    singles = [100 * float(run.summary["accuracy"]) for run in runs["FedAvg"]]
    yield f"FedAvg's seeds are between {min(singles):.0f} and {max(singles):.0f} %, and [where both"
    (one,) = (run for run in runs["FedAvg"] if run.settings["seed"] == 1)
    yield f"FedAvg has {100 * one.after(60):.1f} % after round 60 and {100 * one.after(100):.1f} % after round 100"
    falling = results.by_label(*results.FALLING)
    falls = on_own_images(falling)
    ends = [f"{each(found['FedAvg'].values()):.1f}" for found in (falls, final) for each in (min, max)]
    yield "ends at {} to {} % on own images instead of {} to {} %".format(*ends)
    yield f"most of the {-paired(final['FedAvg'], final['FixBN']).difference:.1f} points of FixBN above FedAvg"
    left, free = paired(final["FixBN"], falls["FedAvg"]), paired(falls["FedWon"], falls["FedAvg"])
    yield f"{left.difference:.1f} are left ({left.low:.1f} to {left.high:.1f}, p = {left.p:.1g})"
    yield f"{free.difference:.1f} ({free.low:.1f} to {free.high:.1f}, p = {free.p:.1g})"
    yield f"[where both have FixBN's rate](#at-one-rate) {free.difference:.1f} points are left"
    still, group = paired(final["FixBN"], falls["FedWon"]), paired(final["FedAvg+GN"], falls["FedAvg"])
    assert {each.pairs for each in (left, free, still, group)} == {3}
    yield f"{still.difference:.1f} below FixBN (p = {still.p:.1g})"
    yield f"above batch norm, by {group.difference:.1f} points (p = {group.p:.1g})"
    gain = [falls["FedWon"][number] - value for number, value in final["FedWon"].items()]
    assert {f"{each:.1f}" for each in gain} == {"0.1"}
    yield "FedWon itself ends 0.1 points higher than with a constant rate with each seed"
    shortest, *_, longest = minutes_of(falling)
    yield f"Three seeds each, {shortest:.0f} to {longest:.0f} minutes a run"
    office = results.by_label("fedwon/office/report.json")
    every = on_own_images(results.by_label(*results.FEDWON["Office-Caltech-10, AlexNet"][0]))
    end = {rule: seeds for rule, seeds in every.items() if sorted(seeds) == [0, 1, 2]}
    single = {rule: seeds[0] for rule, seeds in every.items() if len(seeds) == 1}
    assert {*end, *single} == {*every}
    assert len(single) == 3
    yield "three other strategies have one seed"
    there = results.fedwon_averages("Office-Caltech-10, AlexNet")
    assert there["FedWon"] - there["FedBN"] > 0
    free, own = (results.office_differences(rule, "FedAvg") for rule in ("FedWon", "FedBN"))
    gains = {name: [statistics.mean(each[name]) for each in (free, own)] for name in free}
    yield f"(300 rounds, three seeds), FedWon is {gains['mean'][0]:.1f} points above batch norm on average over"
    frozen = {name: statistics.mean(each) for name, each in results.office_differences("FixBN", "FedAvg").items()}
    both = f"FedBN {gains['mean'][1]:.1f} and FixBN {frozen['mean']:.1f}, each with a gain in each domain"
    yield f"all of it from the 27 test images of DSLR, {both}"
    assert min(min(gains[name][1], frozen[name]) for name in results.OFFICE) > 0
    others = "and {:.1f} points below it on the other three domains. FedBN is above batch norm by {:.1f} points, {:.1f}"
    yield others.format(-gains["without DSLR"][0], gains["mean"][1], gains["without DSLR"][1])
    over = {rule: paired(end[rule], end["FedAvg"]) for rule in ("FedBN", "SiloBN", "FixBN")}
    yield f"and SiloBN {over['SiloBN'].difference:.1f}."
    tests_of_office = [paired(end["FedWon"], seeds) for rule, seeds in end.items() if rule != "FedWon"]
    assert min(results.corrected([*tests_of_office, *over.values()])) > 0.05
    apart = [end["FedBN"][seed] - each for seed, each in end["FedWon"].items()]
    yield f"FedBN is {listed(apart)} points above FedWon with the three seeds"
    for rule in ("FixBN", "SiloBN"):
        leads = sorted(value - end["FedWon"][seed] for seed, value in end[rule].items())
        yield f"{rule} by {leads[0]:.1f} to {leads[-1]:.1f}"
    assert {round(there["FedWon"] - there[rule]) for rule in ("FixBN", "SiloBN")} == {10}
    assert f"{single['FedProx'] - end['FedAvg'][0]:.1f}" == "0.0"
    own_data, layer = (end["FedWon"][0] - single[rule] for rule in ("Standalone", "FedAvg+LN"))
    yield f"FedProx ends as FedAvg, Standalone {own_data:.1f} and layer norm {layer:.1f} points below FedWon"
    widest = max(max(seeds.values()) - min(seeds.values()) for seeds in end.values())
    yield f"By their seeds the other strategies differ by up to {widest:.0f} points"
    assert {f"{minutes:.0f}" for minutes in minutes_of(results.by_label("fedwon/office/gpu.json"))} == {"6"}
    at_the_end, *_, longest = minutes_of(results.by_label("fedwon/office/seeds.json"))
    yield f"seeds 1 and 2 of FixBN and SiloBN took {at_the_end:.0f} to {longest:.0f} minutes"
    without = on_own_images(results.by_label(results.OFFICE_FALLING))["FedAvg"]
    assert [*without] == [1, 2]
    falls, stays, freezes = ([each[seed] for seed in without] for each in (without, end["FedAvg"], end["FixBN"]))
    ends = f"{listed(falls)} % on own images with seeds 1 and 2 ({listed(stays)} at the constant rate)"
    yield f"batch norm ends at {ends}, FixBN at {listed(freezes)}"
    yield f"{listed([one - other for one, other in zip(freezes, falls, strict=True)])} points above it. Two seeds"
    dslr = {rule: results.by_seed(seeds, "clients_own_accuracy_dslr") for rule, seeds in office.items()}
    images = sorted(27 * (dslr["FedWon"][seed] - each) / 100 for seed, each in dslr["FedAvg"].items())
    yield f"on DSLR, the smallest test set, by {listed(images, 0)} of its 27 images"
    early = {rule: listed([100 * run.after(30) for run in seeds]) for rule, seeds in office.items()}
    yield f"the global model of FedWon has {early['FedWon']} %, that of FedAvg {early['FedAvg']} %"
    below = [there[rule] - statistics.fmean(end[rule].values()) for rule in ("FedAvg", "FedBN", "FedWon")]
    at_its_rate = results.by_label(results.OFFICE_RATE)
    higher = on_own_images(at_its_rate)
    missing = there["FedWon"] - statistics.fmean(higher["FedWon"].values())
    yield f"FedAvg, FedBN and FedWon end {listed(below)} points below the published averages"
    yield f"FedWon with the paper's rate {missing:.1f}."
    assert {rule: len(seeds) for rule, seeds in higher.items()} == {"FedWon": 3, "FedBN": 1, "FedAvg": 1}
    rise, (fall,), (drop,) = (
        [each - end[rule][seed] for seed, each in seeds.items()] for rule, seeds in higher.items()
    )
    chance, mean = paired(higher["FedWon"], end["FedWon"]).p, statistics.fmean(higher["FedWon"].values())
    yield f"ends {min(rise):.1f} to {max(rise):.1f} points higher on own images (three seeds, p = {chance:.1g})"
    yield f"(three seeds, p = {chance:.1g}), at {mean:.1f} %"
    against, plain = (paired(end[rule], higher["FedWon"]) for rule in ("FedBN", "FedAvg"))
    yield f"{against.difference:.1f} points above it ({against.low:.1f} to {against.high:.1f}, p = {against.p:.1g})"
    apart_now = higher["FedWon"][0] - higher["FedBN"][0]
    yield f"ends {-fall:.1f} points lower with the only seed, {apart_now:.1f} below FedWon"
    yield f"Batch norm with 0.01 is {-plain.difference:.1f} points below FedWon with 0.08 (p = {plain.p:.1g})"
    yield f"and with 0.08 it ends {-drop:.1f} points lower with the only seed; other rates were not tried"
    yield f"FedWon is {-plain.difference:.1f} points above batch norm and {against.difference:.1f} below FedBN"
    shortest, *_, longest = minutes_of(at_its_rate)
    yield f"{shortest:.0f} to {longest:.0f} minutes a run on a core with other work. The environment is"
    *minutes, longest = minutes_of(office)
    yield f"{minutes[0]:.0f} to {minutes[-1]:.0f} minutes a run on a core with other work, and {longest:.0f} for FedAvg"
    two = {run.label: 100 * run.summary["clients_own_accuracy"] for run in results.read("fedwon/batch2/report.json")}
    normed = [two[rule] for rule in ("FedAvg", "FedBN", "SiloBN", "Standalone")]
    yield f"Standalone end between {math.floor(min(normed))} and {math.ceil(max(normed))} % on own images"
    ahead = [two["FedWon"] - two[rule] for rule in ("FedAvg+GN", "FedAvg+LN")]
    yield f"as in the paper**, {listed(ahead, 0)} points above group norm and layer norm"
    best = results.share("best_test_accuracy", unit=" %")(runs["FedAvg"])
    yield f"the best evaluations of its seeds are {best}"


def domains() -> Iterator[str]:
    found = {
        label.partition(",")[0]: results.by_seed(runs) for label, runs in results.by_label("domains/seeds.json").items()
    }
    ahead = {rule: paired(found[rule], found["FedAvg+BN"]) for rule in ("FedAvg+GN", "FedAvg+LN", "Scaffold", "FixBN")}
    *unsettled, frozen = ahead.values()
    gains, chances = [each.difference for each in unsettled], [each.p for each in unsettled]
    yield f"GN, LN and Scaffold are {min(gains):.1f} to {max(gains):.1f} points above batch norm"
    yield f"three seeds do not settle (p = {min(chances):.2f} to {max(chances):.1g}), and FixBN {frozen.difference:.1f}"
    yield f"(p = {frozen.p:.2f}, not corrected for four comparisons)"
    one_model = [
        statistics.fmean(seeds.values())
        for rule, seeds in found.items()
        if rule not in ("Centralised", "Standalone", "FedBN")
    ]
    yield f"all strategies with one model are within {max(one_model) - min(one_model):.1f} points of one another"


def heart() -> Iterator[str]:
    runs, changed = results.by_label("heart/report.json"), results.by_label("heart/differences.json")
    figures = results.published("FLamby", "Heart Disease")
    pooled, (mean, deviation) = results.share("accuracy")(runs["Pooled"]), figures["Pooled"]["all"]
    yield f"are scaled alike: {pooled} % here, {mean:.1f} ± {deviation:.1f} % in FLamby"
    rows = {label.partition(" ")[0]: each for label, each in (runs | changed).items() if label != "Pooled"}
    apart = []
    for label, each in rows.items():
        key = "clients_own_accuracy" if label == "Local" else "accuracy"
        for hospital, (expected, spread) in figures[label].items():
            found = [100 * run.summary[f"{key}_{hospital}"] for run in each]
            apart.append(abs(statistics.fmean(found) - expected) / max(spread, statistics.pstdev(found)))
    assert max(apart) < 2
    assert sum(each < 1 for each in apart) > len(apart) / 2
    yield "within two standard deviations over seeds and mostly within one"
    powers = [number + 1 for number in (1, 15)]
    ratios = [(1 - 0.9**power) / (1 - 0.999**power) ** 0.5 for power in powers]
    assert [round(each) for each in ratios] == [4, 6]
    assert max((1 - 0.9**power) / (1 - 0.999**power) ** 0.5 for power in range(2, 17)) < 7
    yield "its steps are four to seven times as large"


def mnist() -> Iterator[str]:
    def after(file: str, label: str, number: int) -> float:
        return 100 * statistics.mean(run.after(number) for run in results.by_label(file)[label])

    falls, rises = (
        [after(f"mnist/noniid-lr{rate}.json", "FixBN", number) for number in (250, 260)] for rate in (0.1, 0.5)
    )
    yield f"FixBN's from {falls[0]:.1f} to {falls[1]:.1f} % within ten rounds"
    yield f"it rises from {rises[0]:.1f} to {rises[1]:.1f} %"
    yield f"is at {rises[0]:.1f} % when it freezes after round 250, at {rises[1]:.1f} % ten rounds later"
    constant = results.by_label("mnist/constant-lr0.5.json")
    frozen = {"FixBN": 250} | {f"FedTAN-II M={number}": number for number in (10, 50, 100)}
    assert {label: run.summary["rounds"] for label, (run,) in constant.items()} == {
        label: number + 1 for label, number in frozen.items()
    }
    assert not any(run.finished for (run,) in constant.values())
    yield "FixBN and FedTAN-II diverge in the second round after the freeze"
    small = {label: results.by_seed(runs) for label, runs in results.by_label("mnist/noniid-lr0.1.json").items()}
    fixed = paired(small["FixBN"], small["FedAvg+BN"])
    yield f"At the end it is {fixed.difference:.1f} points above, nearly all of it with one seed (p = {fixed.p:.1g})"
    early = [paired(small["FedTAN-II M=10"], small[f"FedTAN-II M={rounds}"]) for rounds in (50, 100)]
    assert {f"{each.p:.1g}" for each in early} == {"0.2"}
    yield "which three seeds do not settle (p = 0.2)"
    own = results.share("clients_own_accuracy", unit=" %")
    trained = results.by_label("mnist/noniid-lr0.5.json")
    ends = {label: results.by_seed(runs) for label, runs in results.mnist_runs().items()}
    falls = {rule: ends[f"{rule} {results.FALLS}"] for rule in ("FedAvg+BN", "FedAvg+GN", "FedTAN")}
    fixed = {rule: paired(ends["FixBN"], each) for rule, each in falls.items()}
    assert {test.pairs for test in fixed.values()} == {5}
    yield f"FixBN ends {fixed['FedAvg+BN'].difference:.1f} points above batch norm at the same learning rates"
    average = {label: statistics.fmean(each.values()) for label, each in ends.items()}
    near = [rule for rule in ends if rule in (*frozen, "FedTAN", "FedAvg+GN")]
    lost = [average["Centralised"] - average[rule] for rule in near]
    assert 0.5 < min(lost) < 1.5
    assert 3.5 < max(lost) < 4
    lost = [average["Centralised"] - average[rule] for rule in ("FedAvg+BN", f"FedAvg+BN {results.FALLS}")]
    yield f"batch norm ends {lost[0]:.0f} points below centralised training, and at one that falls where FixBN freezes"
    yield f"freezes {lost[1]:.0f}. Frozen"
    lost = sorted(average["Centralised"] - average[rule] for rule in ("FedTAN", "FedAvg+GN"))
    yield f"both {lost[0]:.1f} to {lost[1]:.1f} points below centralised training"
    moved = {rule: statistics.fmean(each.values()) - average[rule] for rule, each in falls.items()}
    assert -0.5 < moved["FedAvg+GN"] < 0
    yield f"The fall of the rate by itself gives batch norm {moved['FedAvg+BN']:.1f} points, group norm none, and"
    yield f"lowers FedTAN by {-moved['FedTAN']:.1f}."
    whole, part = (average["FixBN"] - average["FedAvg+BN"], fixed["FedAvg+BN"].difference)
    yield f"of the {whole:.1f} points between FixBN and batch norm at 0.5 the freeze makes {part:.1f}"
    chances = dict(zip(results.MNIST_PAIRS, results.corrected(
        [paired(ends[one], ends[other]) for one, other in results.MNIST_PAIRS]
    ), strict=True))  # fmt: skip
    assert chances["FixBN", f"FedAvg+GN {results.FALLS}"] > 0.05
    chance = chances["FixBN", f"FedTAN {results.FALLS}"]
    yield f"and it is {fixed['FedTAN'].difference:.1f} points above FedTAN (p = {chance:.1g})"
    yield f"({own(trained['FedBN']).split()[0]} % of their own test images) and no others"
    yield f"those of SiloBN ({own(trained['SiloBN']).split()[0]} %) about a quarter of the others"


def costs() -> Iterator[str]:
    runs = results.by_label("costs/report.json")
    after = {label: 100 * statistics.mean(run.summary["accuracy"] for run in each) for label, each in runs.items()}
    yield f"From M = 10 to 100 it gains {after['FedTAN-II M=100'] - after['FedTAN-II M=10']:.1f} points"
    yield f"it ends {after['FedTAN-II M=100'] - after['FedTAN']:.1f} points above FedTAN"
    setup = results.published("FedTAN", "setup")["MNIST"]
    yield f"the {setup['statistics']} running statistics that a model of {setup['parameters']:,} parameters has"
    yield f"ours are {100 * setup['statistics'] / setup['parameters']:.2f} % larger"


def clients() -> Iterator[str]:
    runs = results.by_label("clients/clients.json", "clients/participation.json")
    cells = dict.fromkeys(label.partition(", ")[2] for label in runs)

    def after(rule: str, cell: str) -> float:
        return 100 * statistics.mean(run.summary["accuracy"] for run in runs[f"{rule}, {cell}"])

    behind = {cell: after("FedAvg+GN", cell) - after("FedAvg+BN", cell) for cell in cells}
    five = behind.pop("clients=5")
    yield f"it is {five:.0f} points below group norm"
    yield f"or a part of them in a round, {min(behind.values()):.0f} to {max(behind.values()):.0f}."
    good = [[after(rule, cell) for rule in ("FedTAN-II", "FixBN", "FedAvg+GN")] for cell in cells]
    yield f"are within {max(max(each) - min(each) for each in good):.1f} points of one another in each column"
    lost = [after("FedAvg+GN", "clients=5") - after(rule, "clients=5") for rule in ("FedTAN", "Scaffold")]
    yield f"except with five clients, where it is {lost[0]:.1f} points below, and Scaffold {lost[1]:.0f}"
    rules = {label.partition(", ")[0] for label in runs}
    cost = max(after(rule, "clients=100") - after(rule, "fraction_train=0.05") for rule in rules)
    yield f"{cost:.1f} points or less with every strategy"
    constant = {label: run for label, (run,) in results.by_label("clients/constant.json").items()}

    def last(label: str) -> str:
        return f"{100 * constant[label].summary['accuracy']:.1f} %"

    before, frozen = (100 * constant["FixBN, clients=100"].after(number) for number in (100, 110))
    yield f"FixBN falls from {before:.1f} to {frozen:.1f} % within ten rounds of the freeze with 100 clients"
    yield f"ends at {last('FixBN, clients=100')}, 10 points below batch norm"
    yield f"it ends at {last('FixBN, clients=5')}, batch norm at {last('FedAvg+BN, clients=5')}"
    ends = [100 * constant[f"FedTAN-II, clients={number}"].summary["accuracy"] for number in (5, 20, 100)]
    yield f"ends at {min(ends):.1f} to {max(ends):.1f} %"


STREAMS = "FedTAN streams"


def network() -> Iterator[str]:
    lines = results.lines("network/latency.jsonl")
    seconds = {each["milliseconds"]: each["median"] for each in lines if (each["clients"], each["run"]) == (2, STREAMS)}
    yield f"seconds = {seconds[0]:.2f} + {results.ROUND_TRIPS} x round trip"
    assert (seconds[100] - seconds[0]) / 0.2 == pytest.approx(results.ROUND_TRIPS, abs=0.5)
    medians = {(each["clients"], each["milliseconds"]): each["median"] for each in lines if each["run"] == STREAMS}
    slopes = [(medians[clients, 100] - medians[clients, 0]) / 0.2 for clients in (2, 5, 10)]
    yield f"({listed(slopes, 0)} with 2, 5 and 10 clients)"
    shares = [f"{100 - 100 * seconds[0] / seconds[ms]:.0f} % at {ms} ms" for ms in (10, 50, 100)]
    yield f"{shares[0]} each way, {shares[1]} and {shares[2]}"
    nodes = {(each["nodes"], each["run"]): each["seconds"] for each in results.lines("network/nodes.jsonl")}
    messages = [seconds / 5 for seconds in nodes[2, "FedTAN messages, cnn"]]
    least, most = (39 * each / 60 for each in (min(messages), max(messages)))
    yield f"{min(messages):.0f} to {max(messages):.0f} s each it would take {least:.1f} to {most:.0f} minutes"
    yield f"a round of FedAvg took {nodes[5, 'FedAvg'][0]:.0f} and {nodes[5, 'FedAvg'][1]:.0f} s"


def performance() -> Iterator[str]:
    def spread(file: str, name: str, place: int = 0) -> str:
        found = outputs.figures(file)[name][place]
        return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"

    speed, memory = outputs.figures("speed.txt"), outputs.figures("memory.txt")
    fedtan = speed["FedTAN iteration / plain passes, five clients, batch 128"][0].median
    yield f"a FedTAN iteration {100 * fedtan - 100:.0f} % more than the same passes"
    there = outputs.figures("gpu.txt")["FedTAN iteration / plain passes, five clients, batch 128"][0].median
    yield f"it takes {there:.1f} times as long. "
    mean = "mean of 100 replies of 11.2 million parameters: Flower's processor time / ours"
    yield f"the ratio of the times falls to that of the processor times, {speed[mean][0].median:.1f}."
    one = spread("sharing.txt", "round of 2 workers / 1/2 of one process's")
    yield f"a round of two workers took {one} times half the round of one process"
    bare = spread("sharing.txt", "round of 2 workers / 1/2 of the bare loop's")
    yield f"and {bare} times half the time of the bare loop"
    threads = spread("sharing.txt", "the server's evaluation, one thread / 2 threads")
    yield f"two threads on two cores are {threads} times as fast"
    earlier = [memory[name][1].median for name in ("run with 2 workers", "(run - images) / bare loop")]
    yield f"to a sum on arrival: {earlier[0]:,.0f} MiB, {earlier[1]:.2f}"
    loop = "the compiled bare loop / bare loop, batch {}, float32"
    at_128 = outputs.figures("compiled.txt")[loop.format(128)][0].median
    yield f"{spread('compiled.txt', loop.format(20))} times the eager one at batch size 20, {at_128:.2f} at 128"
    grouped = "batch 128, float32, group norm"
    compiled = spread("compiled-group-norm.txt", f"steps per second / bare loop, {grouped}")
    yield f"slower than eager ones: {compiled} times their speed at batch size 128"
    yield f"bare loop's {spread('compiled-group-norm.txt', f'the compiled bare loop / bare loop, {grouped}')} ([output]"

    rounds, steps = on_a_gpu()
    engine = spread("gpu.txt", "steps per second / bare loop, one process")
    yield f"the local engine has {engine} times the bare loop's speed"
    yield f"takes {rounds['plain']:.1f} s. With `train.compile: true`"
    two, three, four = (rounds[f"recorded, {count} runs at once"] for count in ("two", "three", "four"))
    yield f"{two:.2f} s with two, {three:.2f} s with three and {four:.2f} s with four runs at once"
    yield f"{4 / four:.1f} rounds a second in all"
    free, beside = steps
    instead = f"{free['recorded']:.1f} ms instead of {free['plain']:.1f}"
    yield f"a step takes {instead}, of which the GPU computes {free['replay of the passes only']:.1f}."
    yield f"compiler ({beside['compiled and recorded']:.1f} ms beside {beside['recorded']:.1f} ms)"
    fedtan = outputs.figures("gpu.txt")["FedTAN iteration / plain passes, five clients, batch 128"][0].spread
    yield f"A FedTAN iteration takes {fedtan} times as long"


def on_a_gpu() -> tuple[dict[str, float], list[dict[str, float]]]:
    """The median seconds of a round, and milliseconds of a step: with the GPU nearly free, and beside four runs."""
    text = (results.RESULTS / "gpu.txt").read_text(encoding="utf-8")
    rounds = re.findall(r"(?m)^rounds, (.+): (.+)$", text)
    steps = [re.findall(r"([a-z][^,]*) ([\d.]+)", line) for line in re.findall(r"(?m)^step: (.+)$", text)]
    return (
        {name: statistics.median(json.loads(seconds)) for name, seconds in rounds},
        [{name: float(milliseconds) for name, milliseconds in each} for each in steps],
    )


def performance_guide() -> Iterator[str]:
    rounds, (step, _) = on_a_gpu()
    yield f"batches of 20 took [{step['recorded']:.1f} ms instead of {step['plain']:.1f}]"
    longer = rounds["recorded, four runs at once"] / rounds["recorded, two runs at once"]
    yield f"four recorded ones took {longer:.1f} times as long as two"
    ratio = outputs.figures("gpu.txt")["FedTAN iteration / plain passes, five clients, batch 128"][0].median
    yield f"FedTAN's first step took [{ratio:.0f} times as long](results/performance.md#on-a-gpu) as plain passes"


def secure() -> Iterator[str]:
    seconds = {
        (line["model"], line["secure"]): line["processor_seconds"]
        for line in results.lines("secure/local.jsonl")
        if line["clients"] == 10
    }
    times = {model: seconds[model, True] / seconds[model, False] for model in ("resnet20", "resnet18")}
    yield f"without training by {times['resnet20']:.1f} with ResNet-20, and by {times['resnet18']:.1f} with ResNet-18"
    plain, masked = (line["seconds"][-1] for line in results.lines("secure/nodes.jsonl"))
    yield f"the second round of FedAvg took {plain:.0f} s, and {masked:.0f} s with Secure"


def private() -> Iterator[str]:
    def numbers(row: Sequence[str | None]) -> list[float]:
        return [float(str(cell)) for cell in row[1:]]

    none, thirty, *stronger = (numbers(row) for row in outputs.private()[1])
    assert all(noisy > clean for noisy, clean in zip(thirty, none, strict=True))
    yield "At epsilon 30 noise costs no accuracy here"
    ten, three = ([each - noise for each in others] for noise, *others in stronger)
    yield f"at epsilon 3 it is {min(three):.0f} to {max(three):.0f} points better to spend all of it on the weights"
    yield f"At epsilon 10 it is {min(ten):.0f} to {max(ten):.0f} points better"
    delta, orders = 1e-5, np.linspace(1.01, 100, 100_000)
    more = []
    for epsilon in (3, 10, 30):
        mu = brentq(lambda mu, epsilon=epsilon: epsilon_of(mu, delta) - epsilon, 0.1, 10)
        # From the Renyi divergences of a Gaussian mechanism to (epsilon, delta): Canonne, Kamath and Steinke 2020.
        bounds = orders * mu**2 / 2 + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        more.append(100 * bounds.min() / epsilon - 100)
    yield f"accounting by Renyi divergences reports {min(more):.0f} to {max(more):.0f} % more at these epsilons"


def attacked() -> dict[tuple[Any, ...], float]:
    """The accuracy by data, rule, options, attack and number of malicious clients."""
    return {
        (*list(line.values())[:4], line["malicious"]): line["accuracy"] for line in results.lines("robust/runs.jsonl")
    }


def robustness() -> Iterator[str]:
    found = attacked()
    lost, alone, noisy = [], [], []
    for (data, rule, options, attack, count), accuracy in found.items():
        if options == "bounds" and attack not in (None, "flipped"):
            lost.append(100 * (found[data, rule, options, None, 0] - accuracy))
        if options == "off" and count == 1 and attack in ("statistics", "scaled"):
            alone.append(100 * (accuracy or 0))  # None: the run failed
        if (data, options, attack, count) == ("digits", "off", "noise", 1):
            noisy.append(100 * (found[data, rule, options, None, 0] - accuracy))
    yield f"false statistics of two clients of ten cost at most {max(lost):.0f} points"
    flipped = {
        (data, rule): 100 * (found[data, rule, "bounds", None, 0] - found[data, rule, "bounds", "flipped", 2])
        for data, rule, options, attack, count in found
        if (options, attack, count) == ("bounds", "flipped", 2)
    }
    yield f"but flipped updates {min(flipped.values()):.0f} to {max(flipped.values()):.0f} (one seed)"
    for data, rule in itertools.product(("digits", "digits-2"), ("FedAvg", "FixBN")):
        for other in ("krum", "trimmed"):
            assert (
                found[data, rule, other, None, 0] - found[data, rule, other, "flipped", 2] < flipped[data, rule] / 100
            )
    for defence in ("bounds", "trimmed"):
        assert found["cifar10", "FedAvg", defence, "flipped", 2] <= found["cifar10", "FedAvg", "off", "flipped", 2]
    assert max(alone) < 14
    yield "Without bounds one client with false statistics or scaled updates ruins the model or ends the run"
    yield f"and one with noise costs {min(noisy):.0f} to {max(noisy):.0f} points on digits"


def bounds() -> Iterator[str]:
    yield next(robustness())
    found = attacked()
    honest = {case[1:3]: 100 * found[case] for case in found if (case[0], case[4]) == ("digits-2", 0)}
    cost = {
        (rule, name): honest[rule, "off"] - value
        for (rule, name), value in honest.items()
        if name not in ("off", "bounds")
    }
    least, most = min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)
    assert (least, most) == (("FixBN", "krum"), ("FedAvg", "median"))
    yield f"costs honest runs {cost[least]:.0f} to {cost[most]:.0f} points of accuracy, `MultiKrum` with FixBN least"
    case = "flipped", 2
    off = [100 * found["cifar10", rule, "off", *case] for rule in ("FedAvg", "FixBN", "FedTAN")]
    trimmed = {f"{100 * found['cifar10', rule, 'trimmed', *case]:.0f}" for rule in ("FedAvg", "FixBN")}
    yield f"slightly worse ({', '.join(trimmed)} %, without {min(off):.0f} to {max(off):.0f} %)"


def personal() -> Iterator[str]:
    own = accuracies("clients/participation.json", key="clients_own_accuracy")
    yield f"had {own['FedBN, fraction_train=0.1']} % on examples of their own classes"
    own = accuracies("clients/clients.json", key="clients_own_accuracy")
    yield f"and {own['FedBN, clients=100']} % with all clients in each round"


def reliability() -> Iterator[str]:
    found = outputs.hostile()
    yield f"In {found['runs']:,} runs with a hostile client"
    yield f"In {found['lie']:,} of them a well-formed false reply counted like any other"
    yield f"and {found['the run ended with its own error']} runs ended with an error that names clients"
    yield f"{found['runs']:,} runs with {found['rules']} strategies"


def privacy() -> Iterator[str]:
    found = {
        (line["setting"], line["model"], line["seen"], line["batch"]): line
        for line in results.lines("privacy/identify.jsonl")
    }
    mlp, lenet, resnet = (
        [found[setting, "trained", seen, 8]["numbers"] for seen in ("exchange", "moments")]
        for setting in ("mnist/mlp", "mnist/lenet", "cifar10/resnet20")
    )
    yield f"exchanges {mlp[0]} numbers ({mlp[1]} of them in the forward pass), LeNet {lenet[0]} ({lenet[1]})"
    yield f"ResNet-20 {resnet[0]:,} ({resnet[1]:,})"
    untrained, trained = (found["mnist/mlp", state, "exchange", 32]["auc"] for state in ("untrained", "trained"))
    yield f"(batch of 32, perceptron, exchanges: {untrained:.2f}, trained {trained:.2f})"
    means = [found[setting, "trained", "agreement", 8] for setting in ("mnist/mlp", "mnist/lenet")]
    solved = [100 * line["solved"] for line in means]
    yield f"it finds {solved[0]:.0f} % (perceptron) and {solved[1]:.0f} % (LeNet) of batches of 8"
    yield f"where guessing finds {100 * means[0]['chance']:.0f} %"
    best = next(
        line["best_psnr"]
        for line in results.lines("privacy/reconstruct.jsonl")
        if (line["model"], line["seen"], line["batch"]) == ("trained", "frozen gradient", 32)
    )
    yield f"sharply (the best one at {best:.0f} dB)"


def accuracies(*files: str, key: str = "accuracy", digits: int = 1) -> dict[str, str]:
    """The mean in percent of each label over its seeds."""
    return {
        label.partition(", batch_size")[0]: results.mean(
            [100 * statistics.mean(run.summary.get(key, 0) for run in runs)], digits
        )
        for label, runs in results.by_label(*files).items()
    }


BASELINE = "demo/small-batches.json"  # the centralised run of the demo with a client's batches


def readme() -> Iterator[str]:
    whole, part, rows = results.coverage()
    yield f"of {rows} published results {whole} are measured in full, {part} in part"
    assert {len(runs) for runs in results.by_label("demo/report.json").values()} == {5}


def demo() -> Iterator[str]:
    means = {label: float(value) for label, value in accuracies("demo/report.json", digits=3).items()}
    yield f"federated averaging with batch norm ends at {means['FedAvg+BN']:.1f} %"
    worst = min(means[label] for label in ("FedAvg+GN", "FixBN", "FedTAN"))
    assert 1.4 < means["Centralised"] - worst < 1.5
    yield "within 1.5 points of training on all data in one place"
    (settings,) = {
        (run.settings["train"]["batch_size"], run.settings["train"]["steps"]) for run in results.read(BASELINE)
    }
    assert settings == (32, 25)
    more = results.share("accuracy")(list(results.read(BASELINE)))
    yield f"With 25 steps on batches of 32, again as many images, it ends at {more} %"
    correct = {
        label: {round(run.summary["accuracy"] * 359, 6) for run in runs}
        for label, runs in results.by_label("demo/report.json").items()
    }
    assert correct["FedAvg+GN"] == {342}
    yield "all end with 342 correct images"


IN_RESULTS = (
    *(demo, fixbn, fedbs, fedtan, fedwon, domains, heart, mnist, costs, clients, network),
    *(performance, secure, private, robustness, reliability, privacy),
)
PLACES = {page: ROOT / "docs" / "results" / f"{page.__name__}.md" for page in IN_RESULTS}
PLACES |= {readme: ROOT / "README.md", performance_guide: ROOT / "docs" / "performance.md"}
PLACES |= {bounds: ROOT / "docs" / "robustness.md", personal: ROOT / "docs" / "strategies" / "fedbn.md"}


@pytest.mark.parametrize("page", PLACES, ids=lambda page: page.__name__)
def test_the_sentences_of_a_page_have_the_figures_of_its_raw_files(page: Callable[[], Iterator[str]]) -> None:
    text = " ".join(PLACES[page].read_text(encoding="utf-8").split())
    assert [sentence for sentence in page() if sentence not in text] == []
