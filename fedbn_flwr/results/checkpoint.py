"""From where a run goes on: written whole or not at all.

checkpoint/
  latest.json             names the folder that counts, with size and checksum of its state.json
  round-12/
    state.json            round, token, who trained when, and size and checksum of the other files
    model.safetensors     what training goes on from
    strategy.safetensors  the strategy's memory (absent where it cannot be saved)
    clients.bin           the clients' memories, one safetensors file after the other (absent where nodes keep them)
    clients.jsonl         a line for each: node, offset, size

A crash while a round's folder is written leaves `latest.json` as it was, and with it the checkpoint before.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from flwr.app import RecordDict

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.serialization import dump, parse, sync_folder, write_whole


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds, without the clients' memories."""

    round: int
    token: str  # of the training run; nodes keep their memory of it under this name
    model: RecordDict
    strategy: RecordDict | None  # None where it cannot be saved, for the reason
    unsaved: str | None = None
    trained: Mapping[int, int] = field(default_factory=dict)  # partition -> the last round it trained in


class CheckpointFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def round(self) -> int:
        """The round after which a run goes on; 0 where there is no checkpoint."""
        return int(self._latest()["round"]) if (self.path / "latest.json").exists() else 0

    def write(self, snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]] | None = None) -> None:
        """`clients` gives each node's memory, one at a time; None where nodes keep their own."""
        name = f"round-{snapshot.round}"
        if (self.path / "latest.json").exists() and self._latest()["folder"] == name:
            return
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)  # what a crash left
        folder.mkdir(parents=True)
        files = {"model.safetensors": _put(folder / "model.safetensors", [dump(snapshot.model)])}
        if snapshot.strategy is not None:
            files["strategy.safetensors"] = _put(folder / "strategy.safetensors", [dump(snapshot.strategy)])
        if clients is not None:
            index: list[str] = []
            files["clients.bin"] = _put(folder / "clients.bin", _one_by_one(clients, index))
            files["clients.jsonl"] = _put(folder / "clients.jsonl", [line.encode() for line in index])
        state = {
            "round": snapshot.round,
            "token": snapshot.token,
            "unsaved": snapshot.unsaved,
            "trained": {str(partition): last for partition, last in sorted(snapshot.trained.items())},
            "files": files,
        }
        sealed = _put(folder / "state.json", [json.dumps(state, indent=2).encode()])
        sync_folder(folder)
        sync_folder(self.path)
        latest = {"folder": name, "round": snapshot.round, "state": sealed}
        text = json.dumps(latest | {"crc32": _crc_of(latest)}) + "\n"
        write_whole(self.path / "latest.json", text.encode())
        for old in self.path.glob("round-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)

    def read(self) -> Snapshot:
        latest = self._latest()
        folder = self.path / str(latest["folder"])
        state = self._json(folder / "state.json", latest["state"])
        files = state["files"]
        has_strategy = "strategy.safetensors" in files
        return Snapshot(
            int(state["round"]),
            str(state["token"]),
            self._records(folder / "model.safetensors", files),
            self._records(folder / "strategy.safetensors", files) if has_strategy else None,
            state["unsaved"],
            {int(partition): int(last) for partition, last in state["trained"].items()},
        )

    def clients(self) -> Iterator[tuple[int, RecordDict]] | None:
        """The memory of each node, one at a time; None where the checkpoint has none."""
        latest = self._latest()
        folder = self.path / str(latest["folder"])
        files = self._json(folder / "state.json", latest["state"])["files"]
        if "clients.bin" not in files:
            return None
        return self._each(folder, files)

    def _each(self, folder: Path, files: Mapping[str, Any]) -> Iterator[tuple[int, RecordDict]]:
        file = folder / "clients.bin"
        index = self._bytes(folder / "clients.jsonl", files["clients.jsonl"]).splitlines()
        if not file.exists() or file.stat().st_size != files["clients.bin"]["bytes"]:
            raise self._damaged(file, "it is missing or not whole")
        with file.open("rb") as stream:
            for line in index:
                node, offset, size = json.loads(line)
                stream.seek(offset)
                try:
                    yield int(node), parse(stream.read(size))  # each has a checksum of its own
                except ValueError as error:
                    raise self._damaged(file, f"of node {node}: {error}") from None

    # --- reading what may be damaged ---

    def _latest(self) -> dict[str, Any]:
        latest = self._json(self.path / "latest.json", None)
        if latest.pop("crc32", None) != _crc_of(latest):
            raise self._damaged(self.path / "latest.json", "its checksum is wrong")
        return latest

    def _json(self, file: Path, expected: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            found = json.loads(self._bytes(file, expected))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise self._damaged(file, str(error)) from None
        if not isinstance(found, dict):
            raise self._damaged(file, f"it holds a {type(found).__name__}")
        return found

    def _records(self, file: Path, files: Mapping[str, Any]) -> RecordDict:
        try:
            return parse(self._bytes(file, files.get(file.name)))
        except ValueError as error:
            if isinstance(error, SettingsError):
                raise
            raise self._damaged(file, str(error)) from None

    def _bytes(self, file: Path, expected: Mapping[str, Any] | None) -> bytes:
        """A file's content, checked against its size and checksum where these are known."""
        try:
            data = file.read_bytes()
        except OSError as error:
            raise self._damaged(file, str(error.strerror)) from None
        if expected is not None and (len(data), zlib.crc32(data)) != (expected["bytes"], expected["crc32"]):
            raise self._damaged(file, f"it has {len(data)} bytes, expected {expected['bytes']} with another checksum")
        return data

    def _damaged(self, file: Path, reason: str) -> SettingsError:
        return SettingsError(
            f"the checkpoint {str(self.path)!r} cannot be read: {file.name} is damaged ({reason}); restore the folder "
            "from a copy, or begin anew with another --out"
        )


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _put(file: Path, parts: Iterable[bytes]) -> dict[str, int]:
    """Write a new file to the disk; returns its size and checksum."""
    size = crc = 0
    with file.open("xb") as stream:
        for part in parts:
            stream.write(part)
            size, crc = size + len(part), zlib.crc32(part, crc)
        _sync(stream)
    return {"bytes": size, "crc32": crc}


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _one_by_one(clients: Iterable[tuple[int, RecordDict]], index: list[str]) -> Iterator[bytes]:
    """The bytes of each memory; `index` gets a line for each."""
    offset = 0
    for node, records in clients:
        data = dump(records)
        index.append(json.dumps([node, offset, len(data)]) + "\n")
        offset += len(data)
        yield data
