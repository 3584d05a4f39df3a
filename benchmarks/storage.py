"""Seconds to store state in the project's files and in sqlite; docs/results/performance/storage.txt.

    python benchmarks/storage.py [REPEATS [FOLDER]]

Small states have 1,376 floats in 40 arrays (the batch norms of ResNet-20), large ones 11 million floats in 60 arrays.
Prints median and minimum of REPEATS (5). The alternatives write the same entries with the same guarantee: sqlite in a
transaction with synchronous=EXTRA, and a new sqlite file that is renamed over the old one.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.client.node_state import stored_state
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.results.folder.checkpoint import CheckpointFile, Snapshot
from fedbn_flwr.storage import replacing, write_store

Entries = Iterable[tuple[str, bytes]]
SMALL, LARGE = (1_376, 40, 10_000), (11_000_000, 60, 10)  # floats, arrays, clients


def state(floats: int, arrays: int, number: int) -> RecordDict:
    values = np.random.default_rng(number).standard_normal(floats, dtype=np.float32)
    split = np.array_split(values, arrays)
    return RecordDict({"fedbn.arrays.local": pack({f"layer.{i}.weight": part for i, part in enumerate(split)})})


def checkpoint(folder: Path, size: tuple[int, int, int]) -> Iterator[tuple[str, float]]:
    floats, arrays, clients = size
    states = [state(floats, arrays, number) for number in range(clients)]
    model = RecordDict({"arrays": pack({"w": np.zeros(floats, np.float32)})})
    file = CheckpointFile(folder / "checkpoint")
    for server_round in range(1, sys.maxsize):
        began = time.perf_counter()
        file.write(Snapshot(server_round, "ab" * 16, model, dump(model)), enumerate(states))
        yield "write", time.perf_counter() - began
        began = time.perf_counter()
        file.read()
        assert sum(1 for _ in file.clients() or ()) == clients
        yield "read", time.perf_counter() - began


def node(folder: Path, size: tuple[int, int, int]) -> Iterator[tuple[str, float]]:
    """Each message is handled by a new process, whose context is empty."""
    floats, arrays, _ = size
    message = LocalGrid(ClientApp(), 1).create_message(RecordDict(), "train", 1, "")
    config: dict[str, object] = {"fedbn.run": "a", "fedbn.run-token": "0" * 32}
    own, rounds, done = state(floats, arrays, 0), 50 if floats < 10_000 else 2, 0
    while True:
        began = time.perf_counter()
        for _ in range(rounds):
            done += 1
            context = Context(1, 1, {"partition-id": 0, "state": str(folder)}, RecordDict(), {})
            with stored_state(message, {**config, "server-round": done, "fedbn.checkpoint-round": done - 1}, context):
                context.state.update(own)
        yield "restore and save", (time.perf_counter() - began) / rounds


def entries_with(
    write: Callable[[Path, Entries], None], folder: Path, size: tuple[int, int, int]
) -> Iterator[tuple[str, float]]:
    floats, arrays, clients = size
    entries = [(f"clients/{number}", dump(state(floats, arrays, number))) for number in range(clients)]
    while True:
        began = time.perf_counter()
        write(folder / "entries", entries)
        yield "write", time.perf_counter() - began


def insert(connection: sqlite3.Connection, entries: Entries) -> None:
    rows = ((name, zlib.crc32(data), data) for name, data in entries)
    connection.executemany("insert into entries values (?, ?, ?)", rows)


def sqlite_file(path: Path, entries: Entries) -> None:
    with replacing(path) as target:
        target.unlink(missing_ok=True)
        with closing(sqlite3.connect(target)) as connection:
            connection.executescript("pragma page_size=65536; pragma journal_mode=off; pragma synchronous=off;")
            connection.execute("create table entries (name text primary key, checksum integer, data blob)")
            insert(connection, entries)
            connection.commit()


def sqlite_transaction(path: Path, entries: Entries) -> None:
    """New rows first and the old table dropped afterwards, so that no row goes to the journal."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma page_size=65536")
        connection.execute("pragma synchronous=extra")
        connection.execute("begin immediate")
        if connection.execute("select 1 from sqlite_master where name = 'entries'").fetchone():
            connection.execute("alter table entries rename to old")
        connection.execute("create table entries (name text primary key, checksum integer, data blob)")
        insert(connection, entries)
        connection.execute("drop table if exists old")
        connection.execute("commit")


def main(repeats: int = 5, folder: str | None = None) -> None:
    ways: dict[str, Callable[[Path, tuple[int, int, int]], Iterator[tuple[str, float]]]] = {
        "checkpoint": checkpoint,
        "node's state": node,
        "entries, store": partial(entries_with, write_store),
        "entries, sqlite file": partial(entries_with, sqlite_file),
        "entries, sqlite transaction": partial(entries_with, sqlite_transaction),
    }
    for label, size in (("small", SMALL), ("large", LARGE)):
        for name, way in ways.items():
            place = Path(tempfile.mkdtemp(dir=folder))
            seconds: dict[str, list[float]] = {}
            for step, spent in way(place, size):
                seconds.setdefault(step, []).append(spent)
                if min(len(values) for values in seconds.values()) > repeats:
                    break
            shutil.rmtree(place)
            for step, values in seconds.items():
                rest = values[1:]  # the first run also fills caches
                print(
                    f"{label:6} {name:28} {step:17} {statistics.median(rest):9.5f} s  min {min(rest):9.5f} s",
                    flush=True,
                )
    os.sync()


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))  # type: ignore[arg-type]
