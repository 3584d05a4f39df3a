"""Runs with one hostile client of five, and the comparison with runs in which that client is absent or honest.

`python -m tests.support.hostile` runs every attack against every rule and prints the counts, which
docs/results/robustness.md#wrong-replies-and-long-runs has; `test_the_counts_of_attacks_are_of_today_s_attacks` fails
if there are more by now.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.errors import FedbnError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.parts import Parts
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.registry import STRATEGIES
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.results.folder.writer import RunFolder

from .attacks import BAD, EITHER, HARMLESS, LIE, REFUSED, Attack, Hostile, Spoil, Unfit, all_attacks

CLIENTS = 5
BASE = f"""
rounds: 3
clients: {CLIENTS}
data: {{name: digits, examples: 100, test_examples: 50, partition: {{kind: iid}}}}
model: {{name: mlp}}
train: {{lr: 0.05, momentum: 0.9, batch_size: 4, steps: 1}}
evaluate: {{every: 1, clients: true}}
engine: {{workers: 0, device: cpu}}
"""
SEEDED = {"Private": ", noise_seed: 0"}
RULES: dict[str, list[str]] = {
    # A masked reply of Secure is any number: what a client adds to the sum cannot be seen.
    **{name: [f"strategy={{name: {name}{SEEDED.get(name, '')}}}"] for name in sorted(STRATEGIES) if name != "Secure"},
    "HeteroBN": ["strategy={name: HeteroBN, statistics: query}", "model.norm=sbn"],
    "HBN": ["strategy={name: HBN}", "model.norm=hbn"],
    "FedWon": ["strategy={name: FedWon}", "model={name: cnn, norm: won}"],
    "FedBS": ["strategy={name: FedBS, epsilon: 100, patience: 3}"],
    "FixBN": ["strategy={name: FixBN, freeze_round: 2}"],
    "FixBN, frozen from the start": ["strategy={name: FixBN, freeze_round: 0}"],
    "FixBN of FedBN": ["strategy={name: FixBN, freeze_round: 1, base: {name: FedBN}}"],
    "FixBN of FedMedian": ["strategy={name: FixBN, freeze_round: 1, base: {name: FedMedian}}"],
    "FedTAN of the paper, by batch": ["strategy={name: FedTAN, exchange: paper, weights: batch, min_batch: 4}"],
    "FedTAN": ["strategy={name: FedTAN, min_batch: 4}"],
    "FedAvgGlobalStats": ["strategy={name: FedAvgGlobalStats, min_batch: 4}"],
    "FedTANII": ["strategy={name: FedTANII, fedtan_rounds: 2, min_batch: 4}"],
    "GlobalMomentum of FedTAN": ["strategy={name: GlobalMomentum, base: {name: FedTAN, min_batch: 4}}"],
    **{f"Flower's {name}": [f"strategy={{name: {name}}}"] for name in (
        "FedAdam", "FedYogi", "FedAdagrad", "FedAvgM", "QFedAvg", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum",
        "Bulyan",
    )},
}  # fmt: skip
RULES["Flower's QFedAvg"] = ["strategy={name: QFedAvg, client_learning_rate: 0.1}"]
RULES["Flower's FedAdam"] = ["strategy={name: FedAdam, eta: 0.01}"]
# A rule that does not read a part of a reply cannot be spoiled by it.
UNREAD = {
    ("FedTAN of the paper, by batch", "num-examples, missing"),
    ("Private", "num-examples, missing"),
    ("Private", "records, empty metrics"),
    ("Standalone", "records, empty arrays"),
}
# The server must not compare single replies with others.
UNCOMPARED = re.compile(r"^Private .* array, (1e18|1e30|3e38)$")
EXCHANGING = [name for name in RULES if "FedTAN" in name or name == "FedAvgGlobalStats"]

# The libraries' own words must not reach a log.
FOREIGN = re.compile(r"pickle|numpy(?!\.ndarray)|unsafe|Traceback|Error\(|object at 0x|codec can't", re.IGNORECASE)


@dataclass
class Outcome:
    """What a run leaves behind, without seconds."""

    error: BaseException | None = None
    model: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    lines: list[Any] = field(default_factory=list)  # of history.jsonl and clients.jsonl, or the metrics of the result
    traffic: list[dict[str, Any]] = field(default_factory=list)  # of each line of history.jsonl
    log: list[str] = field(default_factory=list)
    sent: int = 0  # hostile replies
    largest: int = 0  # bytes of the largest hostile reply

    def naming(self, nodes: Sequence[int]) -> list[str]:
        """The lines whose first node is one of these; after it, a client's own words may follow."""
        named = [(re.search(r"\bnode (\d+)\b", line), line) for line in self.log]
        return [line for found, line in named if found and int(found[1]) in nodes]

    @property
    def is_finite(self) -> bool:
        return all(
            np.isfinite(np.frombuffer(data, dtype)).all() for dtype, _, data in self.model.values() if dtype[0] == "f"
        )


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def kept_log() -> Iterator[list[str]]:
    """What Flower's logger is given, which here goes nowhere else."""
    logger, keep = logging.getLogger("flwr"), _Keep()
    before = logger.level, logger.handlers, logger.propagate
    logger.level, logger.handlers, logger.propagate = logging.INFO, [keep], False
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    try:
        yield keep.lines
    finally:
        logger.level, logger.handlers, logger.propagate = before
        logger.manager._clear_cache()  # type: ignore[attr-defined]


@functools.cache
def prepared_for(rule: str) -> tuple[Any, Parts]:
    experiment = load_experiment(BASE, RULES[rule])
    return experiment, prepare(experiment)[0]


def train(
    rule: str, kind: str, spoil: Spoil | None, *, whole: bool, honest: bool = False, rounds: Sequence[int] | None = None
) -> Outcome:
    """A run with the hostile client; `whole` as `fedbn run` does it, otherwise by the strategy's `start`.

    The client is hostile in `rounds`, by default the first and the last.
    """
    experiment, prepared = prepared_for(rule)
    run, strategy = prepared.run, make_rule(prepared.run)
    prepared = dataclasses.replace(prepared, rule=strategy)  # with a model of its own
    if kind != "evaluate" and not whole:
        _innermost(strategy).fraction_evaluate = 0.0  # half of the time
    if rounds is None:
        rounds = () if honest else (1, run.rounds)

    def make(context: Context, config: Mapping[str, Any]) -> Any:
        return ClientMaker(experiment)(context, config)

    app, found = Hostile(client_app(make), kind, rounds, spoil), Outcome()
    carry_out = _run if whole else _start
    with tempfile.TemporaryDirectory() as folder, kept_log() as found.log, LocalGrid(app, CLIENTS) as grid:
        try:
            carry_out(prepared, grid, Path(folder), found)
        except Exception as error:
            found.error = error
    if app.failure is not None and not isinstance(app.failure, Unfit):
        raise app.failure
    found.sent, found.largest = 0 if app.failure else app.sent, app.largest
    return found


def _innermost(strategy: Any) -> Any:
    return _innermost(strategy.strategy) if hasattr(strategy, "strategy") else strategy


def _run(prepared: Parts, grid: LocalGrid, folder: Path, found: Outcome) -> None:
    of_run = RunFolder(folder / "run")
    of_run.begin(prepared.run.model_dump(mode="json"))
    try:
        run_one(prepared, grid, of_run, Reporter(), 0)
    finally:
        for name in ("history.jsonl", "clients.jsonl"):
            file = of_run.path / name
            text = file.read_text() if file.exists() else ""
            found.lines += [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
        json.loads((of_run.path / "summary.json").read_text(), parse_constant=_refuse)
    for line in found.lines:
        line.pop("seconds", None)
        found.traffic.append({name: line.pop(name) for name in vars(Traffic()) if name in line})
    from safetensors.numpy import load_file

    found.model = _bits(load_file(of_run.path / "model.safetensors"))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _start(prepared: Parts, grid: LocalGrid, folder: Path, found: Outcome) -> None:
    run, models = prepared.run, list[ArrayRecord]()

    def keep(_: int, arrays: ArrayRecord) -> None:
        models.append(arrays)

    identity = {protocol.RUN: prepared.name, protocol.TOKEN: "0" * 32, protocol.CHECKPOINT_ROUND: 0}
    result = prepared.rule.start(
        grid, pack(initial_arrays(prepared.model)), run.rounds,
        train_config=ConfigRecord(identity), evaluate_config=ConfigRecord(dict(identity)), evaluate_fn=keep,
    )  # fmt: skip
    found.model = _bits(unpack(models[-1]))
    for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        found.lines += [(number, dict(record)) for number, record in sorted(metrics.items())]


def _bits(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {key: (value.dtype.str[1:], value.shape, value.tobytes()) for key, value in arrays.items()}


@functools.cache
def without(rule: str, kind: str, whole: bool) -> Outcome:
    """The run in which the client's replies are errors."""
    return train(rule, kind, None, whole=whole)


@functools.cache
def with_honest(rule: str, kind: str, whole: bool) -> Outcome:
    return train(rule, kind, None, whole=whole, honest=True)


def judge(rule: str, kind: str, attack: Attack, whole: bool) -> tuple[str, list[str]]:
    """What became of an attack, and what is wrong with that."""
    found = train(rule, kind, attack.spoil, whole=whole)
    if not found.sent:
        return "unfit", []
    if found.error is not None:
        own = isinstance(found.error, FedbnError)
        what = f"{type(found.error).__name__}: {str(found.error)[:300]}"
        if own and attack.verdict == LIE:
            return "the run ended with its own error", []
        return ("the run ended with its own error" if own else "exception"), [what]
    absent, honest = without(rule, kind, whole), with_honest(rule, kind, whole)
    wrong: list[str] = []
    if not found.is_finite:
        wrong.append("the model is not finite")
    named, others = found.naming([BAD + 1]), found.naming([n + 1 for n in range(CLIENTS) if n != BAD])
    if others and attack.verdict != LIE:
        wrong.append(f"an honest client is named: {others[0][:200]}")
    for line in found.log:
        if FOREIGN.search(line) or len(line) > 2400 or (line in named and not line.strip().isprintable()):
            wrong.append(f"a log line is not fit to read: {line[:200]!r}")
    wrong += _traffic_faults(found, absent)
    is_absent = found.model == absent.model and found.lines == absent.lines
    is_honest = found.model == honest.model and (found.lines == honest.lines or attack.verdict == EITHER)
    if is_absent and len(named) == found.sent:
        fate = REFUSED
    elif is_honest and not named:
        fate = HARMLESS
    elif attack.verdict == LIE:
        fate = LIE
    elif found.model == absent.model:
        fate = "refused, with other lines"
        pairs = [(a, b) for a, b in zip(found.lines, absent.lines, strict=False) if a != b]
        wrong.append(f"{found.sent} replies, named {named}; differs {str(pairs[:1])[:400]}")
    else:
        fate = LIE
    verdict = EITHER if (rule, attack.name) in UNREAD else attack.verdict
    verdict = LIE if UNCOMPARED.search(f"{rule} {attack.name}") else verdict
    allowed = {REFUSED: {REFUSED}, HARMLESS: {HARMLESS}, EITHER: {REFUSED, HARMLESS}, LIE: {REFUSED, HARMLESS, LIE}}
    if fate not in allowed[verdict] and not (fate.startswith("refused,") and wrong):
        wrong.append(f"it is {fate}, expected {verdict}")
    return fate, wrong


def _traffic_faults(found: Outcome, absent: Outcome) -> list[str]:
    faults = []
    for number, (page, expected) in enumerate(zip(found.traffic, absent.traffic, strict=False), 1):
        for name, value in page.items():
            most = max(expected[name], 0) + 2 * max(found.largest, 1) + expected["bytes_down"]
            if not isinstance(value, int) or not 0 <= value <= most:
                faults.append(f"the ledger's {name} of entry {number} is {value}, expected at most {most}")
    return faults


def cases(rules: Sequence[str] = (), names: str = "") -> Iterator[tuple[str, str, Attack]]:
    """Every rule, kind of message and attack that go together."""
    attacks = [attack for attack in all_attacks() if re.search(names, attack.name)]
    for rule in rules or RULES:
        kinds = ["train", "evaluate"]
        if rule in EXCHANGING:
            kinds += [protocol.EXCHANGE_QUERY, "moments"]
        if rule in ("HeteroBN", "HBN"):
            kinds.append(protocol.STATISTICS_QUERY)
        for attack in attacks:
            yield from ((rule, kind, attack) for kind in kinds if kind in attack.kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", action="append", default=[])
    parser.add_argument("--attack", default="", help="a regular expression")
    parser.add_argument("--whole", action="store_true", help="runs as `fedbn run` makes them, with their files")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # Flower's QFedAvg collects garbage at each reply
    total, faulty = Counter[str](), 0
    for rule in given.rule or RULES:
        fates: Counter[str] = Counter()
        for _, kind, attack in cases([rule], given.attack):
            fate, wrong = judge(rule, kind, attack, given.whole)
            fates[fate] += 1
            faulty += bool(wrong)
            if wrong:
                print(f"{rule} | {kind} | {attack.name} | {fate} | {'; '.join(wrong)}", flush=True)
        unfit = fates.pop("unfit", 0)  # a reply that has nothing to change in this way
        total += fates
        print(json.dumps({"strategy": rule, "fates": dict(fates.most_common()), "unfit": unfit}), flush=True)
    print(f"{total.total()} runs: {dict(total.most_common())}; {faulty} with a fault", file=sys.stderr)


if __name__ == "__main__":
    main()
