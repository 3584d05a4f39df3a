"""Measures, without a step, how far the mean of the clients' gradients is from the gradient of their union.

A client with batch norm normalises by the statistics of its own batch, so the mean of the clients' gradients, along
which FedAvg moves, differs from the gradient on all their batches together. FedTAN's exchange computes the latter
exactly. In a round of `Diagnose` each client computes both for one batch and sends them back; nothing is trained. With
g_i the gradient of client i on its own, f_i the one with exchanges, and p_i its share of the examples,

    own = sum_i p_i g_i      union = sum_i p_i f_i      error = |own - union| / |union|

Both are means over the batches of several rounds. Then some rounds may train as FedAvg does, and measuring begins
again: at the initial weights errors are largest, and after long training the gradient is too small to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, cast

import numpy as np
import torch
from annotated_types import Ge
from flwr.app import Message
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Batch, Value, first
from fedbn_flwr.client.rule import ClientRule, Gradient, Key, Loss, Memo, Tensors, clone, rule_of
from fedbn_flwr.client.training import backpropagate
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, weighted_mean
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.trees import Tree

GRADIENTS = "fedbn.gradients"
OWN, UNION = "own", "union"  # records of replies
FOUND = "gradients"  # the key in summary.json


class Diagnose(FedTAN):
    """Measures the gradients of `batches` rounds, trains `warm_up` rounds as FedAvg does, and measures again.

    Accepts FedTAN's arguments too, except for `exchange`.

    Parameters
    ----------
    batches : int (default: 8)
        The rounds of each measurement; in each one a client takes one batch.
    warm_up : int (default: 1)
        The rounds of training before the second measurement; with 0 there is none.
    """

    traits = Traits(records={OWN: "weighted", UNION: "weighted"})

    @dataclass
    class Memory(FedTAN.Memory):
        # By the rounds of training before: the sums of both gradients, and the errors of single batches.
        sums: dict[int, dict[str, Arrays]] = field(default_factory=dict)
        errors: dict[int, list[float]] = field(default_factory=dict)

    memory: Memory

    def __init__(
        self, *, batches: Annotated[int, Ge(1)] = 8, warm_up: Annotated[int, Ge(0)] = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self.batches, self.warm_up = batches, warm_up
        self.traits = replace(self.traits, steps=frozenset())  # no step follows an exchange

    def trained(self, number: int) -> int | None:
        """The rounds of training before a round that measures; None for a round that trains."""
        if number <= self.batches:
            return 0
        return self.warm_up if number > self.batches + self.warm_up else None

    def config(self, round: Round) -> Config:
        return {} if self.trained(round.number) is None else {**super().config(round), GRADIENTS: True}

    def with_exchanges(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self.trained(round.number) is None else super().with_exchanges(round, messages)

    def compare(self, replies: Mapping[int, Reply], sent: Arrays, records: Iterable[str]) -> dict[int, str]:
        assert self._round is not None
        return super().compare(replies, sent, records if GRADIENTS in self._round.config else ())

    @mean_is_enough
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        if self.trained(round.number) is None:
            return super().combine(round, replies, weights)
        return {key: round.arrays[key].numpy() for key in replies[0].arrays}

    @mean_is_enough
    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        if (place := self.trained(round.number)) is None:
            return
        means = {name: weighted_mean([reply.records[name] for reply in replies], weights) for name in (OWN, UNION)}
        before = self.memory.sums.get(place, {})
        self.memory.sums[place] = {
            name: {key: value.astype(np.float64) + before.get(name, {}).get(key, 0.0) for key, value in mean.items()}
            for name, mean in means.items()
        }
        self.memory.errors.setdefault(place, []).append(apart(means[OWN], means[UNION])["error"])

    def notes(self) -> Tree:
        found = {str(place): self._found(place) for place in self.memory.sums}
        return {**super().notes(), FOUND: found} if found else super().notes()

    def _found(self, place: int) -> Tree:
        own, union = (self.memory.sums[place][name] for name in (OWN, UNION))
        layers = dict.fromkeys(key.rpartition(".")[0] for key in union)
        by_layer = {layer: apart(own, union, f"{layer}.") for layer in layers}
        errors = self.memory.errors[place]
        deviation = float(np.std(errors, ddof=1)) if len(errors) > 1 else math.nan
        one = {"mean": float(np.mean(errors)), "deviation": deviation}
        return {**apart(own, union), "of_one_batch": one, "batches": len(errors), "layers": by_layer}


def apart(own: Arrays, union: Arrays, layer: str = "") -> dict[str, float]:
    """The error of `own` relative to `union`, and the cosine of the angle between them, of a layer or of all."""
    keys = [key for key in union if key.rpartition(".")[0] + "." == layer or not layer]
    a, b = (np.concatenate([each[key].ravel().astype(np.float64) for key in keys]) for each in (own, union))
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    error = float(np.linalg.norm(a - b)) / norms[1] if norms[1] else math.nan
    return {"error": error, "cosine": float(a @ b) / math.prod(norms) if all(norms) else math.nan}


class GradientsClient(ClientRule):
    """Computes the gradient of one batch, alone and with exchanges, and takes no step."""

    keys = {
        GRADIENTS: Key("true", "send the gradients of the first batch, on its own and with exchanges; train nothing")
    }
    order = -1  # its first gradient is taken instead of FedTAN's
    trains_alone = True

    def batches(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return islice(batches, 1)

    def first_gradient(self) -> Gradient:
        exchanged: Gradient = cast(Any, rule_of(protocol.EXCHANGE))(self.local).exchanged()

        def both(model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> Tensor:
            device, seed = first(inputs).device, int(self.local.config.get(protocol.ROUND, 0))
            with seeding.streams(seed, device):  # dropout draws the same twice
                backpropagate(model, inputs, targets, loss)
            self.own = clone(_gradients(self.local.optimizer.parameters))
            model.zero_grad()
            with seeding.streams(seed, device):
                return exchanged(model, inputs, targets, loss)

        return both

    def begin(self, w: Tensors) -> Memo:
        return {OWN: {name: self.own[name] for name in w}, UNION: clone(_gradients(w))}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        torch._foreach_zero_([*g.values()])

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        records |= {name: copied(memo[name]) for name in (OWN, UNION)}


def _gradients(w: Tensors) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in w.items()}
