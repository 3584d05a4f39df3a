"""From a prepared experiment to finished runs: the server's half, on any grid (ours, Flower's simulation, real nodes).

The clients' half is `node.make_client`.
"""

from __future__ import annotations

import functools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.model_tensors import initial_arrays
from fedbn_flwr.client.training import cross_entropy
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, metrics_in, pack, unpack
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.results.checkpoint import Snapshot
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.results.ledger import MeteredGrid, Traffic
from fedbn_flwr.results.progress import RunProgress
from fedbn_flwr.results.report import write_report
from fedbn_flwr.strategies import CannotSave, Round, Wrapper, as_rule

from .data import moments_of, rows_by_domain
from .find import from_run_config
from .model import choose_device
from .node import client_of
from .prepare import Prepared, prepare, strategy_name
from .settings import Experiment, Settings


class _Recorded(Wrapper):
    """A run's strategy as Flower's loop sees it: notes the clients' metrics, and begins where a run was stopped."""

    def __init__(self, strategy: Strategy, run: Settings, before: Snapshot | None = None) -> None:
        super().__init__(strategy)
        self.run = run
        self.before = before  # of an earlier session
        self.done = 0 if before is None else before.round  # Flower counts from 1 again
        self.trained = {} if before is None else dict(before.trained)  # partition -> its last round
        self.kept_round = self.done  # to which the server may come back
        by_rule = self.traits.personal or not run.evaluate.server
        self.asks_clients = by_rule if run.evaluate.clients is None else run.evaluate.clients
        self.metrics: dict[str, Any] = {}
        self.answered = 0  # clients that trained in this round

    def evaluates(self, server_round: int) -> bool:
        return server_round % self.run.evaluate.every == 0 or server_round == self.run.rounds

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(self.run.rounds, arrays)
        if self.before is not None and self.before.strategy is not None:
            self.rule.restore(self.before.strategy)

    def check(self, num_rounds: int) -> None:
        super().check(self.run.rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.metrics = {}
        config[protocol.KEPT_ROUND] = self.kept_round
        return super().configure_train(server_round + self.done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.answered = sum(reply.has_content() for reply in replies)
        self.trained |= dict.fromkeys(_partitions(replies), server_round + self.done)
        arrays, metrics = super().aggregate_train(server_round + self.done, replies)
        self.metrics |= {key.replace("-", "_"): value for key, value in (metrics or {}).items()}
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not (self.asks_clients and self.evaluates(server_round + self.done)):
            return []
        return super().configure_evaluate(server_round + self.done, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        replies = list(replies)
        if not replies:
            return None
        metrics = super().aggregate_evaluate(server_round + self.done, replies)
        shared = {key: value for key, value in (metrics or {}).items() if not key.startswith("own@")}
        metrics = MetricRecord({**shared, **_own_figures(replies)})
        self.metrics |= {f"clients_{key.replace('-', '_')}": value for key, value in metrics.items()}
        return metrics


def _partitions(replies: Iterable[Message]) -> Iterator[int]:
    """Of the clients that trained, as far as they tell."""
    for reply in replies:
        for metrics in metrics_in(reply.content).values() if reply.has_content() else ():
            if isinstance(partition := metrics.get(protocol.PARTITION), int):
                yield partition


def _own_figures(replies: Sequence[Message]) -> dict[str, float]:
    """What clients measured on test data of their own: the mean over those that have some, each counted alike.

    Of all of it, and of what each domain has of it: "own-accuracy" and "own-accuracy-DOMAIN".
    """
    told: dict[str, list[float]] = {}
    for reply in replies:
        for metrics in metrics_in(reply.content).values() if reply.has_content() else ():
            for key, value in metrics.items():
                where, _, what = key.partition("-")
                whose, _, domain = where.partition("@")
                if whose == "own" and what in ("loss", "accuracy") and isinstance(value, float):
                    told.setdefault(f"own-{what}-{domain}" if domain else key, []).append(value)
    return {key: statistics.fmean(values) for key, values in told.items()}


def _judge_of(prepared: Prepared) -> Callable[[ArrayRecord, ArrayRecord], tuple[dict[str, Any], str]] | None:
    """Judges a global model (see _judge); None where there is none, or no data to judge it by."""
    run, dataset = prepared.run, prepared.dataset
    if dataset is None or not as_rule(prepared.strategy).traits.has_global_model:
        return None
    test_of = functools.partial(TestBatches, dataset.test, moments_of(run, dataset), run.evaluate.batch_size)
    domains = {name: test_of(rows) for name, rows in rows_by_domain(dataset).items()}
    return functools.partial(_judge, prepared, test=test_of(), domains=domains)


def _judge(
    prepared: Prepared,
    arrays: ArrayRecord,
    trained: ArrayRecord,
    test: TestBatches,
    domains: Mapping[str, TestBatches],
) -> tuple[dict[str, Any], str]:
    """Loss and accuracy of a global model on the test images, and whose statistics its batch norms used.

    The accuracy on each of `domains` is `accuracy-DOMAIN`.

    `arrays` is what somebody outside would use, `trained` what training goes on from.
    """
    model, device = prepared.model, prepared.device
    state = {key: torch.from_numpy(value.copy()) for key, value in unpack(arrays).items()}
    model.load_state_dict(state, strict=False)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    used = "model" if all(norm.running_mean is not None for norm in norms) else "batch"
    if set(arrays) - set(trained):
        used = "query"  # a rule asked clients for them
    if norms and prepared.run.evaluate.statistics == "reestimated":
        found, _ = reestimate(model, test, device)
        model.load_state_dict(found, strict=False)
        used = "reestimated"
    figures = evaluate(model, test, cross_entropy, device)
    figures.pop("num-examples")
    for domain, some in domains.items():
        figures[f"accuracy-{domain}"] = evaluate(model, some, cross_entropy, device)["accuracy"]
    return {key.replace("-", "_"): value for key, value in figures.items()}, used


def check_nodes(grid: Grid, run: Settings, config: Mapping[str, Any]) -> dict[int, int]:
    """Every partition is held by one node, or the run does not begin; `config` names the run, and its last round.

    Returns, for each partition whose node has a folder for its memory, the round that this is of.
    """
    deadline = time.monotonic() + run.engine.node_timeout
    told = 0.0
    while len(nodes := list(grid.get_node_ids())) < run.clients:
        now = time.monotonic()
        hint = (
            f'in a simulation, give flwr run --federation-config "num-supernodes={run.clients} '
            'client-resources-num-cpus=1"; on machines of your own, start the missing SuperNodes'
        )
        if now > deadline:
            raise RunFailed(
                f"{len(nodes)} of {run.clients} nodes are connected after {run.engine.node_timeout:g} s; {hint}"
            )
        if now - told > 10:
            print(f"waiting for nodes: {len(nodes)} of {run.clients} are connected; {hint}", flush=True)
            told = now
        time.sleep(0.2)
    content = RecordDict({"config": ConfigRecord({**config, protocol.READY: True})})
    questions = [Message(content, node, protocol.PARTITION_QUERY) for node in nodes]
    replies = list(grid.send_and_receive(questions, timeout=run.engine.timeout))
    holders: dict[int, list[int]] = {}
    folders: dict[int, int] = {}
    problems = []
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            problems.append(f"node {node}: {reply.error.reason}")
            continue
        answer = next(iter(metrics_in(reply.content).values()), MetricRecord())
        partition_id = int(answer.get(protocol.PARTITION, -1))  # type: ignore[arg-type]
        holders.setdefault(partition_id, []).append(node)
        if protocol.STATE_ROUND in answer:
            folders[partition_id] = int(answer[protocol.STATE_ROUND])  # type: ignore[arg-type]
    if (silent := len(nodes) - len(replies)) > 0:
        problems.append(f"{silent} nodes did not answer within {run.engine.timeout:g} s")
    for partition_id in range(run.clients):
        if len(held := holders.get(partition_id, [])) != 1 and not problems:
            problems.append(f"partition {partition_id} is held by {len(held)} nodes, expected one: {held}")
    if problems:
        listed = "".join(f"\n  - {' '.join(problem.split())}" for problem in sorted(problems))
        raise RunFailed(f"the run cannot begin:{listed}")
    return folders


def _needed_of_clients(prepared: Prepared) -> str | None:
    """What clients keep of their own from round to round and training depends on, in words."""
    if prepared.run.train.keep_momentum:
        return "their momentum"
    norms = [module for module in prepared.model.modules() if isinstance(module, _BatchNorm)]
    if any(isinstance(norm, BatchRenorm) or norm.momentum is None for norm in norms):
        return "their counters of batches"
    return as_rule(prepared.strategy).traits.client_memory


def _bring_back_clients(
    prepared: Prepared, grid: Grid, folder: RunFolder, trained: Mapping[int, int], folders: Mapping[int, int]
) -> None:
    """What the clients remembered, from the checkpoint or from their own disks; or an error where it is lost."""
    saved = folder.checkpoint.clients()
    if isinstance(grid, LocalGrid) and saved is not None:
        for node, records in saved:
            grid.write_state(node, records)
        return
    if (needed := _needed_of_clients(prepared)) is None:
        return
    lost = [f"client {who} has none" for who in trained if who not in folders]
    lost += [
        f"client {who} has that of round {folders[who]}, and trained in round {last}"
        for who, last in trained.items()
        if who in folders and folders[who] < last
    ]
    if lost:
        more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
        raise SettingsError(
            f"{str(folder.path)!r} cannot be resumed here: {strategy_name(prepared.run.strategy)} needs what its "
            f"clients keep of their own ({needed}), and {'; '.join(sorted(lost)[:3])}{more}. Resume it on the local "
            "engine if it began there, or give each node a folder before a run begins: --node-config "
            "\"state='/srv/fedbn-state'\""
        )


def run_one(prepared: Prepared, grid: Grid, folder: RunFolder, progress: RunProgress, done: int) -> dict[str, Any]:
    """Train one run to its end and return its summary."""
    run = prepared.run
    before = folder.checkpoint.read() if done else None
    if before is not None and before.strategy is None:
        raise SettingsError(f"{str(folder.path)!r} cannot be resumed: {before.unsaved}")
    metered = MeteredGrid(grid)
    total = Traffic()
    strategy = _Recorded(prepared.strategy, run, before)
    judge = _judge_of(prepared)
    arrays = pack(initial_arrays(prepared.model)) if before is None else arrays_in(before.model)["arrays"]
    identity = {protocol.RUN: prepared.name, protocol.TOKEN: secrets.token_hex(16) if before is None else before.token}
    summary = _blank_summary(prepared)
    if "evaluated_with" in (earlier := folder.summary()) and done:
        summary["evaluated_with"] = earlier["evaluated_with"]
    for line in folder.history():
        _account(summary, total, line)
    checkpoint_every = run.engine.checkpoint_every or max(1, run.rounds // 20)
    began = mark = time.monotonic()
    spent = summary["seconds"]
    latest = done
    outside = arrays  # the model that somebody outside would use; training goes on from another with some rules
    after: Snapshot | None = None  # of the last whole round

    def record(flower_round: int, current: ArrayRecord) -> MetricRecord | None:
        nonlocal mark, latest, outside, after
        if flower_round == 0:
            return None  # Flower evaluates before the first round as well; a history has one line per round
        server_round = flower_round + done
        figures: dict[str, Any] = {}
        outside = current
        if strategy.evaluates(server_round) and strategy.traits.has_global_model:
            outside = strategy.global_model(Round(server_round, run.rounds, current, identity, metered))
        if strategy.evaluates(server_round) and judge is not None:
            figures, summary["evaluated_with"] = judge(outside, current)
        elif judge is None:  # the clients' means
            metrics = strategy.metrics
            figures = {key: metrics[f"clients_{key}"] for key in ("loss", "accuracy") if f"clients_{key}" in metrics}
        now = time.monotonic()
        line = {
            "round": server_round,
            "clients": strategy.answered,
            **figures,
            **strategy.metrics,
            **vars(metered.take()),
            "seconds": now - mark,
        }
        mark, latest = now, server_round
        folder.add_round(line)
        _account(summary, total, line)
        summary.update(seconds=spent + now - began, **strategy.notes())
        folder.write_summary(summary)
        progress.end_round(line, run.rounds)
        after = _snapshot(strategy, server_round, current, identity[protocol.TOKEN])
        if server_round % checkpoint_every == 0 or server_round == run.rounds or progress.stops:
            save(after)
        if server_round < run.rounds:
            progress.check_stop()
        return None

    def save(snapshot: Snapshot) -> None:
        """With the clients' memories where they can be read, which is between rounds."""
        folder.write_model(unpack(outside))
        folder.write_checkpoint(snapshot, _memories(grid) if isinstance(grid, LocalGrid) else None)
        strategy.kept_round = snapshot.round

    try:
        folders = check_nodes(metered, run, {**identity, protocol.ROUND: done})
        if before is not None:
            _bring_back_clients(prepared, grid, folder, before.trained, folders)
            metered.take()  # a run that goes on has asked them before
        strategy.start(
            metered,
            arrays,
            num_rounds=run.rounds - done,
            timeout=run.engine.timeout,
            train_config=ConfigRecord(dict(identity)),
            evaluate_config=ConfigRecord(dict(identity)),
            evaluate_fn=record,
        )
        summary.update(strategy.notes(), status="finished")
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        summary["status"] = "interrupted" if interrupted else "failed"
        if not interrupted:
            summary["error"] = str(error)
        raise
    finally:
        summary.update(seconds=spent + time.monotonic() - began)
        folder.write_summary(summary)
        if latest > done:
            folder.write_model(unpack(outside))
        if after is not None and not isinstance(grid, LocalGrid):
            save(after)  # nodes know what they remembered then; those of the local engine are in the middle of a round
    return summary


def _snapshot(strategy: _Recorded, server_round: int, arrays: ArrayRecord, token: str) -> Snapshot:
    memory: RecordDict | None = None
    unsaved = None
    try:
        memory = strategy.rule.state()
    except CannotSave as error:
        unsaved = str(error)
    return Snapshot(server_round, token, RecordDict({"arrays": arrays}), memory, unsaved, dict(strategy.trained))


def _memories(grid: LocalGrid) -> Iterator[tuple[int, RecordDict]]:
    return ((node, grid.read_state(node)) for node in grid.get_node_ids())


def _blank_summary(prepared: Prepared) -> dict[str, Any]:
    run = prepared.run
    return {
        "name": run.name,
        "label": run.label,
        "strategy": strategy_name(run.strategy),
        "model": run.model.name,
        "norm": run.model.norm,
        "seed": run.seed,
        "status": "running",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": 0,
        "accuracy": None,
        "best_accuracy": None,
        "loss": None,
        "seconds": 0.0,
        **_what_changes_numbers(run),
        "parameters": sum(parameter.numel() for parameter in prepared.model.parameters()),
        "device": str(prepared.device),
        "accuracy_of": _accuracy_of(prepared),
    }


def _what_changes_numbers(run: Settings) -> dict[str, Any]:
    """Options for speed's sake that are in use, and with which results differ: in the last bits, or more."""
    found: dict[str, Any] = {}
    if run.train.channels_last:
        found["memory_format"] = "channels_last"
    if run.train.precision != "float32":
        found["precision"] = run.train.precision
    return found


def _accuracy_of(prepared: Prepared) -> str:
    if not as_rule(prepared.strategy).traits.has_global_model:
        return "the clients' models, mean"
    return "the global model" if prepared.dataset is not None else "the clients' models on their test images, mean"


def _account(summary: dict[str, Any], total: Traffic, line: Mapping[str, Any]) -> None:
    """Add a round of the history to a summary."""
    total.add(Traffic(**{key: line[key] for key in vars(Traffic())}))
    summary.update(
        vars(total),
        rounds=line["round"],
        broadcast_mib_per_round=total.broadcast_bytes / line["round"] / 2**20,
    )
    summary["seconds"] += line["seconds"]
    if line.get("accuracy") is not None:
        summary.update(accuracy=line["accuracy"], loss=line["loss"])
        summary["best_accuracy"] = max(summary["best_accuracy"] or 0.0, line["accuracy"])
    for key in ("mean_iou", "clients_accuracy", "clients_own_accuracy", "clients_mean_iou"):
        if line.get(key) is not None:
            summary[key] = line[key]
    # Of each domain, where there are domains.
    of_domains = ("accuracy_", "clients_own_accuracy_")
    summary.update({key: value for key, value in line.items() if key.startswith(of_domains) and value is not None})


@dataclass(frozen=True)
class Outcome:
    folder: Path
    table: str
    page: Path
    picture: Path
    failures: tuple[str, ...]  # runs that could not go on, each with its reason

    def announce(self) -> None:
        """Print the table and where all is; raise where a run failed."""
        print(f"\n{self.table}\n\ntable: {self.page}\nplot:  {self.picture}", flush=True)
        if self.failures:
            raise RunFailed(f"{len(self.failures)} of the runs failed:\n" + "\n".join(self.failures))


def run_experiment(
    experiment: Experiment, make_grid: Any, out: Path, *, resume: bool = False, plain: bool | None = None
) -> Outcome:
    """Carry out all runs, one after the other; `make_grid(run)` is a context manager that gives each its grid."""
    prepared = prepare(experiment)
    names = [item.name for item in prepared]
    folders = [RunFolder(out / name) for name in names]
    for item, folder in zip(prepared, folders, strict=True):  # before the first trains, not before the last
        folder.check(item.run.model_dump(mode="json"), resume=resume)
    failures: list[str] = []
    rounds = sum(run.rounds for run in experiment.runs)
    with RunProgress(len(names), rounds, plain=plain) as progress:
        progress.message(f"run folders: {out.resolve()}")
        for number, (item, folder) in enumerate(zip(prepared, folders, strict=True), start=1):
            progress.check_stop()
            if resume and folder.is_finished():
                progress.skip_run(number, item.run.label, item.run.rounds)
                continue
            done = folder.begin(item.run.model_dump(mode="json"))
            progress.begin_run(number, item.run.label, item.run.rounds, done)
            try:
                with make_grid(item.run) as grid:
                    run_one(item, grid, folder, progress, done)
            except RunFailed as error:
                if len(prepared) == 1:
                    raise
                # One rule that diverges is a result too; the others are still wanted.
                failures.append(f"{item.name}: {error}")
                progress.message(f"[{number}/{len(names)}] {item.run.label}: failed: {str(error).splitlines()[0]}")
    table, page, picture = write_report([out], out)
    return Outcome(out, table, page, picture, tuple(failures))


def default_out(experiment: Experiment) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(os.environ.get("FEDBN_OUT") or "runs") / f"{experiment.name}-{stamp}"


def run_locally(experiment: Experiment, out: Path, *, resume: bool) -> Outcome:
    """All runs on the local engine."""
    app = client_app(functools.partial(client_of, experiment))

    @contextmanager
    def make_grid(run: Settings) -> Iterator[Grid]:
        workers = run.engine.workers
        if choose_device(run.engine.device).type == "cuda" or run.engine.threads > 1:
            workers = 0  # neither a GPU nor a pool of threads survives a fork
        elif workers == "auto":
            cores = os.cpu_count() or 1
            workers = cores if cores > 1 else 0
        with LocalGrid(
            app,
            run.clients,
            workers=workers,
            threads=run.engine.threads,
            state_memory=run.engine.state_memory,
        ) as grid:
            yield grid

    return run_experiment(experiment, make_grid, out, resume=resume)


def serve(grid: Grid, run_config: Mapping[str, Any]) -> Outcome:
    """What the ServerApp does: all runs of the experiment on the grid that Flower gave it."""
    experiment = from_run_config(run_config)
    counts = {run.clients for run in experiment.runs}
    if len(counts) > 1:
        raise SettingsError(f"the runs have {sorted(counts)} clients; under Flower's runtimes all must have as many")
    if hasattr(grid, "pull_interval"):
        grid.pull_interval = 0.02  # Flower's simulation looks for replies ten times a second by default
    else:
        grid = PollingGrid(grid)  # real nodes
    resume = bool(run_config.get("resume"))
    if resume and not run_config.get("out"):
        raise SettingsError("resume is true, but out is empty; give the folder of the runs to continue")
    out = Path(str(run_config.get("out") or "") or default_out(experiment)).resolve()

    @contextmanager
    def make_grid(run: Settings) -> Iterator[Grid]:
        yield grid

    return run_experiment(experiment, make_grid, out, resume=resume, plain=True)
