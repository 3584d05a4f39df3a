"""Runs that are stopped and resumed: the cases, a session of a run, and its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.node import ClientMaker, make_client
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.registry import FLOWER, STRATEGIES
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.experiment.settings import Experiment
from fedbn_flwr.results.folder.summary import Summary
from fedbn_flwr.results.folder.writer import RunFolder

BASE = """
rounds: 5
clients: 3
data: {name: digits, test_examples: 80, partition: {kind: classes, classes_per_client: 4}}
model: {name: cnn}
train: {lr: 0.05, momentum: 0.9, batch_size: 16, steps: 2}
evaluate: {every: 2}
engine: {workers: 0, device: cpu, checkpoint_every: 5}
"""
SPECIAL: dict[str, str] = {
    "HeteroBN": "strategy: {name: HeteroBN, statistics: query}\nmodel: {norm: sbn}",
    "HBN": "strategy: {name: HBN, statistics: model}\nmodel: {norm: hbn}",
    "FedWon": "strategy: {name: FedWon}\nmodel: {norm: won}",
    "FixBN": "strategy: {name: FixBN, freeze_round: 2}",
    "FedTAN": "strategy: {name: FedTAN, min_batch: 16}",
    "FedAvgGlobalStats": "strategy: {name: FedAvgGlobalStats, min_batch: 16}",
    "FedTANII": "strategy: {name: FedTANII, fedtan_rounds: 2, min_batch: 16}",
    "Secure": "strategy: {name: Secure, base: {name: FixBN, freeze_round: 3, base: {name: Scaffold}}}",
    "Private": "strategy: {name: Private, noise: 0.1, noise_seed: 1, base: {name: FixBN, freeze_round: 3}}",
    "FedBS": "strategy: {name: FedBS, epsilon: 100, patience: 3}",
    "FedRep": "strategy: {name: FedRep, head_epochs: 1}",
}
# Other states that a resumed run needs.
MORE: dict[str, str] = {
    "FixBN of FedBN": "strategy: {name: FixBN, freeze_round: 3, base: {name: FedBN}}",
    "FixBN, settled": "strategy: {name: FixBN, freeze_round: {window: 3, below: 100}}",  # after round 3
    "GlobalMomentum of SiloBN": "strategy: {name: GlobalMomentum, base: {name: SiloBN}}",
    "kept layers": "strategy: {name: FixBN, freeze_round: 3, base: {name: FedAvg, kept: [last]}}",
    "some clients": "strategy: {name: Scaffold, fraction_train: 0.67}",
    "keep_momentum": "train: {keep_momentum: true}",
    "adamw": "train: {optimizer: adamw, momentum: 0.0, keep_momentum: true}\nevaluate: {metrics: [auc, macro_f1]}",
    "brn": "model: {norm: brn, brn: {warmup: 3, r_steps: 8, d_steps: 8}}",
}
# Arguments of Flower's strategies.
OF_FLOWER = {
    "FedAdam": ", eta: 0.01",
    "FedYogi": ", eta: 0.01",
    "FedAdagrad": ", eta: 0.01",
    "FedAvgM": ", server_momentum: 0.9, server_learning_rate: 0.5",
    "FedTrimmedAvg": ", beta: 0.34",
    "MultiKrum": ", num_nodes_to_select: 2",
}
CASES = {name: SPECIAL.get(name, f"strategy: {{name: {name}}}") for name in sorted(STRATEGIES)} | MORE
if "Private" in STRATEGIES:
    CASES["Private, keep"] = "strategy: {name: Private, noise_seed: 1, base: {name: SiloBN, global_norm: initial}}"
CASES |= {name: f"strategy: {{name: {name}{OF_FLOWER.get(name, '')}}}" for name in FLOWER}
CHOICES = {"best round": "strategy: {name: FedBN}\ntrain: {lr: 1.0e-20}\nevaluate: {every: 1, validation: 0.1}"}
SHORT = {"short FedBN": "rounds: 3\nstrategy: {name: FedBN}\nevaluate: {every: 3, clients: false}"}  # for real nodes


def overrides(case: str) -> list[str]:
    return [line.replace(": ", "=", 1) for line in (CASES | CHOICES | SHORT)[case].splitlines()]


class Stopping(Reporter):
    """Stops the run after round `last`, as Ctrl-C in that round does."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        stop = KeyboardInterrupt() if finished.number == self.last else None
        return dataclasses.replace(super().on_round(running, finished), stop=stop)


def session(case: str, out: Path, stop: int = 0, **options: Any) -> None:
    """A session of a run of the case."""
    carried_out(load_experiment(BASE, overrides(case)), out, stop, **options)


def carried_out(
    experiment: Experiment,
    out: Path,
    stop: int = 0,
    *,
    workers: int = 0,
    grid: Any = None,
    interrupted: bool | None = None,
) -> None:
    """A session of an experiment's only run as in a new process: the state is read from the folder.

    `interrupted` states whether Ctrl-C must end it; by default, whether it is to stop after a round.
    """
    (prepared,) = prepare(experiment)
    run, config = RunFolder(out), prepared.run.model_dump(mode="json")
    run.check(config, resume=True)
    done = run.begin(config)
    own = grid or LocalGrid(client_app(ClientMaker(experiment)), prepared.run.clients, workers=workers)
    try:
        run_one(prepared, own, run, Stopping(stop), done)
        ended = "at its end"
    except KeyboardInterrupt:
        ended = "by Ctrl-C"
    finally:
        if grid is None:
            own.close()
    assert ended == ("by Ctrl-C" if (bool(stop) if interrupted is None else interrupted) else "at its end")


def summary_of(out: Path) -> Summary:
    summary = RunFolder(out).summary()
    assert summary is not None
    return summary


def outcome(out: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """The results of a run, without times."""
    run = RunFolder(out)
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in run.history()]
    lines += run.lines("clients.jsonl")
    summary = {key: value for key, value in summary_of(out).to_json().items() if key not in ("seconds", "began")}
    return (out / "model.safetensors").read_bytes(), lines, summary


class Elsewhere(MeteredGrid):
    """A grid whose nodes' states the server cannot read, as on Flower's own; each session's contexts are new."""

    def __init__(
        self, case: str, folder: Path | Sequence[Path] | None, nodes: Sequence[int] = (1, 2, 3), workers: int = 0
    ) -> None:
        run_config = {"experiment": BASE, "set": " ".join(f"'{word}'" for word in overrides(case))}
        folders = [folder] * len(nodes) if isinstance(folder, Path) else folder or ()
        given = [{"state": str(each)} for each in folders] or None
        self.local = LocalGrid(
            client_app(make_client), 3, run_config=run_config, node_config=given, node_ids=nodes, workers=workers
        )
        super().__init__(self.local)

    def contexts(self) -> None:
        return None
