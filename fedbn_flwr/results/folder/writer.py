"""Writes the files of a run folder, after every round, and checks it before a run begins or continues."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

import numpy as np
from flwr.app import RecordDict

from fedbn_flwr.errors import SettingsError, log_once
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.results.naming import sources
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.storage import open_private, replacing, to_json, write_store, writing
from fedbn_flwr.trees import Tree

from .checkpoint import Snapshot
from .environment import environment
from .files import damaged, write_text
from .lock import locked
from .reader import LINES, RunReader, lasting
from .summary import Summary


class RunFolder(RunReader):
    """A run that this process carries out, or continues."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines = hashlib.sha256()  # of history.jsonl, from `begin` on

    @property
    def digest(self) -> str:
        """The SHA-256 of history.jsonl, by which a checkpoint knows the rounds before it."""
        return self._lines.hexdigest()

    def check(self, config: Tree, *, resume: bool) -> None:
        """Raise an error if this would overwrite a run, or resume one with other settings."""
        existing = self.config()
        if not existing:
            if self.checkpoint.path.exists():
                raise damaged(self.path / "config.yaml", "it is missing, but there is a checkpoint")
            return
        if not resume:
            raise SettingsError(
                f"{str(self.path)!r} holds a run already; give another --out, or --resume to continue it"
            )
        if missing := [key for key in config if key not in existing]:
            raise damaged(self.path / "config.yaml", f"it lacks {', '.join(missing)}")
        if different := _difference(lasting(existing), lasting(config)):
            raise SettingsError(f"{str(self.path)!r} cannot be resumed with other settings: {different}")

    def check_data(self, checksum: str | None) -> None:
        """Raise an error if the run had other examples; the checksum is None if they are not known."""
        was = (self.read("environment.json") or {}).get("data_checksum")
        if None not in (was, checksum) and was != checksum:
            raise SettingsError(
                f"{str(self.path)!r} cannot be resumed with other data: environment.json has data_checksum {was}, and "
                f"the examples of data.name now have {checksum}; restore its files, or start again with "
                "another --out"
            )

    def locked(self) -> AbstractContextManager[object]:
        """Lock the folder, as `lock.locked`."""
        self._make()
        return locked(self.path)

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"cannot create the run folder {str(self.path)!r}: {error.strerror}") from None

    def begin(self, config: Tree, more: Tree = MappingProxyType({})) -> int:
        """Prepare the folder, and return the round after which the run continues (0: a new run)."""
        first = (self.read("environment.json") or {}) if self.config() else {}
        saved = self.checkpoint.read(whole=False) if self.checkpoint.path.exists() else None
        done = 0
        if saved is not None:
            done, now = saved.round, {**lasting(config), "token": first.get("token", saved.token)}
            if saved.unsaved is not None:
                raise SettingsError(f"{str(self.path)!r} cannot be resumed: {saved.unsaved}")
            known = {**lasting(saved.settings), "token": saved.token}
            if different := _difference(known, now):
                raise damaged(self.checkpoint.path, f"it belongs to another run: {different}")
        elif lost := len(self.history()):
            log_once(f"{self.path} has no checkpoint of its {lost} rounds; the run begins again at round 1")
        kept = {LINES[0]: [line for line in self.history() if 0 < line["round"] <= done]}
        self._lines = hashlib.sha256(_text_of(kept[LINES[0]]).encode())
        if saved is not None and saved.history != self.digest:
            found = f"it has {len(kept[LINES[0]])} of the {done} rounds before the checkpoint, or other ones"
            raise damaged(self.path / LINES[0], found)
        kept |= {name: [line for line in self.lines(name) if 0 < line["round"] <= done] for name in LINES[1:]}
        summary = self.readable_summary()
        session = {**environment(), "modules": sources(config), **more}
        before = [first, *first.get("resumed", [])][-1]
        if done and (different := _difference(_versions(before), _versions(session))):
            log_once(
                f"{self.path} continues with other code: {different}. Its later rounds may differ from an "
                'uninterrupted run, and it may fail (docs/operations.md, "Upgrading")'
            )
        self._make()
        write_text(self.path / "config.yaml", dump_yaml(dict(config)), durable=True)
        content = {**(first or session), "token": secrets.token_hex(16) if saved is None else saved.token}
        if first:
            content["resumed"] = [*first.get("resumed", []), {"after_round": done, **session}]
        self.write("environment.json", content, indent=2, durable=True)
        for name, lines in kept.items():
            if lines or name == LINES[0]:
                write_text(self.path / name, _text_of(lines))
            else:
                (self.path / name).unlink(missing_ok=True)
        if summary is not None:  # for the lines that are left, in case the run doesn't begin
            self.write_summary(summary.of(kept[LINES[0]]))
        return done

    def add_line(self, name: str, line: Tree) -> None:
        """Add the line of a round to one of the files in `LINES`."""
        file, text = self.path / name, f"{to_json(line)}\n"
        with writing(file), open(file, "a", encoding="utf-8", opener=open_private) as lines:
            lines.write(text)
        if name == "history.jsonl":
            self._lines.update(text.encode())

    def write(self, name: str, content: Tree, *, indent: int | None = None, durable: bool = False) -> None:
        write_text(self.path / name, to_json(content, indent) + "\n", durable=durable)

    def write_summary(self, summary: Summary) -> None:
        self.write("summary.json", summary.to_json(), indent=2)

    def write_model(self, arrays: Arrays, server_round: int, name: str = "model.safetensors") -> None:
        """Write the model of a round; the metadata of the file has the round."""
        from safetensors.numpy import save

        whole = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in arrays.items()}
        content = save(whole, {"round": str(server_round)})
        with replacing(self.path / name, durable=False) as file:
            file.write_bytes(content)

    def write_promises(self, promises: Mapping[str, float]) -> None:
        write_store(self.path / "promises", [("promises", json.dumps(dict(promises)).encode())])

    def write_checkpoint(self, snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]]) -> None:
        history = self.path / "history.jsonl"
        with writing(history), history.open("rb") as stream:
            os.fsync(stream.fileno())  # its rounds must be on disk before their checkpoint is
        self.checkpoint.write(snapshot, clients)


def _text_of(lines: Iterable[Tree]) -> str:
    return "".join(f"{to_json(line)}\n" for line in lines)


def _versions(session: Tree) -> Tree:
    """The versions of the code that a session runs, from its entry in environment.json."""
    return {**session.get("versions", {}), "commit": session.get("commit")}


def _difference(before: Tree, now: Tree, prefix: str = "") -> str:
    """The first setting that differs, with both values; empty if none does."""
    for key in sorted({*before, *now}):
        was, new = before.get(key), now.get(key)
        if was != new:
            inner = isinstance(was, Mapping) and isinstance(new, Mapping) and _difference(was, new, f"{prefix}{key}.")
            return inner or f"{prefix}{key} was {was!r} and is {new!r}"
    return ""
