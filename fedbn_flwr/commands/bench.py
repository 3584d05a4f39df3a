"""`fedbn bench`: measures the overhead over a bare PyTorch loop."""

from __future__ import annotations

import argparse

from fedbn_flwr.cores import cores
from fedbn_flwr.errors import SettingsError, did_you_mean

from .common import Commands, add_command

# The names in fedbn_flwr/bench/command.py, which imports torch.
# In this order: workers cannot be forked after "compiled".
BENCHMARKS = ("overhead", "exchange", "fedtan", "round", "scale", "sharing", "memory", "start", "compiled", "gpu")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        bench,
        summary="measure the overhead over a bare PyTorch loop",
        description=(
            "Compare the local engine with a bare PyTorch loop that makes the same steps, in the same run. Each figure "
            "is the median of its repetitions, with minimum and maximum. Takes minutes on a CPU; close other programs."
        ),
        epilog="Example: fedbn bench overhead exchange --json > bench.json",
    )
    parser.add_argument("names", nargs="*", metavar="WHAT", help=f"any of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="as JSON, with machine and versions")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repetitions of each measurement (5)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a client in a round (100)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (one per core)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for training")


def bench(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        if name not in BENCHMARKS:
            raise SettingsError(f"there is no benchmark {name!r}; {did_you_mean(name, BENCHMARKS)}")
    for name in ("repeats", "steps", "workers"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise SettingsError(f"--{name} is {value}; expected 1 or more")
    from fedbn_flwr.bench.command import run
    from fedbn_flwr.bench.common import Options
    from fedbn_flwr.experiment.model import choose_device

    workers = arguments.workers or cores()
    options = Options(arguments.repeats, arguments.steps, choose_device(arguments.device), workers)
    run(sorted(arguments.names, key=BENCHMARKS.index), options, as_json=arguments.json)
