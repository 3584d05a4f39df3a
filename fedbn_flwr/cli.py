"""The command `fedbn`. Large modules are imported only when they are needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import __version__
from .errors import FedbnError, SettingsError, did_you_mean

# The names in bench/command.py, which imports torch.
BENCHMARKS = ("overhead", "exchange", "fedtan", "round", "scale", "start", "gpu")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedbn",
        description="Federated learning of networks with batch normalisation, on Flower and PyTorch.",
        epilog="FEDBN_DEBUG=1 shows where an error comes from.",
    )
    parser.add_argument("--version", action="version", version=f"fedbn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="carry out an experiment",
        description="Carry out an experiment: a shipped one by name (see `fedbn list experiments`) or a YAML file.",
        epilog="Example: fedbn run demo rounds=10 train.lr=0.05 --out runs/try",
    )
    _add_experiment(run, "rounds=10 train.lr=0.05")
    run.add_argument("--engine", choices=("local", "ray"), help="local: this library's; ray: Flower's simulation")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="device for training (auto: a GPU if there is one)"
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="folder for the run folders (runs/NAME-TIME)")
    run.add_argument("--resume", action="store_true", help="continue the interrupted runs in --out")
    run.set_defaults(command=_run)

    report = commands.add_parser(
        "report",
        help="a table and a plot from run folders",
        description="Make a table and a plot of runs (accuracy against rounds, communication rounds and bytes).",
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders, or their parent folders")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (runs/report-TIME)")
    report.set_defaults(command=_report)

    splitting = commands.add_parser(
        "partition",
        help="the images of each client, as a table and a plot",
        description="Show how an experiment's data is partitioned: the images of each class that each client has.",
        epilog="Example: fedbn partition demo clients=10 data.partition='{kind: dirichlet, alpha: 0.1}'",
    )
    _add_experiment(splitting, "clients=10")
    splitting.add_argument("--out", type=Path, metavar="FILE.png", help="file for the plot (partition.png)")
    splitting.set_defaults(command=_partition)

    listing = commands.add_parser("list", help="strategies, models, norms, data sets, partitions or experiments")
    listing.add_argument("what", choices=("strategies", "models", "norms", "datasets", "partitions", "experiments"))
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(command=_list)

    bench = commands.add_parser(
        "bench",
        help="measure the overhead over a bare PyTorch loop",
        description=(
            "Compare the local engine with a bare PyTorch loop that makes the same steps, in the same run. Each figure "
            "is the median of its repetitions, with minimum and maximum. Takes minutes on a CPU; close other programs."
        ),
        epilog="Example: fedbn bench overhead exchange --json > bench.json",
    )
    bench.add_argument("names", nargs="*", metavar="WHAT", help=f"any of {', '.join(BENCHMARKS)} (default: all)")
    bench.add_argument("--json", action="store_true", help="as JSON, with machine and versions")
    bench.add_argument("--repeats", type=int, default=5, metavar="N", help="repetitions of each measurement (5)")
    bench.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a client in a round (100)")
    bench.add_argument("--workers", type=int, metavar="N", help="worker processes (one per core)")
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for training")
    bench.set_defaults(command=_bench)

    flwr = commands.add_parser(
        "flwr",
        help="`flwr run` on a temporary SuperLink: fedbn flwr run .",
        description=(
            "Run a Flower app like `flwr run`, on a SuperLink that is started for this run and stopped afterwards. "
            "The app uses the current environment, there is one node per client, logs are streamed, and the exit code "
            "is 0 only if the run succeeded. Options of `flwr run` are passed on."
        ),
        epilog="Example: fedbn flwr run . --run-config \"set='rounds=10'\"",
    )
    flwr.add_argument("arguments", nargs=argparse.REMAINDER, metavar="run [APP] [OPTION ...]")
    flwr.set_defaults(command=_flwr)
    return parser


def _add_experiment(parser: argparse.ArgumentParser, changes: str) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="name of a shipped experiment, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"changes to it, such as {changes}")


def _run(arguments: argparse.Namespace) -> int:
    from .experiment.find import load_experiment
    from .experiment.prepare import prepare
    from .experiment.run import open_folders, run_locally
    from .results.folder import default_out

    if arguments.resume and arguments.out is None:
        raise SettingsError("--resume needs --out: the folder of the runs to continue")
    overrides = list(arguments.overrides)
    if arguments.engine:
        overrides.append(f"engine.name={arguments.engine}")
    if arguments.device:
        overrides.append(f"engine.device={arguments.device}")
    experiment = load_experiment(arguments.experiment, overrides)
    out = arguments.out or default_out(experiment.name)
    if experiment.runs[0].engine.name == "ray":
        from .engines.simulation import run_installed

        open_folders(prepare(experiment), out, resume=arguments.resume)
        with _stopped_by_hand(out):
            run_config = {**experiment.run_config, "out": str(out.resolve()), "resume": arguments.resume}
            return run_installed(experiment.runs[0].clients, run_config)
    import logging

    from .engines.context_cache import keep_freed_memory

    logging.getLogger("flwr").setLevel(logging.WARNING)
    keep_freed_memory()
    run_locally(experiment, out, resume=arguments.resume).announce()
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from .results.folder import default_out
    from .results.report import write_report

    table, page, picture = write_report(arguments.folders, arguments.out or default_out("report"))
    print(f"{table}\n\ntable: {page}\nplot:  {picture}")
    return 0


def _partition(arguments: argparse.Namespace) -> int:
    from .experiment.find import load_experiment
    from .experiment.partition import count_partitions
    from .results.partition import partition_table, plot_partitions

    counts = count_partitions(load_experiment(arguments.experiment, arguments.overrides))
    out = arguments.out or Path("partition.png")
    plot_partitions(counts, out)
    print("\n\n".join(map(partition_table, counts)) + f"\n\nplot: {out}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    lines: Mapping[str, str]
    match arguments.what:
        case "strategies":
            from .strategies import describe_strategies

            lines = describe_strategies()
        case "models":
            from .models.build import describe_models

            lines = describe_models()
        case "norms":
            from .norms.convert import NORMS

            lines = {name: line for name, (line, _) in NORMS.items()}
        case "datasets":
            from .data.catalogue import describe_datasets

            lines = describe_datasets()
        case "partitions":
            from .data.partition.kinds import describe_partitions

            lines = describe_partitions()
        case _:
            from .experiment.find import load_experiment, shipped_experiments

            lines = {name: load_experiment(name).description for name in shipped_experiments()}
    if arguments.json:
        print(json.dumps(lines, indent=2))
    else:
        width = max(len(name) for name in lines)
        for name, line in lines.items():
            print(f"{name.ljust(width)}  {line}")
    return 0


def _bench(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        if name not in BENCHMARKS:
            raise SettingsError(f"there is no benchmark {name!r}; {did_you_mean(name, BENCHMARKS)}")
    for name in ("repeats", "steps", "workers"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise SettingsError(f"--{name} is {value}; expected 1 or more")
    from .bench.command import run
    from .bench.common import Options
    from .experiment.model import choose_device

    workers = arguments.workers or os.cpu_count() or 1
    options = Options(arguments.repeats, arguments.steps, choose_device(arguments.device), workers)
    run(arguments.names, options, as_json=arguments.json)


def _flwr(arguments: argparse.Namespace) -> int:
    from .engines.simulation import FlwrRun, federation_config, run_app

    request = FlwrRun.parse(arguments.arguments)
    run_config, federation = request.run_config, request.federation_config
    if request.project["project"]["name"] == "fedbn-flwr":
        from .experiment.find import from_run_config
        from .experiment.prepare import prepare
        from .results.folder import default_out

        defaults = request.project["tool"]["flwr"]["app"]["config"]
        for key in run_config:
            if key not in defaults:
                raise SettingsError(f"--run-config has no key {key!r}; {did_you_mean(key, defaults)}")
        experiment = from_run_config({**defaults, **run_config})
        prepare(experiment)
        if not run_config.get("out") and not run_config.get("resume"):  # resuming without `out` is an error
            run_config["out"] = str(default_out(experiment.name).resolve())
        federation = federation or federation_config(experiment.runs[0].clients)
    with _stopped_by_hand(Path(run_config["out"]) if "out" in run_config else None):
        return run_app(request.app, run_config, federation or "client-resources-num-cpus=1", request.options)


@contextmanager
def _stopped_by_hand(out: Path | None) -> Iterator[None]:
    """Mark runs as interrupted: Ctrl-C ends Flower's processes before they can do that."""
    try:
        yield
    except KeyboardInterrupt:
        if out is not None:
            from .results.folder import mark_interrupted

            mark_interrupted(out)
        raise


if __name__ == "__main__":
    sys.exit(main())
