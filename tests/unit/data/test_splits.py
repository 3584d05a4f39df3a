"""The papers' splits: sizes and classes as asked, no image lost or given twice, the same split for the same seed."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbn_flwr.batch import first
from fedbn_flwr.data.dataset import Groups
from fedbn_flwr.data.examples import main_input
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import hold_out
from fedbn_flwr.data.partitions import partition as split
from fedbn_flwr.data.source import HeldOut, Source
from fedbn_flwr.errors import DataError
from fedbn_flwr.experiment.file.layers import load_experiment

SORTED = torch.arange(10).repeat_interleave(40)  # 400 images of ten classes
SITES = Groups(("attic", "barn", "cellar"), torch.arange(400) % 3, None)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "iid": ("iid", {}),
    "dirichlet": ("dirichlet", {"alpha": 1.0}),
    "classes": ("classes", {"classes_per_client": 5}),
    "shards": ("shards", {"shards_per_client": 2}),
    "unbalanced_shards": ("unbalanced_shards", {"shard_size": 5, "min_shards": 1, "max_shards": 40}),
    "domain": ("domain", {"groups": SITES}),
    "natural": ("natural", {"groups": SITES}),
}
CLIENTS = {"domain": st.sampled_from([3, 6, 9, 12]), "natural": st.just(3)}


def partition(*given: Any, groups: Groups | None = None, **options: Any) -> list[Tensor]:
    return split(*given, groups, **options)  # type: ignore[call-arg]


def held(part: Tensor, labels: Tensor = SORTED) -> list[int]:
    return torch.bincount(labels[part], minlength=10).tolist()


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_nothing_is_lost_and_nothing_given_twice(name: str, data: st.DataObject, seed: int) -> None:
    kind, options = KINDS[name]
    clients = data.draw(CLIENTS.get(name, st.integers(2, 12)))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(400))  # no split may rely on sorted rows
    parts = partition(SORTED[order], 10, clients, seed, kind, **options)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(400))
    assert all(part.equal(part.sort().values) for part in parts)
    assert kind != "classes" or {np.count_nonzero(held(part, SORTED[order])) for part in parts} == {5}
    again = partition(SORTED[order], 10, clients, seed, kind, **options)
    assert all(one.equal(two) for one, two in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"natural"}))
def test_another_seed_is_another_split(name: str) -> None:
    kind, options = KINDS[name]
    one, two = ([part.tolist() for part in partition(SORTED, 10, 6, seed, kind, **options)] for seed in (1, 2))
    assert one != two


# --- shards ------------------------------------------------------------------


def test_fedbs_deals_1200_shards_of_50_so_that_each_client_has_1_to_30() -> None:
    labels = torch.arange(10).repeat_interleave(6_000)
    sizes = []
    for seed in range(5):
        parts = partition(labels, 10, 100, seed, "unbalanced_shards", shard_size=50)
        shards = [len(part) / 50 for part in parts]
        assert all(n == int(n) and 1 <= n <= 30 for n in shards)
        assert sum(shards) == 1_200
        sizes += shards
    assert min(sizes) <= 2
    assert max(sizes) >= 20, "they differ widely"


@settings(max_examples=60)
@given(clients=st.integers(1, 20), least=st.integers(1, 5), more=st.integers(0, 20), seed=st.integers(0, 99))
def test_numbers_of_unbalanced_shards_keep_their_bounds(clients: int, least: int, more: int, seed: int) -> None:
    """80 shards of five examples; also where the bounds leave little or no choice."""
    options = {"shard_size": 5, "min_shards": least, "max_shards": least + more}
    if clients * least <= 80 <= clients * (least + more):
        parts = partition(SORTED, 10, clients, seed, "unbalanced_shards", **options)
        assert all(least <= len(part) / 5 <= least + more for part in parts)
    else:
        with pytest.raises(DataError, match="shard_size=5 makes 80 shards"):
            partition(SORTED, 10, clients, seed, "unbalanced_shards", **options)


# --- classes -----------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 6, 8, 10])
def test_fedtan_sweep_client_i_holds_k_classes_from_2i_on(k: int) -> None:
    """Appendix D of its paper: five clients, ten classes, wrapping around; each class is shared equally."""
    labels = torch.arange(10).repeat_interleave(60)
    for client, part in enumerate(partition(labels, 10, 5, 0, "classes", classes_per_client=k)):
        counts = held(part, labels)
        own = {(2 * client + j) % 10 for j in range(k)}
        assert {label for label, n in enumerate(counts) if n} == own
        assert len(part) == 120
        assert [counts[label] for label in sorted(own)] == [60 // (k // 2)] * k


def test_more_clients_than_classes_share_them() -> None:
    parts = partition(SORTED, 10, 20, 0, "classes", classes_per_client=1)
    assert [{*SORTED[part].tolist()} for part in parts] == [{i // 2} for i in range(20)]


def test_a_client_without_images_is_an_error_that_names_it() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1])  # client 2 of 4 holds half of class 1, of which there is one image
    with pytest.raises(DataError, match=r"leaves 1 of 4 clients without examples \(clients 3\)"):
        partition(labels, 2, 4, 0, "classes", classes_per_client=1)


# --- all examples --------------------------------------------------------------


def test_iid_parts_are_of_equal_size_and_hold_all_classes() -> None:
    parts = partition(SORTED, 10, 5, 0, "iid")
    assert [len(part) for part in parts] == [80] * 5
    assert all(np.count_nonzero(held(part)) == 10 for part in parts)


# --- groups ------------------------------------------------------------------


def test_each_domain_goes_over_its_clients_and_no_further() -> None:
    parts = partition(SORTED, 10, 6, 0, "domain", groups=SITES)
    assert [set(SITES.train[part].tolist()) for part in parts] == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert [len(part) for part in parts] == [67, 67, 67, 66, 67, 66]
    assert all(np.count_nonzero(held(part)) == 10 for part in parts), "IID within a domain"


def test_each_natural_id_is_a_client() -> None:
    parts = partition(SORTED, 10, 3, 0, "natural", groups=SITES)
    assert [part.tolist() for part in parts] == [list(range(i, 400, 3)) for i in range(3)]


def test_clients_of_a_domain_can_have_a_part_of_its_images() -> None:
    whole = partition(SORTED, 10, 3, 0, "domain", groups=SITES)
    parts = partition(SORTED, 10, 3, 0, "domain", groups=SITES, examples=62)
    assert [len(part) for part in parts] == [62, 62, 62]
    for part, images in zip(parts, whole, strict=True):
        assert set(part.tolist()) < set(images.tolist())
    assert parts[0].tolist() != partition(SORTED, 10, 3, 1, "domain", groups=SITES, examples=62)[0].tolist()


def test_a_domain_with_only_test_images_has_no_client() -> None:
    held_out = Groups(("attic", "barn", "zoo"), torch.arange(400) % 2, None)
    assert len(partition(SORTED, 10, 2, 0, "domain", groups=held_out)) == 2


@pytest.mark.parametrize(
    ("clients", "kind", "options", "message"),
    [
        (4, "domain", {"groups": SITES}, r"3 domains \(attic, barn, cellar\) cannot be .* to clients=4.*clients=3"),
        (2, "domain", {"groups": SITES}, "set clients=3"),
        (6, "domain", {"groups": SITES, "clients_per_domain": 3}, "for 3 per domain set clients=9"),
        (3, "domain", {"groups": SITES, "examples": 200}, "'attic' has 134 examples for 1 clients with examples=200"),
        (3, "domain", {}, "the data has no domains; name their column by data.domain"),
        (5, "natural", {"groups": SITES}, "has 3 values .*, but clients is 5; set clients=3"),
        (
            300,
            "domain",
            {"groups": Groups(("a",), torch.zeros(299, dtype=torch.int64), None)},
            "299 examples for 300",
        ),
        (401, "iid", {}, "clients is 401, but the data has 400 training examples"),
        (4, "dirichlet", {"alpha": 0.1, "min_size": 399}, r"min_size=399 examples; use a larger alpha"),
        (5, "classes", {"classes_per_client": 11}, r"classes_per_client=11, but the data has 10 classes"),
        (
            3,
            "classes",
            {"classes_per_client": 2},
            r"160 of 400 examples to no client \(classes \[2, 5, 8, 9\]\)",
        ),
        (
            21,
            "shards",
            {"shards_per_client": 20},
            r"400 examples cannot be cut into 420 shards \(21 clients with shards_per_client",
        ),
    ],
)
def test_a_split_that_does_not_fit_the_clients_is_an_error(
    clients: int, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        partition(SORTED, 10, clients, 0, kind, **options)


# --- Kinds of partition that Flower has too: every client has the same examples as from flwr-datasets.


def by_flower(name: str, labels: np.ndarray, clients: int, seed: int, **options: Any) -> list[list[int]]:
    from flwr_datasets import partitioner as partitioners  # it takes a second, in each process that collects tests

    partitioner = getattr(partitioners, name)(num_partitions=clients, partition_by="label", seed=seed, **options)
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels, "row": np.arange(len(labels))})
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return [sorted(partitioner.load_partition(i)["row"][:]) for i in range(clients)]


def dirichlet(draw: st.DrawFn, clients: int, images: int) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    alpha, least = draw(st.sampled_from([1e-3, 0.1, 0.5, 1.0, 30.0])), draw(st.integers(0, 6))
    options = {"alpha": alpha, "min_partition_size": least, "self_balancing": False}
    return "dirichlet", {"alpha": alpha, "min_size": least}, "DirichletPartitioner", options


def shards(draw: st.DrawFn, clients: int, images: int) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    each = draw(st.integers(1, 4))
    options = {"shard_size": -(-images // (clients * each)), "keep_incomplete_shard": True}
    return "shards", {"shards_per_client": each}, "ShardPartitioner", options


@st.composite
def cases(draw: st.DrawFn, kind: Any) -> tuple[Any, ...]:
    clients, images = draw(st.integers(1, 12)), draw(st.integers(12, 120))
    labels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, draw(st.integers(2, 10)), images)
    return labels, clients, draw(st.integers(0, 2**31 - 1)), *kind(draw, clients, images)


@pytest.mark.parametrize("kind", [dirichlet, shards], ids=lambda kind: kind.__name__)
def test_the_images_are_those_of_flower(kind: Any) -> None:
    compared = 0

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(case=cases(kind))
    def compare(case: tuple[Any, ...]) -> None:
        nonlocal compared
        labels, clients, seed, name, options, flower, flower_options = case
        try:
            expected = by_flower(flower, labels, clients, seed, **flower_options)
        except ValueError:
            expected = None
        try:
            parts = partition(torch.from_numpy(labels), 10, clients, seed, name, **options)
        except DataError:
            # Also where Flower leaves out images, or clients have none.
            assert expected is None or sum(map(len, expected)) < len(labels) or not all(expected) or name == "shards"
            return
        assert [part.tolist() for part in parts] == expected
        compared += 1

    compare()
    assert compared >= 15, "most draws were refused"


# --- The test split that is held out of the examples: shares, folds, patients and times.


ROWS = 240


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows with their number as input; 40 patients of two sites, six rows each; ten dates."""
    number = np.arange(ROWS)
    frame = pd.DataFrame(
        {
            "row": number,
            "sick": np.where(number % 3 == 0, "yes", "no"),
            "patient": number % 40,
            "site": np.where(number % 2 == 0, "a", "b"),
            "date": [f"2024-{1 + (i * 7) % 10:02}-01" for i in number],
        }
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def rows(table: Path, seed: int = 0, **test: Any) -> tuple[set[int], set[int]]:
    """The numbers of the training and of the test rows."""
    source = Source(name=str(table), label=("sick",), group="site", inputs=("row",), test=test).of_seed(seed)
    data = load(source)
    train, found = ({int(row) for row in first(part.inputs).flatten()} for part in (data.train, data.test))
    assert not train & found
    assert train | found == set(range(ROWS))
    return train, found


def test_no_patient_is_on_both_sides(table: Path) -> None:
    train, test = rows(table, share=0.2, by="patient")
    patients = {row % 40 for row in test}
    assert len(patients) == 8
    assert len(test) == 8 * 6
    assert not patients & {row % 40 for row in train}
    assert sum(patient % 2 for patient in patients) == 4, "in proportion to the sites"


@pytest.mark.parametrize("form", ["2024-{:02}-01", "{}", "{}.5", "2024-{}-1 12:00"])
def test_the_last_share_of_the_time_is_the_test_split(tmp_path: Path, form: str) -> None:
    months = [1 + (i * 7) % 12 for i in range(ROWS)]
    frame = pd.DataFrame({"row": range(ROWS), "sick": [i % 3 for i in range(ROWS)], "site": 1})
    frame.assign(date=[form.format(month) for month in months]).to_csv(tmp_path / "t.csv", index=False)
    _, test = rows(tmp_path / "t.csv", share=0.2, time="date")
    assert {months[row] for row in test} == {11, 12}, "a sixth of the rows, since a quarter is further from a fifth"


def test_a_seed_draws_its_own_split_and_folds_cover_all_rows_once(table: Path) -> None:
    plain = rows(table, share=0.2)[1]
    assert rows(table, seed=1, share=0.2)[1] == plain, "the same for all seeds"
    assert rows(table, seed=0, share=0.2, split="seed")[1] == plain
    assert rows(table, seed=1, share=0.2, split="seed") == rows(table, share=0.2, split=1)
    assert rows(table, share=0.2, split=1)[1] != plain
    folds = [rows(table, seed=seed, folds=5)[1] for seed in range(5)]
    assert set().union(*folds) == set(range(ROWS))
    assert [len(fold) for fold in folds] == [48] * 5
    assert all(abs(sum(row % 3 == 0 for row in fold) - 16) <= 1 for fold in folds), "in proportion to the classes"
    again = [rows(table, seed=seed, folds=5)[1] for seed in range(5, 10)]
    assert again[0] not in folds
    assert set().union(*again) == set(range(ROWS))
    patients = [{row % 40 for row in rows(table, seed=seed, folds=4, by="patient")[1]} for seed in range(4)]
    assert sorted(patient for fold in patients for patient in fold) == list(range(40))


def test_validation_keeps_together_what_the_test_split_does(table: Path) -> None:
    source = Source(name=str(table), label=("sick",), test={"share": 0.2, "by": "patient"})  # type: ignore[arg-type]
    data = load(source)
    rows = torch.arange(len(data.train))[::2]
    train, held = hold_out(data, {1: rows}, 0.25, 0)[1]
    assert sorted([*train.tolist(), *held.tolist()]) == rows.tolist()
    patients = [{int(row) % 40 for row in main_input(data.train.select(part).inputs)[:, 0]} for part in (train, held)]
    assert len(patients[1]) == round(len(patients[0] | patients[1]) / 4)
    assert patients[0].isdisjoint(patients[1])


def test_the_columns_of_a_split_are_no_inputs(table: Path) -> None:
    source = Source(name=str(table), label=("sick",), test={"share": 0.2, "by": "patient"})  # type: ignore[arg-type]
    data = load(source)
    assert data.input_names == ("row",)
    assert data.columns["patient"] == "data.test.by"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"share": 0.2, "by": "pat"}, r"data\.test\.by='pat' is not a column"),
        ({"share": 0.01, "by": "patient"}, r"data\.test is 0\.01, which is 0 of 40 values of data\.test\.by='patient'"),
        ({"folds": 50, "by": "patient"}, r"data\.test\.folds is 50, more than the 40 values"),
        (
            {"share": 0.2, "time": "sick"},
            r"data\.test\.time='sick': .* has other times than numbers, or dates .*: 'no'",
        ),
    ],
)
def test_errors_name_the_key_and_the_column(table: Path, test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(table, **test)


def test_folds_replace_a_share_and_the_other_way_round() -> None:
    text = "{data: {test: {share: 0.2, by: patient}}, runs: {A: {}, B: {data: {test: {folds: 2}}}}}"
    found = [run.data.held_out for run in load_experiment(text).runs]
    assert found == [HeldOut(share=0.2, by="patient"), *[HeldOut(folds=2, by="patient")] * 2]
    (run,) = load_experiment(text, ["data.test.share=0.3", "only=B"]).runs
    assert run.data.held_out == HeldOut(share=0.3, by="patient")


def test_folds_without_seeds_are_a_run_each() -> None:
    def seeds(text: str, *changes: str) -> list[int]:
        return [run.seed for run in load_experiment(text, changes).runs]

    assert seeds("{data: {test: {folds: 3}}}") == [0, 1, 2]
    assert seeds("{data: {test: {folds: 3}}}", "seed=4") == [4]
    assert seeds("{seeds: [7, 8], data: {test: {folds: 3}}}") == [7, 8]
    assert seeds("{data: {test: {folds: 3, split: 1}}}") == [0]
    assert load_experiment("{data: {test: {folds: 3}}}").runs[1].source.held_out.split == 1  # type: ignore[union-attr]
