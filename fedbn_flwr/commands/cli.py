"""The command `fedbn`: its parser, and how its errors end. Each command is a module of its own."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedbn_flwr import __version__
from fedbn_flwr.errors import FedbnError, RunFailed, described, did_you_mean
from fedbn_flwr.extensions import parts

from . import explain, flwr, listing, new, report, run, status

COMMANDS = (run, new, explain, status, report, listing, flwr)  # as in the help


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:  # closed: `fedbn ... >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows what it lacks as \u2026
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _carried_out(_parsed(argv))
        sys.stdout.flush()  # its errors are found here, not when Python ends
        return code
    except FedbnError as error:
        if os.environ.get("FEDBN_DEBUG"):
            raise
        print("\n".join([f"fedbn: error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:  # its notes: how to continue
        print("\n".join(["\nfedbn: stopped", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedbn list ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UnicodeEncodeError as error:
        print(
            f"fedbn: error: {error.object!a} has characters that the encoding of this locale, "
            f"{sys.getfilesystemencoding()}, does not have; set PYTHONUTF8=1, or a locale such as C.UTF-8",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        full = error.errno in _NO_SPACE
        if os.environ.get("FEDBN_DEBUG") or (error.filename is None and not full):
            raise
        what = "the output" if error.filename is None else repr(str(error.filename))
        reason = error.strerror or type(error).__name__
        print(f"fedbn: error: {what}{' cannot be written' if full else ''}: {reason}", file=sys.stderr)
        return 1


def _carried_out(arguments: argparse.Namespace) -> int:
    """The exit code of the command, which code of the user does not end as if it had succeeded."""
    try:
        return int(arguments.command(arguments) or 0)
    except SystemExit as error:
        raise RunFailed(f"a part of the experiment ended the process: {described(error)}") from error


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; key=value may also follow an option, where argparse does not expect it."""
    found = parser()
    arguments, others = found.parse_known_args(argv)
    if others and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in others)):
        words = " ".join(others)
        setting = re.match(r"--([\w.]+)[= ]([^-]\S*)", words) if hasattr(arguments, "overrides") else None
        hint = f"; a setting has no dashes: write {setting[1]}={setting[2]}" if setting else ""
        found.error(f"unrecognized arguments: {words}{hint}")
    if others:
        arguments.overrides += others
    for word in getattr(arguments, "overrides", ()):
        word.encode()  # UnicodeEncodeError if the locale's encoding lacks a character of it
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as other errors, with the nearest of the choices; argparse prints the usage first."""
        if match := re.fullmatch(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = match[3].replace("'", "").split(", ")
            message = f"{match[1]} is {match[2]!r}; {did_you_mean(match[2], known)}"
        self.exit(2, f"fedbn: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fedbn",
        description=(
            "Federated learning of networks with batch normalisation, on Flower and PyTorch. Start with: fedbn run "
            "demo. Then write an experiment of your own: fedbn new mine; fedbn explain mine.yaml; fedbn run mine.yaml. "
            "The documentation is the folder docs of your clone, from docs/tutorial.md on."
        ),
        epilog=(
            "Exit codes: 0 success, 1 a run or a check failed, 2 wrong usage or settings, 130 interrupted. "
            "FEDBN_DEBUG=1 shows where an error comes from."
        ),
    )
    parser.add_argument("--version", action="version", version=f"fedbn {__version__}")
    parser.set_defaults(command=lambda _: parser.print_help() or 2)  # type: ignore[func-returns-value]
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (*[command.add for command in COMMANDS], *parts("commands")):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
