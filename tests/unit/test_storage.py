"""Stores survive a crash at any moment, and damage is noticed."""

from __future__ import annotations

import copy
import io
import itertools
import multiprocessing
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import run
from fedbn_flwr.errors import StorageError, UserError
from fedbn_flwr.storage import _seal, read_store, replacing, write_store

fork = multiprocessing.get_context("fork")


def test_entries_come_back_in_their_order(tmp_path: Path) -> None:
    entries = {"z": b"1", "": b"\x00", "a/ä": b"", "y": bytes(range(256)) * 300}
    write_store(tmp_path / "s", entries.items())
    assert list(read_store(tmp_path / "s").items()) == list(entries.items())
    write_store(tmp_path / "s", [])
    assert read_store(tmp_path / "s") == {}
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


@pytest.mark.slow
def test_no_changed_byte_changes_an_entry_and_every_missing_one_is_noticed(tmp_path: Path) -> None:
    path, entries = tmp_path / "s", {"one": b"\x00" * 20, "two": b"", "three": b"abc", "ä": b"d"}
    write_store(path, entries.items())
    data = path.read_bytes()
    ignored = 0  # dates, attributes and other fields of zip files that a store has no use for
    for place, bit in itertools.product(range(len(data)), range(8)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        try:
            found = read_store(path)
        except StorageError:
            continue
        assert list(found.items()) == list(entries.items()), place
        ignored += 1
    assert ignored < len(data) * 8 // 2
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match="s' is damaged: "):
            read_store(path)


def test_a_store_of_another_version_or_with_forged_entries_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"{}" + struct.pack("<QI12s", 2, zlib.crc32(b"{}"), b"fedbn-store1"))
    with pytest.raises(StorageError, match=r"s' is damaged: not a complete fedbn-store4 \(File is not a zip file\)"):
        read_store(path)
    write_store(path, [("a", b"1")])
    path.write_bytes(path.read_bytes().replace(b"fedbn-store4", b"fedbn-store9"))
    with pytest.raises(StorageError, match=r"another version of fedbn-flwr wrote it as fedbn-store9"):
        read_store(path)
    for kind, times, reason in (
        (zipfile.ZIP_STORED, 1, r"its end is b''"),
        (zipfile.ZIP_DEFLATED, 1, "compressed, or larger than the file"),
        (zipfile.ZIP_STORED, 9, "compressed, or larger than the file"),
    ):
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("a", bytes(1000))
            entry = archive.infolist()[0]
            for number in range(1, times):  # entries that share the bytes of the first
                archive.filelist.append(copy.copy(entry))
                archive.filelist[-1].filename = f"a{number}"
            archive.comment = b"" if reason.endswith("''") else _seal(archive)
        with pytest.raises(StorageError, match=rf"not a complete fedbn-store4 \(.*{reason}"):
            read_store(path)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="none' cannot be read: No such file"):
        read_store(tmp_path / "none")
    with pytest.raises(StorageError, match="none/s' cannot be written: No such file"):
        write_store(tmp_path / "none" / "s", [])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/s/.*' cannot be read: Not a directory"):
        run("quick", out=tmp_path / "file" / "s", progress=False)


def test_an_error_while_writing_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(TypeError), replacing(file) as temporary:
        temporary.write_bytes("not bytes")  # type: ignore[arg-type]
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def generation(number: int) -> Iterator[tuple[str, bytes]]:
    for name in "abc":
        yield name, f"{name}{number};".encode() * 5


def _write_and_die(path: Path, at: int) -> None:
    """Ends this process as kill -9 would: before its `at`th system call that changes the disk, or half through it."""
    calls = 0

    def count() -> bool:
        nonlocal calls
        calls += 1
        return calls == at

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count():
                os._exit(9)
            return function(*args, **kwargs)

        return call

    class Torn(io.FileIO):
        def write(self, data: Any) -> int:
            if count():
                super().write(bytes(data)[: len(data) // 2])
                os._exit(9)
            return super().write(data)

    for name in ("open", "fsync", "replace", "unlink", "close"):
        setattr(os, name, dying(getattr(os, name)))
    io.open = dying(lambda file, mode, *_: Torn(file, mode))  # type: ignore[assignment]
    write_store(path, generation(2))
    os._exit(0)


@pytest.mark.slow
def test_a_crash_at_any_step_leaves_a_whole_store(tmp_path: Path) -> None:
    at, status, found = 0, 9, []
    while status == 9:
        at += 1
        path = tmp_path / str(at) / "s"
        path.parent.mkdir()
        write_store(path, generation(1))
        process = fork.Process(target=_write_and_die, args=(path, at))
        process.start()
        process.join(30)
        status = process.exitcode or 0
        entries = read_store(path)
        found.append(1 if entries == dict(generation(1)) else 2)
        assert entries == dict(generation(found[-1])), f"killed at step {at}"
        write_store(path, generation(3))  # whatever the crash left there
        assert read_store(path) == dict(generation(3))
        assert [file.name for file in path.parent.iterdir()] == ["s"]
    assert status == 0
    assert found == sorted(found)
    assert found.count(1) >= 8, "opened, three entries, the index, flushed, renamed"
    assert found.count(2) >= 3, "the folder is flushed after the rename"


def test_only_the_owner_can_read_a_store_and_the_files_of_a_run(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_store(tmp_path / "s", [("a", b"1")])
        run(
            "quick",
            strategy="FedAvg",
            rounds=1,
            train={"steps": 1},
            engine={"workers": 0},
            out=tmp_path / "runs",
            progress=False,
        )
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    folder = modes.pop("runs"), modes.pop("FedAvg")
    assert folder[1] == 0o700  # what trackers write
    assert modes == dict.fromkeys(modes, 0o600)
    assert {"s", "report.md", "clients.jsonl", "history.jsonl", "checkpoint", "model.json"} <= modes.keys()
