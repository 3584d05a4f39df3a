"""`fedbn bench`: what federated training costs beside a bare PyTorch loop that does the same steps.

Each measurement interleaves the two sides and reports the median of their ratio over the repetitions, with the
smallest and the largest: machines are shared and noisy, and a ratio within one run is less so. The bare loop below is
plain PyTorch, with nothing federated in it. docs/performance.md says what was found.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import Tensor, nn
from torch.nn import functional as F

from .client.app import client_app
from .client.client import BNClient
from .client.model_tensors import ModelTensors, flatten_storage, initial_arrays
from .data.batches import ClientBatches
from .data.images import Images
from .engines.context_cache import keep_freed_memory
from .engines.local import LocalGrid
from .messages.aggregate import weighted_mean
from .messages.arrays import pack, unpack
from .models.build import build_model
from .strategies import FedAvg, FedTAN

BATCH = 20
MOMENTS = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@dataclass(frozen=True)
class Figure:
    """One measured number: the median over the repetitions, and the smallest and largest."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    goal: str = ""
    met: bool | None = None


def figure(
    name: str, values: Sequence[float], unit: str, *, most: float | None = None, least: float | None = None
) -> Figure:
    middle = statistics.median(values)
    goal, met = "", None
    if most is not None:
        goal, met = f"at most {most:g}", middle <= most
    if least is not None:
        goal, met = f"at least {least:g}", middle >= least
    return Figure(name, middle, min(values), max(values), unit, goal, met)


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# --- the bare loop: plain PyTorch ---------------------------------------------


class BareLoop:
    """SGD with momentum on images that are cut, normalised and fed batch by batch."""

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int, device: torch.device) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.model = build_model("resnet20", 10, "bn").to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.mean = torch.tensor(MOMENTS[0], device=device).view(1, 3, 1, 1)
        self.deviation = torch.tensor(MOMENTS[1], device=device).view(1, 3, 1, 1)

    def __call__(self, steps: int) -> None:
        self.model.train()
        total = torch.zeros((), device=self.images.device)
        rows = torch.randperm(len(self.images))[: steps * self.batch_size].to(self.images.device)
        for batch in rows.split(self.batch_size):
            inputs = (self.images[batch].float() / 255 - self.mean) / self.deviation
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), self.labels[batch])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        float(total)


def _images(count: int, device: torch.device) -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Images(images.to(device), torch.randint(0, 10, (count,), generator=generator).to(device))


# --- what is measured -----------------------------------------------------------


@dataclass(frozen=True)
class Options:
    repeats: int
    steps: int  # of a client in a round, in `overhead`
    device: torch.device
    workers: int


def overhead(options: Options) -> Iterator[Figure]:
    """Local training through the local engine against the bare loop, in steps per second."""
    steps, device = options.steps, options.device
    data = _images(BATCH * steps, device)
    bare = BareLoop(data.images, data.labels, BATCH, device)
    parts = ModelTensors(
        flatten_storage(build_model("resnet20", 10, "bn").to(device))
    )  # which an experiment's clients share too
    first = pack(initial_arrays(bare.model))

    def rounds(workers: int, clients: int) -> Iterator[float]:
        strategy = FedAvg(min_available_nodes=clients, min_train_nodes=clients)
        with LocalGrid(_clients(data, lambda _: parts, steps), clients, workers=workers, threads=1) as grid:
            arrays, number = first, 0

            def one_round() -> None:
                nonlocal arrays, number
                number += 1
                arrays = _round(strategy, grid, number, arrays)

            one_round()
            while True:
                yield clients * steps / seconds(one_round)

    def ratios(workers: int, clients: int) -> list[float]:
        torch.set_num_threads(1)
        federated = rounds(workers, clients)
        bare(min(steps, 5))
        found = []
        for _ in range(options.repeats):
            speed = next(federated)
            found.append(speed * seconds(lambda: bare(steps)) / steps)
        return found

    yield figure("steps per second / bare loop, one process", ratios(0, 1), "x", least=0.97)
    if device.type == "cpu" and (n := options.workers) > 1:
        found = ratios(n, n)
        yield figure(f"steps per second / bare loop on one core, {n} workers", found, "x", least=0.9 * n)


def _clients(data: Images, parts_of: Callable[[int], ModelTensors], steps: int, **how: Any) -> ClientApp:
    """Clients that all hold these images, and train the model of their number."""

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        batches = ClientBatches(data, torch.arange(len(data.labels)), MOMENTS, batch_size=BATCH, client=client, seed=0)
        return BNClient(parts_of(client), batches, lr=0.01, momentum=0.9, steps=steps, context=context, **how)

    return client_app(make_client)


def gpu(options: Options) -> Iterator[Figure]:
    """On a GPU: steps per second against the bare loop, and the time of FedTAN's round against FedAvg's."""
    if options.device.type == "cuda":
        yield from _on_device(options)


def _on_device(options: Options) -> Iterator[Figure]:
    steps, clients, device = options.steps, 5, options.device
    data = _images(BATCH * steps, device)
    bare = BareLoop(data.images, data.labels, BATCH, device)
    first = pack(initial_arrays(bare.model))

    def rounds(strategy: FedAvg, steps: int, **how: Any) -> Callable[[], None]:
        number = 0

        @functools.cache
        def parts(which: int) -> ModelTensors:
            model = build_model("resnet20", 10, "bn").to(device)
            if how.get("channels_last"):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            return ModelTensors(flatten_storage(model))

        # FedTAN's rounds run side by side: a model for each.
        parts_of = parts if isinstance(strategy, FedTAN) else lambda _: parts(0)
        grid = LocalGrid(_clients(data, parts_of, steps, **how), clients)
        strategy.prepare(1, first)

        def one_round() -> None:
            nonlocal number
            number += 1
            _round(strategy, grid, number, first)  # which ends on the host: nothing is under way any more

        one_round()
        return one_round

    fast: dict[str, Any] = {"precision": torch.bfloat16, "channels_last": True}
    bare(steps)
    for name, how in (("float32", {}), ("bfloat16 and channels-last", fast)):
        one_round = rounds(FedAvg(min_available_nodes=clients), steps, **how)
        ratios = [clients * seconds(lambda: bare(steps)) / seconds(one_round) for _ in range(options.repeats)]
        yield figure(f"steps per second / bare loop, batch 20, {name}", ratios, "x")
    one, other = (
        rounds(strategy, 1) for strategy in (FedTAN(min_available_nodes=clients), FedAvg(min_available_nodes=clients))
    )
    ratios = [seconds(one) / seconds(other) for _ in range(options.repeats)]
    yield figure("round of one step, five clients: FedTAN / FedAvg", ratios, "x", most=4)


def _round(strategy: FedAvg, grid: LocalGrid, number: int, arrays: ArrayRecord) -> ArrayRecord:
    messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
    mean, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
    assert mean is not None
    return mean


def exchange(options: Options) -> Iterator[Figure]:
    """A send-and-receive of 1,376 float32 with five nodes."""
    app = ClientApp()

    @app.query("echo")
    def echo(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    content = RecordDict({"arrays": pack({"values": np.ones(1376, dtype=np.float32)})})
    for workers, most, where in ((0, 1.0, "in one process"), (options.workers, 3.0, f"{options.workers} workers")):
        with LocalGrid(app, 5, workers=workers) as grid:

            def once(grid: LocalGrid = grid) -> None:
                replies = grid.send_and_receive([Message(content, node, "query.echo") for node in range(1, 6)])
                assert all(len(unpack(reply.content.array_records["arrays"])["values"]) == 1376 for reply in replies)

            once()
            values = [1000 * seconds(once) for _ in range(50 * options.repeats)]
        yield figure(f"exchange with five nodes, {where}", values, "ms", most=most)


def fedtan(options: Options) -> Iterator[Figure]:
    """A FedTAN iteration (E = 1) against the same forward and backward passes with plain batch norm."""
    clients, batch, device = 5, 128, options.device
    torch.set_num_threads(1)
    data = _images(clients * batch, device)
    batches = [
        ((data.images[rows].float() - 128) / 64, data.labels[rows])
        for rows in torch.arange(clients * batch).split(batch)
    ]
    models = [build_model("resnet20", 10, "bn").to(device) for _ in range(clients)]

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        return BNClient(models[client], [batches[client]], steps=1, lr=0.01, context=context)

    grid = LocalGrid(client_app(make_client), clients)
    strategy = FedTAN(min_available_nodes=clients)
    arrays = pack(initial_arrays(models[0]))
    strategy.prepare(1, arrays)
    plain = build_model("resnet20", 10, "bn").to(device)

    def passes() -> None:
        for inputs, labels in batches:
            plain.zero_grad()
            F.cross_entropy(plain(inputs), labels).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def iteration() -> None:
        _round(strategy, grid, 1, arrays)

    iteration()
    passes()
    ratios = [seconds(iteration) / seconds(passes) for _ in range(options.repeats)]
    yield figure("FedTAN iteration / plain passes, five clients, batch 128", ratios, "x", most=1.25)


class _Idle(NumPyClient):
    """Takes a model and gives it back."""

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return parameters, 1, {}


def round_(options: Options) -> Iterator[Figure]:
    """A round in which nobody trains, aggregation included; and the aggregation of large models."""
    model = build_model("resnet20", 10, "bn")
    parts, arrays = ModelTensors(flatten_storage(model)), pack(initial_arrays(model))
    data = _images(BATCH, torch.device("cpu"))
    strategy = FedAvg(min_available_nodes=5)
    with LocalGrid(_clients(data, lambda _: parts, steps=0), 5, threads=1) as grid:
        _round(strategy, grid, 1, arrays)
        values = [1000 * seconds(lambda: _round(strategy, grid, 1, arrays)) for _ in range(10 * options.repeats)]
    yield figure("round without a step, five clients, 270k parameters", values, "ms", most=5)
    yield from _aggregation(options)


def _aggregation(options: Options) -> Iterator[Figure]:
    large = build_model("resnet18", 10, "bn")
    values = {key: value.numpy() for key, value in large.state_dict().items() if value.is_floating_point()}
    size = sum(value.size for value in values.values())
    # As replies come from a network: bytes. Four of them, each many times over; a hundred need not lie in memory.
    records = [ArrayRecord({key: Array(value + i) for key, value in values.items()}) for i in range(4)]
    replies = [RecordDict({"arrays": records[i % 4], "metrics": MetricRecord({"n": 1.0})}) for i in range(100)]

    def ours() -> None:
        weighted_mean((unpack(reply.array_records["arrays"]) for reply in replies), [1.0] * 100)

    def flowers() -> None:
        aggregate_arrayrecords(replies, "n")

    block = np.ones(size, dtype=np.float32)
    target = np.empty_like(block)

    def memory() -> None:  # what any mean must do: read each reply once
        for _ in range(100):
            np.copyto(target, block)

    pairs = [(seconds(ours), seconds(flowers), seconds(memory)) for _ in range(max(1, options.repeats // 2))]
    name = f"mean of 100 replies of {size / 1e6:.1f} million parameters"
    yield figure(f"{name}: Flower's time / ours", [b / a for a, b, _ in pairs], "x", least=3)
    yield figure(f"{name}: ours / copying them once", [a / c for a, _, c in pairs], "x")
    tracemalloc.start()
    weighted_mean((unpack(reply.array_records["arrays"]) for reply in replies[:16]), [1.0] * 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield figure(f"{name}: memory in use / one reply", [peak / (4 * size)], "x", most=8)


def scale(options: Options) -> Iterator[Figure]:
    """10,000 registered clients, 100 of which take part in a round."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    arrays = pack(initial_arrays(model))

    def start(registered: int) -> tuple[LocalGrid, Callable[[], None]]:
        grid = LocalGrid(client_app(lambda context: _Idle()), registered)
        strategy = FedAvg(
            fraction_train=100 / registered, min_train_nodes=100, min_available_nodes=registered, fraction_evaluate=0.0
        )
        number = 0

        def one_round() -> None:
            nonlocal number
            number += 1
            _round(strategy, grid, number, arrays)

        return grid, one_round

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    _, few_round = start(200)
    few_round()
    before = resident()
    starts: list[float] = []
    many_round: Callable[[], None] = few_round

    def begin() -> None:
        nonlocal many_round
        _, many_round = start(10_000)
        many_round()

    starts.append(seconds(begin))
    yield figure("10,000 registered clients: start and first round", starts, "s", most=5)
    yield figure("10,000 registered clients: memory of each", [(resident() - before) / 10_000 / 1024], "KiB", most=10)
    ratios = [seconds(many_round) / seconds(few_round) for _ in range(3 * options.repeats)]
    yield figure("round of 100: 10,000 registered / 200 registered", ratios, "x", most=1.5)


def start(options: Options) -> Iterator[Figure]:
    """From the command to its first answer, and to the first round of an experiment."""
    fedbn = [sys.executable, "-m", f"{__package__}.cli"]

    def ask_for_help() -> None:
        subprocess.run([*fedbn, "--help"], check=True, capture_output=True)

    def first_step() -> None:
        with tempfile.TemporaryDirectory() as folder:
            experiment = "{clients: 2, rounds: 1, model: {name: resnet20}, train: {steps: 1}, engine: {workers: 0}}"
            run = [*fedbn, "run", experiment, "--out", f"{folder}/out"]
            begun = time.perf_counter()
            process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                while not any(file.stat().st_size for file in Path(folder).rglob("history.jsonl")):
                    if process.poll() is not None or time.perf_counter() - begun > 120:
                        assert process.stderr is not None
                        raise RuntimeError(f"{' '.join(run)} made no round: {process.stderr.read().decode()}")
                    time.sleep(0.005)
                found.append(time.perf_counter() - begun)
            finally:
                process.communicate(timeout=120)

    ask_for_help()
    yield figure("fedbn --help", [seconds(ask_for_help) for _ in range(options.repeats)], "s", most=0.5)
    found: list[float] = []
    for _ in range(options.repeats):
        first_step()
    yield figure("fedbn run on digits, to the end of the first round", found, "s", most=3)


BENCHMARKS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "overhead": overhead,
    "exchange": exchange,
    "fedtan": fedtan,
    "round": round_,
    "scale": scale,
    "start": start,
    "gpu": gpu,
}


def run(names: Sequence[str], options: Options, *, as_json: bool) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    keep_freed_memory()  # as `fedbn run` does
    found: dict[str, list[Figure]] = {}
    threads = torch.get_num_threads()
    for name in names or BENCHMARKS:
        if not as_json:
            print(f"{name}: {(BENCHMARKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        found[name] = []
        for each in BENCHMARKS[name](options):
            found[name].append(each)
            if not as_json:
                told = "" if each.met is None else f"   goal: {each.goal}" + ("" if each.met else " (missed)")
                spread = f"({each.low:.3g} to {each.high:.3g})"
                print(f"  {each.name}: {each.value:.3g} {each.unit} {spread}{told}", flush=True)
        if not found[name] and not as_json:
            print(f"  nothing measured on {options.device.type}")
        torch.set_num_threads(threads)
    if as_json:
        from .results.folder import environment

        figures = {name: [asdict(each) for each in each_of] for name, each_of in found.items()}
        chosen = {**asdict(options), "device": str(options.device)}
        print(json.dumps({"environment": environment(), "options": chosen, "figures": figures}, indent=2))
