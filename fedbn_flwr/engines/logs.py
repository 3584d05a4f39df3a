"""The log: errors of this project without a traceback, and with FEDBN_LOG=json one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from fedbn_flwr.errors import FedbnError, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import configs_in

FIELDS: dict[str, Any] = {}  # of every JSON line: what this process works at, such as run and round


def is_json() -> bool:
    """Whether the log has a JSON object a line."""
    form = os.environ.get("FEDBN_LOG", "")
    if form not in ("", "text", "json"):
        raise SettingsError(f"FEDBN_LOG is {form!r}; expected json or text")
    return form == "json"


def write_json(level: str, message: str, **more: Any) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    # The stream of this moment, which Flower replaces to copy the log of a ServerApp.
    print(json.dumps({"time": now, "level": level, **FIELDS, **more, "message": message}), flush=True)


class _JsonHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if message := " ".join(self.format(record).split()):
            write_json(record.levelname, message)


def use_json() -> None:
    """Write Flower's log as JSON, if FEDBN_LOG asks for it."""
    if is_json():
        logging.getLogger("flwr").handlers[:] = [_JsonHandler()]


def log_message(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod of Flower: a JSON line for each message that a client has handled."""
    if not is_json():
        return call_next(message, context)
    config = next(iter(configs_in(message.content).values()), ConfigRecord())
    FIELDS["node"] = context.node_id
    for key, source, name in (
        ("client", context.node_config, "partition-id"),
        ("run", config, protocol.RUN),
        ("round", config, protocol.ROUND),
    ):
        FIELDS[key] = source.get(name)
    task, began = message.metadata.message_type, time.monotonic()
    try:
        reply = call_next(message, context)
    except Exception as error:
        write_json("ERROR", " ".join(str(error).split()), task=task, seconds=round(time.monotonic() - began, 3))
        raise
    write_json("INFO", f"answered {task}", task=task, seconds=round(time.monotonic() - began, 3))
    return reply


class OneLine(logging.Filter):
    """Replaces the traceback of a FedbnError by its message, unless FEDBN_DEBUG is set.

    Flower's next record, which calls the error an unhandled exception and refers to a web page, is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FedbnError) and not os.environ.get("FEDBN_DEBUG"):
            record.msg, record.args, record.exc_info = "%s", (str(error),), None
            self.has_failed = True
        return not (self.has_failed and record.getMessage().startswith("Exit Code: "))
