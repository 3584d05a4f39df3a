"""A run folder with files of another run, cut off, or of another kind is refused by the name of the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.errors import UserError
from fedbn_flwr.results.folder.files import write_text
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs, read_state
from fedbn_flwr.results.report.write import write_report
from tests.support.sessions import session


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the same shape, stopped after round 2."""
    folder = tmp_path_factory.mktemp("stopped")
    for case in ("Scaffold", "FedProx", "again"):
        session("Scaffold" if case == "again" else case, folder / case, 2)
    return {case: folder / case for case in ("Scaffold", "FedProx", "again")}


def resume(out: Path) -> None:
    session("Scaffold", out, 3)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("FedProx", r"checkpoint': it belongs to another run: label was 'FedProx' and is 'Scaffold'; restore the file"),
        ("again", r"checkpoint': it belongs to another run: token was '[0-9a-f]{32}' and is '[0-9a-f]{32}'; restore"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(
    stopped: dict[str, Path], tmp_path: Path, other: str, words: str
) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    shutil.copy(stopped[other] / "checkpoint", tmp_path / "run")
    before = content(tmp_path / "run")
    with pytest.raises(UserError, match=words):
        resume(tmp_path / "run")
    assert before == content(tmp_path / "run")


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_clients_of_another_run_are_refused(stopped: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    shutil.copy(stopped["FedProx"] / "clients.jsonl", tmp_path / "run")
    words = r"clients\.jsonl', line \d: round \d is not the one in history\.jsonl, of another run"
    with pytest.raises(UserError, match=words):
        resume(tmp_path / "run")
    with pytest.raises(UserError, match=words):
        write_report([tmp_path / "run"], tmp_path / "report")


@pytest.mark.parametrize("other", ["FedProx", "again", "edited"])
def test_the_history_of_another_run_is_refused(stopped: dict[str, Path], tmp_path: Path, other: str) -> None:
    """Its rounds have the same numbers."""
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    history = tmp_path / "run" / "history.jsonl"
    text = history.read_text()
    history.write_text(
        text.replace('"clients": 3', '"clients": 2', 1)
        if other == "edited"
        else (stopped[other] / "history.jsonl").read_text()
    )
    assert history.read_text() != text
    with pytest.raises(
        UserError, match=r"history.jsonl': it has 2 of the 2 rounds before the checkpoint, or other ones; rest"
    ):
        resume(tmp_path / "run")
    history.write_text(text + text.splitlines()[-1].replace('"round": 2', '"round": 3') + "\n")  # it was killed then
    resume(tmp_path / "run")


def test_a_copy_of_a_run_without_its_environment_is_resumed(stopped: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    resume(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert run.token() == run.checkpoint.read().token


@pytest.mark.parametrize("key", ["data", "engine", "cell"])
def test_a_truncated_config_is_called_damaged(stopped: dict[str, Path], tmp_path: Path, key: str) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text()
    empty = "engine is None; .*" if key == "engine" else "it lacks .*size"  # the others may be null
    for more, words in ((1, r"it lacks .*size"), (3, ".*"), (len(key) + 2, empty)):
        file.write_text(text[: text.index(f"\n{key}:") + more])
        with pytest.raises(UserError, match=rf"config\.yaml': {words}; restore the file from a copy, or start again"):
            resume(tmp_path / "run")


# --- temporary files -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "file of a killed process"])
def test_a_temporary_file_is_a_new_one(tmp_path: Path, kind: str) -> None:
    mine, temporary = tmp_path / "mine", tmp_path / ".summary.json.tmp"
    mine.write_text("mine")
    if kind == "symbolic link":
        temporary.symlink_to(mine)
    elif kind == "hard link":
        os.link(mine, temporary)
    else:
        temporary.write_text("cut o")
    write_text(tmp_path / "summary.json", "new")
    assert (mine.read_text(), (tmp_path / "summary.json").read_text()) == ("mine", "new")
    assert not (tmp_path / "summary.json").is_symlink()
    assert {file.name for file in tmp_path.iterdir()} == {"mine", "summary.json"}


def test_links_in_a_run_folder_change_no_other_file(stopped: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    names = [file.name for file in (tmp_path / "run").iterdir()]
    for name in names:
        (tmp_path / name).write_text("mine")
        (tmp_path / "run" / f".{name}.tmp").symlink_to(tmp_path / name)
    resume(tmp_path / "run")
    assert {(tmp_path / name).read_text() for name in names} == {"mine"}


# --- files of another kind -----------------------------------------------------


NAMES = ["config.yaml", "environment.json", "history.jsonl", "partition.json", "clients.jsonl", "norms.jsonl",
         "summary.json", "model.json", "checkpoint", "promises"]  # fmt: skip


def readers(folder: Path) -> dict[str, Any]:
    run = RunFolder(folder)
    return {
        "resume": lambda: resume(folder),
        "report": lambda: [
            run.config(),
            find_runs([folder]),
            run.read("partition.json"),
            run.model_description(),
        ],
        "status": lambda: read_state(folder),
        "rest": lambda: [
            run.read("environment.json"),
            run.promises(),
            run.checkpoint.path.exists() and run.checkpoint.read(),
            run.lines("norms.jsonl"),
        ],
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*NAMES, "model.safetensors", "wandb.id", "norms.png"])
def test_a_fifo_hangs_nothing(stopped: dict[str, Path], tmp_path: Path, name: str) -> None:
    shutil.copytree(stopped["Scaffold"], tmp_path / "run")
    file = tmp_path / "run" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    refused = {}
    for what, read in readers(tmp_path / "run").items():
        try:
            read()
        except (UserError, ValueError) as error:
            refused[what] = str(error)
    assert all(name in reason for reason in refused.values())
    # A run that continues replaces these without reading them, and reads no file of others.
    replaced = ("partition.json", "summary.json", "model.json", "model.safetensors", "wandb.id", "norms.png")
    assert ("resume" in refused) == (name not in replaced)
