"""The checkpoint of a run: everything needed to resume it, in one file that each checkpoint replaces.

state          JSON: round, token and settings of the run, a digest of its history, and the last round in which each
               client trained
model          the arrays that training continues from
strategy       the strategy's state (absent if it cannot be saved)
clients/NODE   the state of each client (absent if the nodes store it)
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import RecordDict

from fedbn_flwr.errors import SettingsError, StorageError
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.storage import opened_store, write_store
from fedbn_flwr.trees import Tree

_CLIENT = "clients/"


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds, without the clients' states."""

    round: int
    token: str  # of the run; nodes store their state of it under this name
    model: RecordDict
    strategy: bytes | None  # its state; None if it cannot be saved
    unsaved: str | None = None  # why not
    trained: Mapping[int, int] = field(default_factory=dict)  # partition -> the last round in which it trained
    settings: Tree = field(default_factory=dict)  # that affect results
    history: str = ""  # the digest of history.jsonl up to this round


@dataclass(frozen=True)
class CheckpointFile:
    path: Path

    def write(self, snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]] = ()) -> None:
        """`clients` yields the state of one node at a time; none if the nodes store it."""
        try:
            write_store(self.path, _entries(snapshot, clients))
        except StorageError as error:
            raise StorageError(f"{error}; the previous checkpoint is unchanged") from None

    def read(self, *, whole: bool = True) -> Snapshot:
        """Read all but the clients' states; if it isn't `whole`, neither the model nor the strategy's state."""
        with self._opened() as store:
            state, is_saved = json.loads(store["state"]), "strategy" in store
            return Snapshot(
                round=int(state["round"]),
                token=str(state["token"]),
                model=parse(store["model"], RecordDict) if whole else RecordDict(),
                strategy=store.get("strategy") if whole else None,
                unsaved=None if is_saved else str(state["unsaved"]),
                trained={int(partition): int(last) for partition, last in state["trained"].items()},
                settings=dict(state["settings"]),
                history=str(state["history"]),
            )

    def nodes(self) -> list[int]:
        """The nodes whose states it has, in ascending order; none if there is no checkpoint, or if they store it."""
        if not self.path.exists():
            return []
        with self._opened() as store:
            return sorted(int(name.removeprefix(_CLIENT)) for name in store if name.startswith(_CLIENT))

    def clients(self, nodes: Container[int] | None = None) -> Iterator[tuple[int, RecordDict]]:
        """The state of one node at a time, of all of them or of these."""
        with self._opened() as store:
            for name in store:
                if name.startswith(_CLIENT) and (nodes is None or int(name.removeprefix(_CLIENT)) in nodes):
                    yield int(name.removeprefix(_CLIENT)), parse(store[name], RecordDict)

    @contextmanager
    def _opened(self) -> Iterator[Mapping[str, bytes]]:
        try:
            with opened_store(self.path) as store:
                yield store
        except (StorageError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            # The file is intact, but has other content.
            damage = f"{str(self.path)!r} is damaged: {type(error).__name__}: {str(error)[:200]}"
            what = error if isinstance(error, StorageError) else damage
            raise SettingsError(
                f"the checkpoint {what}; restore the run folder from a copy, or start again with another --out"
            ) from None


def _entries(snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]]) -> Iterator[tuple[str, bytes]]:
    state = {
        "round": snapshot.round,
        "token": snapshot.token,
        "unsaved": snapshot.unsaved,
        "trained": {str(partition): last for partition, last in sorted(snapshot.trained.items())},
        "settings": snapshot.settings,
        "history": snapshot.history,
    }
    yield "state", json.dumps(state).encode()
    yield "model", dump(snapshot.model)
    if snapshot.strategy is not None:
        yield "strategy", snapshot.strategy
    for node, records in clients:
        yield f"{_CLIENT}{node}", dump(records)
