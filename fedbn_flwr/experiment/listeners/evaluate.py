"""Evaluates after a round: the global model on the server's test examples, the clients' models on the clients, and what
newcomers receive on those.

Then chooses the best round, and whether the run goes on.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client import evaluation
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.engines.worker import return_freed_memory
from fedbn_flwr.errors import FedbnError, RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import record_of, unpack
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.named import in_a_line
from fedbn_flwr.norms.roles import split
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.results.folder.clients import by_metric, spread
from fedbn_flwr.results.metric_key import CLIENTS, MetricKey
from fedbn_flwr.results.units import in_units
from fedbn_flwr.strategies import evaluation_round
from fedbn_flwr.tasks import ROUNDING, SHARES, goodness, title_of
from fedbn_flwr.trees import Draft, Tree

from ..data import rows_by_domain
from ..parts import Parts, plain_loss
from .dynamics import Dynamics
from .listener import ByClient, FinishedRound, Listener, Running

_IDENTIFIERS = (protocol.PARTITION, protocol.BATCH_EXAMPLES)


class Evaluate(Listener):
    """On a CPU, `threads` evaluate a batch each at the same time; results do not depend on their number."""

    after = (Dynamics,)  # which frees the memory of the replies

    def __init__(self, prepared: Parts, threads: int = 1) -> None:
        run = prepared.run
        self.prepared = prepared
        self.threads = threads if prepared.device.type == "cpu" else 1
        self.rule = prepared.rule
        traits, given, on_server = self.rule.traits, run.evaluate.clients, run.evaluate.server
        self.asks_clients = bool(traits.local) or not on_server if given is None else bool(given)
        # Else means over all test examples of the clients are metrics of the run.
        self.only_own = given == "own" and on_server and traits.has_global_model and not run.evaluate.domains
        self.loss = plain_loss(run, prepared.task)
        self.names = (*prepared.task.reported, *map(evaluation.name_of, prepared.metrics))

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        if not finished.is_evaluated:
            return finished
        try:
            return self._evaluate(running, finished)
        except FedbnError:
            raise
        except (ValueError, RuntimeError) as error:
            raise RunFailed(f"round {finished.number}: the model cannot be evaluated: {in_a_line(error)}") from error

    def _evaluate(self, running: Running, finished: FinishedRound) -> FinishedRound:
        clients, line = self._on_clients(running, finished) if self.asks_clients else ({}, {})
        model = finished.model
        if self.rule.traits.has_global_model:
            config = ConfigRecord({**running.config})
            round = evaluation_round(self.rule, finished.number, finished.arrays, config, running.grid)
            model = self.rule.global_model(round)
        if self.rule.traits.has_global_model and (dataset := self.prepared.dataset) is not None:
            line |= self._on_server(running, dataset, model, queried=bool(set(model) - set(finished.arrays)))
        else:
            means = {key: line.get(str(MetricKey(key, CLIENTS))) for key in ("loss", *self.names)}
            line |= {key: value for key, value in means.items() if value is not None}
        return finished.with_metrics(line, clients, model=model)

    def _on_server(self, running: Running, dataset: DataSet, model: ArrayRecord, *, queried: bool) -> Draft:
        """Metrics on all test examples, on each domain, and on held-out examples unless clients report them."""
        run, agreed = self.prepared.run, running.agreed
        self.units = self.prepared.units(agreed)
        batches = functools.partial(
            TestBatches, normalise=self.prepared.normalise(agreed), batch_size=run.evaluate.batch_size
        )
        torch.set_num_threads(run.engine.threads)  # the last bits can depend on it
        test = batches(dataset.test)
        used = self._load(model, test, queried)
        line = self._measure(test) | {"evaluated_with": used}
        for domain, rows in rows_by_domain(dataset).items():
            measured = self._measure(batches(dataset.test, indices=rows))
            line |= {str(MetricKey(name, domain=domain)): measured[name] for name in self.names if name in measured}
        if run.evaluate.validation and not self.asks_clients:
            held = batches(dataset.train, indices=self.prepared.held_out)
            self._load(model, held, queried)
            measured = self._measure(held)
            keys = measured.keys() & {"loss", self.prepared.task.main}
            line |= {str(MetricKey(key, "validation")): measured[key] for key in sorted(keys, reverse=True)}
        if self.threads > 1:  # the workers need the memory now, and a model is built in less time than it evaluates
            self.prepared.release()
            return_freed_memory()
        return line

    def _on_clients(self, running: Running, finished: FinishedRound) -> tuple[ByClient, Draft]:
        """The values of each client, and the metrics over all of them."""
        asked = {protocol.OWN_TESTS: True} if self.only_own else {}
        config = ConfigRecord({**running.config, **asked})
        messages = self.rule.configure_evaluate(finished.number, finished.arrays, config, running.grid)
        self.rule.base.evaluation.impossible = self._impossible
        if not running.run.rounds:  # the evaluation is all that the run is for
            self.rule.base.evaluation.needed = running.run.clients
        replies = running.grid.send_and_receive(messages, timeout=running.run.engine.timeout)
        if not replies:
            return {}, {}
        metrics = self.rule.aggregate_evaluate(finished.number, replies)
        answers = self.rule.base.evaluation.answers()
        values = {client: values_in(reply.metrics, "test_examples") for client, reply in answers.items()}
        means = {history_name(key): value for key, value in (metrics or {}).items() if not isinstance(value, list)}
        overall = {**means, **own_means(values), **spreads(values)}
        held_out = validation_means(values, self.prepared.task.main)
        if self.only_own:
            values = {client: _of_own(metrics) for client, metrics in values.items()}
            overall = _of_own(overall)
        shown = {name: value for name, value in overall.items() if MetricKey.parse(name).whose != "validation"}
        return values, {str(MetricKey(name, CLIENTS)): value for name, value in shown.items()} | held_out

    def _impossible(self, reply: Reply) -> str | None:
        """Why a client of an experiment cannot have measured this, or None."""
        values = {MetricKey.parse(key): value for key, value in values_in(reply.metrics, "test_examples").items()}
        examples, main = values.get(MetricKey("examples", "own"), 0), self.prepared.task.main
        lacks = examples and MetricKey(main, "own") not in values and not self.prepared.run.rounds
        if examples % 1 or lacks:
            return f"it has {examples:g} test examples and reports {shown([*reply.metrics])}; expected {main} too"
        shares = [(key.name, value) for key, value in values.items() if key.name in SHARES and value > 1 + ROUNDING]
        return f"its {title_of(shares[0][0])} is {shares[0][1]:g}; expected 0 to 1" if shares else None

    def _load(self, arrays: ArrayRecord, examples: TestBatches, queried: bool) -> str:
        """Load the global model to evaluate it on `examples`; returns the statistics that its batch norms use."""
        model = self.prepared.model
        state = {key: torch.from_numpy(value.copy()) for key, value in unpack(arrays).items()}
        model.load_state_dict(state, strict=False)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if norms and self.prepared.run.evaluate.statistics == "reestimated":
            found = reestimate(model, examples, self.prepared.device, pooled=True, threads=self.threads)[0]
            model.load_state_dict(found, strict=False)
            return "reestimated"
        if queried:  # the strategy asked clients for statistics
            return "query"
        return "model" if all(norm.running_mean is not None for norm in norms) else "batch"

    def _measure(self, examples: TestBatches) -> Draft:
        prepared = self.prepared
        with in_units(prepared.model, self.units):
            measured = evaluation.evaluate(
                prepared.model,
                examples,
                self.loss,
                prepared.device,
                prepared.metrics,
                task=prepared.task,
                threads=self.threads,
            )
        return {key.replace("-", "_"): value for key, value in measured.items() if key != protocol.NUM_EXAMPLES}


class Unseen(Listener):
    """Evaluates the clients that never train (`evaluate.unseen`), as newcomers that receive a model.

    A newcomer has no batch norm of its own. With `mean` it receives the server's, which is the mean of the clients',
    also where a strategy keeps batch norm on them (FedBN, SiloBN). With `batch` it then measures the statistics of its
    training inputs, without labels, as AdaBN does (Li et al. 2016, https://arxiv.org/abs/1603.04779). With `own` it
    receives what the strategy sends to a new client, whose other arrays are those of a newly built model. Strategies
    that keep nothing on the clients give the same with `own` as with `mean`.
    """

    after = (Evaluate,)

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        for way in running.run.evaluate.unseen.statistics if finished.is_evaluated else ():
            values = self._newcomers(running, finished, way)
            means = {name: statistics.fmean(of_name.values()) for name, of_name in by_metric(values).items()}
            finished = finished.with_metrics(means, values)
        return finished

    def _newcomers(self, running: Running, finished: FinishedRound, way: str) -> ByClient:
        """The metrics of each newcomer with statistics of this kind, on its own test examples if it has some."""
        prepared = running.prepared
        given = ConfigRecord({**running.config})
        round = evaluation_round(prepared.rule, finished.number, finished.arrays, given, running.grid)
        config = {**round.config, protocol.ROUND: finished.number}
        config |= {protocol.REESTIMATE: True} if way == "batch" else {}
        arrays, kept = finished.arrays, prepared.rule.traits.local
        if way == "own" and kept:
            arrays = record_of(split(arrays, prepared.rule.traits.local_keys(arrays))[1])
            config[protocol.KEPT] = protocol.join(kept)
        replies = running.ask(
            f"round {finished.number}, newcomers",
            MessageType.EVALUATE,
            lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES),
            arrays,
            config,
            nodes=running.federation.unseen,
        )
        names = dict.fromkeys((prepared.task.main, *prepared.task.reported, *map(evaluation.name_of, prepared.metrics)))
        found = {client: values_in(reply.metrics, "test_examples") for client, reply in replies.items()}
        return {
            client: {
                str(MetricKey(name, f"unseen_{way}")): value
                for name in names
                if (value := values.get(str(MetricKey(name, "own")), values.get(name))) is not None
            }
            for client, values in found.items()
        }


class Peak:
    """The best round by a metric of the history, the first of equal ones; a better one differs by more than `least`."""

    def __init__(self, key: MetricKey, least: float = 0.0) -> None:
        self.key, self.least = key, least
        self.best, self.round = -math.inf, 0

    def rises(self, line: Tree) -> bool:
        """Whether the round of this line is the best so far; a round that was not measured is not."""
        found = goodness(self.key.name, line.get(str(self.key), math.nan))
        if is_better := found > self.best + self.least:
            self.best, self.round = found, line["round"]
        return is_better


class Choose(Listener):
    """Chooses the best round by the validation examples, and ends a run in which nothing gets better (`patience`).

    Both follow from the history alone, so a resumed run chooses the same round, and ends after the same one.
    """

    after = (Evaluate,)

    def __init__(self, prepared: Parts, lines: Iterable[Tree]) -> None:
        """`lines` are those of the history so far."""
        self.run, main = prepared.run, prepared.task.main
        options, validation = self.run.evaluate, MetricKey(main, "validation")
        self.best = Peak(validation)
        # Without validation examples, patience is with the main metric of the run.
        self.latest = Peak(validation if options.validation else MetricKey(main), options.min_difference)
        for line in lines:
            self._is_best(line)

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        if self._is_best(finished.line):
            has_model = running.prepared.rule.traits.has_global_model
            finished = finished.with_metrics({"best_round": finished.number}, is_best=has_model)
        why = self.ended(finished.number) if finished.is_evaluated else ""
        return replace(finished, stopped=why, is_last=finished.is_last or bool(why))

    def _is_best(self, line: Tree) -> bool:
        self.latest.rises(line)
        return bool(self.run.evaluate.validation) and self.best.rises(line)

    def ended(self, number: int) -> str:
        """Why the run ends after this round before its last one, in words; empty if it goes on."""
        patience, peak = self.run.evaluate.patience, self.latest
        if patience is None or not peak.round or number - peak.round < patience or number >= self.run.rounds:
            return ""
        by = f" by more than {peak.least:g}" if peak.least else ""
        value = f"{peak.key.title} {abs(peak.best):.4g}"
        return f"stopped after round {number}: none was better{by} than round {peak.round} ({value})"


# --- the values of each client, their means and their spread ---


def history_name(key: str) -> str:
    """The name in the history of a metric in a message."""
    return str(MetricKey.of_message(key))


def values_in(metrics: Config, examples: str, named: Callable[[str], str] = history_name) -> dict[str, float]:
    """The numbers in the metrics of a reply, under the names of `clients.jsonl`; num-examples is `examples`."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    count = {examples: numbers.pop(protocol.NUM_EXAMPLES)} if protocol.NUM_EXAMPLES in numbers else {}
    return {**renamed({key: numbers[key] for key in numbers if key not in _IDENTIFIERS}, named), **count}


def renamed(metrics: Mapping[str, float], named: Callable[[str], str]) -> dict[str, float]:
    """The metrics by their new names; one that has its name already takes precedence."""
    ordered = sorted(metrics, key=lambda key: named(key) == history_name(key))
    return {named(key): metrics[key] for key in ordered}


def _of_own(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics on a client's own examples; the others are on the same ones if it was asked for nothing else."""
    return {name: value for name, value in metrics.items() if MetricKey.parse(name).whose in ("own", "validation")}


def own_means(clients: ByClient) -> dict[str, float]:
    """Means over the clients' own test examples, with equal weights, over the clients that have some (of a domain)."""
    metrics = {MetricKey.parse(name): values.values() for name, values in by_metric(clients).items()}
    own = {key: values for key, values in metrics.items() if key.whose == "own" and not key.is_count}
    return {str(key): statistics.fmean(values) for key, values in own.items()}


def validation_means(clients: ByClient, main: str) -> dict[str, float]:
    """Validation loss and main metric over the examples that all clients hold out; empty if none reports any."""
    examples, *names = (str(MetricKey(name, "validation")) for name in dict.fromkeys(("examples", "loss", main)))
    held = by_metric({client: own for client, own in clients.items() if own.get(examples) and own.keys() >= {*names}})
    total = math.fsum(held[examples].values()) if held else 0.0
    return {
        name: math.fsum(value * held[examples][client] for client, value in held[name].items()) / total
        for name in names
        if held
    }


def spreads(clients: ByClient) -> dict[str, float]:
    """Deviation and worst tenth of each metric over the clients, with equal weights."""
    metrics = by_metric(clients)
    found: dict[str, float] = {}
    for name, values in metrics.items():
        key = MetricKey.parse(name)
        # Without `evaluate.domains` a metric of a single domain exists only on own test examples.
        if str(key.of("") if key.whose == "own" else key) in metrics and not key.is_count:
            measured = spread([*values.values()], name)
            over = {"std": measured.deviation, "worst_tenth": measured.worst_tenth}
            found |= {str(replace(key, statistic=statistic)): value for statistic, value in over.items()}
    return found
