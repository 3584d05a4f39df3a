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


def is_json() -> bool:
    """Whether the log has a JSON object a line."""
    form = os.environ.get("FEDBN_LOG", "")
    if form not in ("", "text", "json"):
        raise SettingsError(f"FEDBN_LOG is {form!r}; expected json or text")
    return form == "json"


def write_json(level: str, message: str, **more: Any) -> None:
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level, **more}
    # The stream of this moment, which Flower replaces to copy the log of a ServerApp.
    print(json.dumps({**line, "message": message}), flush=True)


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
    task, began = message.metadata.message_type, time.monotonic()
    node, client = context.node_id, context.node_config.get("partition-id")
    of_run = {"run": config.get(protocol.RUN), "round": config.get(protocol.ROUND)}
    level, text = "INFO", f"answered {task}"
    try:
        return call_next(message, context)
    except Exception as error:
        level, text = "ERROR", " ".join(str(error).split())
        raise
    finally:
        write_json(
            level, text, node=node, client=client, **of_run, task=task, seconds=round(time.monotonic() - began, 3)
        )


class OneLine(logging.Filter):
    """Replaces the traceback of a FedbnError by its message, unless FEDBN_DEBUG is set.

    Flower's next record, which calls the error an unhandled exception and refers to a web page, is left out.
    """

    has_failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FedbnError) and not os.environ.get("FEDBN_DEBUG"):
            record.msg, record.args, record.exc_info = "%s", (str(error),), None
            self.has_failed = True
        return not (self.has_failed and record.getMessage().startswith("Exit Code: "))
