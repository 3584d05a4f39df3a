"""`fedbn adapt`: a run's model for a site that joins afterwards, with the statistics of its own inputs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbn_flwr.commands.common import Commands, add_command, loading

from .model import RUN


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "adapt",
        adapt,
        summary="at a site that joins after training: a model with the statistics of its inputs",
        description=(
            "Measure batch norm's statistics on the inputs of a site that didn't train (no labels are needed), compare "
            f"the batch norms that it can use, and write a run folder with the adapted model. {RUN}"
        ),
        epilog="Example: fedbn adapt heart --data new.csv --out adapted, then fedbn predict adapted --data new.csv ...",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        required=True,
        help="the site's folder (its training examples are measured, its test examples compared), or as for predict",
    )
    parser.add_argument(
        "--labels", type=Path, metavar="PATH", help="other examples, with labels, to compare on (those of --data)"
    )
    parser.add_argument(
        "--use", choices=("mean", "batch", "own"), default="batch", help="the batch norm of the written model (batch)"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="MODULE:NAME", help="as for `fedbn predict`")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new run folder")


def adapt(arguments: argparse.Namespace) -> None:
    with loading():
        from fedbn_flwr import named
        from fedbn_flwr.errors import UserError, needs
        from fedbn_flwr.results.result import Result

        with needs("data", "fedbn adapt"):
            from .newcomer import adapted, write
            from .predict import opened

    if arguments.out.exists():
        raise UserError(f"--out {str(arguments.out)!r} exists already; give a new folder")
    with named.only(arguments.allow):  # someone else may have written the run's folder
        result = Result.read(arguments.run, allow=arguments.allow)
        new = opened(result.files, arguments.data, part="train")
        tested = opened(result.files, arguments.labels or arguments.data)
        found = adapted(result, new, tested)
        write(result, found.models[arguments.use], arguments.use, arguments.out)
    print(f"{arguments.data}: {len(new.there)} examples\n\n{found}")
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"\nmodel: {arguments.out}")
