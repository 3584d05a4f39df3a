"""Evaluates after a round: the global model on the server's test examples, and the clients' models on the clients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr import strategies
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.metrics import key_of
from fedbn_flwr.client.training import cross_entropy
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.engines.worker import return_freed_memory
from fedbn_flwr.errors import FedbnError, RunFailed
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.norms.statistics import reestimate

from ..data import normalisation_of, rows_by_domain
from ..parts import Parts
from .listener import Listener, Round, Running
from .of_clients import ByClient, name_of, own_means, spreads, validation_means, values_of


class Evaluate(Listener):
    """`threads` evaluate on a CPU, a batch at a time each; the figures do not depend on their number."""

    def __init__(self, prepared: Parts, threads: int = 1) -> None:
        run, dataset = prepared.run, prepared.dataset
        self.prepared = prepared
        self.threads = threads if prepared.device.type == "cpu" else 1
        self.rule = prepared.rule
        only_by_clients = self.rule.traits.personal or not run.evaluate.server
        self.asks_clients = only_by_clients if run.evaluate.clients is None else run.evaluate.clients
        self.loss = prepared.loss or cross_entropy
        self.metrics = prepared.metrics
        self.names = [name_of(key_of(metric)) for metric in self.metrics]
        self.test: TestBatches | None = None
        if dataset is not None and self.rule.traits.has_global_model:
            normalisation = normalisation_of(run, dataset)
            test_of = functools.partial(TestBatches, dataset.test, normalisation, run.evaluate.batch_size)
            self.test = test_of()
            self.domains = {name: test_of(rows) for name, rows in rows_by_domain(dataset).items()}
        self.validation: TestBatches | None = None  # None: clients report it, if there is any
        if run.evaluate.validation and dataset is not None and not self.asks_clients:
            normalisation = normalisation_of(run, dataset)
            self.validation = TestBatches(dataset.train, normalisation, run.evaluate.batch_size, prepared.held_out)

    def on_round(self, running: Running, at: Round) -> Round:
        if not at.is_evaluated:
            return at
        try:
            return self._evaluate(running, at)
        except FedbnError:
            raise
        except (ValueError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunFailed(f"round {at.number}: the model cannot be evaluated: {reason}") from error

    def _evaluate(self, running: Running, at: Round) -> Round:
        run = running.run
        clients, line = self._on_clients(running, at) if self.asks_clients else ({}, {})
        model = at.model
        if self.rule.traits.has_global_model:
            asked = strategies.Round(at.number, run.rounds, at.arrays, running.identity, running.grid)
            model = self.rule.global_model(asked)
        if self.test is not None:
            torch.set_num_threads(run.engine.threads)  # the last bits can depend on it
            running.grid.report("test sets evaluated", 0, 1 + len(self.domains))
            queried = bool(set(model) - set(at.arrays))
            used = self._load(model, self.test, queried)
            line |= self._measure(self.test) | {"evaluated_with": used}
            names = ("accuracy", *self.names)
            for domain, test in self.domains.items():
                measured = self._measure(test)
                line |= {f"{name}_{domain}": value for name, value in measured.items() if name in names}
            if self.validation is not None:
                self._load(model, self.validation, queried)
                measured = self._measure(self.validation)
                line |= {f"validation_{key}": measured[key] for key in ("loss", "accuracy")}
            if self.threads > 1:  # the workers need the memory now, and a model is built in less time than it evaluates
                self.prepared.release()
                return_freed_memory()
        else:
            means = {key: line.get(f"clients_{key}") for key in ("loss", "accuracy", *self.names)}
            line |= {key: value for key, value in means.items() if value is not None}
        return at.with_figures(line, clients, model=model)

    def _on_clients(self, running: Running, at: Round) -> tuple[ByClient, dict[str, Any]]:
        """The values of each client, and the figures of all."""
        config = ConfigRecord(dict(running.identity))
        messages = self.rule.configure_evaluate(at.number, at.arrays, config, running.grid)
        replies = gate(running.grid.send_and_receive(messages, timeout=running.run.engine.timeout))
        if not replies:
            return {}, {}
        metrics = self.rule.aggregate_evaluate(at.number, replies)
        used = self.rule.leaf.used
        values = values_of((reply for reply in replies if reply.metadata.src_node_id in used), "test_examples")
        means = {name_of(key): value for key, value in (metrics or {}).items() if not isinstance(value, list)}
        figures = {**means, **own_means(values), **spreads(values)}
        by_clients = {f"clients_{name}": value for name, value in figures.items() if not name.startswith("validation_")}
        return values, by_clients | validation_means(values)

    def _load(self, arrays: ArrayRecord, examples: TestBatches, queried: bool) -> str:
        """Load the global model to evaluate it on `examples`; returns the statistics that its batch norms use."""
        model = self.prepared.model
        state = {key: torch.from_numpy(value.copy()) for key, value in unpack(arrays).items()}
        model.load_state_dict(state, strict=False)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if norms and self.prepared.run.evaluate.statistics == "reestimated":
            statistics = reestimate(model, examples, self.prepared.device, pooled=True, threads=self.threads)[0]
            model.load_state_dict(statistics, strict=False)
            return "reestimated"
        if queried:  # the strategy asked clients for statistics
            return "query"
        return "model" if all(norm.running_mean is not None for norm in norms) else "batch"

    def _measure(self, examples: TestBatches) -> dict[str, Any]:
        model, device = self.prepared.model, self.prepared.device
        figures = evaluate(model, examples, self.loss, device, self.metrics, threads=self.threads)
        figures.pop("num-examples")
        return {key.replace("-", "_"): value for key, value in figures.items()}
