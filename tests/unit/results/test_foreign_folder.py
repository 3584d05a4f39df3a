"""What a run folder from someone else can do to those who read it: it executes no code that they haven't allowed."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from torch import nn

from fedbn_flwr import Result, Results, run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.storage import read_store, write_store
from tests.support.runs import change_summary

TINY: dict[str, Any] = {"rounds": 1, "clients": 2, "train": {"steps": 1}, "engine": {"workers": 0, "device": "cpu"}}
# A module and a repository of the folder's author: each leaves a file where it was imported.
CODE = "import pathlib; pathlib.Path('executed').touch()\ndef net(*_, **__): pass\nRule = Norm = net\n"


class TinyNet(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))


HUB = {"repo_or_dir": ".", "model": "net", "source": "local", "trust_repo": True}
SYSTEM = {"command": "touch executed"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("quick", **TINY, strategy="FedBN", out=tmp_path_factory.mktemp("run"), progress=False).folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run's folder, in a working folder with code of its author; and data to predict."""
    shutil.copytree(trained, tmp_path / "run")
    for name in ("evil.py", "hubconf.py"):
        (tmp_path / name).write_text(CODE)
    np.savez(tmp_path / "new.npz", inputs=np.zeros((4, 8, 8), np.uint8))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def change(folder: Path, **sections: Any) -> None:
    """Change the mappings in model.json."""
    content = json.loads((folder / "model.json").read_text())
    for key, values in sections.items():
        content[key] = {**content.get(key, {}), **values}
    (folder / "model.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("section", "key", "name", "more"),
    [
        ("build", "name", "torch.hub:load", {"arguments": HUB}),
        ("build", "name", "os:system", {"arguments": SYSTEM}),
        ("build", "name", "fedbn_flwr.models.build:inspect.os.system", {"arguments": SYSTEM}),
        ("build", "name", "evil:net", {}),
        ("build", "name", "evil:net(width=1)", {}),
        ("build", "norm", "evil:Norm", {}),
    ],
)
@pytest.mark.parametrize("words", [("predict", "--data", "new.npz"), ("model",)], ids=lambda words: words[0])
def test_code_that_its_model_names_is_refused(
    section: str,
    key: str,
    name: str,
    more: dict[str, Any],
    words: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder, **{section: {key: name, **more}})
    assert cli.main([*words, "run", "--client", "0", "--out", "found"]) == 2
    said, plain = capsys.readouterr().err, name.partition("(")[0]
    assert f"{name!r} is code that the run folder names" in said
    assert f"--allow {plain}, in Python Result.read(folder, allow={plain!r})" in said
    with pytest.raises(SettingsError, match="is code that the run folder names"):
        Result.read(folder, allow="other:net").model(client=0)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"build": {"num_classes": "a"}},
        {"build": {"groups": 0, "norm": "gn"}},
        {"build": {"input_shape": [2, 8, 8]}},
        {"normalise": {}},
        {"normalise": {"std": [0.0]}},
        {"normalise": {"mean": [math.nan]}},
        {"normalise": {"mean": [0.5, 0.5]}},
        {"normalise": {"mean": [0.5] * 3, "std": [0.5] * 3}},
        {"targets": {"std": [1.0]}},
        {"targets": {"mean": [1.0], "std": [1.0]}},
        {"classes": ["a", "a"]},
        {"classes": ["a"]},
        {"inputs": {"a": 1}},
        {"inputs": ["a", "b"]},
        {"inputs": ["a", "b"], "types": ["int64", "int64"]},
        {"local": "last"},
        [],
    ],
    ids=str,
)
def test_a_model_whose_description_cannot_be_right_is_damaged(
    sections: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.json"
    whole = json.loads(file.read_text())
    for key, value in dict(sections).items():
        whole[key] = {**whole[key], **value} if value and isinstance(whole[key], dict) else value
    file.write_text(json.dumps(whole if sections else sections))
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 2
    assert "'run/model.json'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["environment.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_not_followed(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).rename(tmp_path / "own")
    (folder / name).symlink_to(tmp_path / "own")
    assert cli.main(["adapt", "run", "--data", "new.npz", "--out", "adapted"]) == 2
    assert f"'run/{name}': it is a link to a file outside of the folder" in capsys.readouterr().err


def test_a_label_does_not_reach_the_terminal_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_summary(folder, label="A\x1b[2J\x9b1m")
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 0
    assert cli.main(["export", "run", "--format", "safetensors", "--out", "found"]) == 0
    assert {"\x1b", "\x9b"}.isdisjoint("".join(capsys.readouterr()))


def test_weights_that_are_not_finite_are_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    save_file({key: np.full_like(value, np.nan) for key, value in load_file(file).items()}, file, {"round": "1"})
    assert cli.main(["predict", "run", "--data", "new.npz", "--out", "found"]) == 2
    assert "has values that are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": {"name": "evil:net"}},
        {"strategy": {"name": "FixBN", "base": {"name": "evil:net"}}},
        {"data": {"name": "evil:net"}},
        {"data": {"name": "os:system", "options": SYSTEM}},
        {"data": {"augment": ["evil:net"]}},
        {"data": {"partition": {"kind": "evil:net"}}},
        {"model": {"name": "evil:net", "norm": "evil:Norm"}},
        {"train": {"loss": "evil:net"}},
        {"train": {"loss": {"name": "os:system", **SYSTEM}}},
        {"train": {"optimizer": {"name": "evil:net"}}},
        {"train": {"schedule": {"kind": "evil:net"}}},
        {"evaluate": {"metrics": ["evil:net"]}},
        {"track": ["evil:net"]},
    ],
    ids=str,
)
def test_its_settings_execute_nothing(
    changes: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["predict", "run", "--client", "0", "--data", "new.npz", "--out", "found"]) == 0
    for words in (["report", "--out", "report"], ["report", "--html", "--out", "page.html"], ["status"]):
        assert cli.main([*words, "run"]) == 0
    given = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]
    shutil.copytree(folder, "out/FedBN")
    assert cli.main(["run", "quick", *given, "strategy=FedBN", "--out", "out", "--resume"]) == (
        2 if "track" not in changes else 0
    )
    assert not Path("executed").exists(), capsys.readouterr()


class Executed:
    """When it is unpickled, a file is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("executed").touch, ()


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint", "checkpoint's model"])
def test_pickled_content_is_never_unpickled(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled, file = pickle.dumps(Executed()), folder / name.removesuffix("'s model")
    if file.name == name:
        file.write_bytes(pickled)
    else:
        entries = read_store(file)
        write_store(file, {**entries, "model": pickled}.items())
    client = ["--client", "0"] if file.name == "checkpoint" else []
    assert cli.main(["predict", "run", *client, "--data", "new.npz", "--out", "found"]) == 2
    assert f"'run/{file.name}'" in capsys.readouterr().err
    assert not Path("executed").exists()
    pickle.loads(pickled)
    assert Path("executed").exists()


def test_a_network_of_one_s_own_is_built_if_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `run` the names are the caller's own."""
    monkeypatch.chdir(tmp_path)
    result = run("quick", **TINY, strategy="FedAvg", model=TinyNet, out="out", progress=False)
    name = f"{TinyNet.__module__}:TinyNet"
    same = run("quick", **TINY, strategy="FedAvg", model=TinyNet, out="out", progress=False, resume=True)
    found = [result, same, Result.read(result.folder, allow=name), Results.read("out", allow=[name])[0]]
    assert all(isinstance(each.model(), TinyNet) for each in found)
    with pytest.raises(SettingsError, match="is code that the run folder names"):
        Result.read(result.folder).model()
    np.savez("new.npz", inputs=np.zeros((4, 8, 8), np.uint8))
    command = ["predict", str(result.folder), "--data", "new.npz", "--out", "found.csv"]
    assert cli.main(command) == 2
    assert cli.main([*command, "--allow", name]) == 0
