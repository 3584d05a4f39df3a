"""Sites with their own data, and a server without data."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import FedbnError, RunFailed, SettingsError, UserError
from fedbn_flwr.experiment import node
from fedbn_flwr.experiment.data import forget_data
from fedbn_flwr.experiment.file.layers import parse_yaml, read_experiment
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.results.result import Result
from tests.support.command import ROOT
from tests.support.images import numbered, write_parquet
from tests.support.marks import slow_except
from tests.support.network import Deployment, missing_tools
from tests.support.sites import served

SIZES = (24, 30, 18)
EXPERIMENT: dict[str, Any] = {
    "rounds": 2,
    "clients": 3,
    "data": {"name": "/nowhere", "classes": 3, "channels": 3, "size": 8, "normalise": "unit"},
    "model": {"name": "cnn", "norm": "bn"},
    "train": {"lr": 0.1, "batch_size": 6},
    "strategy": {"name": "FedAvg"},
    "evaluate": {"server": False},
    "engine": {"device": "cpu"},
}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A folder per site; the third has images of two domains, and only "sea" is to take part."""
    monkeypatch.setenv("FEDBN_CACHE", str(tmp_path / "cache"))
    folders = [tmp_path / f"site-{i}" for i in range(3)]
    for i, (folder, size) in enumerate(zip(folders, SIZES, strict=True)):
        for split, count in (("train", size), ("test", size // 2)):
            rows: dict[str, Any] = {"label": [(i + k) % 3 for k in range(count)]}
            if i == 2:
                rows["domain"] = ["sea" if k % 3 else "farm" for k in range(count)]
            write_parquet(folder / f"{split}.parquet", (8, 8, 3), rows, {"label": numbered(3)}, "image")
    return folders


def node_configs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    configs: list[dict[str, Any]] = [{"data-path": str(folder), "min-batch": 6} for folder in folders]
    configs[2]["domain"] = "sea"
    return configs


class WithoutPartitions(ClientApp):
    """The same app on nodes whose config has no partition-id, as SuperNodes of Flower's hub have none.

    The node's id is the number that it would have had.
    """

    def __init__(self, nodes: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.app = client_app(make_client)
        self.nodes = nodes  # the partitions that the config lacks

    def __call__(self, message: Message, context: Context) -> Message:
        given, node = context.node_config, context.node_id
        if given["partition-id"] in self.nodes:
            kept = {key: value for key, value in given.items() if key not in ("partition-id", "num-partitions")}
            context.node_config, context.node_id = kept, given["partition-id"]
        try:
            return self.app(message, context)
        finally:
            context.node_config, context.node_id = given, node


def run(
    folders: Sequence[Path], out: Path, app: ClientApp | None = None, **changes: Any
) -> tuple[list[dict[str, Any]], dict[str, Any], bytes]:
    folder = served(EXPERIMENT | changes, out, node_configs(folders), app)
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return history, json.loads((folder / "summary.json").read_text()), (folder / "model.safetensors").read_bytes()


STRATEGIES: list[dict[str, Any]] = [{"name": "FedAvg"}, {"name": "FedBN"}, {"name": "FedTAN", "min_batch": 6}]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda spec: spec["name"])
def test_a_server_without_data_trains_the_same_model(
    strategy: dict[str, Any], sites: list[Path], tmp_path: Path
) -> None:
    """The folder that the experiment names does not exist, so the server cannot read it."""
    without = run(sites, tmp_path / "without", strategy=strategy)
    server = {"data": EXPERIMENT["data"] | {"name": str(sites[0])}, "evaluate": {"clients": True}}
    with_data = run(sites, tmp_path / "with", strategy=strategy, **server)
    assert without[2] == with_data[2]
    for line, other in zip(without[0], with_data[0], strict=True):
        assert line["clients"] == 3
        assert line["accuracy"] == line["clients_accuracy"] == other["clients_accuracy"]
        assert line["loss"] == other["clients_loss"]
    assert without[1]["accuracy"] == without[0][-1]["accuracy"]
    assert without[1]["accuracy_of"] == "the clients' models on their test examples, mean"


def test_a_site_with_its_own_data_has_a_limit_of_its_own(sites: list[Path], tmp_path: Path) -> None:
    """The experiment allows batches of 6 images; the first site has not, and reports it before training."""
    changes = {"strategy": {"name": "FedTAN", "min_batch": 6}}
    run_config = {"experiment": json.dumps(EXPERIMENT | changes), "out": str(tmp_path)}
    nodes = node_configs(sites)
    del nodes[0]["min-batch"]
    grid = LocalGrid(client_app(make_client), 3, run_config=run_config, node_config=nodes)
    message = r"the run cannot begin: .*\s+- node 1: .* the batch of this client has \.\.\. examples, and it "
    message += (
        r"refuses to exchange the statistics of fewer than \.\.\. examples, .* or lower min-batch in this node's "
    )
    message += r"config .*"
    with pytest.raises(RunFailed, match=message):
        serve(grid, run_config)
    with pytest.raises(SettingsError, match="this node's config has min-batch='few'; expected a number of examples"):
        make_client(
            Context(
                1, 1, nodes[0] | {"partition-id": 0, "num-partitions": 3, "min-batch": "few"}, RecordDict(), run_config
            ),
            {},
        )


def test_a_site_that_names_a_domain_holds_that_one(sites: list[Path]) -> None:
    places = [{"partition-id": i, "num-partitions": 3, **config} for i, config in enumerate(node_configs(sites))]
    run_config = {"experiment": json.dumps(EXPERIMENT)}
    clients = [make_client(Context(1, i, place, RecordDict(), run_config), {}) for i, place in enumerate(places)]
    assert [client.num_examples for client in clients] == [24, 30, 12]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda spec: spec["name"])
def test_sites_with_their_own_data_need_no_partition(
    strategy: dict[str, Any], sites: list[Path], tmp_path: Path
) -> None:
    """Their random draws depend on the node's id, and at other sites on the partition-id."""
    numbered_sites = run(sites, tmp_path / "numbered", strategy=strategy)
    history, summary, model = run(sites, tmp_path / "hub", WithoutPartitions(), strategy=strategy)
    assert [line["clients"] for line in history] == [3, 3]
    assert summary["status"] == "finished"
    assert model == numbered_sites[2]


def test_a_node_without_partition_or_data_is_named(tmp_path: Path) -> None:
    context = Context(1, 7, {}, RecordDict(), {"experiment": json.dumps(EXPERIMENT)})
    with pytest.raises(SettingsError, match=r'has no partition-id, .*"data-path='):
        make_client(context, {})


def test_settings_that_a_server_without_data_needs_are_named() -> None:
    for wrong in ("clients: false", "statistics: reestimated"):
        with pytest.raises(SettingsError, match="server"):
            read_experiment(parse_yaml(f"evaluate: {{server: false, {wrong}}}"))


DATA = EXPERIMENT["data"]
NAMED = r"cannot begin:(.|\n)*client 1 .*"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"app": WithoutPartitions([1])}, "node 2: it has no partition-id, and most clients have one"),
        ({"data": DATA | {"classes": 4}}, NAMED + r"data\.classes is \.\.\., but data-path has "),
        ({"data": DATA | {"channels": 1}}, NAMED + r"data\.channels is \.\.\., but data-path has "),
        (
            {"data": {"name": "/nowhere", "classes": 3, "normalise": "unit"}},
            r"server reads no data, and data\.shape must be given",
        ),
    ],
)
def test_what_is_wrong_at_a_site_or_its_server_is_named(
    given: dict[str, Any], message: str, sites: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(FedbnError, match=message):
        run(sites, tmp_path / "out", **given)


# --- tables ---------------------------------------------------------------------

TABLE = EXPERIMENT | {
    "data": {
        "name": "/nowhere",
        "inputs": ["age", "pressure", "sex"],
        "label": "outcome",
        "categories": {"sex": ["f", "m"]},
        "class_names": ["ill", "well"],
        "ranges": {"age": [0, 120]},
        "missing": "mean",
    },
    "model": {"name": "mlp", "norm": "bn"},
    "train": {"lr": 0.1, "batch_size": 16, "steps": 2},
}

DIAGNOSE = "fedbn_flwr.extensions.diagnose.strategy:Diagnose"
DIAGNOSIS = TABLE | {"rounds": 3, "strategy": {"name": DIAGNOSE, "batches": 1, "min_batch": 16}}


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """A folder of CSV files per site, of which the last has columns of its own; and one with the data of all."""
    random = np.random.default_rng(0)
    everything: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    folders = [tmp_path / f"table-{i}" for i in range(3)]
    for i, folder in enumerate(folders):
        for split, rows in everything.items():
            here = [
                {
                    "age": int(random.integers(20, 60 + 15 * i)),
                    "pressure": "" if k % 9 == 4 else round(float(random.normal(120 + 9 * i, 15)), 1),
                    "sex": str(random.choice(["f", "m"])),
                    "outcome": ("ill", "well")[k % 2],
                    "site": f"site {i}",
                }
                for k in range(40 + 5 * i)
            ]
            rows += here
            write_csv(folder / f"{split}.csv", [row | {"ward": "A 3"} for row in here] if i == 2 else here)
    for split, rows in everything.items():
        write_csv(tmp_path / "tables" / f"{split}.csv", rows)
    return folders


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="") as stream:
        return [*csv.DictReader(stream)]


def run_tables(
    folders: Sequence[Path] | None, out: Path, experiment: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    nodes = [{"data-path": str(each), "min-batch": 16} for each in folders or ()]  # about 20 rows have each sex
    folder = served(experiment, out, nodes or None)
    summary, described = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "model"))
    return summary, described, (folder / "model.safetensors").read_bytes()


def test_sites_with_tables_train_the_model_of_a_simulation_with_all_rows(tables: list[Path], tmp_path: Path) -> None:
    """Bit for bit: a missing value is the mean of all sites, on which they agree."""
    summary, described, model = run_tables(tables, tmp_path / "sites", TABLE)
    data = TABLE["data"] | {"name": str(tmp_path / "tables"), "group": "site", "partition": {"kind": "natural"}}
    simulated = run_tables(None, tmp_path / "all", TABLE | {"data": data, "evaluate": {"server": True}})
    assert model == simulated[2]
    assert described["normalise"] == simulated[1]["normalise"]
    assert len(described["normalise"]["mean"]) == 4
    assert summary["status"] == "finished"


def test_sites_with_tables_train_with_bounds_as_the_error_says(tables: list[Path], tmp_path: Path) -> None:
    bounded = TABLE | {"strategy": {"name": "FedAvg", "bounds": {"clip_factor": 2, "plausible": 10}}}
    with pytest.raises(SettingsError) as found:
        run_tables(tables, tmp_path / "out", bounded)
    assert "own with partition: {kind: natural}; data.missing may be drop" in str(found.value)
    cure = TABLE["data"] | {"normalise": "own", "partition": {"kind": "natural"}, "missing": "drop"}
    summary, described, _ = run_tables(tables, tmp_path / "cured", bounded | {"data": cure})
    assert summary["status"] == "finished"
    assert described["normalise"]["mean"] == [0.0] * 4, "each site's own"


class Leaves(ClientApp):
    """The app of a site, client 2, that is gone in some rounds."""

    def __init__(self, gone: Sequence[int]) -> None:
        super().__init__()
        self.app, self.gone = client_app(make_client), gone

    def __call__(self, message: Message, context: Context) -> Message:
        configs = message.content.config_records.values()
        server_round = next((config["server-round"] for config in configs if "server-round" in config), 0)
        if context.node_config["partition-id"] == 2 and server_round in self.gone:
            self.leave()
        return self.app(message, context)

    def leave(self) -> None:
        raise ConnectionError("the site is gone")


Rows = list[dict[str, Any]]


class Changes(Leaves):
    """The app of a site whose table changes; a SuperNode starts a process for each message, which reads it anew."""

    def __init__(self, gone: Sequence[int], file: Path, change: Callable[[Rows], Rows]) -> None:
        super().__init__(gone)
        self.file, self.change, self.changed = file, change, False

    def leave(self) -> None:
        if not self.changed:
            write_csv(self.file, self.change(read_csv(self.file)))
        self.changed = True
        forget_data()
        node._clients.cache_clear()


def in_another_order(rows: Rows) -> Rows:
    return [dict(reversed(row.items())) for row in rows]


@pytest.mark.parametrize(
    ("change", "listed", "leaves"),
    [
        (lambda rows: [{"height": 1, **row} for row in in_another_order(rows)], True, False),
        (in_another_order, False, True),
        (lambda rows: [{key: row[key] for key in row if key != "pressure"} for row in rows], True, True),
        (lambda rows: [row | {"sex": "x"} for row in rows], True, True),
        (lambda rows: [row | {"age": 1e6} for row in rows], True, True),
    ],
    ids=["one more, another order", "another order of all", "a column less", "a new category", "another unit"],
)
def test_a_site_whose_table_changes_in_a_run_is_as_before_or_left_out(
    change: Callable[[Rows], Rows], listed: bool, leaves: bool, tables: list[Path], tmp_path: Path
) -> None:
    data = TABLE["data"]
    if not listed:
        data = {key: data[key] for key in data if key not in ("inputs", "ranges")} | {"shape": [4]}
        for file in tmp_path.glob("table-*/*.csv"):
            write_csv(
                file, [{key: row[key] for key in TABLE["data"]["inputs"] + ["outcome"]} for row in read_csv(file)]
            )
    models = []
    for app in (Leaves((2, 3) if leaves else ()), Changes((2, 3), tables[2] / "train.csv", change)):
        out = tmp_path / type(app).__name__
        run_config = {"experiment": json.dumps(TABLE | {"rounds": 3, "data": data}), "out": str(out)}
        configs = [{"data-path": str(folder)} for folder in tables]
        serve(LocalGrid(app, 3, run_config=run_config, node_config=configs), run_config)
        models.append((out / "FedAvg" / "model.safetensors").read_bytes())
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("gone", "missing", "trained"),
    [
        ((), "", ("3", "3")),
        ((2, 3), "2 of 3 clients since round 2", ("1", "1")),
        ((2,), "fewer than 3 clients in 1 of 3 rounds", ("2", "3")),
    ],
)
def test_a_report_says_whose_data_it_was_and_who_took_part(
    gone: Sequence[int],
    missing: str,
    trained: tuple[str, str],
    tables: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_config = {"experiment": json.dumps(TABLE | {"rounds": 3}), "out": str(tmp_path / "out")}
    configs = [{"data-path": str(folder)} for folder in tables]
    grid = LocalGrid(Leaves(gone), 3, run_config=run_config, node_config=configs)
    printed = serve(grid, run_config).report
    assert f"FedAvg [{missing}] " in printed if missing else "FedAvg  " in printed
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.startswith("experiment: own data of 3 sites, mlp, 3 clients, 3 rounds, seed 0.")
    assert "own data of 3 sites" in (tmp_path / "out" / "report.html").read_text()
    (summary,) = (tmp_path / "out").rglob("summary.json")
    found = json.loads(summary.read_text())
    assert (found["own_data_sites"], found["clients_due"]) == (3, 3)
    assert found["clients"] == (2 if gone == (2, 3) else 3)
    by_client = [line.split(" | ") for line in page.partition("clients that took part")[2].splitlines()[4:7]]
    assert by_client == [
        ["| FedAvg", "0", "40", "3", "3 |"],
        ["| FedAvg", "1", "45", "3", "3 |"],
        ["| FedAvg", "2", "50", trained[0], f"{trained[1]} |"],
    ]
    capsys.readouterr()
    assert cli.main(["status", str(tmp_path / "out")]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[3:]] == ([missing] if missing else [])


def predicted(capsys: pytest.CaptureFixture[str], file: Path, *words: str | Path) -> tuple[list[dict[str, str]], str]:
    """The rows that `fedbn predict` writes, and what it prints."""
    code = cli.main(["predict", *map(str, words), "--out", str(file)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream)), printed.out


def check_models_of_sites(
    run: Path,
    states: Sequence[Path],
    folders: Sequence[Path],
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The predictions of each site's model are as often right as the run reported; others need no labels."""
    out.mkdir()
    reported = json.loads((run / "clients.jsonl").read_text().splitlines()[-1])["clients"]
    result, written = Result.read(run), set()
    with pytest.raises(UserError, match=r"the nodes store them\. At a site with a state folder: fedbn model"):
        result.model(client=0)
    copy = out / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint"))
    capsys.readouterr()
    for i, (state, folder) in enumerate(zip(states, folders, strict=True)):
        words = copy, "--state", state, "--data"
        rows, printed = predicted(capsys, out / f"{i}.csv", *words, folder)
        right = sum(row["label"] == row["prediction"] for row in rows)
        assert right / len(rows) == pytest.approx(reported[str(i)]["accuracy"], abs=1e-6)
        assert printed.startswith(f"the model of client {i}: {result.label} after round 2, and ")
        assert f"accuracy {right / len(rows):.4f}: {right} of {len(rows)} labels" in printed
        assert predicted(capsys, out / "table.csv", *words, folder / "test.csv")[0] == rows
        with (folder / "test.csv").open(newline="") as stream:
            unlabelled = [{key: row[key] for key in ("age", "pressure", "sex")} for row in csv.DictReader(stream)]
        write_csv(out / "new.csv", unlabelled)
        new, _ = predicted(capsys, out / "new-predictions.csv", *words, out / "new.csv")
        assert new == [{key: value for key, value in row.items() if key != "label"} for row in rows]
        sums = [sum(float(row[f"probability {name}"]) for name in ("ill", "well")) for row in rows]
        assert sums == pytest.approx([1.0] * len(rows), abs=1e-4)
        file = out / f"{i}.safetensors"
        assert cli.main(["model", str(copy), "--state", str(state), "--out", str(file)]) == 0
        arrays = safetensors.numpy.load_file(file)
        for key, value in result.model(state=state).state_dict().items():
            np.testing.assert_array_equal(value.numpy(), arrays[key])
        written.add(file.read_bytes())
        capsys.readouterr()
    assert len(written) == 3, "each has a model of its own"
    assert cli.main(["model", str(copy), "--state", str(out), "--out", str(out / "none")]) == 2
    assert "has no state of this run" in capsys.readouterr().err


PERSONAL: list[dict[str, Any]] = [
    {"name": "FedBN"},
    {"name": "FedRep", "head_epochs": 1},
]


@pytest.mark.parametrize(
    "strategy",
    slow_except(PERSONAL[:1], PERSONAL),
    ids=lambda spec: " of ".join([spec["name"], *spec.get("base", {}).values()]),
)
def test_a_site_has_its_own_model_after_the_run(
    strategy: dict[str, Any], tables: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [tmp_path / f"state-{i}" for i in range(3)]
    pairs = zip(tables, states, strict=True)
    configs = [{"data-path": str(folder), "state": str(state)} for folder, state in pairs]
    run = served(TABLE | {"strategy": strategy}, tmp_path / "out", configs)
    (run / "checkpoint").rename(tmp_path / "checkpoint")  # of the local engine, with the clients' states
    check_models_of_sites(run, states, tables, tmp_path / "predictions", capsys)


def test_a_site_has_what_the_page_on_sites_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/sites.md: its experiment, sent as its commands say, and each `fedbn` command after the run."""
    page = (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    (experiment,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    texts = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (columns,) = (text.splitlines()[0].split(",") for text in texts if text.startswith("age,"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heart.yaml").write_text(experiment)
    (command,) = re.findall(r"^\{ echo .*", page, re.MULTILINE)
    subprocess.run(["sh", "-c", command], check=True)
    run_config = tomllib.loads((tmp_path / "heart.toml").read_text())
    run_config["out"] = run_config["out"].removeprefix("/")

    random = np.random.default_rng(0)
    configs = []
    for i in range(2):
        for split in ("train", "test"):
            rows = [dict.fromkeys(columns, int(random.integers(20, 90))) for _ in range(40)]
            rows = [row | {"sex": "fm"[k % 2], "outcome": ("well", "ill")[k % 3 // 2]} for k, row in enumerate(rows)]
            write_csv(tmp_path / f"heart-{i}" / f"{split}.csv", rows)
        configs.append({"data-path": str(tmp_path / f"heart-{i}"), "state": str(tmp_path / f"state-{i}")})
    with LocalGrid(client_app(make_client), 2, run_config=run_config, node_config=configs) as grid:
        serve(grid, run_config)
    capsys.readouterr()

    commands = [shlex.split(line) for line in re.findall(r"^(?:sudo \.venv/bin/)?fedbn (.*)", page, re.MULTILINE)]
    assert [words[0] for words in commands] == ["status", "report", "model", "predict"]
    for words in commands:
        here = [word.replace("/srv/heart", "heart-1").replace("/srv/fedbn-state", "state-1") for word in words]
        assert cli.main(here) == 0
    printed = capsys.readouterr().out
    for shown in ("the model of client 1: FedBN after round 10, and ", "test.csv: ", "predictions: predictions.csv"):
        assert shown in page
        assert shown in printed
    (header,) = (text.splitlines()[0] for text in texts if text.startswith("row,"))
    assert (tmp_path / "predictions.csv").read_text().splitlines()[0] == header


def deployed(folders: list[Path], tmp_path: Path, **variables: str) -> Deployment:
    """A SuperLink and three SuperNodes, each with a folder of its own."""
    if missing_tools():
        pytest.skip(f"not installed: {', '.join(missing_tools())}")
    of_sites = {f"DATA_{i}": str(folder) for i, folder in enumerate(folders)}
    of_sites |= {f"NODE_{i}": "data-path='/data'" for i in range(3)}
    return Deployment(tmp_path / "deployment", variables={**of_sites, **variables})


@pytest.mark.slow
def test_a_deployment_of_sites_with_tables(
    tables: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three real SuperNodes, each with a folder of CSV files; the same model and diagnosis as on the local engine.

    A client's model is of all three places: the rest on the server, batch norm at the site, the network in model.json.
    """
    least = {f"NODE_{i}": "data-path='/data' min-batch=16" for i in range(3)}
    with deployed(tables, tmp_path, **least) as deployment:
        out = deployment.run_app({"experiment": json.dumps(TABLE)})
        personal = deployment.run_app({"experiment": json.dumps(TABLE | {"strategy": PERSONAL[0]})})
        diagnosis = deployment.run_app({"experiment": json.dumps(DIAGNOSIS)})
        states = [deployment.mounts(f"superexec-clientapp-{i}")["/state"] for i in range(3)]
        check_models_of_sites(personal, states, tables, tmp_path / "predictions", capsys)
    gradients = json.loads((diagnosis / "summary.json").read_text())["gradients"]
    assert gradients == run_tables(tables, tmp_path / "diagnosis", DIAGNOSIS)[0]["gradients"]
    _, described, model = run_tables(tables, tmp_path / "local", TABLE)
    assert (out / "model.safetensors").read_bytes() == model
    assert json.loads((out / "model.json").read_text())["normalise"] == described["normalise"]
    text = (out / "environment.json").read_text()
    assert "--token" in json.loads(text)["command"], "as Flower starts a ServerApp"
    assert json.loads(text)["command"][json.loads(text)["command"].index("--token") + 1] == "***"


@pytest.mark.slow
def test_a_deployment_whose_server_has_no_data(sites: list[Path], tmp_path: Path) -> None:
    """The compose file's services, each site with its own folder; the same model as on the local engine."""
    with deployed(sites, tmp_path, NODE_2="data-path='/data' domain='sea'") as deployment:
        (file,) = deployment.mounts("superexec-serverapp")["/data"].iterdir()
        assert file.name == "DATA_is_not_set"
        out = deployment.run_app({"experiment": json.dumps(EXPERIMENT | {"strategy": {"name": "FedBN"}})})
        kept = [list(deployment.mounts(f"superexec-clientapp-{i}")["/state"].rglob("client-*")) for i in range(3)]
    history, _, model = run(sites, tmp_path / "local", strategy={"name": "FedBN"})
    assert (out / "model.safetensors").read_bytes() == model
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines] == [line["accuracy"] for line in history]
    # The states of FedBN's clients are in each site's own state folder.
    assert [[path.name for path in paths] for paths in kept] == [["client-0"], ["client-1"], ["client-2"]]


@pytest.mark.slow
def test_real_sites_train_in_their_own_way_and_answer_without_training(tables: list[Path], tmp_path: Path) -> None:
    """Batches, epochs and rates of node configs, evaluation and survey give what they give on the local engine."""
    ways: list[dict[str, Any]] = [{"batch-size": 8, "epochs": 2}, {"lr-factor": 0.5}, {"steps": 3}]
    own = [{"data-path": str(folder), "survey": True, **way} for folder, way in zip(tables, ways, strict=True)]
    words = [" ".join(f"{key}={value}" for key, value in way.items()) for way in ways]
    nodes = {f"NODE_{i}": f"data-path='/data' survey=true {given}" for i, given in enumerate(words)}
    local = served(TABLE, tmp_path / "local", own)
    without_rounds = {
        name: json.dumps(TABLE | {"rounds": 0, "evaluate": {"server": False, **asked}})
        for name, asked in (("evaluation", {"models": [str(local)]}), ("survey", {"survey": True}))
    }
    with deployed(tables, tmp_path, **nodes) as deployment:
        out = deployment.run_app({"experiment": json.dumps(TABLE)})
        for experiment in without_rounds.values():
            run_id = deployment.submit({"experiment": experiment, "out": str(tmp_path / "real")})
            assert deployment.wait_for_end(run_id) == "finished:completed", deployment.log(run_id)
    assert (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
    assert '"lr_factor": 0.5' in (out / "clients.jsonl").read_text()
    for experiment in without_rounds.values():
        config = {"experiment": experiment, "out": str(tmp_path / "simulated")}
        with LocalGrid(client_app(make_client), 3, run_config=config, node_config=own) as grid:
            serve(grid, config)
    for name in ("*/survey.json", "*/clients.jsonl"):
        real, simulated = (
            sorted(file.read_text() for file in (tmp_path / kind).glob(name)) for kind in ("real", "simulated")
        )
        assert real == simulated != []
