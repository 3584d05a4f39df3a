"""Tables, series, tokens and volumes: from files with columns, and from arrays, to inputs and targets."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from sklearn.datasets import load_breast_cancer, load_diabetes

from fedbn_flwr.batch import first
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.columns import read
from fedbn_flwr.data.dataset import DataSet, fewer, in_order
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import partition, share_test
from fedbn_flwr.data.source import Source
from fedbn_flwr.data.table import joined, table_of
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment.data import load_data, shape_without_data, shares_of
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings
from fedbn_flwr.models.build import build_model

RNG = np.random.default_rng(0)


def cancer() -> pd.DataFrame:
    frame = load_breast_cancer(as_frame=True).frame
    kinds = np.where(frame.pop("target") == 1, "benign", "malignant")
    return frame.assign(diagnosis=kinds, site=[f"s{row % 4}" for row in range(len(frame))])


def opened(file: Path, **options: Any) -> DataSet:
    return load(Source(name=str(file), **options))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same table as CSV, Parquet and NumPy arrays."""
    folder = tmp_path_factory.mktemp("tables")
    frame = cancer()
    frame.to_csv(folder / "all.csv", index=False)
    frame.to_parquet(folder / "all.parquet")
    columns = {name: frame[name].to_numpy(str if frame[name].dtype.kind not in "if" else None) for name in frame}
    np.savez(folder / "all.npz", **columns)
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(folder / "diabetes.csv", index=False)
    return folder


def test_a_table_is_the_same_from_csv_parquet_and_numpy(tables: Path) -> None:
    frame = cancer()
    names = [name for name in frame if name not in ("diagnosis", "site")]
    found = [
        opened(tables / f"all.{kind}", inputs=names, label="diagnosis", group="site", test=0.2)
        for kind in ("csv", "parquet", "npz")
    ]
    for data in found:
        assert (data.task.name, data.class_names, data.shape) == ("classification", ("benign", "malignant"), (30,))
        assert data.input_names == tuple(names)
        assert data.train.inputs.equal(found[0].train.inputs)
        assert data.test.targets.equal(found[0].test.targets)
    rows = torch.cat([first(found[0].train.inputs), first(found[0].test.inputs)])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, frame[names].to_numpy(np.float32).tolist()))


def test_without_names_the_inputs_are_all_numbers_that_have_no_other_use(tables: Path) -> None:
    data = opened(tables / "all.csv", label="diagnosis", domain="site", test=0.2)
    assert "site" not in data.input_names
    assert len(data.input_names) == 30


def test_a_share_is_held_out_of_each_class_and_group(tables: Path) -> None:
    data = opened(tables / "all.csv", label="diagnosis", group="site", test=0.2)
    assert len(data.test) == round(0.2 * 569)
    for group in range(4):
        for kind in range(2):
            here, there = (
                int(((split == group) & (part.labels == kind)).sum())
                for split, part in ((data.groups.train, data.train), (data.groups.test, data.test))
            )
            assert abs(there - 0.2 * (here + there)) < 1


def test_labels_and_groups_that_are_texts_in_one_split_are_texts_in_both(tmp_path: Path) -> None:
    """The codes of the test split are numbers by chance."""
    rows = {"train": ["01", "2", "A", "02", "1"], "test": ["2", "01", "1", "1"]}
    for name, codes in rows.items():
        frame = pd.DataFrame({"x": range(len(codes)), "ward": codes, "code": codes})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    source = Source(name=str(tmp_path), label="code", group="ward")
    data = load(source)
    assert data.class_names == ("01", "02", "1", "2", "A")
    assert data.train.labels.tolist() == [0, 3, 4, 1, 2]
    assert data.test.labels.tolist() == [3, 0, 2, 2]
    assert data.groups.names == ("01", "1", "02", "2", "A"), "by the numbers in them"


def test_parquet_labels_of_two_types_are_classes_by_their_texts(tmp_path: Path) -> None:
    for part, labels in (("train", ["10", "a", "9"]), ("test", [9, 10, 9])):
        pd.DataFrame({"age": [1.0, 2.0, 3.0], "label": labels}).to_parquet(tmp_path / f"{part}.parquet")
    data = opened(tmp_path, label="label")
    assert data.class_names == ("10", "9", "a")
    assert data.test.labels.tolist() == [1, 0, 1]


def test_two_files_are_training_and_test_split(tmp_path: Path) -> None:
    frame = cancer()
    frame[:400].to_csv(tmp_path / "train.csv", index=False)
    frame[400:].to_csv(tmp_path / "test.csv", index=False)
    data = opened(tmp_path, label="diagnosis")
    assert (len(data.train), len(data.test)) == (400, 169)


# --- values ------------------------------------------------------------------


def test_missing_values_become_the_mean(tmp_path: Path) -> None:
    frame = cancer()
    frame.loc[3:7, "mean area"] = np.nan
    frame.loc[5:6, "mean radius"] = np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    data = opened(tmp_path / "gaps.csv", label="diagnosis", test=0.2, missing="mean")
    ((inputs, _),) = TestBatches(data.train, data.moments, len(data.train))
    gaps = data.train.inputs.isnan()
    assert int(gaps.sum()) + int(data.test.inputs.isnan().sum()) == 7
    assert not inputs[gaps].any(), "zero after normalisation"
    assert inputs.double().mean(0).abs().max() < 1e-6, "the mean of the others did not change"


def test_rows_with_missing_inputs_are_left_out_with_their_labels_and_groups(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    frame = pd.DataFrame({"a": np.arange(20.0), "sex": ["f", "m"] * 10, "y": [*"ab"] * 10, "site": np.arange(20) // 5})
    frame.loc[[0, 7], "a"], frame.loc[11, "sex"] = np.nan, None
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame[:9].to_csv(tmp_path / "test.csv", index=False)
    chosen: dict[str, Any] = {"label": "y", "group": "site", "categories": {"sex": ["f", "m"]}}
    with pytest.raises(DataError, match=r"no value .* in a \(4\), sex=f \(1\), .*data\.missing: mean, .* or drop"):
        opened(tmp_path, **chosen)
    data = opened(tmp_path, **chosen, missing="drop")
    kept = [row for row in range(20) if row not in (0, 7, 11)]
    assert first(data.train.inputs)[:, 0].tolist() == kept
    assert first(data.test.inputs)[:, 0].tolist() == kept[:7]
    assert data.train.labels.tolist() == [row % 2 for row in kept]
    assert data.groups.train.tolist() == [row // 5 for row in kept]
    assert "data.missing: drop leaves out 3 of 20 training examples" in flower_log.text
    assert "drop leaves out 2 of 9 test examples" in flower_log.text


def test_a_column_without_values_has_no_mean(tmp_path: Path) -> None:
    frame = pd.DataFrame({"fee": [None] * 20, "dose": range(20), "ill": [0, 1] * 10})
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = opened(tmp_path / "t.csv", inputs=["dose", "fee"], label="ill", test=0.2, missing="mean")
    with pytest.raises(DataError, match=r"column 'fee' of the inputs has no value in any row; leave it out"):
        data.moments  # noqa: B018


def test_texts_are_inputs_only_if_their_values_are_given(tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": range(20), "sex": ["m", "f"] * 10, "ill": [0, 1, 1, 0] * 5})
    frame.to_csv(tmp_path / "t.csv", index=False)
    chosen: dict[str, Any] = {"inputs": ["age", "sex"], "label": "ill", "test": 0.2}
    data = opened(tmp_path / "t.csv", **chosen, categories={"sex": ["m", "f", "x"]})
    assert data.input_names == ("age", "sex=m", "sex=f", "sex=x")
    assert [row[1:] for row in data.train.inputs.tolist()] == [
        [1, 0, 0] if row[0] % 2 == 0 else [0, 1, 0] for row in data.train.inputs.tolist()
    ]


# --- series and tokens -------------------------------------------------------


def test_columns_of_lists_are_arrays(tmp_path: Path) -> None:
    signal, words = RNG.normal(3, 2, (12, 2, 6)), RNG.integers(0, 8, (12, 5))
    words[0, 0] = 7
    lists = {
        "signal": [row.tolist() for row in signal],
        "words": words.tolist(),
        "kind": [row % 3 for row in range(12)],
    }
    lists["ragged"] = [[1.0] * (1 + row % 2) for row in range(12)]
    pd.DataFrame(lists).to_parquet(tmp_path / "series.parquet")
    chosen: dict[str, Any] = {"label": "kind", "test": 0.25}
    pd.DataFrame({"age": np.arange(12.0), **lists}).to_parquet(tmp_path / "more.parquet")
    assert opened(tmp_path / "more.parquet", **chosen).input_names == ("age",), "lists are inputs if they are named"
    series = opened(tmp_path / "series.parquet", inputs="signal", **chosen)
    assert series.shape == (2, 6)
    both = opened(tmp_path / "series.parquet", inputs=["signal", "words"], **chosen).train.inputs
    assert both["signal"].equal(series.train.inputs)
    data = opened(tmp_path / "series.parquet", inputs="words", **chosen)
    assert (data.train.inputs.dtype, data.tokens) == (torch.int64, 8)
    ((inputs, _),) = TestBatches(data.train, data.moments, 12)
    assert inputs.equal(data.train.inputs), "tokens are not normalised"
    assert opened(tmp_path / "series.parquet", inputs="words", tokens=100, **chosen).tokens == 100, "of all sites"


@pytest.mark.parametrize(
    ("values", "shape", "dtype"),
    [
        (RNG.normal(size=(8, 5)), (5,), torch.float32),
        (RNG.normal(size=(8, 3, 16)), (3, 16), torch.float32),
        (RNG.normal(size=(8, 2, 4, 5, 6)), (2, 4, 5, 6), torch.float32),
        (RNG.integers(0, 9, (8, 7)), (7,), torch.int64),
        (RNG.integers(0, 256, (8, 6, 4), np.uint8), (1, 6, 4), torch.uint8),
        (RNG.integers(0, 256, (8, 1, 3, 6, 4), np.uint8), (1, 3, 6, 4), torch.uint8),
    ],
)
def test_arrays_keep_their_shape(
    tmp_path: Path, values: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    np.savez(tmp_path / "all.npz", inputs=values, labels=np.arange(8) % 2)
    data = opened(tmp_path / "all.npz", test=0.25)
    assert (data.shape, data.train.inputs.dtype) == (shape, dtype)
    blank = data.blank(2)
    assert blank.shape == (2, *shape)
    assert blank.dtype == (torch.int64 if dtype is torch.int64 else torch.float32)
    ((inputs, _),) = TestBatches(data.train, data.moments, 8)
    if dtype is not torch.int64:
        assert inputs.transpose(0, 1).flatten(1).mean(1).abs().max() < 1e-5


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_arrays_are_copied_once_and_parts_that_follow_one_another_not_again(kind: Any) -> None:
    given = {part: table_of(part, {"inputs": np.ones((count, 3, 8, 8), kind), "labels": np.arange(count) % 2})
             for part, count in (("train", 30), ("test", 10))}  # fmt: skip
    whole = joined("own", *given.values())
    data = read(Source(name="own"), whole)
    places = {part.inputs.untyped_storage().data_ptr() for part in (data.train, data.test)}
    assert len(places) == 1
    alone = read(Source(name="own"), given["train"], trains=False).train.inputs
    assert alone.data_ptr() == given["train"].rows("", "inputs").ctypes.data, "of one table they are not copied at all"


def test_several_arrays_are_a_dict(tmp_path: Path) -> None:
    mask = np.arange(6) < RNG.integers(2, 7, (8, 1))
    np.savez(
        tmp_path / "all.npz", signal=RNG.normal(5, 2, (8, 3, 6)), mask=mask, age=RNG.normal(size=8), y=np.arange(8) % 2
    )
    data = opened(tmp_path / "all.npz", inputs=["signal", "mask", "age"], label="y", test=0.25)
    assert {key: part.shape[1:] for key, part in data.train.inputs.items()} == {
        "signal": (3, 6),
        "mask": (6,),
        "age": (),
    }
    ((inputs, _),) = TestBatches(data.train, data.moments, 8)
    assert inputs["signal"].transpose(0, 1)[:, inputs["mask"]].mean(1).abs().max() < 1e-6
    assert not inputs["signal"].transpose(1, 2)[~inputs["mask"]].any(), "padding is zero"
    assert inputs["age"].equal(data.train.inputs["age"])


@pytest.mark.parametrize("kind", ["int64", "uint8", "float32"])
def test_a_mask_of_0_and_1_is_one_of_truth_values(tmp_path: Path, kind: str) -> None:
    mask, chosen = np.arange(6) < RNG.integers(2, 7, (8, 1)), {"inputs": ["inputs", "mask"], "test": 0.25}
    given: dict[str, Any] = {"inputs": RNG.normal(5, 2, (8, 3, 6)), "labels": np.arange(8) % 2}
    for name, some in (("bool", mask), ("numbers", mask.astype(kind))):
        np.savez(tmp_path / f"{name}.npz", mask=some, **given)
    data, twin = (opened(tmp_path / f"{name}.npz", **chosen) for name in ("numbers", "bool"))
    assert (data.train.inputs["mask"].dtype, data.moments) == (torch.bool, twin.moments)


def test_one_value_for_each_example_beside_an_array_is_a_feature(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", a=np.arange(8.0), b=RNG.normal(size=(8, 4)), labels=np.arange(8) % 2)
    data = opened(tmp_path / "all.npz", inputs=["a", "b"], test=0.25)
    assert (data.shape, len(data.moments[0])) == ((1,), 1)


# --- targets -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "task", "found", "names"),
    [
        ("age", None, "classification", None),
        ("age", "regression", "regression", ("age",)),
        ("bp", None, "regression", ("bp",)),
        (["bp", "target"], None, "regression", ("bp", "target")),
        (["age", "bp"], "regression", "regression", ("age", "bp")),
        (["man", "old"], None, "multilabel", ("man", "old")),
    ],
)
def test_labels_are_classes_numbers_or_several_labels_by_their_type(
    tmp_path: Path, label: Any, task: str | None, found: str, names: tuple[str, ...] | None
) -> None:
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["age"] = frame["age"].astype(int)
    frame = frame.assign(man=(frame["sex"] == 1).astype(int), old=(frame["age"] > 50).astype(int))
    frame.to_parquet(tmp_path / "d.parquet")
    data = opened(tmp_path / "d.parquet", inputs=["bmi"], label=label, task=task, test=0.2)
    assert data.task.name == found
    assert names is None or data.class_names == names
    if found != "classification":
        assert data.train.targets.dtype is torch.float32
        expected = frame[label].to_numpy(np.float32)
        assert torch.cat([first(data.train.targets), first(data.test.targets)]).sum() == pytest.approx(expected.sum())


def test_a_task_is_the_same_in_another_process(tables: Path) -> None:
    data = pickle.loads(pickle.dumps(opened(tables / "diabetes.csv", label="target", test=0.2)))
    assert len(data.strata().names) == 10, "tasks are compared by identity"


def test_a_site_with_test_rows_only_has_no_client(tmp_path: Path) -> None:
    sites: dict[str, list[str]] = {"train": ["A", "B"] * 20, "test": ["A", "B", "C"] * 10}
    for part, some in sites.items():
        columns = {"a": RNG.normal(size=len(some)), "y": np.arange(len(some)) // 3 % 2, "site": some}
        pd.DataFrame(columns).to_csv(tmp_path / f"{part}.csv", index=False)
    data = Data(name=str(tmp_path), label="y", group="site", partition={"kind": "natural"})
    own = shares_of(data, 2, 0, "cpu")[1]
    assert [{sites["test"][row] for row in rows.tolist()} for rows in own] == [{"A"}, {"B"}]
    assert len(load_data(data, "cpu").test) == 30


# --- partitions --------------------------------------------------------------


def test_every_kind_of_partition_takes_numbers_to_predict(tables: Path) -> None:
    data = opened(tables / "diabetes.csv", label="target", test=0.2)
    strata = data.strata()
    assert len(strata.names) == 10
    assert torch.bincount(strata.train).max() - torch.bincount(strata.train).min() <= 4, "equally many"
    values = [data.train.targets[strata.train == number] for number in range(10)]
    assert all(low.max() <= high.min() for low, high in itertools.pairwise(values))
    for kind, options in {
        "dirichlet": {"alpha": 0.5}, "classes": {"classes_per_client": 4}, "shards": {"shards_per_client": 2},
    }.items():  # fmt: skip
        parts = partition(strata.train, 10, 3, 0, kind, **options)
        assert torch.cat(parts).sort().values.equal(torch.arange(len(data.train)))
        assert sum(map(len, share_test(parts, strata.train, strata.test, 0))) == len(data.test)
    some = fewer(data, 100, 40)
    assert (len(some.train), len(some.test)) == (100, 40)
    assert some.train.targets.mean() == pytest.approx(float(data.train.targets.mean()), rel=0.05)


def test_several_labels_are_partitioned_by_their_combination(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": range(40), "a": [0, 1] * 20, "b": [0, 0, 1, 1] * 10})
    frame.to_csv(tmp_path / "t.csv", index=False)
    strata = opened(tmp_path / "t.csv", label=["a", "b"], test=0.2).strata()
    assert sorted(strata.names) == ["a", "a+b", "b", "none"]


def test_a_group_is_a_client_and_is_tested_on_its_own_rows(tables: Path) -> None:
    data = Data(name=str(tables / "all.csv"), label="diagnosis", group="site", test=0.2, partition={"kind": "natural"})
    parts, tests = shares_of(data, 4, 0, "cpu")
    found = opened(tables / "all.csv", label="diagnosis", group="site", test=0.2)
    for client in range(4):
        assert (found.groups.train[parts[client]] == client).all()
        assert (found.groups.test[tests[client]] == client).all()
    assert sum(map(len, tests)) == len(found.test)
    with pytest.raises(SettingsError, match=r"data\.group is None; .* The columns of .* mean radius, .*, site"):
        shares_of(data.model_copy(update={"group": None}), 4, 0, "cpu")
    with pytest.raises(SettingsError, match=r"data\.group is 'hospital'; expected the column"):
        shares_of(data.model_copy(update={"group": "hospital"}), 4, 0, "cpu")


@pytest.mark.parametrize(
    "sites",
    [
        [*range(1, 12)],
        [-2, -1, 0.5, 1.25, 10],
        ["2", "10", "x1"],
        ["site1", "site2", "site10", "site10b", "ward 3"],
        ["1a", "01b", "2a"],
    ],
)
def test_clients_are_in_the_order_of_the_numbers_in_their_sites_names(sites: list[Any], tmp_path: Path) -> None:
    """As texts, site 10 would be client 1."""
    rows = [site for site in sites for _ in range(4)]
    columns = {"x": range(len(rows)), "y": [0, 1] * (len(rows) // 2), "site": rows}
    pd.DataFrame(columns).sample(frac=1, random_state=0).to_csv(tmp_path / "t.csv", index=False)
    data = Data(name=str(tmp_path / "t.csv"), label="y", group="site", test=0.25, partition={"kind": "natural"})
    parts, _ = shares_of(data, len(sites), 0, "cpu")
    groups = opened(tmp_path / "t.csv", label="y", group="site", test=0.25).groups
    assert [{groups.names[place] for place in groups.train[part].tolist()} for part in parts] == [
        {str(float(site)) if 0.5 in sites else str(site)} for site in sites
    ]


def test_the_order_of_groups_is_total() -> None:
    """Otherwise it would depend on the order of a set, which differs between processes."""
    for names in (["1", "01", "1.0"], ["a1", "a01"], ["a" + "1" * 5000, "a2"], ["nan", "2", "10"]):
        assert {tuple(in_order(each)) for each in itertools.permutations(names)} == {tuple(in_order(names))}
    assert in_order(["a" + "1" * 5000, "a2"])[0] == "a2"


def test_a_group_is_tested_on_rows_of_classes_that_it_does_not_train_on_too(tmp_path: Path) -> None:
    train = pd.DataFrame({"x": range(40), "y": ["cold"] * 20 + ["cold", "flu"] * 10, "site": ["a"] * 20 + ["b"] * 20})
    test = pd.DataFrame({"x": range(40), "y": ["cold", "flu"] * 20, "site": ["b"] * 10 + ["a"] * 30})
    for name, rows in (("train", train), ("test", test)):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
    data = Data(name=str(tmp_path), label="y", group="site", partition={"kind": "natural"})
    assert [each.tolist() for each in shares_of(data, 2, 0, "cpu")[1]] == [[*range(10, 40)], [*range(10)]]


@pytest.mark.parametrize("has_column", [False, True])
def test_a_site_s_table_needs_no_column_of_groups_and_it_is_no_input(has_column: bool, tmp_path: Path) -> None:
    own = cancer().drop(columns="site")
    (own.assign(site=3) if has_column else own).to_csv(tmp_path / "own.csv", index=False)
    run = Settings(data={"label": "diagnosis", "group": "site", "test": 0.2, "partition": {"kind": "natural"}})
    node: dict[str, Any] = {"data-path": str(tmp_path / "own.csv"), "partition-id": 0, "num-partitions": run.clients}
    site = ClientParts.of(run, Context(run_id=0, node_id=0, node_config=node, state=RecordDict(), run_config={}))
    assert len(site.dataset.train) == 455
    assert site.dataset.shape == (30,)


# --- models ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "tokens", "message"),
    [
        ("resnet18", [30], None, r"'resnet18' takes images.* the shape \[30\]; use mlp, .* or module:"),
        (
            "cnn",
            [3, 16],
            None,
            r"'cnn' takes images.* the shape \[3, 16\]; use .*for series \[channels, time\] cnn1d",
        ),
        ("mlp", [16], 9, r"'mlp' takes numbers, but these inputs are tokens"),
    ],
)
def test_networks_refuse_inputs_of_another_kind_by_name(
    name: str, shape: list[int], tokens: int | None, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        build_model(name, 2, input_shape=shape, num_tokens=tokens)
    assert build_model("mlp", 2, input_shape=[30])(torch.zeros(4, 30)).shape == (4, 2)


def test_padding_does_not_change_what_cnn1d_returns() -> None:
    model = build_model("cnn1d", 3, input_shape=[2, 10]).double()
    x = torch.randn(4, 2, 10, dtype=torch.float64)
    mask = torch.arange(16).expand(4, -1) < 10
    padded = {"inputs": torch.nn.functional.pad(x, (0, 6)), "mask": mask}
    for each in (model.train(), model.eval()):
        torch.testing.assert_close(each(x), each(padded), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("data", "shape", "blank"),
    [
        ({"classes": 2, "inputs": ["a", "b", "sex"], "categories": {"sex": ["f", "m"]}}, (4,), (2, 4)),
        ({"classes": 6, "shape": [9, 128]}, (9, 128), (2, 9, 128)),
        ({"classes": 10, "channels": 3, "size": 32}, (3, 32, 32), (2, 3, 32, 32)),
        ({"task": "regression", "label": ["u", "v"], "shape": [5]}, (5,), (2, 5)),
    ],
)
def test_a_server_without_data_knows_the_shape_from_the_settings(data: Any, shape: Any, blank: Any) -> None:
    run = Settings(data=data, evaluate={"server": False})
    found = shape_without_data(run)
    assert found.shape == shape
    assert found.blank(2).shape == blank
    assert found.outputs == data.get("classes", 2)


def test_a_server_without_data_says_which_keys_are_missing() -> None:
    with pytest.raises(SettingsError, match=r"data\.classes and data\.shape must be given"):
        shape_without_data(Settings(evaluate={"server": False}))
    masked = shape_without_data(Settings(data={"classes": 2, "shape": [3, None]}, evaluate={"server": False})).blank(2)
    assert masked["mask"].all()
