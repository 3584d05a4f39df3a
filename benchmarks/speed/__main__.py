"""`python -m benchmarks.speed`: the overhead of the local engine over a bare PyTorch loop with the same steps.

Each figure is the median of its repetitions, with minimum and maximum, and most are ratios within one run. It takes
minutes on a CPU; close other programs. Example: `python -m benchmarks.speed overhead exchange --json > speed.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from fedbn_flwr.cores import cores
from fedbn_flwr.engines.worker import keep_freed_memory
from fedbn_flwr.experiment.parts import choose_device
from fedbn_flwr.results.folder.environment import environment

from .common import Figure, Options
from .layouts import layouts
from .memory import memory
from .messages import empty_round, exchange, scale
from .sharing import sharing
from .startup import start
from .training import compiled, fedtan, overhead

# In this order: workers cannot be forked after `compiled`.
BENCHMARKS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "overhead": overhead,
    "exchange": exchange,
    "fedtan": fedtan,
    "round": empty_round,
    "scale": scale,
    "sharing": sharing,
    "memory": memory,
    "start": start,
    "layouts": layouts,
    "compiled": compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WHAT", help=f"any of {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--json", action="store_true", help="as JSON, with machine and versions")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repetitions of each measurement (5)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a client in a round (100)")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="worker processes (one per core)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for training")
    given = parser.parse_args()
    if unknown := set(given.names) - BENCHMARKS.keys():
        parser.error(f"there is no benchmark {sorted(unknown)}; expected some of {', '.join(BENCHMARKS)}")
    if min(given.repeats, given.steps, given.workers) < 1:
        parser.error("--repeats, --steps and --workers are numbers of 1 or more")
    options = Options(given.repeats, given.steps, choose_device(given.device), given.workers)
    run(sorted(given.names, key=[*BENCHMARKS].index), options, as_json=given.json)


def run(names: Sequence[str], options: Options, *, as_json: bool) -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    keep_freed_memory()  # as `fedbn run` does
    figures: dict[str, list[Figure]] = {}
    threads = torch.get_num_threads()
    for name in names or BENCHMARKS:
        if not as_json:
            print(f"{name}: {(BENCHMARKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        figures[name] = []
        for figure in BENCHMARKS[name](options):
            figures[name].append(figure)
            if not as_json:
                goal = "" if figure.met is None else f"   goal: {figure.goal}" + ("" if figure.met else " (missed)")
                spread = f"({figure.low:.3g} to {figure.high:.3g})"
                print(f"  {figure.name}: {figure.value:.3g} {figure.unit} {spread}{goal}", flush=True)
        if not figures[name] and not as_json:
            print(f"  nothing measured on {options.device.type}")
        torch.set_num_threads(threads)
    if as_json:
        dicts = {name: [asdict(figure) for figure in of_name] for name, of_name in figures.items()}
        chosen = {**asdict(options), "device": str(options.device)}
        print(json.dumps({"environment": environment(), "options": chosen, "figures": dicts}, indent=2))


if __name__ == "__main__":
    main()
