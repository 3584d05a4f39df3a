"""Flower's log of a ServerApp that failed with an error of this project: one line, without a traceback."""

from __future__ import annotations

import logging
import os

from fedbn_flwr.errors import FedbnError


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
