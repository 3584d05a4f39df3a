"""Sites with data of their own agree on the moments of their columns: those of all data, whatever one of them sends."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict

from fedbn_flwr import client_app
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError, UserError
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.reply import arrays_of
from tests.support.federations import near
from tests.support.images import picture, png
from tests.support.records import put
from tests.support.sites import served

SIZES = (40, 64, 33)
EXPERIMENT: dict[str, Any] = {
    "rounds": 3,
    "clients": 3,
    "data": {"name": "/nowhere", "classes": 3, "channels": 3, "size": 8, "normalise": "moments"},
    "model": {"name": "cnn", "norm": "bn"},
    "train": {"lr": 0.1, "batch_size": 16, "steps": 2},
    "strategy": {"name": "FedAvg"},
    "evaluate": {"server": False},
    "engine": {"device": "cpu", "checkpoint_every": 1},
}
FEDTAN = {"name": "FedTAN", "min_batch": 16}
SMALL = {"min-batch": 16}  # in the nodes' config
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    features["site"] = datasets.Value("string")
    for split in ("train", "test"):
        datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(folder / f"{split}.parquet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each site, and one with the data of all."""
    root, count = tmp_path_factory.mktemp("sites"), iter(range(1000))
    rows = [
        [{"image": picture(next(count), (8, 8, 3)), "label": k % 3, "site": f"site {i}"} for k in range(size)]
        for i, size in enumerate(SIZES)
    ]
    for i, some in enumerate(rows):
        write(root / f"site-{i}", some)
    write(root / "all", [row for some in rows for row in some])
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_CACHE", str(tmp_path / "cache"))


def run(
    folders: Path | None, out: Path, *mods: Mod, nodes: Mapping[str, Any] | None = None, **changes: Any
) -> tuple[bytes, dict[str, Any]]:
    """The model of a run, and what model.json says of it. Without folders the nodes have parts of the server's data."""
    resume = changes.pop("resume", False)
    configs = [{"data-path": str(folders / f"site-{i}"), **(nodes or {})} for i in range(3)] if folders else None
    app = client_app(make_client, mods={"query": mods, "train": mods})
    folder = served(EXPERIMENT | changes, out, configs, app, resume=resume)
    return (folder / "model.safetensors").read_bytes(), json.loads((folder / "model.json").read_text())


def of_all(folders: Path, **more: Any) -> dict[str, Any]:
    here = {"name": str(folders / "all"), "partition": {"kind": "natural"}, "group": "site"}
    return {"data": EXPERIMENT["data"] | here, **more}


def moments_of_all(folders: Path) -> dict[str, list[float]]:
    """A twin: in float64, from the pixels of all sites at once."""
    images = datasets.load_dataset("parquet", data_files=str(folders / "all" / "train.parquet"))["train"]["image"]
    pixels = np.stack([np.asarray(image) for image in images]).reshape(-1, 3) / 255
    return {"mean": pixels.mean(0).tolist(), "std": pixels.std(0).tolist()}


@pytest.mark.parametrize("strategy", [{"name": "FedAvg"}, FEDTAN], ids=str)
def test_sites_train_the_model_of_a_simulation_with_all_data(
    strategy: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    model, described = run(folders, tmp_path / "sites", strategy=strategy, nodes=SMALL)
    simulated, known = run(None, tmp_path / "all", **of_all(folders, strategy=strategy, evaluate={"server": True}))
    assert model == simulated
    assert described["normalise"] == known["normalise"]
    near(moments_of_all(folders), described["normalise"], rtol=1e-12)


def test_nodes_with_parts_of_one_data_set_and_a_server_without_it_agree_too(folders: Path, tmp_path: Path) -> None:
    model, described = run(None, tmp_path / "without", **of_all(folders))
    simulated, known = run(None, tmp_path / "with", **of_all(folders, evaluate={"server": True}))
    assert (model, described["normalise"]) == (simulated, known["normalise"])


def test_a_server_with_data_evaluates_by_the_moments_of_the_sites(folders: Path, tmp_path: Path) -> None:
    """The server's data are those of one site."""
    data = EXPERIMENT["data"] | {"name": str(folders / "site-2")}
    changes: dict[str, Any] = {"data": data, "evaluate": {"server": True, "clients": True}}
    model, described = run(folders, tmp_path / "out", **changes)
    assert model == run(folders, tmp_path / "without")[0]
    np.testing.assert_allclose(described["normalise"]["mean"], moments_of_all(folders)["mean"], rtol=1e-12)
    (file,) = (tmp_path / "out").rglob("history.jsonl")
    (clients,) = (tmp_path / "out").rglob("clients.jsonl")
    last, own = (json.loads(path.read_text().splitlines()[-1]) for path in (file, clients))
    of_site = own["clients"]["2"]
    assert (last["loss"], last["accuracy"]) == (of_site["loss"], of_site["accuracy"])


# --- resumed runs and restarted nodes ----------------------------------------


class Failing:
    """A mod with which the site's clients fail from a round on, and which counts the questions for sums."""

    def __init__(self, last: int) -> None:
        self.last, self.asked = last, 0

    def __call__(self, message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        self.asked += message.metadata.message_type == protocol.SUMS_QUERY
        config = message.content.config_records["config"]
        if int(config.get(protocol.ROUND, 0)) > self.last:  # type: ignore[arg-type]
            raise ValueError("no power")
        return call_next(message, context)


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_moments_with_which_it_began(folders: Path, tmp_path: Path) -> None:
    """No site is asked again."""
    straight = run(folders, tmp_path / "straight", strategy=FEDTAN, nodes=SMALL)
    first, again = Failing(2), Failing(99)
    with pytest.raises(RunFailed, match="could not take part in a layer-wise step: ValueError"):
        run(folders, tmp_path / "out", first, strategy=FEDTAN, nodes=SMALL)
    assert first.asked == 3
    assert run(folders, tmp_path / "out", again, strategy=FEDTAN, nodes=SMALL, resume=True) == straight
    assert again.asked == 0
    (file,) = (tmp_path / "out").rglob("model.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalise": "mine:scaled"}))
    (summary,) = (tmp_path / "out").rglob("summary.json")
    summary.write_text(summary.read_text().replace('"finished"', '"interrupted"'))
    with pytest.raises(UserError, match=r"model\.json': normalise: Input should be an object"):
        run(folders, tmp_path / "out", strategy=FEDTAN, nodes=SMALL, resume=True)


def test_every_message_has_the_moments(folders: Path, tmp_path: Path) -> None:
    """So a client needs no memory of them: a process that has seen no other message trains and evaluates."""
    seen: dict[str, set[tuple[float, ...]]] = {}

    def watch(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        config = message.content.config_records["config"]
        seen.setdefault(message.metadata.message_type, set()).add(tuple(config.get(protocol.MEANS, ())))  # type: ignore
        return call_next(message, context)

    _, described = run(folders, tmp_path / "out", watch, strategy=FEDTAN, nodes=SMALL)
    (means,) = seen.pop("train")
    assert list(means) == described["normalise"]["mean"]
    assert seen.pop(protocol.PARTITION_QUERY) == seen.pop(protocol.SUMS_QUERY) == {()}
    assert seen.pop(protocol.EXCHANGE_QUERY) == {means}
    assert not seen


def test_a_message_without_the_moments_is_refused(folders: Path) -> None:
    node = {"data-path": str(folders / "site-0"), "partition-id": 0, "num-partitions": 3}
    client = make_client(Context(1, 1, node, RecordDict(), {"experiment": json.dumps(EXPERIMENT)}), {})
    arrays = dict(zip(client._sent_keys(), client.get_parameters({}), strict=True))
    with pytest.raises(MessageError, match=r"data\.normalise is 'moments', and the message has no 'fedbn\.means'"):
        client.train_round(arrays, {})


# --- what a site sends -------------------------------------------------------


def lying(change: Callable[[np.ndarray], np.ndarray]) -> Mod:
    """The last site's sums are changed."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type != protocol.SUMS_QUERY or context.node_config["partition-id"] != 2:
            return reply
        sums = change(unpack(arrays_of(reply.content))["sums"].copy())
        return Message(RecordDict({**reply.content, "arrays": pack({"sums": sums})}), reply_to=message)

    return mod


LIES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "no number": (put(1, 1, value=np.nan), "'sums' has 1 of 21 values that are not finite"),
    "infinite": (put(4, 1, value=np.inf), "'sums' has 1 of 21 values that are not finite"),
    "negative squares": (put(4, 1, value=-5.0), "its sums of column 1 cannot be sums of any values"),
    "no deviation can be so small": (put(4, 1, value=1.0), "its sums of column 1 cannot be sums of any values"),
    "negative count": (put(0, 1, value=-3.0), "its sums of column 1 cannot be sums of any values"),
    "half a value": (put(0, 1, value=2112.5), "its sums of column 1 cannot be sums of any values"),
    "more values than there are": (put(0, 1, value=1e100), "its sums of column 1 cannot be sums of any values"),
    "sums of nothing": (put(0, 1, value=0.0), "its sums of column 1 cannot be sums of any values"),
    "wrong width": (
        lambda sums: sums[:, :2],
        r"'sums' has shape \(7, 2\); the server sent shape \(7, 3\); its columns",
    ),
    "float32": (lambda sums: sums.astype(np.float32), "'sums' is float32; the server sent float64"),
    "texts": (lambda sums: sums.astype("U8"), "cannot be read|'sums'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_site_that_lies_is_named_before_training(lie: str, folders: Path, tmp_path: Path) -> None:
    change, says = LIES[lie]
    with pytest.raises(RunFailed, match=rf"the run cannot begin: 2 of 3 .*\s+- client 2 \(node 3\): .*({says})"):
        run(folders, tmp_path / "out", lying(change))
    assert not list((tmp_path / "out").rglob("model.safetensors"))


def test_a_site_whose_pixels_are_all_equal_in_a_channel_takes_part(tmp_path: Path) -> None:
    """Numbers such as 14/255 have no end in binary digits, and their sums are rounded."""
    for i in range(3):
        images = np.random.default_rng(i).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
        images[..., 1] = 14 + i
        rows = [{"image": {"bytes": png(image), "path": None}, "label": k % 3} for k, image in enumerate(images)]
        write(tmp_path / f"site-{i}", [{**row, "site": f"site {i}"} for row in rows])
    _, description = run(tmp_path, tmp_path / "out")
    assert description["normalise"]["mean"][1] == pytest.approx(15 / 255)
    assert description["normalise"]["std"][1] == pytest.approx(math.sqrt(2 / 3) / 255)


def test_a_site_that_fails_or_sends_something_else_is_named(folders: Path, tmp_path: Path) -> None:
    def other(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if message.metadata.message_type != protocol.SUMS_QUERY:
            return call_next(message, context)
        if context.node_config["partition-id"] == 0:
            raise OSError("the disk is gone")
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 5})}), reply_to=message)

    with pytest.raises(RunFailed) as found:
        run(folders, tmp_path / "out", other)
    assert "client 0 (node 1): could not send the sums of its columns: OSError: the client's log has" in str(
        found.value
    )
    assert "client 2 (node 3): expected an ArrayRecord 'arrays'; found 0 ArrayRecords" in str(found.value)


def test_a_site_refuses_to_send_the_sums_of_few_examples(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as found:
        run(folders, tmp_path / "out", nodes={"min-batch": 41})
    assert "node 2" not in str(found.value)
    says = "client 0 (node 1), client 2 (node 3): could not send the sums of its columns: DataError: it has fewer "
    assert says in str(found.value)
    assert not re.search(r"\b(33|40|41)\b", str(found.value)), "numbers are in the site's log"


@pytest.mark.parametrize(
    ("extension", "strategy", "says"),
    [
        ("secure", {"name": "Secure"}, r"but Secure\(FedAvg\) hides the replies of single clients"),
        ("private", {"name": "Private"}, r"but Private\(FedAvg\) adds noise to the mean"),
        ("bounds", {"bounds": {"max_share": 0.5}}, r"but strategy\.bounds limits the influence of one client"),
    ],
)
def test_strategies_that_protect_single_clients_do_not_ask(
    extension: str, strategy: dict[str, Any], says: str, folders: Path, tmp_path: Path
) -> None:
    pytest.importorskip(f"fedbn_flwr.extensions.{extension}")
    wraps = {"base": {"name": "FedAvg"}} if "name" in strategy else {"name": "FedAvg"}
    counting = Failing(99)
    with pytest.raises(SettingsError, match=r"data\.normalise is 'moments', for which each site sends .* " + says):
        run(folders, tmp_path / "out", counting, strategy={**strategy, **wraps})
    assert counting.asked == 0
    assert not (tmp_path / "out").exists(), "a server without data refuses it before it asks any site"
    data = EXPERIMENT["data"] | {"name": str(folders / "site-2")}
    changes: dict[str, Any] = {"data": data, "evaluate": {"server": True}}
    with pytest.raises(SettingsError, match=says):  # only the sites say that they have data of their own
        run(folders, tmp_path / "out", counting, strategy={**strategy, **wraps}, **changes)
    assert counting.asked == 0
