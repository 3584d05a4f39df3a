"""Records in the state folder how a site's client handled its last messages, for deploy/monitoring/metrics.py.

Flower starts a process for every message, so the process itself cannot be asked for metrics.

    FOLDER/RUN-TOKEN/client-2/status.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message

from fedbn_flwr.client.node_state import StateFolder
from fedbn_flwr.errors import MessageError, StorageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import configs_in, metrics_in
from fedbn_flwr.storage import replacing, to_json

FILE = "status.json"
_FIGURES = {protocol.NUM_EXAMPLES: "examples", protocol.TRAIN_LOSS: "loss", "loss": "loss", "accuracy": "accuracy"}


def record_status(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of Flower; without a state folder it only passes the message on."""
    if "state" not in context.node_config:
        return call_next(message, context)
    began = time.time()
    try:
        reply = call_next(message, context)
    except Exception as error:
        _write(message, context, began, f"{type(error).__name__}: {error}", {})
        raise
    if reply.has_error():
        _write(message, context, began, str(reply.error.reason), {})
    elif message.metadata.message_type != protocol.COHORT_QUERY:  # of its many in a step only a failure is recorded
        figures = {
            name: float(value)
            for record in metrics_in(reply.content).values()
            for key, name in _FIGURES.items()
            if isinstance(value := record.get(key), int | float)
        }
        _write(message, context, began, None, figures)
    return reply


def _write(message: Message, context: Context, began: float, error: str | None, figures: dict[str, float]) -> None:
    config = next(iter(configs_in(message.content).values()), ConfigRecord())
    try:
        folder = StateFolder.of(config, context)
        if folder is None or not folder.path.parent.parent.is_dir():
            return
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, now = folder.path / FILE, time.time()
        known = read_status(file.read_text(encoding="utf-8")) if file.exists() else {}
        kind = message.metadata.message_type
        task = "train" if kind == protocol.COHORT_QUERY else kind.split(".")[0]
        succeeded = known.get(task, {}).get("succeeded") if error else now
        line = {"round": config.get(protocol.ROUND, 0), "seconds": now - began, "error": error}
        with replacing(file, durable=False, mode=0o600) as temporary:
            temporary.write_text(to_json({**known, task: {**line, "succeeded": succeeded, **figures}}))
    except (OSError, MessageError, StorageError):
        return  # a full disk or a wrong token has its own error where the state is saved


def read_status(text: str) -> dict[str, dict[str, object]]:
    """The entry of each task; empty if the text is damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {task: line for task, line in found.items() if isinstance(line, dict)} if isinstance(found, dict) else {}
