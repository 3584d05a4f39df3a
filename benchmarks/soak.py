"""Long runs in which clients fail, with memory, open files, threads and temporary files; docs/results/reliability.

    python benchmarks/soak.py [STRATEGY] [--rounds N] [--workers N] [--late N]

Five clients train a perceptron on digits on the local engine, with history, ledger and checkpoints as in `fedbn run`.
In each round a client fails with a probability of 5 %: it sends an error, an array that cannot be read, or NaN, or with
workers its process is killed. In `--late` rounds, client 0 answers after the time limit. Then the run is repeated with
an error in place of each of these replies: both must end with the same model, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.internals import ErrorCode
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, configs_in, pack, unpack
from fedbn_flwr.results.folder.writer import RunFolder

CLIENTS = 5
SHARE = 0.05  # of the replies that fail
TIMEOUT, LATE = 5.0, 7.0  # seconds of a round, and of a late reply
EXPERIMENT = f"""
clients: {CLIENTS}
data: {{name: digits}}
model: {{name: mlp}}
train: {{lr: 0.01, momentum: 0.9, batch_size: 8, steps: 1}}
engine: {{device: cpu, timeout: {TIMEOUT}}}
"""


class Failing(ClientApp):
    """`inner`, of which some replies fail; with `as_errors`, an error stands for each of them."""

    def __init__(self, inner: ClientApp, *, dies: bool, late: int, rounds: int, as_errors: bool) -> None:
        super().__init__()
        self.inner = inner
        self.kinds = ["error", "garbage", "NaN", *(["death"] if dies else [])]
        self.late = frozenset(range(rounds // (late + 1), rounds, rounds // (late + 1))) if late else frozenset()
        self.as_errors = as_errors

    def fault(self, server_round: int, client: int, step: int | None) -> str | None:
        """How the client fails in its reply to this message, if it does; `step` is that of FedTAN's exchanges."""
        if server_round in self.late and client == 0:
            return "late"
        draw = random.Random(f"{server_round} {client}")
        if draw.random() >= SHARE:
            return None
        kind, at = draw.choice(self.kinds), draw.randrange(3)  # two exchanges of the one batch norm, and training
        return kind if step is None or step == at else None

    def __call__(self, message: Message, context: Context) -> Message:
        config = config_of(message.content)
        if not config or message.metadata.message_type not in ("train", protocol.EXCHANGE_QUERY):
            return self.inner(message, context)
        step = config.get(protocol.EXCHANGE_STEP)
        kind = self.fault(int(config[protocol.ROUND]), int(context.node_config["partition-id"]), step)  # type: ignore[arg-type]
        if kind == "late" and not self.as_errors:
            time.sleep(LATE)
        if kind == "death" and not self.as_errors:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind not in ("error", "death"):
            reply = self.inner(message, context)
            if kind is None or reply.has_error() or (kind == "late" and not self.as_errors):
                return reply
        if kind in ("error", "death") or self.as_errors:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it fails"), reply_to=message)
        content = RecordDict(dict(reply.content))
        name, record = next(iter(arrays_in(content).items()))
        content[name] = changed = record.copy()
        if kind == "NaN":
            content[name] = pack({key: np.full_like(value, np.nan) for key, value in unpack(record).items()})
        else:
            changed[next(iter(record))] = Array("float32", (3,), "numpy.ndarray", os.urandom(200))
        return Message(content, reply_to=message)


class Arithmetic(ClientApp):
    """Instead of training, numbers are added to the arrays: a round takes a fifth of the time."""

    def __init__(self, inner: ClientApp) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return self.inner(message, context)
        client = int(context.node_config["partition-id"])
        draw = np.random.default_rng([int(configs_in(message.content)["config"][protocol.ROUND]), client])  # type: ignore[arg-type]
        arrays = unpack(arrays_in(message.content)["arrays"])
        changed = {
            key: value * value.dtype.type(0.9) + draw.random(value.shape, value.dtype) for key, value in arrays.items()
        }
        metrics = MetricRecord({protocol.NUM_EXAMPLES: 10 + client, protocol.TRAIN_LOSS: 1.0})
        about = ConfigRecord({protocol.PARTITION: client})
        return Message(RecordDict({"arrays": pack(changed), "metrics": metrics, "client": about}), reply_to=message)


class Watch(Reporter):
    """Measures this process after some of the rounds."""

    def __init__(self, rounds: int, temporary: Path) -> None:
        super().__init__()
        self.every = max(rounds // 20, 1)
        self.temporary = temporary
        self.rows: list[tuple[int, ...]] = []
        self.digest = ""

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        if finished.number % self.every == 0:
            self.rows.append((finished.number, *measured(self.temporary)))
        self.digest = hashlib.sha256(b"".join(v.tobytes() for v in unpack(finished.arrays).values())).hexdigest()
        return finished


HEADS = ("round", "RSS_MB", "workers_MB", "files", "threads", "workers", "temporary")


def measured(temporary: Path) -> tuple[int, ...]:
    children = list(children_of(os.getpid()))
    folders = [path for path in temporary.iterdir() if path.name != "run"]
    return (
        resident(os.getpid()), sum(map(resident, children)), len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")), len(children), len(folders),
    )  # fmt: skip


def children_of(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def resident(process: int) -> int:
    """MB of memory; of workers, with the part that they share with their parent."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0)


def soak(
    strategy: str, rounds: int, workers: int, late: int, trains: bool, *, as_errors: bool
) -> tuple[Watch, Failing]:
    allowed = ", min_batch: 1" if strategy in ("FedTAN", "FedAvgGlobalStats") else ""  # of eight images
    settings = [
        f"strategy={{name: {strategy}, min_train_nodes: 1{allowed}}}", f"rounds={rounds}", f"engine.workers={workers}",
        f"evaluate={{every: {rounds}, clients: false}}", f"engine.checkpoint_every={max(rounds // 10, 1)}",
    ]  # fmt: skip
    experiment = load_experiment(EXPERIMENT, settings)
    (prepared,) = prepare(experiment)

    def make(context: Context, config: Mapping[str, Any]) -> Any:
        return ClientMaker(experiment)(context, config)

    honest = client_app(make) if trains else Arithmetic(client_app(make))
    app = Failing(honest, dies=workers > 0, late=late, rounds=rounds, as_errors=as_errors)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # of this process and its workers
        try:
            run = RunFolder(Path(folder) / "run")
            run.begin(prepared.run.model_dump(mode="json"))
            watch = Watch(rounds, Path(folder))
            with LocalGrid(app, CLIENTS, workers=workers) as grid:
                run_one(prepared, grid, run, watch, 0)
        finally:
            tempfile.tempdir = None
    return watch, app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", nargs="?", default="FedAvg")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--late", type=int, default=0, help="rounds with a late reply; needs --workers")
    parser.add_argument("--arithmetic", action="store_true", help="clients add numbers instead of training")
    given = parser.parse_args()
    arguments = (given.strategy, given.rounds, given.workers, given.late, not given.arithmetic)
    logging.getLogger("flwr").setLevel(logging.ERROR)  # a warning for each failing reply
    began = time.monotonic()
    watch, app = soak(*arguments, as_errors=False)
    seconds = time.monotonic() - began
    faults = Counter(
        app.fault(number, client, None)
        for number, client in itertools.product(range(1, given.rounds + 1), range(CLIENTS))
    )
    absent, _ = soak(*arguments, as_errors=True)
    found = {
        "command": shlex.join(["python", "benchmarks/soak.py", *sys.argv[1:]]),
        "about": f"{given.rounds} rounds of {CLIENTS} clients, {given.workers} workers, {seconds:.0f} s",
        "failing": {kind: count for kind, count in sorted(faults.items(), key=str) if kind},
        "columns": HEADS,
        "rows": watch.rows,
        "same_model": absent.digest == watch.digest,  # as without these replies
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
