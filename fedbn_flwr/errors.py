"""Everything this project raises on purpose.

FedbnError                 anything below; one message, no traceback needed
├── UserError              what was asked for cannot be done; nothing was trained (exit code 2)
│   ├── SettingsError      an experiment's key, or a strategy's argument
│   └── DataError          data set, columns, partition
├── MessageError           a message or its arrays do not fit the model or the protocol
├── StorageError           a file of our own cannot be written or is damaged
└── RunFailed              training began and could not go on (exit code 1)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedbnError(Exception):
    """Base of all; `exit_code` is what the command line ends with."""

    exit_code = 1


class UserError(FedbnError, ValueError):
    exit_code = 2


class SettingsError(UserError):
    pass


class DataError(UserError):
    pass


class MessageError(FedbnError, ValueError):
    pass


class StorageError(FedbnError, ValueError):
    pass


class RunFailed(FedbnError, RuntimeError):
    pass


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known one, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"
