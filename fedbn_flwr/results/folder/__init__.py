"""The folder of a run. It is updated after every round, so that an interrupted run can be read and resumed.

config.yaml         the resolved settings
environment.json    token, commit, versions, hardware, command, modules of the user, for each session
history.jsonl       one line per round: metrics, messages and bytes in each direction, seconds
partition.json      the examples of each client by class, unless nodes have data of their own
clients.jsonl       one line per round: the values of each client
norms.jsonl         one line per evaluated round: the dynamics of batch norm, if they are recorded
summary.json        the metrics of the whole run so far, and its status
model.safetensors   the global model; model-best.safetensors has the model of the best round
model.json          how to build the network and to normalise its examples
promises            what the rounds so far have spent, if a strategy must never lose count, for instance of privacy
checkpoint          everything needed to resume the run, see checkpoint.py
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import numpy as np
from flwr.app import RecordDict

from fedbn_flwr.data import Moments
from fedbn_flwr.errors import SettingsError, UserError, log_once
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.named import sources
from fedbn_flwr.storage import read_store, replacing, to_json, write_store, writing
from fedbn_flwr.text import file_name
from fedbn_flwr.trees import Draft, Json
from fedbn_flwr.yaml_text import dump_yaml, parse_yaml

from .checkpoint import CheckpointFile, Snapshot
from .clients import PartitionCounts
from .environment import environment
from .files import check, damaged, parse, read_text, write_text
from .summary import Summary

CLIENTS_DIGEST = "clients_digest"  # in a line of history.jsonl, of the round's line in clients.jsonl
LINES = ("history.jsonl", "clients.jsonl", "norms.jsonl")  # a line per round; a resumed run continues them


def default_folder() -> Path:
    """The folder of all output, `runs` or $FEDBN_OUT."""
    return Path(os.environ.get("FEDBN_OUT") or "runs")


def default_out(name: str) -> Path:
    """A new folder for output, NAME-TIME in the default parent folder."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = default_folder() / f"{file_name(name)}-{stamp}"
    repeats = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], repeats) if not path.exists())


def out_folder(name: str, out: str | Path | None, *, resume: bool) -> Path:
    """The folder that the user asks for, or a new one."""
    if resume and not out:
        raise SettingsError("to resume runs, give their folder by --out")
    if "\0" in str(out):
        raise SettingsError(f"out is {str(out)!r}; expected a path without the character '\\x00'")
    return (Path(out).expanduser() if out else default_out(name)).resolve()  # a part of the user may change the folder


def from_here(path: Path) -> Path:
    """A path as a person writes it: relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def digest_of(line: str) -> str:
    """By which the lines of two runs differ, without their line break."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def file_of(client: int) -> str:
    """The file of what the server has made for this client alone, in a run whose clients have models of their own."""
    return f"model-client-{client}.safetensors"


_locks: set[int] = set()  # the descriptors that lock this process's run folders


def _close_locks() -> None:
    """In a forked process: its copies would keep the folders locked after its parent was killed."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks)
_TRIES = 5  # to lock a folder: `has_writer` of another process locks it for a moment


def _lock(descriptor: int, kind: int) -> bool | None:
    """Whether the lock could be taken; None if the file system has no locks, as some network file systems."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = hashlib.sha256()  # of history.jsonl, from `begin` on

    @property
    def digest(self) -> str:
        """The SHA-256 of history.jsonl, by which a checkpoint knows the rounds before it."""
        return self._lines.hexdigest()

    def check(self, config: Json, *, resume: bool, complete: Callable[[Json], Json] = dict) -> None:
        """Raise an error if this would overwrite a run, or resume one with other settings.

        `complete` gives settings that an earlier version has written the defaults of keys that it did not have.
        """
        existing = self.config()
        if not existing:
            if self.checkpoint.path.exists():
                raise damaged(self.path / "config.yaml", "it is missing, but there is a checkpoint")
            return
        if not resume:
            raise SettingsError(
                f"{str(self.path)!r} holds a run already; give another --out, or --resume to continue it"
            )
        if (missing := [key for key in config if key not in existing]) and not self._is_of_other_code():
            raise damaged(self.path / "config.yaml", f"it lacks {', '.join(missing)}")
        try:
            existing = complete(existing)
        except SettingsError as error:
            reason = f"{error}; it is damaged, or another version of fedbn-flwr has written it"
            raise damaged(self.path / "config.yaml", reason) from None
        if different := _difference(deciding(existing), deciding(config)):
            raise SettingsError(f"{str(self.path)!r} cannot be resumed with other settings: {different}")

    def _is_of_other_code(self) -> bool:
        """Whether the last session ran another version of this project or of its packages."""
        return _versions(_last_session(self.read("environment.json") or {})) != _versions(environment())

    def check_data(self, checksum: str | None) -> None:
        """Raise an error if the run had other examples; the checksum is None if they are not known."""
        was = (self.read("environment.json") or {}).get("data_checksum")
        if None not in (was, checksum) and was != checksum:
            raise SettingsError(
                f"{str(self.path)!r} cannot be resumed with other data: environment.json has data_checksum {was}, and "
                f"the examples of data.name now have {checksum}; restore its files, or start again with "
                "another --out"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder; an error if another process writes it. The system ends the lock with the process."""
        self._make()
        descriptor = os.open(self.path, os.O_RDONLY)
        for tries in range(_TRIES):
            if _lock(descriptor, fcntl.LOCK_EX) is not False:
                break
            time.sleep(0.1 * (tries < _TRIES - 1))
        else:
            os.close(descriptor)
            raise SettingsError(
                f"another process is writing {str(self.path)!r}; wait until it ends, or give another --out"
            )
        _locks.add(descriptor)
        try:
            yield
        finally:
            _locks.remove(descriptor)
            os.close(descriptor)

    def has_writer(self) -> bool | None:
        """Whether a process has locked the folder; None if this cannot be known."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        try:
            found = _lock(descriptor, fcntl.LOCK_SH)
            return None if found is None else not found
        finally:
            os.close(descriptor)  # ends the lock

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"cannot create the run folder {str(self.path)!r}: {error.strerror}") from None

    def begin(self, config: Json, more: Json = MappingProxyType({})) -> int:
        """Prepare the folder, and return the round after which the run continues (0: a new run)."""
        first = (self.read("environment.json") or {}) if self.config() else {}
        saved = self.checkpoint.read(whole=False) if self.checkpoint.path.exists() else None
        done = 0
        if saved is not None:
            done, now = saved.round, {**deciding(config), "token": first.get("token", saved.token)}
            if saved.unsaved is not None:
                raise SettingsError(f"{str(self.path)!r} cannot be resumed: {saved.unsaved}")
            known = {**saved.settings, "token": saved.token}
            # `check` has compared the keys that the checkpoint's version did not have.
            if different := _difference(known, _with_keys_of(known, now)):
                raise damaged(self.checkpoint.path, f"it belongs to another run: {different}")
        elif lost := len(self.history()):
            log_once(f"{self.path} has no checkpoint of its {lost} rounds; the run begins again at round 1")
        kept = {LINES[0]: [line for line in self.history() if line["round"] <= done]}
        if (rounds := [line["round"] for line in kept[LINES[0]]]) != list(range(1, done + 1)):
            raise SettingsError(
                f"{str(self.path)!r} cannot be resumed: its checkpoint is of round {done}, but history.jsonl has the "
                f"rounds {rounds}; restore the folder from a copy, or start again with another --out"
            )
        self._lines = hashlib.sha256(_text_of(kept[LINES[0]]).encode())
        if saved is not None and saved.history != self.digest:
            raise damaged(self.path / "history.jsonl", "its rounds are not the ones before the checkpoint")
        kept |= {name: [line for line in self.lines(name) if line["round"] <= done] for name in LINES[1:]}
        summary = self.readable_summary()
        session = {**environment(), "modules": sources(config), **more}
        if done and (different := _difference(_versions(_last_session(first)), _versions(session))):
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

    def config(self) -> Json:
        """The resolved settings; empty if there is no file."""
        file = self.path / "config.yaml"
        if (text := read_text(file)) is None:
            return {}
        try:
            found = parse_yaml(text)
            if not isinstance(found, dict) or not found:
                raise ValueError("it has no settings")
            sections = dict.fromkeys(("published", "cell", "data"), Draft | None)
            check(found, {**sections, "engine": Draft, "evaluate": Draft})
        except ValueError as error:
            raise damaged(file, str(error)) from None
        return found

    def end(self) -> Summary | None:
        """The summary of a run that is finished, or that diverged, as it would again; None if it may continue."""
        summary = self.readable_summary()
        is_over = summary is not None and (summary.status == "finished" or summary.diverged_in is not None)
        return summary if is_over else None

    def add_line(self, name: str, line: Json) -> None:
        """Add the line of a round to one of the files in `LINES`."""
        file, text = self.path / name, f"{to_json(line)}\n"
        with writing(file), file.open("a", encoding="utf-8") as lines:
            lines.write(text)
        if name == "history.jsonl":
            self._lines.update(text.encode())

    def partition(self) -> PartitionCounts | None:
        """The examples of each client by class; None if the run doesn't know them."""
        if (found := self.read("partition.json")) is None:
            return None
        counts = PartitionCounts(**{key.name: found[key.name] for key in fields(PartitionCounts)})
        if any(len(row) != len(counts.classes) for row in counts.counts):
            raise damaged(self.path / "partition.json", "a client's counts are not one for each class")
        if len(counts.clients) not in (0, len(counts.counts)):
            raise damaged(self.path / "partition.json", "its clients have neither a name each nor none")
        return counts

    def history(self) -> list[Json]:
        return self.lines("history.jsonl")

    def lines(self, name: str) -> list[Json]:
        """The mappings in a .jsonl file, one for each round; empty if there is no file."""
        file = self.path / name
        *lines, _ = (read_text(file) or "").split("\n")  # what follows the last line break was cut off by a crash
        known = {line["round"]: line.get(CLIENTS_DIGEST) for line in self.history()} if name == "clients.jsonl" else {}
        found: list[Json] = []
        for number, text in enumerate(lines, start=1):
            line = parse(text, file, number)
            if found and line["round"] <= found[-1]["round"]:
                raise damaged(file, f"round {line['round']} follows round {found[-1]['round']}", number)
            if known.get(line["round"]) not in (None, digest_of(text)):
                raise damaged(file, f"round {line['round']} is not the one in history.jsonl, of another run", number)
            found.append(line)
        return found

    def read(self, name: str) -> Json | None:
        """The content of a .json file; None if there is none."""
        text = read_text(self.path / name)
        return None if text is None else parse(text, self.path / name)

    def write(self, name: str, content: Json, *, indent: int | None = None, durable: bool = False) -> None:
        write_text(self.path / name, to_json(content, indent) + "\n", durable=durable)

    def write_summary(self, summary: Summary) -> None:
        self.write("summary.json", summary.to_json(), indent=2)

    def summary(self) -> Summary | None:
        """None if there is none."""
        found = self.progress()
        return found and found[0]

    def readable_summary(self) -> Summary | None:
        """None if there is none or it is damaged: a run that begins or continues writes it again."""
        with suppress(UserError):
            return self.summary()
        return None

    def error_since(self, began: str) -> str | None:
        """Why the run failed, if that was at this time or later (`time_stamp`)."""
        summary = self.readable_summary()
        return summary.error if summary is not None and summary.began >= began else None

    def progress(self) -> tuple[Summary, list[Json]] | None:
        """The summary and the lines of history.jsonl; None if there is no summary.

        A process that was killed, or had a full disk, has left the status "running": its lock has ended.
        """
        if (content := self.read("summary.json")) is None:
            return None
        history = self.history()  # a run that is running writes it before the summary
        try:
            summary = Summary.from_json(content, history)
        except (ValueError, TypeError) as error:
            raise damaged(self.path / "summary.json", str(error)) from None
        if summary.status == "running" and self.has_writer() is False:
            summary.status = "interrupted"
        return summary, history

    def token(self) -> str:
        """The run's token, under which nodes store their state."""
        return str((self.read("environment.json") or {})["token"])

    def write_model(self, arrays: Arrays, server_round: int, name: str = "model.safetensors") -> None:
        """Write the model of a round; the metadata of the file has the round."""
        from safetensors.numpy import save

        whole = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in arrays.items()}
        content = save(whole, {"round": str(server_round)})
        with replacing(self.path / name, durable=False) as file:
            file.write_bytes(content)

    def model_description(self) -> Json:
        """How to build the network and to normalise its examples."""
        if (found := self.read("model.json")) is None:
            raise UserError(f"{str(self.path)!r} has no model.json")
        return found

    def moments(self) -> Moments:
        """The moments by which the run normalises examples."""
        known = self.model_description()["normalise"]
        return tuple(known["mean"]), tuple(known["std"])

    def units(self) -> Moments | None:
        """The moments of the regression targets, if the run scales them."""
        known = self.model_description().get("targets")
        return None if known is None else (tuple(known["mean"]), tuple(known["std"]))

    def agreed(self) -> Moments:
        """The moments of inputs and targets together, as sites agree on them."""
        (means, deviations), units = self.moments(), self.units() or ((), ())
        return means + units[0], deviations + units[1]

    def write_promises(self, promises: Mapping[str, float]) -> None:
        write_store(self.path / "promises", [("promises", json.dumps(dict(promises)).encode())])

    def promises(self) -> dict[str, float]:
        """What the strategy has spent with the rounds that began; empty if none did."""
        file = self.path / "promises"
        store = read_store(file) if file.exists() else {"promises": b"{}"}
        if "promises" not in store:  # an intact file of another kind, such as the checkpoint
            raise damaged(file, f"it has the entries {', '.join(store)[:200]}")
        found: dict[str, float] = json.loads(store["promises"])
        return found

    @property
    def checkpoint(self) -> CheckpointFile:
        return CheckpointFile(self.path / "checkpoint")

    def write_checkpoint(self, snapshot: Snapshot, clients: Iterable[tuple[int, RecordDict]]) -> None:
        history = self.path / "history.jsonl"
        with writing(history), history.open("rb") as stream:
            os.fsync(stream.fileno())  # its rounds must be on disk before their checkpoint is
        self.checkpoint.write(snapshot, clients)


# Settings of the engine that may differ when a run is resumed, because they do not affect results.
_FREE = ("workers", "timeout", "node_timeout", "checkpoint_every")


def deciding(config: Json) -> Json:
    """The settings that affect results."""
    engine = {key: value for key, value in config.get("engine", {}).items() if key not in _FREE}
    evaluate = {key: value for key, value in config.get("evaluate", {}).items() if key != "dynamics"}
    if evaluate.get("clients") == "own":  # which only adds metrics, when a run that personalises joins the experiment
        evaluate["clients"] = None
    rest = {key: value for key, value in config.items() if key not in ("track", "published", "cell", "size")}
    return {**rest, "engine": engine, "evaluate": evaluate}


def _text_of(lines: Iterable[Json]) -> str:
    return "".join(f"{to_json(line)}\n" for line in lines)


def _last_session(about: Json) -> Json:
    sessions: list[Json] = [about, *about.get("resumed", [])]
    return sessions[-1]


def _versions(session: Json) -> Json:
    """The versions of the code that a session runs, from its entry in environment.json."""
    return {**session.get("versions", {}), "commit": session.get("commit")}


def _difference(before: Json, now: Json, prefix: str = "") -> str:
    """The first setting that differs, with both values; empty if none does."""
    for key in sorted({*before, *now}):
        was, new = before.get(key), now.get(key)
        if was != new:
            inner = isinstance(was, Mapping) and isinstance(new, Mapping) and _difference(was, new, f"{prefix}{key}.")
            return inner or f"{prefix}{key} was {was!r} and is {new!r}"
    return ""


def _with_keys_of(before: Json, now: Json) -> Json:
    """`now`, without the keys that `before` lacks, in sections too."""
    pairs = ((key, before[key], value) for key, value in now.items() if key in before)
    return {
        key: _with_keys_of(was, new) if isinstance(was, Mapping) and isinstance(new, Mapping) else new
        for key, was, new in pairs
    }


def find_folders(folders: Iterable[Path]) -> dict[Path, int]:
    """All folders with a summary.json in these folders and below them, and the index of the folder they are in."""
    found: dict[Path, int] = {}
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder; give run folders or their parent folders")
        # A subfolder may disappear during the search, or not be readable: os.walk leaves it out.
        found = dict.fromkeys(sorted(_with_summary(folder)), number) | found
    return found


def _with_summary(folder: Path) -> Iterator[Path]:
    """The folders with a summary.json: this one, those below it, and those that links in it lead to; each once.

    Links are not followed further, since they may lead to the whole disk.
    """
    seen = set()
    for where, below, _ in os.walk(folder):
        below.sort()
        links = (path for name in below if os.path.islink(path := os.path.join(where, name)))
        for path in (where, *links):
            if os.path.exists(os.path.join(path, "summary.json")) and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield Path(path)
