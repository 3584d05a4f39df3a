"""The results pages say what their raw files say: tools/tables.py makes their tables."""

from __future__ import annotations

import csv
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import measured
import outputs
import pictures
import pytest
import results
from scipy.special import stdtr, stdtrit

from fedbn_flwr.commands import cli
from fedbn_flwr.commands.common import overrides_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.report.tables import Paired
from tests.support.command import ROOT

RESULTS = results.RESULTS
DIFFERENCES = [name for name, spec in results.specification("results/tables.yaml").items() if "differences" in spec]
LISTED = [*csv.DictReader(results.sets().splitlines())]
SETTINGS = r"settings[\w-]*\.yaml"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(RESULTS.glob("*.md"))}


def test_each_table_of_a_results_page_is_generated() -> None:
    for page, text in PAGES.items():
        by_hand = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
        assert not re.search(r"(?:^|\n\n)\|", by_hand), f"{page} has a table that its raw files cannot change"
    names = re.findall(r"<!-- table: (.*?) -->", "".join(PAGES.values()))
    assert sorted({*names}) == sorted({"coverage", *results.TABLES, *outputs.TABLES} - {"evidence"})


def test_each_raw_file_is_used_by_a_page() -> None:
    """By sets.csv, a link, a generated table or a command; environments.json is next to the report."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    pages += "\n".join(f"{each['set']}/report.json" for each in LISTED)
    pages += "\n".join(f"{each['set']}/{file}" for each in LISTED for file in re.findall(SETTINGS, each["commands"]))
    files = (file for file in RESULTS.glob("*/**/*") if file.is_file() and "__pycache__" not in file.parts)
    kept = [file.relative_to(RESULTS).as_posix() for file in files]
    assert len(kept) > 100
    assert [name for name in kept if name.replace("environments.json", "report.json") not in pages] == []


def test_a_set_has_a_report_and_no_token() -> None:
    assert [file for file in RESULTS.glob("*/*/*.json") if not (file.parent / "report.json").is_file()] == []
    assert [file for file in RESULTS.rglob("environment*.json") if "token" in file.read_text(encoding="utf-8")] == []


@pytest.mark.slow
def test_each_run_that_has_all_settings_of_a_paper_s_row_counts_for_its_item() -> None:
    """Several tables share a row: a run of one is a result of the others too."""

    def in_short(settings: Mapping[str, Any]) -> tuple[Any, ...]:  # all are compared where this is equal: saves time
        return settings["rounds"], settings["clients"], *(settings[key]["name"] for key in ("strategy", "model"))

    similar: dict[tuple[Any, ...], list[tuple[str, results.Run]]] = {}
    for name in (file.parent.relative_to(RESULTS).as_posix() for file in RESULTS.rglob("report.json")):
        for run, *_ in results.by_label(name).values():
            similar.setdefault(in_short(run.settings), []).append((name, run))
    counted, equal = set[tuple[str, str, str]](), set[tuple[str, str, str]]()
    for _, _, item in measured.items():
        for name, labels in item.get("sets", {}).items():
            counted |= {(item["experiment"], run.label, name) for run in measured.runs_for({"sets": {name: labels}})}
        for label, (paper, *_) in measured.rows_of(item["experiment"]).items():
            for name, run in similar.get(in_short(paper.model_dump(mode="json")), ()):
                if run.finished and not measured.differing(paper, run.settings):
                    equal.add((item["experiment"], label, name))
    assert ("fixbn/tableI", "GN, groups=2", "fixbn/table4") in equal
    assert equal <= counted


def test_each_picture_of_results_shows_what_the_raw_files_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the reconstructed images are a benchmark's own output. Other numbers make a picture stale."""
    shown = {f"results/{name}" for text in PAGES.values() for name in re.findall(r"\]\((\w[^)]*\.png)\)", text)}
    listed = results.specification("results/pictures.yaml")
    assert shown - {"results/privacy/reconstruction.png"} == {name for name in listed if name.startswith("results/")}
    assert pictures.stale() == []
    name = "results/fixbn/table4-16px/curves.png"
    curve = [{**point, "accuracy": 0.5} for point in results.runs_of("fixbn/table4-16px:BN")[0].curve]
    changed = [run._replace(curve=curve) if run.label == "BN" else run for run in results.read("fixbn/table4-16px")]
    read = results.read
    monkeypatch.setattr(results, "read", lambda each: changed if each == "fixbn/table4-16px" else read(each))
    assert pictures.stale() == [pictures.DOCS / name]


# --- what the table of the papers may claim ------------------------------------------


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives a set its runs: those of fedtan/table3, with changes of their settings."""
    paper = {run.label: run.model_dump(mode="json") for run in load_experiment("fedtan/table3").runs}

    def give(*runs: tuple[str, dict[str, Any]], status: str = "finished") -> None:
        found = [results.Run(label, {**paper[label], **changes}, {"status": status}, ()) for label, changes in runs]
        for module in (results, measured):
            monkeypatch.setattr(module, "read", lambda name: {"runs": found}[name])

    return give


ITEM: dict[str, Any] = {"experiment": "fedtan/table3", "sets": {"runs": None}}
INFERRED = {**ITEM, "inferred": "FedBN's protocol"}
GN, TAN = "FedAvg+GN", "FedTAN"
JOINED = {"strategy": {"name": "FedTAN", "exchange": "joined"}, "engine": {"name": "ray"}}


def every(**changes: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (GN, changes), ("FedAvg+BN", changes), (TAN, changes)


@pytest.mark.parametrize(
    ("runs", "item", "says", "counts"),
    [
        (every(), ITEM, "whole budget", (3, 0)),
        (every()[:2], ITEM, "whole budget; 2 of 3 runs", (2, 0)),
        ((*every()[:2], (TAN, JOINED)), ITEM, "whole budget; other `strategy.exchange`", (2, 1)),
        (every(clients=3), ITEM, "whole budget; other `clients`", (0, 3)),
        (every(clients=3), {**ITEM, "changes": ["clients=3"]}, "whole budget", (0, 3)),
        (every(), INFERRED, "all rounds of FedBN's protocol, which is inferred", (0, 3)),
        (every(rounds=0.25), INFERRED, "25 % of the rounds of FedBN's protocol, which is inferred", (0, 3)),
        (((GN, {"rounds": 0.5}), (TAN, {})), ITEM, "50 to 100 % of the rounds; 2 of 3 runs", (1, 1)),
    ],
)
def test_an_item_s_status_is_what_its_raw_files_have(
    raw: Callable[..., None], monkeypatch: pytest.MonkeyPatch, runs: Any, item: Any, says: str, counts: tuple[int, int]
) -> None:
    """And it counts as measured in full or in part; of an inferred protocol always in part."""
    rounds = load_experiment("fedtan/table3").runs[0].rounds
    raw(*((label, {**changes, "rounds": rounds * changes.get("rounds", 1)}) for label, changes in runs))
    assert measured.status(item) == (says, "1 of 1")
    monkeypatch.setattr(measured, "items", lambda: [("FedTAN", "Table 3", item)])
    kinds = ("accuracies", "in part", "not measured")
    assert measured.coverage() == {"FedTAN": Counter(dict(zip(kinds, (*counts, 3 - sum(counts)), strict=True)))}


def test_the_results_of_a_table_have_the_words_of_a_label() -> None:
    """A strategy's values by hospital are one result, and its accuracies by partition several."""
    labels = [{"FedTAN", "partition=iid"}, {"FedTAN", "partition=classes"}, {"GN"}]
    table = {"FedTAN": {"partition=iid": 91.3, "partition=classes": 87.7}, "GN": {"cleveland": 1.0, "va": 2.0}}
    assert [*measured.printed(table, labels)] == [*labels]
    with pytest.raises(ValueError, match="no run of the experiment is called FedTAN, partition=classes=2"):
        [*measured.printed({"FedTAN": {"partition=iid": 91.3, "partition=classes=2": 87.7}}, labels)]


def test_every_table_of_the_papers_is_counted() -> None:
    titles = {(paper, title) for paper, title, _ in measured.items()}
    papers = results.specification("published.yaml")
    assert {(paper, table) for paper in papers for table in papers[paper] if table != "setup"} <= titles
    assert measured.coverage()["FixBN"]["accuracies"] == 6, (
        "three runs of Table 4, two of them in Table H, one in Table I"
    )


def test_a_result_of_too_few_seeds_is_measured_in_part(
    raw: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {label: row * 5 for label, row in measured.rows_of("fedtan/table3").items()}
    monkeypatch.setattr(measured, "rows_of", lambda *_: asked)
    monkeypatch.setattr(measured, "items", lambda: [("FedTAN", "Table 3", {**ITEM, "costs": True})])
    for seeds, kind in ((2, "in part"), (3, "costs")):
        raw(*(each for seed in range(seeds) for each in every(seed=seed)))
        assert measured.coverage() == {"FedTAN": {kind: 3}}


def test_an_item_claims_no_more_than_its_runs(raw: Callable[..., None]) -> None:
    raw(*every(), status="failed")
    assert measured.status(ITEM) == ("whole budget; 3 failed", "1 of 1")
    assert measured.status({"experiment": "fedtan/table3"}) == ("not measured", "")
    assert measured.status({"experiment": "fedtan/table3", "needs": "a GPU"}) == ("not measured; needs a GPU", "")
    with pytest.raises(ValueError, match="runs has no run 'FixBN'"):
        measured.status({**ITEM, "sets": {"runs": {"FixBN": "FedTAN"}}})
    with pytest.raises(ValueError, match=r"fedtan/table3 has no run 'SiloBN'"):
        measured.status({**ITEM, "sets": {"runs": {"FedTAN": "SiloBN"}}})


# --- statistics -----------------------------------------------------------------------


def test_the_primary_endpoint_is_the_mean_of_the_last_tenth_of_the_evaluations() -> None:
    """FixBN and BN at 16 pixels by hand: 64 evaluations, so the last seven."""
    runs = [results.runs_of(f"fixbn/table4-16px:{label}") for label in ("FixBN", "BN")]
    curves = [[[100 * point["accuracy"] for point in run.curve] for run in of_label] for of_label in runs]
    assert {len(curve) for of_label in curves for curve in of_label} == {64}
    late = [statistics.mean(one[57:]) - statistics.mean(other[57:]) for one, other in zip(*curves, strict=True)]
    found = {(each.title, each.setup): each for each in results.differences("results fixbn differences")}
    five, three = (found["FixBN - BN", setup] for setup in ("16 pixels", "32 pixels"))
    assert five.values == pytest.approx(late)
    assert five.published == pytest.approx(76.56 - 53.97)
    error = statistics.stdev(late) / 5**0.5
    assert five.test.low == pytest.approx(statistics.mean(late) - 2.776 * error, abs=0.01)
    assert five.p < 0.001
    assert str(five) == "24.1 (20.3 to 28.0)"
    assert (str(three), three.test.pairs) == ("33.8 (21.0 to 46.7)", 3)
    assert str(found["Fixup - GN", "25 % of the rounds"]) == "4.7"


def test_no_significant_difference_has_another_sign_at_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def every() -> list[results.Difference]:
        return [each for name in DIFFERENCES for each in results.differences(name)]

    primary = every()
    for other, most in {"metric": 2.0, "best": 20.0}.items():
        monkeypatch.setattr(results.Run, "late", getattr(results.Run, other))
        for one, same in zip(primary, every(), strict=True):
            if one.p < 0.05:
                assert one.test.difference * same.test.difference >= 0, (other, one)
                assert abs(one.test.difference - same.test.difference) < most, (other, one)


def test_without_a_curve_of_the_metric_the_last_round_counts() -> None:
    """FedBN's own models were tested after the last round only, so batch norm's model is compared there too."""
    every = results.differences("results label-skew differences")
    fedbn, _ = (each for each in every if each.setup.startswith("own models"))
    runs = {label: results.runs_of(f"mnist/noniid-lr0.5:{label}")[:5] for label in ("FedBN", "FedAvg+BN")}
    ends = zip(*runs.values(), strict=True)
    by_hand = [100 * (own.summary["clients_accuracy"] - one.summary["accuracy"]) for own, one in ends]
    assert fedbn.values == pytest.approx(by_hand)


def test_seeds_that_were_added_after_a_look_do_not_count() -> None:
    assert len(results.runs_of("mnist/noniid-lr0.5:FedTAN")) == 10
    every = results.differences("results label-skew differences")
    assert {len(each.values) for each in every if each.setup == "two classes"} == {5}


def test_a_difference_may_be_of_other_rounds_in_each_run() -> None:
    """FedBS in round 10 and FedAvg in round 20, from their curves."""
    halved = results.differences("results clients differences")[-1]
    for run in results.runs_of("fedbs/cifar10-unbalanced:FedBS"):
        (other,) = (each for each in results.runs_of("fedbs/cifar10-unbalanced:FedAvg") if each.seed == run.seed)
        ours, theirs = ({point["round"]: 100 * point["accuracy"] for point in each.curve} for each in (run, other))
        assert halved.values[run.seed] == pytest.approx(ours[10] - theirs[20])


def test_a_run_is_found_by_its_label_with_or_without_swept_keys() -> None:
    assert [run.settings["seed"] for run in results.runs_of("FedTAN", "fedtan/table2-16px")] == [0, 1]
    assert results.runs_of("mnist/falling:FixBN") == []
    with pytest.raises(ValueError, match="is several runs of a seed"):
        results.runs_of("fixbn/lenet-rate:FixBN")
    rates = [run.settings["train"]["lr"] for run in results.runs_of("fixbn/lenet-rate:FixBN where train.lr=0.0002")]
    assert rates == [0.0002] * 5


def test_cells_have_what_the_raw_files_have() -> None:
    runs = results.runs_of("fedbs/fashion-mnist:FedBS")
    late = [statistics.mean(100 * point["accuracy"] for point in run.curve if point["round"] > 40) for run in runs]
    assert results.cell({"rounds": [41, 60], "digits": 2}, runs) == f"{statistics.mean(late):.2f} ± 0.81"
    (stopped,) = results.runs_of("fedtan/table1:FedTAN-II")
    assert results.cell({"key": "accuracy"}, [stopped]) == "diverged in round 22"
    assert results.by_seed([stopped]) == {}
    without_global_model = results.runs_of("domains/seeds:Standalone")
    assert results.cell({"key": "accuracy"}, without_global_model) == "-"
    assert results.figure(["FedTAN", "Table 1"], {}, "FedTAN") == 87.66
    assert results.figure(["FixBN", "Table 4"], {"GN+WS": "GN+WN"}, "GN+WS") == 66.90
    assert results.figure(["FedWon", "Table 1, Office-Caltech-10"], {}, "FedWon") == 75.6


# --- claims ------------------------------------------------------------------------------


def difference(low: float, high: float, pairs: int = 3, margin: float = 2.0) -> results.Difference:
    """Of an interval: the p value follows from it."""
    centre, freedom = (low + high) / 2, pairs - 1
    error = (high - low) / 2 / stdtrit(freedom, 0.975)
    test = Paired(pairs, centre, low, high, 2 * float(stdtr(freedom, -abs(centre) / error)))
    return results.Difference("", "", [], test, margin, None)


UP, DOWN, WIDE, NONE = difference(4, 6), difference(-6, -4), difference(-1, 9), difference(-0.5, 1)
FEW = results.Difference("", "", [1.0], Paired(1, 1.0), 2.0, None)


@pytest.mark.parametrize(
    ("expects", "found", "says"),
    [
        ("above", [], "not measured"),
        ("above", [UP, UP], "supported"),
        ("above", [DOWN], "contradicted"),
        ("below", [DOWN], "supported"),
        ("above", [WIDE, DOWN], "contradicted"),
        ("above", [UP, DOWN], "contradicted"),
        ("above", [UP, WIDE], "open: too wide an interval"),
        ("above", [UP, FEW], "open: 1 seed"),
        ("above", [NONE], "equal"),
        ("above", [difference(0.2, 0.4)], "equal"),
        ("above", [difference(0.2, 0.4, margin=0.3)], "supported"),
        ("equal", [NONE], "supported"),
        ("equal", [difference(-1, 2.5)], "open: too wide an interval"),
        ("equal", [difference(-2.5, -2.1)], "contradicted"),
        ("equal", [difference(-2.1, -1.5, margin=0.7)], "contradicted"),
        ("level", [difference(-1, 5)], "supported"),
        ("level", [difference(-3, 5)], "open: too wide an interval"),
        ("level", [difference(-4, -3)], "contradicted"),
        ("mixed", [UP, WIDE, DOWN], "supported"),
        ("mixed", [UP, WIDE], "open: one never leads clearly"),
        ("mixed", [UP, difference(-0.4, -0.2)], "open: one never leads clearly"),
    ],
)
def test_the_verdict_on_a_claim(expects: str, found: list[results.Difference], says: str) -> None:
    assert results.verdict(expects, found) == says


def test_only_what_refutes_a_claim_is_corrected_for_the_number_of_comparisons() -> None:
    """At p = 0.04 each of two comparisons supports a claim, and one of two doesn't contradict it."""
    barely = difference(0.3, 9.7)
    assert 0.025 < barely.p_differs < 0.05
    assert results.verdict("above", [barely, barely]) == "supported"
    assert results.verdict("below", [barely]) == "contradicted"
    assert results.verdict("below", [barely, WIDE]) == "open: too wide an interval"


def test_the_margin_is_two_points_or_a_fifth_of_the_baseline_s_error() -> None:
    found = {(each.title, each.setup): each for each in results.differences("results label-skew differences")}
    central = [run.late("accuracy") for run in results.runs_of("mnist/noniid-lr0.5:Centralised")[:5]]
    assert found["FedTAN - Centralised", "two classes"].margin == pytest.approx((100 - statistics.mean(central)) / 5)
    assert found["FedTAN - FedAvg+BN", "two classes"].margin == 2


def test_the_costs_of_fedtan_ii_are_the_papers() -> None:
    """The counted claim: rounds are equal, and bits but for the running statistics, which the paper omits."""
    for _, _, _, paper, ours, bits, our_bits, *_ in results.costs()[1]:
        assert paper == ours
        assert float(str(our_bits)) == pytest.approx(float(str(bits).rstrip("*")) * (1 + 60 / 23_920), rel=1e-3)


# --- figures outside the results pages ----------------------------------------------------


def test_the_evidence_for_a_strategy_is_of_the_page_that_it_links_to() -> None:
    rows = {str(row[0]): row for row in results.evidence()[1]}
    (few,) = (row for title, row in rows.items() if title.startswith("[few classes: MNIST, "))
    falling = results.by_seed(results.runs_of("mnist/falling:FedAvg+BN")).values()
    assert few[1] == f"{statistics.mean(falling):.1f} ± {statistics.stdev(falling):.1f}", "at FixBN's rate"
    for title, row in results.specification("results/tables.yaml")["evidence"]["rows"].items():
        page = re.findall(r"\]\(results/([\w-]+)\.md", title)[0]
        assert f"<!-- table: results {row['set'].partition('/')[0]}" in PAGES[f"{page}.md"]


def test_rows_that_the_seeds_do_not_tell_apart_share_a_rank() -> None:
    seeds = (
        (90.1, 89.9, 90.0, 90.2, 89.8),
        (90.2, 89.8, 90.0, 89.9, 90.0),
        (79.9, 80.0, 80.1, 80.0, 80.0),
        (59, 99, 69, 89, 79),
    )
    best, close, lower, lower_and_wide = (dict(enumerate(each)) for each in seeds)
    assert results.ranks([best, lower, {}, close, lower_and_wide]) == [1, 3, 0, 1, 3], "79 in the mean isn't first"


# --- The commands of sets.csv repeat the runs.


NOT_EXPERIMENTS = {"fixbn/lenet-rate": "begins from the models of another set"}
REFUSED = {"domains/batches": "FedAvg+BRN"}  # is batch norm there, which is an error by now, and in no table
GONE = "FedAP"  # pages name the last commit that has it


COMMANDS = {each["set"]: each["commands"].split(" ; ") for each in LISTED}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NOT_EXPERIMENTS])
def test_the_commands_for_a_set_repeat_its_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their settings, rounds and seeds. Rows that weren't measured may be trained too, but no other conditions."""
    papers: dict[tuple[str, int], Settings] = {}
    for command in COMMANDS[name]:
        where, _, line = command.rpartition(" && ")
        monkeypatch.chdir(ROOT / where.removeprefix("cd "))
        arguments = cli._parsed(shlex.split(line)[1:])
        papers |= {
            (run.label, run.seed): run for run in load_experiment(arguments.experiment, overrides_of(arguments)).runs
        }
    raw = {(run.label, run.seed): run.settings for run in results.read(name)}
    raw = {key: settings for key, settings in raw.items() if key[0].partition(", ")[0] not in (REFUSED.get(name), GONE)}
    assert sorted(raw.keys() - papers.keys()) == [], "sets.yaml has the commands that repeat them"
    for key, settings in raw.items():
        assert (key, measured.differing(papers[key], settings)) == (key, set())
        assert papers[key].rounds == settings["rounds"]
    rows, labels = {label.partition(", ")[0] for label, _ in raw}, {label for label, _ in raw}
    assert {label for label, _ in papers if label.partition(", ")[0] in rows} <= labels
    assert {seed for _, seed in papers} == {seed for _, seed in raw}
