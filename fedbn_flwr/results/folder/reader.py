"""Reads the files of a run folder; errors name the damaged file."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.errors import UserError
from fedbn_flwr.results.yaml_text import parse_yaml
from fedbn_flwr.storage import read_store
from fedbn_flwr.trees import Draft, Tree

from .clients import PartitionCounts
from .description import Description
from .files import check, damaged, parse, read_declared, read_text
from .lock import has_writer
from .summary import Summary

if TYPE_CHECKING:
    from .checkpoint import CheckpointFile

CLIENTS_DIGEST = "clients_digest"  # in a line of history.jsonl, of the round's line in clients.jsonl
LINES = ("history.jsonl", "clients.jsonl", "norms.jsonl")  # a line per round; a resumed run continues them


def digest_of(line: str) -> str:
    """By which the lines of two runs differ, without their line break."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


class RunReader:
    """A run, finished or not, as its folder has it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Tree:
        """The resolved settings; empty if there is no file."""
        file = self.path / "config.yaml"
        if (text := read_text(file)) is None:
            return {}
        try:
            found = parse_yaml(text)
            if not isinstance(found, dict) or not found:
                raise ValueError("it has no settings")
            sections = dict.fromkeys(("cell", "data"), Draft | None)
            check(found, {**sections, "engine": Draft, "evaluate": Draft})
        except ValueError as error:
            raise damaged(file, str(error)) from None
        return found

    def end(self, config: Tree) -> Summary | None:
        """The summary of a run that is finished, or that diverged, as it would again; None if it may continue.

        With these settings: a finished run continues if they let it end later.
        """
        summary = self.readable_summary()
        if summary is None or (summary.diverged_in is None and summary.status != "finished"):
            return None
        is_over = summary.diverged_in is not None or _end(self.config()) == _end(config)
        return summary if is_over else None

    def partition(self) -> PartitionCounts | None:
        """The examples of each client by class; None if the run doesn't know them."""
        file = self.path / "partition.json"
        return read_declared(PartitionCounts, file) if file.exists() else None

    def name_of(self, client: int | str) -> str:
        """A client's number, with its name if it is known."""
        names = enumerate(found.names) if (found := self.partition()) else ()
        return {str(number): name for number, name in names}.get(str(client), str(client))

    def history(self) -> list[Tree]:
        return self.lines("history.jsonl")

    def lines(self, name: str) -> list[Tree]:
        """The mappings in a .jsonl file, one for each round; empty if there is no file."""
        file = self.path / name
        *lines, _ = (read_text(file) or "").split("\n")  # what follows the last line break was cut off by a crash
        known = {line["round"]: line.get(CLIENTS_DIGEST) for line in self.history()} if name == "clients.jsonl" else {}
        found: list[Tree] = []
        for number, text in enumerate(lines, start=1):
            line = parse(text, file, number)
            if found and line["round"] <= found[-1]["round"]:
                raise damaged(file, f"round {line['round']} follows round {found[-1]['round']}", number)
            if known.get(line["round"]) not in (None, digest_of(text)):
                raise damaged(file, f"round {line['round']} is not the one in history.jsonl, of another run", number)
            found.append(line)
        return found

    def read(self, name: str) -> Tree | None:
        """The content of a .json file; None if there is none."""
        text = read_text(self.path / name)
        return None if text is None else parse(text, self.path / name)

    def summary(self) -> Summary | None:
        """None if there is none."""
        found = self.progress()
        return found and found[0]

    def readable_summary(self) -> Summary | None:
        """None if there is none or it is damaged: a run that begins or continues writes it again."""
        with suppress(UserError):
            return self.summary()
        return None

    def progress(self) -> tuple[Summary, list[Tree]] | None:
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
        if summary.status == "running" and has_writer(self.path) is False:
            summary.status = "interrupted"
        return summary, history

    def token(self) -> str:
        """The run's token, under which nodes store their state."""
        return str((self.read("environment.json") or {})["token"])

    def model_description(self) -> Description:
        """How to build the network, to normalise its examples and to read its outputs."""
        return read_declared(Description, self.path / "model.json")

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
        from .checkpoint import CheckpointFile  # Flower, which those who read only texts do not need

        return CheckpointFile(self.path / "checkpoint")


# Settings of the engine that may differ when a run is resumed, because they do not affect results.
_FREE = ("workers", "timeout", "node_timeout", "checkpoint_every")


_OF_END = ("patience", "min_difference")  # under `evaluate`: with `rounds`, they decide when a run ends


def _end(config: Tree) -> list[object]:
    return [config.get("rounds"), *(config.get("evaluate", {}).get(key) or None for key in _OF_END)]


def lasting(config: Tree) -> Tree:
    """The settings that affect the results of a round; a resumed run may only change when it ends."""
    found = deciding(config)
    evaluate = {key: value for key, value in found["evaluate"].items() if key not in _OF_END}
    return {**{key: value for key, value in found.items() if key != "rounds"}, "evaluate": evaluate}


def deciding(config: Tree) -> Tree:
    """The settings that affect results."""
    engine = {key: value for key, value in config.get("engine", {}).items() if key not in _FREE}
    evaluate = {key: value for key, value in config.get("evaluate", {}).items() if key != "dynamics"}
    if evaluate.get("clients") == "own":  # which only adds metrics, when a run that personalises joins the experiment
        evaluate["clients"] = None
    rest = {key: value for key, value in config.items() if key not in ("track", "cell", "size")}
    return {**rest, "engine": engine, "evaluate": evaluate}
