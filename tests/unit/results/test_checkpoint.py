"""Checkpoints: written whole, read one client at a time, and refused where damaged."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from fedbn_flwr.errors import SettingsError, StorageError, UserError
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.results.folder.checkpoint import CheckpointFile, Snapshot
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.storage import read_store
from tests.support.records import content


def snapshot(server_round: int) -> Snapshot:
    value = np.full(3, server_round, np.float32)
    return Snapshot(
        server_round, "ab" * 16, RecordDict({"arrays": pack({"w": value})}), dump([value]),
        trained={0: server_round},
    )  # fmt: skip


def states(server_round: int) -> Iterator[tuple[int, RecordDict]]:
    for node in range(3):
        yield node, RecordDict({"own": pack({"n": np.array(10 * server_round + node)})})


def told(of: Snapshot, states: Iterable[tuple[int, RecordDict]]) -> tuple[Any, ...]:
    clients = [(node, content(records)) for node, records in states]
    return of.round, of.token, dict(of.trained), content(of.model), of.strategy, clients


def read_all(file: CheckpointFile) -> tuple[Any, ...]:
    return told(file.read(), file.clients())


def expected(server_round: int) -> tuple[Any, ...]:
    return told(snapshot(server_round), states(server_round))


def test_a_checkpoint_comes_back_and_replaces_the_one_before(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path / "checkpoint")
    for server_round in (2, 4):
        file.write(snapshot(server_round), states(server_round))
        assert read_all(file) == expected(server_round)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    file.write(dataclasses.replace(snapshot(5), strategy=None, unsaved="why"))
    assert (file.read().strategy, file.read().unsaved, list(file.clients())) == (None, "why", [])


def test_a_client_that_cannot_be_read_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[int, RecordDict]]:
        yield from states(4)
        raise RuntimeError("a worker died")

    file = CheckpointFile(tmp_path / "checkpoint")
    file.write(snapshot(2), states(2))
    with pytest.raises(RuntimeError, match="a worker died"):
        file.write(snapshot(4), broken())
    assert read_all(file) == expected(2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_written_and_read_one_client_at_a_time(tmp_path: Path) -> None:
    size, file = 2**20, CheckpointFile(tmp_path / "checkpoint")
    tracemalloc.start()
    try:
        file.write(
            snapshot(1), ((node, RecordDict({"own": pack({"n": np.zeros(size, np.uint8)})})) for node in range(30))
        )
        assert file.read().round == 1
        assert file.nodes() == list(range(30))
        for _ in file.clients():
            pass
        ((node, _),) = file.clients([7])
        assert node == 7
        assert tracemalloc.get_traced_memory()[1] < 6 * size  # of a client: file, tensors, arrays
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, how: str) -> None:
    file = CheckpointFile(tmp_path / "checkpoint")
    file.write(snapshot(4), states(4))
    parts = read_store(file.path).values()
    data = file.path.read_bytes()
    within = [place for part in parts for place in range(data.index(part), data.index(part) + len(part), 7)]
    for place in within if how == "changed" else range(0, len(data), 97):
        file.path.write_bytes(data[:place] + (bytes([data[place] ^ 1]) + data[place + 1 :]) * (how == "changed"))
        with pytest.raises(SettingsError, match=r"checkpoint' is damaged: .*; restore the run folder from a copy, or"):
            read_all(file)


def test_a_disk_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.tmp").mkdir()
    with pytest.raises(StorageError, match="checkpoint' cannot be written: Is a directory; the previous checkpoint is"):
        CheckpointFile(tmp_path / "checkpoint").write(snapshot(1))


def test_a_run_folder_is_written_by_one_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(SettingsError, match=r"another process is writing .*run"), folder.locked():
        pass
    with folder.locked():
        pass


def test_another_store_in_place_of_the_promises_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_promises({"total": 1.5})
    assert folder.promises() == {"total": 1.5}
    CheckpointFile(tmp_path / "promises").write(snapshot(3), [])
    with pytest.raises(UserError, match=r"promises': it has the entries state, model"):
        folder.promises()
