"""`python -m benchmarks.rivals`: milliseconds of a client-step here, in pfl-research, fedjax and a bare PyTorch loop.

Ten clients train one pass over 500 examples each by plain SGD, and their models are averaged. Because machines are
noisy, the candidates take turns, round by round. The table has medians and, in brackets, how many times as long as ours
with as many processes they take. Before it, a line for each candidate says whether the first round gave the same model.
The rivals are installed in environments of their own, in `.rivals`. Example:

    python -m benchmarks.rivals mlp cnn --json rivals.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbn_flwr.results.folder.environment import environment

from . import networks
from .environments import python_of
from .task import BATCH, CLIENTS, EXAMPLES, NETWORKS, STEPS, Array, write

ROOT = Path(__file__).resolve().parents[2]
SAME = 1e-2  # of the change of the parameters in a round; float32 rounds to less, another algorithm differs by more


class Candidate(NamedTuple):
    title: str  # with the versions of packages
    module: str
    processes: int = 1
    rival: str | None = None  # whose environment it needs
    networks: tuple[str, ...] = tuple(NETWORKS)


CANDIDATES = {
    "bare": Candidate("bare loop, torch {torch}", "bare"),
    "ours": Candidate("ours", "ours"),
    "together": Candidate("ours, clients at once", "ours_together", networks=("mlp", "mlp-bn")),
    "pfl": Candidate("pfl {pfl}", "with_pfl", rival="pfl"),
    "fedjax": Candidate("fedjax {fedjax}, JAX {jax}", "with_fedjax", rival="fedjax", networks=("mlp", "cnn")),
    "ours-2": Candidate("ours, two workers", "ours", 2),
    "pfl-2": Candidate("pfl {pfl}, two processes", "with_pfl", 2, "pfl"),
}
if find_spec("fedbn_flwr.extensions.together") is None:
    del CANDIDATES["together"]


class Process:
    """A candidate in its interpreter, which trains a round when it is asked to."""

    def __init__(self, name: str, network: str, task: Path, folder: Path) -> None:
        candidate = CANDIDATES[name]
        python = sys.executable if candidate.rival is None else python_of(candidate.rival, folder)
        self.name, self.trained = name, task.with_name(f"{network}-{name}.npz")
        self.errors = task.with_name(f"{network}-{name}.txt")
        # pfl divides the clients among the processes that torchrun starts.
        torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        several = [*torchrun, "--nproc-per-node", candidate.processes] if name == "pfl-2" else []
        workers = candidate.processes if name != "ours" else 0  # trained in the candidate's own process
        words = ["-m", f"benchmarks.rivals.{candidate.module}", task, network, workers, self.trained]
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FLWR_TELEMETRY_ENABLED": "0"}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in (python, *several, *words)],
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.versions: Mapping[str, str] = {}

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its standard input, at whose end it stops

    def begin(self) -> None:
        """Train the rounds that do not count, in which code is imported and compiled."""
        self.versions = json.loads(self._line())
        for _ in range(2):
            self.round()

    def round(self) -> float:
        """Milliseconds of a client's step, averaged over a round."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line()) / STEPS * 1000

    def _line(self) -> str:
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return line
        self.process.wait()
        last = "\n".join(self.errors.read_text().strip().splitlines()[-10:])
        raise SystemExit(f"{self.name} ended with status {self.process.returncode}:\n{last}")


def difference(model: Mapping[str, Array], ours: Mapping[str, Array], initial: Mapping[str, Array]) -> float:
    """How far the parameters are from ours, relative to how far those moved in the round."""

    def distance(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
        return float(np.sqrt(sum(np.sum(np.square(a[name] - b[name], dtype=np.float64)) for name in initial)))

    return distance(model, ours) / distance(ours, initial)


def measure(network: str, names: Sequence[str], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What all candidates needed for a step, turn by turn, and how far their first models are from ours."""
    torch.manual_seed(0)
    initial = {name: value.detach().numpy() for name, value in networks.build(network).named_parameters()}
    task = folder / f"{network}.npz"
    write(task, network, initial)
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(name, network, task, given.folder)) for name in names]
        for process in processes:
            process.begin()
        models = {process.name: np.load(process.trained) for process in processes}
        found = {name: difference(model, models["ours"], initial) for name, model in models.items()}
        taken: dict[str, list[float]] = {name: [] for name in names}
        begin, turns = time.monotonic(), 0
        while turns < given.repeats or time.monotonic() - begin < given.seconds:
            for process in processes[:: 1 if turns % 2 else -1]:
                taken[process.name].append(process.round())
            turns += 1
    return {
        "milliseconds": {name: [float(f"{value:.4g}") for value in values] for name, values in taken.items()},
        "difference": found,
        "versions": {process.name: process.versions for process in processes},
    }


def table(measured: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Columns and rows of the table, as text."""
    versions = {name: each for of_network in measured.values() for name, each in of_network["versions"].items()}
    names = [name for name in names if name in versions]
    return {
        "columns": ["network", *(CANDIDATES[name].title.format(**versions[name]) for name in names)],
        "rows": [
            [NETWORKS[network].title, *(cell(of_network["milliseconds"], name) for name in names)]
            for network, of_network in measured.items()
        ],
    }


def cell(milliseconds: Mapping[str, Sequence[float]], name: str) -> str:
    reference = "ours-2" if CANDIDATES[name].processes == 2 else "ours"
    if name not in milliseconds:
        return "-"
    median = f"{statistics.median(milliseconds[name]):#.3g}".rstrip(".")
    if name == reference or reference not in milliseconds:
        return median
    turns = zip(milliseconds[name], milliseconds[reference], strict=True)
    return f"{median} ({statistics.median(value / ours for value, ours in turns):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"any of {', '.join(NETWORKS)} (all)")
    parser.add_argument(
        "--only", nargs="+", metavar="WHO", default=[*CANDIDATES], help=f"some of {', '.join(CANDIDATES)}"
    )
    parser.add_argument("--folder", type=Path, default=Path(".rivals"), help="of the environments (.rivals)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="turns of each network, at least (7)")
    parser.add_argument(
        "--seconds", type=float, default=10, metavar="S", help="of turns of each network, at least (10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with machine and versions")
    parser.add_argument("--note", default="", metavar="TEXT", help="about the machine, for the file")
    given = parser.parse_args()
    for values, known in ((given.networks, NETWORKS), (given.only, CANDIDATES)):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"there is no {unknown[0]!r}; expected some of {', '.join(known)}")
    if "ours" not in given.only or given.repeats < 1:
        parser.error("--only needs ours, which the others are compared with, and --repeats a number of 1 or more")
    names = [name for name in CANDIDATES if name in given.only]
    machine, measured = environment(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for network in [network for network in NETWORKS if network in (given.networks or NETWORKS)]:
            able = [name for name in names if network in CANDIDATES[name].networks]
            measured[network] = measure(network, able, given, Path(folder))
            for name, value in measured[network]["difference"].items():
                if name != "ours":
                    says = "the same model as ours" if value < SAME else "ANOTHER MODEL than ours"
                    print(f"{network}, {name}: {says} after a round, {value:.0e} of its change apart", flush=True)
            made = table(measured, names)
            if given.json is not None:  # after each network, since a run takes minutes
                figures = {
                    "environment": machine,
                    "note": given.note,
                    "load": os.getloadavg(),
                    "task": {"clients": CLIENTS, "examples of each": EXAMPLES, "batch": BATCH, "threads": 1},
                    "table": made,
                    "networks": measured,
                }
                given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    lines = [made["columns"], ["---", *["---:"] * (len(made["columns"]) - 1)], *made["rows"]]
    print("", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
