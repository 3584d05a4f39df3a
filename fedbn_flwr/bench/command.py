"""The measurements by name, and how their figures are printed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from fedbn_flwr.engines.context_cache import keep_freed_memory
from fedbn_flwr.results.folder import environment

from .common import Figure, Options
from .gpu import gpu
from .memory import memory
from .messages import empty_round, exchange, scale
from .sharing import sharing
from .startup import start
from .training import compiled, fedtan, overhead

BENCHMARKS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "overhead": overhead,
    "compiled": compiled,
    "exchange": exchange,
    "fedtan": fedtan,
    "round": empty_round,
    "scale": scale,
    "sharing": sharing,
    "memory": memory,
    "start": start,
    "gpu": gpu,
}


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
