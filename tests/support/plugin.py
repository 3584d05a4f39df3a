"""Another Flower project (`plugin_project/`): copies of it, changed or not, and runs on the local engine."""

from __future__ import annotations

import contextlib
import importlib
import random
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedbn_flwr import LocalGrid

PROJECT = Path(__file__).resolve().parent / "plugin_project"
PACKAGE = "pytorchexample"
CLIENTS = 4


@dataclass(frozen=True)
class Sent:
    """A message as it was sent: strategies change its config afterwards."""

    kind: str
    config: dict[str, Any]
    arrays: ArrayRecord


class RecordingGrid(LocalGrid):
    """A LocalGrid that records its messages and replies."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Sent] = []
        self.replies: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        for message in messages:
            config = dict(next(iter(message.content.config_records.values()), {}))
            arrays = next(iter(message.content.array_records.values()), ArrayRecord())
            self.sent.append(Sent(message.metadata.message_type, config, arrays))
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.replies += replies
        return replies

    def count(self, kind: str) -> int:
        return sum(message.kind == kind for message in self.sent)

    def trained(self, server_round: int) -> list[dict[str, bytes]]:
        """The arrays that were sent to each client to train in this round."""
        return [
            {key: array.numpy().tobytes() for key, array in message.arrays.items()}
            for message in self.sent
            if (message.kind, message.config.get("server-round")) == ("train", server_round)
        ]

    def errors(self) -> list[str]:
        return [reply.error.reason for reply in self.replies if reply.has_error()]


def copied(folder: Path, changes: Mapping[str, Mapping[str, str]] = {}, **files: str) -> Path:
    """A copy of the project: `changes` replaces lines of server_app and others, `files` whole modules."""
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for module, text in files.items():
        (folder / PACKAGE / f"{module}.py").write_text(text)
    for module, lines in changes.items():
        file = folder / PACKAGE / f"{module}.py"
        text = file.read_text()
        for old, new in lines.items():
            assert text.count(old) == 1, f"{module}.py has {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        file.write_text(text)
    return folder


@dataclass(frozen=True)
class Project:
    """The project, imported."""

    server_app: ServerApp
    client_app: ClientApp
    task: Any
    config: dict[str, Any]

    def grid(self) -> RecordingGrid:
        return RecordingGrid(self.client_app, CLIENTS, run_config=self.config)

    def serve(self) -> RecordingGrid:
        """Run the ServerApp on a grid, as `flwr run` does."""
        grid = self.grid()
        torch.manual_seed(0)  # the project itself seeds neither its initial model nor its order of images
        random.seed(0)  # Flower draws the nodes of a round from it
        self.server_app(grid, Context(1, 0, {}, RecordDict(), self.config))
        return grid


@contextlib.contextmanager
def imported(folder: Path = PROJECT) -> Iterator[Project]:
    """The project in `folder`, imported as Flower does; unloaded afterwards, since copies have the same name."""
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    others = _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            server, client, task = (
                importlib.import_module(f"{PACKAGE}.{name}") for name in ("server_app", "client_app", "task")
            )
            assert Path(task.__file__).is_relative_to(folder)
            yield Project(server.app, client.app, task, config)
        finally:
            _forget()
            sys.modules.update(others)


def _forget() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
