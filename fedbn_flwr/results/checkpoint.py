"""The checkpoint of a run: everything needed to resume it, in one file that each checkpoint replaces.

state          JSON: round, token, and the last round in which each client trained
model          the arrays that training continues from
strategy       the strategy's state (absent if it cannot be saved)
clients/NODE   the state of each client (absent if the nodes store it)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedbn_flwr.errors import SettingsError, StorageError
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.storage import Store, write_store

_CLIENT = "clients/"


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds, without the clients' states."""

    round: int
    token: str  # of the run; nodes store their state of it under this name
    model: RecordDict
    strategy: RecordDict | None  # None if it cannot be saved
    unsaved: str | None = None  # the reason
    trained: Mapping[int, int] = field(default_factory=dict)  # partition -> the last round in which it trained


class CheckpointFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def round(self) -> int:
        """The round after which a run continues; 0 if there is no checkpoint."""
        return self.progress()[0]

    def progress(self) -> tuple[int, str | None]:
        """This round, and the reason why a run cannot continue from it."""
        if not self.path.exists():
            return 0, None
        with self._opened() as store:
            state = _state(store)
            return int(state["round"]), None if "strategy" in store else str(state["unsaved"])

    def write(self, snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]] | None = None) -> None:
        """`clients` yields the state of one node at a time; None if the nodes store it."""
        try:
            write_store(self.path, _entries(snapshot, clients))
        except StorageError as error:
            raise StorageError(f"{error}; the previous checkpoint is unchanged") from None

    def read(self) -> Snapshot:
        with self._opened() as store:
            state = _state(store)
            return Snapshot(
                int(state["round"]),
                str(state["token"]),
                parse(store["model"]),
                parse(store["strategy"]) if "strategy" in store else None,
                state["unsaved"],
                {int(partition): int(last) for partition, last in state["trained"].items()},
            )

    def clients(self) -> Iterator[tuple[int, RecordDict]] | None:
        """The state of one node at a time; None if the checkpoint has none."""
        with self._opened() as store:
            return self._clients() if _state(store)["clients"] else None

    def _clients(self) -> Iterator[tuple[int, RecordDict]]:
        with self._opened() as store:
            for name in store:
                if name.startswith(_CLIENT):
                    yield int(name.removeprefix(_CLIENT)), parse(store[name])

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        try:
            with Store(self.path) as store:
                yield store
        except StorageError as error:
            raise self._refusal(str(error)) from None
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:  # whole, but of other content
            raise self._refusal(f"{str(self.path)!r} is damaged: {type(error).__name__}: {str(error)[:200]}") from None

    def _refusal(self, reason: str) -> SettingsError:
        return SettingsError(
            f"the checkpoint {reason}; restore the run folder from a copy, or start again with another --out"
        )


def _entries(snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]] | None) -> Iterator[tuple[str, bytes]]:
    state = {
        "round": snapshot.round,
        "token": snapshot.token,
        "unsaved": snapshot.unsaved,
        "trained": {str(partition): last for partition, last in sorted(snapshot.trained.items())},
        "clients": clients is not None,
    }
    yield "state", json.dumps(state).encode()
    yield "model", dump(snapshot.model)
    if snapshot.strategy is not None:
        yield "strategy", dump(snapshot.strategy)
    for node, records in clients or ():
        yield f"{_CLIENT}{node}", dump(records)


def _state(store: Store) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(store["state"])
    return state
