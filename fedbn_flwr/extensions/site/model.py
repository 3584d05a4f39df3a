"""`fedbn model`, `fedbn predict` and `fedbn export`: what a run's global model, or a client's, is for after the run."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.commands.common import Commands, add_command, loading
from fedbn_flwr.errors import SettingsError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from fedbn_flwr.results.folder.reader import RunReader

RUN = (
    "RUN is the run's folder, or a copy of it at the site. Copy it without `checkpoint`: on the local engine, this "
    "folder contains other clients' states."
)


def add_model(commands: Commands) -> None:
    parser = add_command(
        commands,
        "model",
        write,
        summary="write a client's own model, from the run's model and the client's state",
        description=(
            f"Combine a run's global model with the arrays that a client keeps, such as FedBN's batch norms. {RUN}"
        ),
        epilog=(
            "Examples: fedbn model heart --state /srv/fedbn-state --out model-site.safetensors; after a run on this "
            "machine: fedbn model runs/mine/FedBN --client 0 --out model-0.safetensors"
        ),
    )
    add_run(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the model, in safetensors format")


def add_predict(commands: Commands) -> None:
    parser = add_command(
        commands,
        "predict",
        predict,
        summary="predict with a run's model or a client's",
        description=f"Predict with a run's global model or, with --client or --state, with a client's model. {RUN}",
        epilog="Example: fedbn predict heart --state /srv/fedbn-state --data new.csv --out predictions.csv",
    )
    add_run(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        required=True,
        help="a table or a folder of images, with or without labels, or a site's folder (its test examples)",
    )
    parser.add_argument("--id", metavar="COLUMN", help="a column of the table to copy, such as the patient's number")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        required=True,
        help="the predictions, a CSV file; masks go to the folder FILE-masks, each a file",
    )


def add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        export,
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


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--state", type=Path, metavar="DIR", help="the state folder of the site's node")
    parser.add_argument(
        "--client",
        metavar="N",
        help="the client whose model this is, by its number or name; needed with --state if that has several clients",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="code of your own that the run's model calls; without it only this library's networks are built",
    )


def write(arguments: argparse.Namespace) -> None:
    from fedbn_flwr import named

    if arguments.client is None and arguments.state is None:
        raise SettingsError(
            "whose model? Give --client N for one of a run on this machine, or --state DIR at a site; "
            "model.safetensors in the run's folder is the global model"
        )
    with named.only(arguments.allow):
        _, model = model_of(arguments)
    with loading():
        from safetensors.torch import save

        from fedbn_flwr.storage import replacing
    content = save({key: value.contiguous() for key, value in model.state_dict().items()})
    with replacing(arguments.out) as file:
        file.write_bytes(content)
    print(f"model: {arguments.out}")


def predict(arguments: argparse.Namespace) -> None:
    with loading():
        from fedbn_flwr import named
        from fedbn_flwr.errors import needs
        from fedbn_flwr.results.text import printable
        from fedbn_flwr.results.units import in_units
        from fedbn_flwr.storage import replacing

        with needs("data", "fedbn predict"):
            from .predict import predictions, write_masks

    with named.only(arguments.allow):  # someone else may have written the run's folder
        folder, model = model_of(arguments)
        in_units(model, folder.model_description().units)  # for as long as it lives
        found = predictions(folder, model, arguments.data, arguments.id)
    with replacing(arguments.out) as file, file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([found.columns, *found.rows])
    print("\n".join([*map(printable, found.said), f"predictions: {arguments.out}"]))
    if found.masks:
        write_masks(found.masks, folder := arguments.out.with_name(f"{arguments.out.stem}-masks"))
        print(f"masks: {folder}, with the number of a class for each pixel")


def export(arguments: argparse.Namespace) -> None:
    with loading():
        from fedbn_flwr import named
        from fedbn_flwr.results.read import portable
        from fedbn_flwr.results.text import printable

    with named.only(arguments.allow):
        folder, model = model_of(arguments)
        said = portable.export(folder, model, arguments.out, arguments.format, fold=arguments.fold)
    print("\n".join([*map(printable, said), f"model: {arguments.out}"]))


def model_of(arguments: argparse.Namespace) -> tuple[RunReader, nn.Module]:
    """Load the model that the options ask for, and print which one it is."""
    with loading():
        from fedbn_flwr.results.read.trained import global_model, personal_model, site_model
        from fedbn_flwr.results.result import Result
        from fedbn_flwr.results.text import printable

    result = Result.read(arguments.run, allow=arguments.allow)
    folder, label = result.files, printable(result.label)
    client = None if arguments.client is None else _number_of(folder, arguments.client)
    if arguments.state is not None:
        found = site_model(folder, arguments.state, client)
    elif client is not None:
        found = personal_model(folder, client)
    else:
        model = global_model(folder)
        print(f"the global model of {label}")
        if result.summary.personal:
            print(
                f"warning: with {label} each client has a model of its own, and the global model may predict "
                "badly; give --client N for a client's model, or --state DIR at a site",
                file=sys.stderr,
            )
        return folder, model
    print(
        f"the model of client {folder.name_of(found.client)}: {label} after round {found.round}, and {found.own} "
        f"arrays of its own, of round {found.state_round}"
    )
    return folder, found.network


def _number_of(folder: RunReader, client: str) -> int:
    """The number of a client that is given by its number or by its name."""
    known = folder.partition()
    names = known.clients if known else ()
    if client in names:
        return list(names).index(client)
    if client.isdecimal():
        return int(client)
    raise SettingsError(
        f"--client: there is no client {client!r}; give its number, or its name; {did_you_mean(client, names)}"
    )
