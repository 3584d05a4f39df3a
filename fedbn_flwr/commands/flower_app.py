"""Any Flower app on the local engine, in this process: without Ray, a SuperLink or anything left running."""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.config import get_fused_config_from_dir, get_project_config
from flwr.server import server as old_server
from flwr.serverapp.server_app import LoadServerAppError
from flwr.supercore.object_ref import load_app

from fedbn_flwr import seeding
from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.engines.pool import ForkPool, Nodes, Pool
from fedbn_flwr.errors import RunFailed, few


class SeededApp:
    """A ClientApp whose draws from global generators depend on the seed, the node and its messages so far alone.

    So a run can be repeated bit for bit, whichever worker serves a node, although the app itself seeds nothing.
    """

    def __init__(self, app: ClientApp, seed: int) -> None:
        self.app, self.seed = app, seed

    def __call__(self, message: Message, context: Context) -> Message:
        node, number = message.metadata.message_id.split(".")
        with seeding.streams(seeding.seed_for(self.seed, "app", int(node), int(number))):
            try:
                return self.app(message, context)
            except (Exception, SystemExit):  # which the server learns without its traceback
                traceback.print_exc()
                raise


def run_app(
    folder: str | Path,
    num_nodes: int,
    *,
    workers: int = 0,
    run_config: Mapping[str, str | int | float | bool] | None = None,
    seed: int = 0,
) -> None:
    """Run the Flower app in a folder; raise RunFailed if one of its clients raised an error.

    `workers` processes serve the nodes; with 0 this process does, so that a debugger can stop in a client's code.
    """
    folder = Path(folder).resolve()
    config = get_fused_config_from_dir(folder, {**(run_config or {})})
    parts = get_project_config(folder)["tool"]["flwr"]["app"]["components"]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    server = load_app(parts["serverapp"], LoadServerAppError, folder)
    client = SeededApp(load_app(parts["clientapp"], LoadClientAppError, folder), seed)
    _put_old_replies_in_order()
    errors: list[str] = []

    def make_pool(nodes: Nodes, on_reply: OnReply) -> Pool:
        def note(reply: Message) -> None:
            if reply.has_error():
                client_number = nodes.contexts[reply.metadata.src_node_id].node_config["partition-id"]
                errors.append(f"client {client_number}, {reply.metadata.message_type}: {reply.error.reason}")
            on_reply(reply)

        return ForkPool(nodes, note, workers) if workers else Pool(nodes, note)

    with LocalGrid(cast(ClientApp, client), num_nodes, pool=make_pool, run_config=config) as grid:
        grid.start()  # forks before the server has threads or uses a GPU
        try:
            server(grid=grid, context=Context(1, 0, {}, RecordDict(), config))
        except Exception as error:
            if errors:  # a server without replies often fails at something else
                error.add_note(failed(errors))
            raise
    if errors:
        raise RunFailed(failed(errors))


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
    return f"{len(errors)} messages to clients failed: {few(errors, 3, '; ')}"
