"""HBN (Chen, Xu, Wu, Kittler 2025, "Hybrid Batch Normalisation", ICML, https://arxiv.org/abs/2505.21877).

Clients normalise with a learnt mix of the batch's statistics and the server's (`model.norm=hbn`, see
`fedbn_flwr.norms.variants`). Statistics are not averaged over clients' models: each client measures them under the
received model, on one batch before its first step, and the server's move a little towards their union.

From the paper and the authors' code (Hongyao-Chen/HybridBN): the layer; that alpha stays on the client, while the
server's mean of it is for clients that are new; and the server's update, with N_k the images in the batch of client k:

    mu~ = sum_k N_k M_k / N     v~ = sum_k N_k (S_k + (M_k - mu~)^2) / (N - 1)     mu <- r mu~ + (1 - r) mu, v likewise

Their code sends the hybrid m and s as M_k and S_k, and the paper describes the batch's statistics; see `measure`.
Choices where this differs from their code:

- The batch is the first one of the round, whose pass the client needs anyway. Theirs is the first 64 images of the
  client, the same in each round.
- The global model is evaluated with statistics that clients measure afresh: theirs on that batch of the round's clients
  in training mode, here on all data of all clients, with layers that normalise by the batch (`HeteroBN`'s query).
- All clients take part; theirs leaves out those with fewer images than a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Gt, Le
from flwr.app import ArrayRecord

from fedbn_flwr.client.rule import MODEL, ClientRule, Key, LocalRound, Memo, Tensors
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, cast, pooled_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.norms.roles import ALPHA, MEAN, VARIANCE, Role, is_variance, key_of, of_roles, roles
from fedbn_flwr.norms.statistics import MomentRecorder
from fedbn_flwr.norms.variants import HybridBatchNorm
from fedbn_flwr.server.traits import Round, Traits
from fedbn_flwr.trees import Tree

from .fedavg import FedAvg
from .heterobn import with_measured_statistics

HYBRID = "fedbn.hbn"


class HBN(FedAvg):
    """FedAvg for hybrid batch norm, whose statistics clients measure on one batch before training.

    Accepts FedAvg's arguments too, except `bounds`.

    Parameters
    ----------
    refresh : float (default: 0.002)
        r, how far each round moves the statistics towards those that the clients measure, 0 to 1.
    measure : "hybrid" | "batch" (default: "hybrid")
        What clients send: the mix with which they normalise, as in the authors' code, or the statistics of the batch.
    statistics : "query" | "model" (default: "query")
        Evaluate the global model with statistics of all clients' data ("query"), which are queried in every round with
        an evaluation, or with its own ("model"). Clients always evaluate with its own.
    """

    breaks = dict.fromkeys(
        ("mean", "pooled"), "weights statistics by the sizes of the batches that they were measured on"
    )
    traits = Traits(client_memory=("their own alpha",))

    def __init__(
        self,
        *,
        refresh: Annotated[float, Gt(0), Le(1)] = 0.002,
        measure: Literal["hybrid", "batch"] = "hybrid",
        statistics: Literal["query", "model"] = "query",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.refresh, self.measure, self.statistics = refresh, measure, statistics
        if self.bounds is not None:
            raise SettingsError(
                "HBN weights by the sizes of the clients' batches, which bounds don't limit; leave bounds out"
            )

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if not any(role is Role.AFFINE and key.rpartition(".")[2] == ALPHA for key, role in roles(arrays).items()):
            raise SettingsError(
                "HBN trains hybrid batch norm, and the model has none; use model.norm=hbn, or "
                "convert_norm(model, 'hbn') on server and clients"
            )

    def config(self, round: Round) -> Config:
        return {HYBRID: self.measure, protocol.REPORT_BATCH: True}

    def problem(self, round: Round, reply: Reply) -> str | None:
        return number_problem(reply.metrics, protocol.BATCH_EXAMPLES)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = dict(super().combine(round, replies, weights))
        sent = of_roles(unpack(self.sent(round.arrays)), {Role.STATISTICS})
        sizes = [float(reply.metrics[protocol.BATCH_EXAMPLES]) for reply in replies]  # N_k
        n = sum(sizes)
        if not n:
            return {**model, **sent}  # no client had a batch
        measured = pooled_mean(
            [{key: reply.arrays[key].astype(np.float64) for key in sent} for reply in replies], sizes
        )
        for key, value in measured.items():
            fresh = value * n / max(n - 1, 1) if is_variance(key) else value
            model[key] = cast(self.refresh * fresh + (1 - self.refresh) * sent[key], sent[key].dtype)
        return model

    def global_model(self, round: Round) -> ArrayRecord:
        return with_measured_statistics(self, round, pooled_mean) if self.statistics == "query" else round.arrays

    def notes(self) -> Tree:
        return {**super().notes(), "refresh": self.refresh, "measure": self.measure}


class HBNClient(ClientRule):
    """Trains with the client's own alpha, and sends statistics of the first batch under the received model."""

    keys = {
        HYBRID: Key(
            "`hybrid` or `batch`", "send these statistics of the first batch, and train with the client's own alpha"
        )
    }
    trains_alone = True  # compiled passes may leave out the hooks that measure
    stored = "fedbn.alpha"  # the name of its alphas in the client's state

    def __init__(self, local: LocalRound) -> None:
        super().__init__(local)
        self.layers = {name: layer for name, layer in local.model.named_modules() if isinstance(layer, HybridBatchNorm)}
        own = local.state.load(self.stored)
        with torch.no_grad():
            for name, layer in self.layers.items():
                if (alpha := own.get(key_of(name, ALPHA))) is not None:
                    layer.alpha.copy_(torch.from_numpy(alpha.copy()))
                local.resources.callback(setattr, layer, "momentum", layer.momentum)
                layer.momentum = 0.0  # the server's statistics stay as they are during the round
        self.moments = local.resources.enter_context(closing(MomentRecorder(local.model)))

    def begin(self, w: Tensors) -> Memo:
        """Take the statistics of the first batch, whose gradient was computed under the received model."""
        self.moments.close()
        measured = self.moments.statistics()
        if self.local.config[HYBRID] == "hybrid":
            for name, layer in self.layers.items():
                for statistic, running in ((MEAN, layer.running_mean), (VARIANCE, layer.running_var)):
                    if (key := key_of(name, statistic)) in measured and running is not None:
                        measured[key] = layer.mixed(measured[key].to(running), running)
        self.measured = copied(measured)
        return {}

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        model = records[MODEL]
        measured = {key: cast(value, model[key].dtype) for key, value in self.measured.items() if key in model}
        records[MODEL] = {**model, **measured}
        alphas = {key_of(name, ALPHA): layer.alpha.detach() for name, layer in self.layers.items()}
        self.local.state.save(self.stored, copied(alphas))
