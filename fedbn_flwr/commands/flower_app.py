"""Any Flower app with its server in this process, and its clients here, in workers or on a Ray cluster.

No SuperLink is needed, and nothing is left running.
"""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.random import bit_generator

from fedbn_flwr import seeding
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.errors import LOG, RunFailed, SettingsError, by_reason, few, is_new, needs
from fedbn_flwr.extensions import part
from fedbn_flwr.internals import get_fused_config_from_dir, get_project_config, load_app
from fedbn_flwr.internals import server as old_server


def _load(place: str, folder: Path) -> Any:
    """The app at a place such as `client_app:app`."""
    # np.random.default_rng() seeds itself by it.
    bit_generator.randbits = random.getrandbits  # type: ignore[attr-defined]
    return load_app(place, SettingsError, folder)


@dataclass(frozen=True)
class SeededApp:
    """A ClientApp whose draws from global generators depend on the seed, the node and its messages so far alone.

    So a run can be repeated bit for bit, whichever worker serves a node, although the app itself seeds nothing. Each
    worker imports the app itself: threads that an import starts, as JAX's does, would not survive a fork.
    """

    place: str
    folder: Path
    seed: int

    @functools.cache  # noqa: B019 (of a process)
    def load(self) -> ClientApp:
        with seeding.streams(seeding.seed_for(self.seed, "import")):
            return cast(ClientApp, _load(self.place, self.folder))

    def __call__(self, message: Message, context: Context) -> Message:
        node, number = message.metadata.message_id.split(".")
        with seeding.streams(seeding.seed_for(self.seed, "app", int(node), int(number))):
            try:
                return self.load()(message, context)
            except (Exception, SystemExit) as error:  # which the server learns without its traceback
                if is_new(node, traceback.format_tb(error.__traceback__)):
                    traceback.print_exc()
                raise


class NotingGrid(LocalGrid):
    """A grid that notes which messages to clients failed, or had no reply when the server stopped waiting for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.failed: list[str] = []
        super().__init__(*arguments, **options)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for asked in (message.metadata for message in sent if message.metadata.message_id not in answered):
            self._note(asked.dst_node_id, asked.message_type, f"it did not answer within {timeout:g} s")
            LOG.warning("%s", self.failed[-1])
        return replies

    def _receive(self, reply: Message) -> None:
        if reply.has_error():
            self._note(reply.metadata.src_node_id, reply.metadata.message_type, str(reply.error.reason))
        super()._receive(reply)

    def _note(self, node: int, kind: str, reason: str) -> None:
        known = self._nodes.contexts.get(node)
        client = f"node {node}" if known is None else f"client {known.node_config['partition-id']}"
        self.failed.append(f"{client}, {kind}: {reason}")


def run_app(
    folder: str | Path,
    num_nodes: int,
    *,
    workers: int | None = 0,
    run_config: Mapping[str, str | int | float | bool] | None = None,
    seed: int = 0,
    actors: Mapping[str, float] | None = None,
) -> None:
    """Run the Flower app in a folder; raise RunFailed if one of its clients raised an error.

    `workers` processes serve the nodes; with 0 this process does, so that a debugger can stop in a client's code. With
    `actors`, which are the CPUs and GPUs of each, actors of a Ray cluster do (None: as many as fit).
    """
    folder = Path(folder).resolve()
    config = get_fused_config_from_dir(folder, {**(run_config or {})})
    parts = get_project_config(folder)["tool"]["flwr"]["app"]["components"]
    client = SeededApp(parts["clientapp"], folder, seed)
    _put_old_replies_in_order()
    with ExitStack() as stack:
        served: dict[str, Any] = {"workers": workers}
        if actors is not None or not workers:
            client.load()  # an error ends the run here
        if actors is not None:
            with needs("run", "--engine ray"):
                cluster = stack.enter_context(part("pools", "ray")(prints=True))
            cluster.connect([client.place])
            served = {"pool": cluster.pool(workers, **actors)}
        grid = stack.enter_context(NotingGrid(cast(ClientApp, client), num_nodes, run_config=config, **served))
        grid.start()  # forks before the app has threads or uses a GPU
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        server = _load(parts["serverapp"], folder)
        try:
            server(grid=grid, context=Context(1, 0, {}, RecordDict(), config))
        except Exception as error:
            if grid.failed:  # a server without replies often fails at something else
                error.add_note(failed(grid.failed))
            raise
    if grid.failed:
        raise RunFailed(failed(grid.failed))


def _put_old_replies_in_order() -> None:
    """Let servers of Flower's old API add replies in the order of nodes; theirs is that of addresses in memory."""

    def sort(ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def call(*arguments: object, **options: object) -> object:
            results, failures = ask(*arguments, **options)
            return sorted(results, key=lambda result: result[0].node_id), failures

        return call if not hasattr(ask, "__wrapped__") else ask

    old_server.fit_clients = sort(old_server.fit_clients)
    old_server.evaluate_clients = sort(old_server.evaluate_clients)


def failed(errors: Sequence[str]) -> str:
    reasons = by_reason(error.partition(": ")[::2] for error in errors)
    return f"{len(errors)} messages to clients failed: {few(reasons, 3, '; ')}"
