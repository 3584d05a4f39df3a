"""Without training (`rounds: 0`): each client evaluates given models, and sites say how their data differ."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from scipy import stats

from fedbn_flwr import LocalGrid, client_app, evaluate, run, run_all, survey
from fedbn_flwr.commands import cli
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.disclosed import HIDDEN, answer
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.data import load_data, shares_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.messages import protocol
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import group
from fedbn_flwr.results.report.tables import judged_table
from fedbn_flwr.results.result import Result
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.tasks import MULTILABEL

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "data": {"name": "digits", "examples": 300, "test_examples": 150, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "train": {"lr": 0.1, "batch_size": 20, "steps": 5},
    "engine": {"workers": 0, "device": "cpu"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("models")
    names = ("FedAvg", "FixBN")
    return [run({**SETTINGS, "seed": 0}, strategy=name, out=folder / name, progress=False) for name in names]


def twin(result: Result) -> tuple[list[int], list[float]]:
    """The numbers of test examples, and the accuracies, of the four clients, computed directly in float64."""
    (settings,) = load_experiment(json.dumps(SETTINGS)).runs
    dataset = load_data(settings.data, "cpu")
    _, shares = shares_of(settings.data, 4, 0, "cpu")
    model, normalise = result.model().double(), result.normalise()
    outputs = model(normalise(dataset.test.inputs.double() / 255))
    right = (outputs.argmax(1) == dataset.test.labels).double()
    return [len(rows) for rows in shares], [float(right[rows].mean()) for rows in shares]


def test_each_client_measures_what_direct_computation_gives(models: list[Result], tmp_path: Path) -> None:
    judged = evaluate(SETTINGS, *models, out=tmp_path)
    assert judged.labels == [str(model.folder) for model in models]
    counts, *accuracies = twin(models[0])[0], *(twin(model)[1] for model in models)
    for found, expected in zip(judged, accuracies, strict=True):
        assert [found.clients["own_examples"][str(client)] for client in range(4)] == counts
        assert own(found) == pytest.approx(expected, abs=1e-9)
        assert (found.summary.status, found.summary.rounds, len(found.lines)) == ("finished", 0, 1)
    found = {first: cells for first, *cells in judged_table(group(find_runs([tmp_path])))[1]}
    means = [np.average(expected, weights=counts) for expected in accuracies]
    assert found["weighted"] == ["150", *(f"{mean:.2%}" for mean in means)]
    tested = stats.ttest_rel(accuracies[1], accuracies[0])
    low, high = tested.confidence_interval(0.95)
    difference = np.mean(accuracies[1]) - np.mean(accuracies[0])
    assert found["difference to the first"] == ["", "-", f"{100 * difference:+.2f}"]
    assert found["95 % interval"] == ["", "-", f"{100 * low:+.2f} to {100 * high:+.2f}"]
    assert found["p (Holm)"] == ["", "-", f"{tested.pvalue:.3f}"]


def own(result: Result) -> list[float]:
    values = result.clients["own_accuracy"]
    return [values[str(client)] for client in range(len(values))]


def test_runs_that_differ_only_in_how_they_train_need_no_choice(models: list[Result], tmp_path: Path) -> None:
    runs = {"one": {}, "two": {"strategy": "FixBN"}, "three": {"train": {"lr": 0.5}}}
    one, several = (
        evaluate({**SETTINGS, **more}, models[0], out=tmp_path / str(len(more))) for more in ({}, {"runs": runs})
    )
    assert [own(result) for result in one] == [own(result) for result in several]


def test_a_run_without_rounds_stands_beside_those_that_train(tmp_path: Path) -> None:
    runs = {"start": {"rounds": 0}, "trained": {}}
    start, trained = run_all({**SETTINGS, "runs": runs}, out=tmp_path, progress=False)
    assert own(start) == pytest.approx(twin(start)[1], abs=1e-9)
    assert (start.summary.rounds, trained.summary.rounds) == (0, 2)


def test_no_train_message_is_sent(models: list[Result], tmp_path: Path) -> None:
    """On the grid of a Flower run, as on real sites; the model is a file of weights, so the sites agree on moments."""
    kinds: list[str] = []

    class Listening(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            sent = list(messages)
            kinds.extend(message.metadata.message_type for message in sent)
            return super().push_messages(sent)

    torch.save(models[0].model().state_dict(), tmp_path / "weights.pt")
    text = dump_yaml({**SETTINGS, "rounds": 0, "evaluate": {"models": [str(tmp_path / "weights.pt")]}})
    config = {"experiment": text, "out": str(tmp_path / "out")}
    with Listening(client_app(make_client), 4, run_config=config) as grid:
        serve(grid, config)
    assert len([kind for kind in kinds if kind.startswith("evaluate")]) == 4
    assert not any(kind.startswith("train") for kind in kinds)
    assert own(Result.read(tmp_path / "out")) == pytest.approx(twin(models[0])[1], abs=1e-9)


def write_site(folder: Path, seed: int, shift: float) -> Path:
    draw = np.random.default_rng(seed)
    folder.mkdir()
    for part, count in (("train", 60), ("test", 31)):
        frame = pd.DataFrame(draw.normal(shift, 1 + seed, (count, 2)), columns=["a", "b"])
        ill = frame["a"] - frame["b"] + draw.normal(0, 0.5, count) > 0
        frame.assign(label=np.where(ill, "yes", "no")).to_csv(folder / f"{part}.csv", index=False)
    return folder


def test_sites_measure_what_predict_gives_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sites = [write_site(tmp_path / f"site{number}", number, 3.0 * number) for number in range(3)]
    nodes = [{"data-path": str(site), "min-batch": 1} for site in sites]
    settings: dict[str, Any] = {
        "rounds": 3,
        "clients": 3,
        "data": {"name": "sites", "label": "label", "shape": [2], "class_names": ["no", "yes"], "normalise": "moments"},
        "model": "mlp",
        "train": {"lr": 0.1, "batch_size": 20},
        "evaluate": {"server": False},
        "engine": {"workers": 0, "device": "cpu"},
    }
    done = run(settings, strategy="FixBN", node_config=nodes, out="run", progress=False)
    (judged,) = evaluate(settings, done, node_config=nodes, out="judged")
    for number, site in enumerate(sites):
        words = ["predict", str(done.folder), "--data", str(site), "--out", "predictions.csv"]
        assert cli.main(words) == 0
        said = re.search(r"accuracy ([0-9.]+): (\d+) of 31 labels", capsys.readouterr().out)
        assert said is not None
        assert judged.clients["own_examples"][str(number)] == 31
        assert judged.clients["own_accuracy"][str(number)] == pytest.approx(int(said[2]) / 31)
    others = {**settings, "data": {**settings["data"], "class_names": ["yes", "no"]}}
    with pytest.raises((SettingsError, RunFailed), match="classes"):
        evaluate(others, done, node_config=nodes, out="others")


def test_what_cannot_be_judged_is_named(models: list[Result], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not fit the"):
        evaluate(SETTINGS, models[0], model="mlp", out=tmp_path)
    with pytest.raises(SettingsError, match=r"model\.safetensors' cannot be read"):
        evaluate(SETTINGS, tmp_path, out=tmp_path)
    with pytest.raises(SettingsError, match="differ in their data or network; choose one by only=LABEL and seed="):
        evaluate({**SETTINGS, "runs": {"one": {}, "two": {"seed": 1}}}, models[0], out=tmp_path)
    with pytest.raises(SettingsError, match="instead of training, but rounds is 2"):
        run(SETTINGS, evaluate={"models": ["a"]}, out=tmp_path)


def test_the_command_prints_a_table(models: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.yaml").write_text(dump_yaml(SETTINGS))
    words = [word for model in models for word in ("--model", str(model.folder))]
    assert cli.main(["evaluate", str(tmp_path / "e.yaml"), *words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("accuracy on each client's own test examples") :].partition("\n\n")[0]
    assert "difference to the first" in table
    assert cli.main(["report", str(tmp_path)]) == 0
    assert table in capsys.readouterr().out


# --- How the sites differ, before training: moments against the union of the sites in float64, consent, small groups.


HEART: dict[str, Any] = {
    "clients": 4,
    "data": {"name": "heart", "task": "binary", "normalise": "own", "partition": {"kind": "natural"}},
    "model": "mlp",
    "engine": {"workers": 0, "device": "cpu"},
}


def rows_of(content: dict[str, Any]) -> tuple[DataSet, list[torch.Tensor]]:
    """All training examples, not normalised, and which of them each client has."""
    (settings,) = load_experiment(json.dumps(content)).runs
    data = settings.data.model_copy(update={"normalise": "moments"})
    return load_data(data, "cpu"), shares_of(data, settings.clients, 0, "cpu")[0]


def test_pooled_moments_are_those_of_the_union_in_float64(tmp_path: Path) -> None:
    """Also where each site normalises by its own moments, which would hide how they differ."""
    found = survey(HEART, out=tmp_path)
    dataset, parts = rows_of(HEART)
    inputs = dataset.train.inputs.double().numpy()
    for site, rows in [
        (found.union, np.concatenate(parts)),
        *zip(found.sites.values(), (part.numpy() for part in parts), strict=True),
    ]:
        assert site.examples == len(rows)
        counts, means, deviations = zip(*site.moments.values(), strict=True)
        assert {*counts} == {len(rows)}
        np.testing.assert_allclose(means, inputs[rows].mean(0), rtol=1e-14)
        np.testing.assert_allclose(deviations, inputs[rows].std(0), rtol=1e-12)
        assert [*site.classes.values()] == dataset.train.labels[rows].bincount(minlength=2).tolist()
    written = json.loads((tmp_path / "survey" / "survey.json").read_text())
    assert written["union"]["examples"] == 486


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, "inputs"),
        ({"data": {"name": "digits", "partition": {"kind": "iid"}}, "model": "cnn"}, ""),
        (
            {"data": {"name": "digits", "partition": {"kind": "classes", "classes_per_client": 4}}, "model": "cnn"},
            "labels",
        ),
    ],
)
def test_it_measures_how_far_labels_and_inputs_are_apart(changes: dict[str, Any], differs: str, tmp_path: Path) -> None:
    """By a fifth of the labels, or of a standard deviation, and nothing where examples are dealt at random."""
    found = survey({**HEART, **changes}, out=tmp_path)
    measures = {"labels": found.labels_differ, "inputs": found.inputs_differ}
    means = {name: np.mean([*map(measure, found.sites.values())]) for name, measure in measures.items()}
    assert max(means, key=means.__getitem__) == differs or not differs
    assert (max(means.values()) > 0.2) == bool(differs)


@pytest.mark.slow
def test_the_distances_of_layers_are_from_the_network_s_statistics(tmp_path: Path) -> None:
    """Without other layers below it, batch norm's inputs are a linear function of the client's."""
    content = {
        **HEART,
        "data": {**HEART["data"], "normalise": "moments"},
        "rounds": 1,
        "train": {"steps": 2, "batch_size": 499},
    }
    done = run(content, out=tmp_path / "run", progress=False)
    found = survey(content, done, out=tmp_path / "survey")
    dataset, parts = rows_of(content)
    model, normalise = done.model().double().requires_grad_(False), done.normalise()
    norm = model.get_submodule("bn")
    for client, rows in enumerate(parts):
        values = model.hidden(normalise(dataset.train.inputs[rows].double()))
        shift = (values.mean(0) - norm.running_mean) / (norm.running_var + 1e-5).sqrt()
        ratio = ((values.var(0, correction=1) + 1e-5) / (norm.running_var + 1e-5)).log()
        expected = (float(shift.square().mean().sqrt()), float(ratio.square().mean().sqrt()), float(ratio.mean().exp()))
        assert found.sites[client].layers["bn"] == pytest.approx(expected, rel=1e-4)
    weights = tmp_path / "weights.pt"
    torch.save(done.model().state_dict(), weights)
    again = survey(content, weights, out=tmp_path / "weights")
    assert again.sites == found.sites


# --- sites with their own data ---------------------------------------------------------------------------------------


def write_patients(folder: Path, seed: int, labels: dict[str, int]) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    column = np.repeat([*labels], [*labels.values()])
    frame = pd.DataFrame(
        {"age": draw.normal(50 + seed, 9, len(column)), "bp": draw.normal(120, 20, len(column)), "ill": column}
    )
    frame.loc[: 7 * seed, "bp"] = np.nan
    for part in ("train", "test"):
        frame.to_csv(folder / f"{part}.csv", index=False)
    return folder


SITES: dict[str, Any] = {
    "clients": 2,
    "data": {
        "name": "sites", "label": "ill", "shape": [2], "class_names": ["a", "b", "c"], "missing": "mean",
        "normalise": "moments",
    },
    "model": "mlp",
    "evaluate": {"server": False},
    "engine": {"workers": 0, "device": "cpu"},
}  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    counts = [{"a": 60, "b": 50, "c": 40}, {"a": 100, "b": 50, "c": 3}]
    sites = [write_patients(tmp_path / f"site{number}", number, labels) for number, labels in enumerate(counts)]
    return [{"data-path": str(site), "survey": True} for site in sites]


def test_a_site_says_nothing_of_few_examples(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """With b alone, the number of c would follow from the number of all."""
    found = survey(SITES, node_config=nodes, out=tmp_path / "out")
    first, second = found.sites.values()
    assert first.classes == {"a": 60, "b": 50, "c": 40}
    assert second.classes == {"a": 100, "b": None, "c": None}
    assert found.union.classes == {"a": 160, "b": None, "c": None}
    table = pd.read_csv(f"{nodes[1]['data-path']}/train.csv")
    count, mean, deviation = second.moments["bp"]
    assert count == len(table) - 8
    assert mean == pytest.approx(table["bp"].astype(np.float32).mean(), rel=1e-6)
    assert deviation == pytest.approx(table["bp"].std(ddof=0), rel=1e-6)
    said = str(found)
    assert "(8 missing)" in said
    assert said.count("not said") == 4


def test_a_column_of_which_no_site_tells_is_not_said(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    for node in nodes:
        path = Path(node["data-path"], "train.csv")
        table = pd.read_csv(path)
        table.loc[10:, "bp"] = np.nan
        table.to_csv(path, index=False)
    found = survey(SITES, node_config=nodes, out=tmp_path / "out")
    assert [site.moments["bp"] for site in (found.union, *found.sites.values())] == [(0, 0.0, 0.0)] * 3
    assert ["bp", *["not", "said"] * 3] in [line.split() for line in str(found).splitlines()]


@pytest.mark.parametrize(
    ("site", "config", "says"),
    [
        (0, {"survey": False}, r"client 0 .*: could not take part in a survey: .* agreed to surveys; it does by"),
        (1, {"min-batch": 200}, r"fewer training examples than its min-batch, and doesn't send .* \(the client's log"),
    ],
)
def test_a_site_that_has_not_agreed_or_has_few_examples_takes_no_part(
    nodes: list[dict[str, Any]], site: int, config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    nodes[site] |= config
    with pytest.raises(RunFailed, match=says):
        survey(SITES, node_config=nodes, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/survey.json"))


def test_an_older_site_is_named(tmp_path: Path) -> None:
    """Its ClientApp has no handler for the query: Flower's error says so."""

    class Older(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            app = ClientApp() if message.metadata.message_type == protocol.SURVEY_QUERY else client_app(make_client)
            return app(message, context)

    config = {"experiment": dump_yaml({**HEART, "rounds": 0, "evaluate": {"survey": True}}), "out": str(tmp_path)}
    older = r"client 0 \(node 1\), .*client 3 \(node 4\): its version of fedbn-flwr has no surveys"
    with LocalGrid(Older(), 4, run_config=config) as grid, pytest.raises(RunFailed, match=older):
        serve(grid, config)


def test_nothing_is_trained_or_evaluated(tmp_path: Path) -> None:
    kinds: list[str] = []

    def listen(message: Message, context: Context, call_next: Any) -> Message:
        kinds.append(message.metadata.message_type)
        return call_next(message, context)  # type: ignore[no-any-return]

    config = {"experiment": dump_yaml({**HEART, "rounds": 0, "evaluate": {"survey": True}}), "out": str(tmp_path)}
    with LocalGrid(client_app(make_client, mods=[listen]), 4, run_config=config) as grid:
        serve(grid, config)
    assert {*kinds} == {protocol.PARTITION_QUERY, protocol.SURVEY_QUERY}


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["survey", "quick", "engine.workers=0", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "share of 9" in printed
    assert "labels apart" in printed
    assert cli.main(["survey", "quick", "--model", "a", "--model", "b", "--out", str(tmp_path)]) == 2
    assert "evaluate.survey is for one network, but evaluate.models has 2" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"evaluate\.survey is made instead of training, but rounds is 5"):
        run({**HEART, "rounds": 5, "evaluate": {"survey": True}}, out=tmp_path / "run")


# --- the answer ------------------------------------------------------------------------------------------------------


def answered(inputs: torch.Tensor, targets: torch.Tensor, limit: int, classes: int = 1, **options: Any) -> Any:
    """What a site with these training examples says, which tells nothing of fewer than `limit`."""
    examples = Examples(inputs, targets)
    return answer(DataSet("some", examples, examples, tuple(map(str, range(classes))), **options), examples, limit)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([40, 40, 0], [40, 40, 0]),
        ([40, 31, 0], [HIDDEN, HIDDEN, 0]),
        ([31, 90, 40], [HIDDEN, 90, HIDDEN]),
        ([20, 90, 20, 0], [HIDDEN, 90, HIDDEN, 0]),
        ([1, 2, 90, 50, 60], [HIDDEN, HIDDEN, 90, HIDDEN, 60]),
    ],
)
def test_small_classes_do_not_follow_from_the_others(counts: list[int], said: list[int]) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    found = [answered(torch.zeros(len(labels), 1), labels, limit, len(counts))["counts"].tolist() for limit in (32, 1)]
    assert found == [said, counts]


def test_a_label_of_almost_all_is_hidden() -> None:
    targets = torch.zeros(100, 3)
    targets[:50, 0] = targets[:69, 1] = 1
    assert answered(torch.zeros(100, 1), targets, 32, 3, task=MULTILABEL)["counts"].tolist() == [50, HIDDEN, 0]


NORMAL = torch.randn(200, generator=torch.Generator().manual_seed(0))


def column(*counts: int, values: Sequence[float] = (0, 1, 2, 3, 4)) -> torch.Tensor:
    """These numbers of the values, and NaN for the rest of 200 examples."""
    some = torch.cat([torch.full((count,), value) for count, value in zip(counts, values, strict=False)])
    return torch.cat([some.float(), torch.full((200 - len(some),), torch.nan)])


@pytest.mark.parametrize(
    ("inputs", "is_told"),
    [
        (NORMAL, True),
        (torch.where(torch.arange(200) < 31, NORMAL, torch.nan), False),  # 31 values
        (torch.where(torch.arange(200) < 32, NORMAL, torch.nan), True),
        (torch.where(torch.arange(200) < 199, NORMAL, torch.nan), True),  # how many are missing is told
        (torch.where(torch.arange(200) < 190, 0.0, NORMAL), False),  # ten differ from the value that all others have
        (torch.where(torch.arange(200) < 150, torch.arange(200) % 2, NORMAL), True),  # 50 have neither of the two
        (torch.where(torch.arange(200) < 180, torch.arange(200) % 2, NORMAL), False),
        (column(200), True),
        (column(198, 2), False),
        (column(2, 198), False),
        (column(100, 100), True),
        (column(100, 68, 32), True),
        (column(100, 69, 31), False),  # three numbers follow from three sums
        (column(50, 50, 50, 50), True),
        (column(90, 90, 10, 10), False),
        (torch.stack([NORMAL, NORMAL * 2]).T[:, None], True),  # series
        (torch.where(torch.arange(200) < 3, NORMAL, 0.0)[:, None, None].expand(-1, 1, 5), False),  # three are not 0
        ((torch.arange(200) < 3).to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2) * 9, False),  # images
    ],
)
def test_no_sums_tell_of_fewer_than_32_examples(inputs: torch.Tensor, is_told: bool) -> None:
    values = torch.stack([inputs, NORMAL], 1) if inputs.ndim == 1 else inputs
    sums, of_all = (answered(values, torch.zeros(200, dtype=torch.int64), limit)["sums"] for limit in (32, 1))
    assert bool(sums[0, 0]) == bool(sums.any(0)[0]) == is_told
    assert of_all[0].all(), "a site may allow it"


@pytest.mark.parametrize(
    ("counts", "is_told"),
    [((1, 60, 139), (False, False, True)), ((40, 60, 100), (True, True, True)), ((2, 198), (False,) * 2)],
)
def test_no_category_follows_from_the_others(counts: tuple[int, ...], is_told: tuple[bool, ...]) -> None:
    """With 60 and 139 of 200, the number of the first category would be known."""
    inputs = torch.nn.functional.one_hot(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))).float()
    examples = Examples(inputs, torch.zeros(200, dtype=torch.int64))
    data = DataSet("some", examples, examples, ("a",))
    sums = answer(data, examples, 32, [range(len(counts))], survey=False)["sums"]
    assert tuple((sums[0] > 0).tolist()) == is_told
