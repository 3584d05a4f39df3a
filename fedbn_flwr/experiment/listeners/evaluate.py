"""Evaluates after a round: the global model on the server's test images, and the clients' models on the clients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.metrics import key_of
from fedbn_flwr.client.training import cross_entropy
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.strategies import Round

from ..data import normalisation_of, rows_by_domain
from ..prepare import Prepared
from ..training import metrics_of, own_loss
from .base import Listener, RunState
from .clients import name_of, own_means, spreads, values_of


class Evaluate(Listener):
    def __init__(self, prepared: Prepared) -> None:
        run, dataset = prepared.run, prepared.dataset
        self.prepared = prepared
        self.rule = prepared.rule
        only_by_clients = self.rule.traits.personal or not run.evaluate.server
        self.asks_clients = only_by_clients if run.evaluate.clients is None else run.evaluate.clients
        self.loss = own_loss(run) or cross_entropy
        self.metrics = metrics_of(run)
        self.names = [name_of(key_of(metric)) for metric in self.metrics]
        self.test: TestBatches | None = None
        if dataset is not None and self.rule.traits.has_global_model:
            normalisation = normalisation_of(run, dataset)
            test_of = functools.partial(TestBatches, dataset.test, normalisation, run.evaluate.batch_size)
            self.test = test_of()
            self.domains = {name: test_of(rows) for name, rows in rows_by_domain(dataset).items()}

    def on_round(self, state: RunState) -> None:
        run = state.run
        if not state.is_evaluated:
            return
        if self.asks_clients:
            state.line |= self._on_clients(state)
        if self.rule.traits.has_global_model:
            state.model = self.rule.global_model(
                Round(state.round, run.rounds, state.arrays, state.identity, state.grid)
            )
        if self.test is not None:
            state.grid.report("test sets evaluated", 0, 1 + len(self.domains))
            state.line |= self._on_server(self.test, state.model, queried=bool(set(state.model) - set(state.arrays)))
        else:
            means = {key: state.line.get(f"clients_{key}") for key in ("loss", "accuracy", *self.names)}
            state.line |= {key: value for key, value in means.items() if value is not None}

    def _on_clients(self, state: RunState) -> dict[str, Any]:
        config = ConfigRecord(dict(state.identity))
        messages = self.rule.configure_evaluate(state.round, state.arrays, config, state.grid)
        replies = list(state.grid.send_and_receive(messages, timeout=state.run.engine.timeout))
        if not replies:
            return {}
        metrics = self.rule.aggregate_evaluate(state.round, replies)
        values = values_of(replies, "test_images")
        for client, measured in values.items():
            state.clients.setdefault(client, {}).update(measured)
        means = {name_of(key): value for key, value in (metrics or {}).items()}
        return {f"clients_{name}": value for name, value in {**means, **own_means(values), **spreads(values)}.items()}

    def _on_server(self, test: TestBatches, arrays: ArrayRecord, queried: bool) -> dict[str, Any]:
        """Figures of the global model, `accuracy_DOMAIN` included, and the statistics that its batch norms used."""
        model, device = self.prepared.model, self.prepared.device
        state = {key: torch.from_numpy(value.copy()) for key, value in unpack(arrays).items()}
        model.load_state_dict(state, strict=False)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        used = "model" if all(norm.running_mean is not None for norm in norms) else "batch"
        if queried:  # the strategy asked clients for statistics
            used = "query"
        if norms and self.prepared.run.evaluate.statistics == "reestimated":
            model.load_state_dict(reestimate(model, test, device, pooled=True)[0], strict=False)
            used = "reestimated"
        figures = evaluate(model, test, self.loss, device, self.metrics)
        figures.pop("num-examples")
        for domain, domain_test in self.domains.items():
            of_domain = evaluate(model, domain_test, self.loss, device, self.metrics)
            names = ("accuracy", *map(key_of, self.metrics))
            figures |= {f"{name}_{domain}": of_domain[name] for name in names if name in of_domain}
        return {key.replace("-", "_"): value for key, value in figures.items()} | {"evaluated_with": used}
