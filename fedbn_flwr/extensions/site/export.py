"""`fedbn export`: a model that loads without this project."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbn_flwr.commands.common import Commands, add_command, loading

from .model import RUN, add_run, model_of


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        write,
        summary="write a run's model, or a client's, for use without this project",
        description=(
            "Write the global model or, with --client or --state, a client's model to one file, which normalises its "
            f"inputs and has the names of the classes. The file is loaded and compared with the run's network. {RUN}"
        ),
        epilog="Example: fedbn export runs/mine/FixBN --format torch --fold --out model.pt2",
    )
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("torch", "onnx", "safetensors"),
        default="torch",
        help="torch.export (default), ONNX, or weights by safetensors",
    )
    parser.add_argument("--fold", action="store_true", help="make batch norms part of the layers before them")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the model")


def write(arguments: argparse.Namespace) -> None:
    with loading():
        from fedbn_flwr import named
        from fedbn_flwr.results.read.portable import export
        from fedbn_flwr.results.text import printable

    with named.only(arguments.allow):
        folder, model = model_of(arguments)
        said = export(folder, model, arguments.out, arguments.format, fold=arguments.fold)
    print("\n".join([*map(printable, said), f"model: {arguments.out}"]))
