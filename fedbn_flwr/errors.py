"""The exceptions of this project.

FedbnError                 base class; the message is enough, without a traceback
├── UserError              the request is invalid; nothing was trained (exit code 2)
│   ├── SettingsError      an experiment's key, or a strategy's argument
│   └── DataError          data set, columns, partition
├── MissingPackage         a package of an extra is not installed (exit code 2)
├── MessageError           a message or its arrays do not fit the model or the protocol
├── StorageError           a file of this project cannot be written or read, or is damaged
├── RoundSkipped           a round makes no new model, and the run goes on
└── RunFailed              training began and could not continue (exit code 1)
    └── Diverged           no client's values were finite any more
"""

from __future__ import annotations

import difflib
import logging
import mmap
import os
import sysconfig
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class FedbnError(Exception):
    """Base class; `exit_code` is the exit code of the command line."""

    exit_code = 1


class UserError(FedbnError, ValueError):
    exit_code = 2

    def __init__(self, message: str, private: str = "") -> None:
        """`private` ends the message with values, files or rows of a site's data, which the server must not see.

        A message may quote a long value, so it is shortened to 2 kB in its middle.
        """
        super().__init__(_shown(message + private))
        self.public = _shown(message)


def _shown(message: str) -> str:
    # Control characters, which a terminal would obey, may come from a file.
    message = "".join(char if char.isprintable() or char == "\n" else "?" for char in message)
    data = message.encode()
    if len(data) < 2000:
        return message
    return f"{data[:1200].decode(errors='ignore')} ... {data[-600:].decode(errors='ignore')}"


class SettingsError(UserError):
    pass


class DataError(UserError):
    pass


def error_if(is_so: object, problem: str, private: str = "") -> None:
    """Raise a DataError for a problem of the data, if it is so.

    The words are made in any case; where they have to be computed, write `if` and `raise`.
    """
    if is_so:
        raise DataError(problem, private)


class MissingPackage(FedbnError, ImportError):
    exit_code = 2


class MessageError(FedbnError, ValueError):
    pass


class StorageError(FedbnError, ValueError):
    pass


class RoundSkipped(FedbnError):
    pass


class RunFailed(FedbnError, RuntimeError):
    pass


class Diverged(RunFailed):
    pass


@contextmanager
def locate_errors(where: str) -> Iterator[None]:
    """Begin the errors of a check with the place that is checked."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__  # one traceback in notebooks


LOG = logging.getLogger("flwr")  # Flower's logger, so that its settings apply


_SAID = mmap.mmap(-1, 1 << 20)  # shared with the processes that are forked from this one


def is_new(*what: object) -> bool:
    """Whether no process of this command has asked this before; of 10,000 answers one may be wrong."""
    place = zlib.crc32(repr(what).encode()) % len(_SAID)
    new, _SAID[place] = not _SAID[place], 1
    return new


def forget_said() -> None:
    """At the start of a command: say again what an earlier one said once."""
    _SAID[:] = bytes(len(_SAID))


def log_once(text: str, level: int = logging.WARNING) -> None:
    """Log a message once per command, not once for each run, client and round."""
    if is_new(text):
        LOG.log(level, "%s", text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: a similar one, or the only one with `name` as a word.

    Upper and lower case do not count.
    """
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1) or [
        other for other in by_lower if name.lower() in other.split("_")
    ]
    return by_lower[near[0]] if len(near) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known name, then all known names, or ten similar ones."""
    names = sorted(map(str, known))
    near, shown = nearest(name, names), ", ".join(names) or "none"
    if len(shown) > 500:
        shown = f"{', '.join(difflib.get_close_matches(name, names, 10, 0))} and {len(names) - 10} more"
    return f"{f'did you mean {near!r}? ' if near else ''}known: {shown}"


def few(words: Iterable[str], most: int, between: str = ", ") -> str:
    """The first words, and how many follow."""
    known = list(words)
    return between.join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def by_reason(problems: Iterable[Sequence[str]]) -> list[str]:
    """Pairs of who has a problem and which, a text for each problem: `client 0 (3 times), client 1: no examples`."""
    found: dict[str, Counter[str]] = {}
    for who, reason in problems:
        found.setdefault(reason, Counter())[who] += 1
    counted = {reason: (who + f" ({n} times)" * (n > 1) for who, n in each.items()) for reason, each in found.items()}
    return [f"{few(each, 5)}: {reason}" for reason, each in counted.items()]


_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), os.path.dirname(__file__))
)


IN_LOG = "the client's log has the whole error"


def described(error: BaseException, *, to_server: bool = False, own_data: bool = False) -> str:
    """An error as text for the server, with the line of the user's code, but not its folder.

    The server does not receive the `private` part of an error. Nor does it receive the text of other packages' errors
    from a site with its own data, since this text may contain values or file names.
    """
    text, whole, ours = str(error), str(error), isinstance(error, FedbnError)
    if to_server:
        text = getattr(error, "public", whole if ours or not own_data else "")
    more = "" if text == whole else IN_LOG
    found = f"{type(error).__name__}: {f'{text} ({more})' if text and more else text or more}"
    frames = [] if ours else list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if os.path.exists(file := frame.f_code.co_filename) and not file.startswith(_LIBRARIES):
            return f"{found} ({os.path.basename(file)}, line {line})"
    return found


def install(extra: str = "") -> str:
    """How to install this project from a clone: it is not on a package index, where anyone may register its name."""
    return f"pip install 'PATH/TO/CLONE{f'[{extra}]' if extra else ''}', with the path of your clone of fedbn-flwr"


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Wrap imports of packages that only this extra installs; `what` names the feature that needs them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{what} needs the package {error.name!r}, which is not installed: {install(extra)}"
        ) from error
