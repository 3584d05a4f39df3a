"""The command `fedbn`: its parser, and how its errors end. Each command is a module of `fedbn_flwr.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .commands import bench, check, completion, explain, flwr, listing, new, partition, report, run
from .errors import FedbnError

COMMANDS = (new, explain, run, report, partition, listing, check, bench, flwr, completion)  # as the help lists them


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except FedbnError as error:
        if os.environ.get("FEDBN_DEBUG"):
            raise
        print(f"fedbn: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nfedbn: stopped; the run folder contains the rounds up to now", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedbn list ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedbn",
        description="Federated learning of networks with batch normalisation, on Flower and PyTorch.",
        epilog="FEDBN_DEBUG=1 shows where an error comes from.",
    )
    parser.add_argument("--version", action="version", version=f"fedbn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
