"""The client: a NumPyClient that trains any PyTorch model as a strategy asks.

    def make_client(context):
        return BNClient(Net(), train_loader, test_loader, lr=0.1, context=context)

`serving.client_app(make_client)` makes a ClientApp of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from torch import nn

from fedbn_flwr import seeding
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, negative_variance
from fedbn_flwr.messages.arrays import FlatArrays
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import reestimate

from .evaluation import evaluate
from .model_tensors import ModelTensors
from .node_state import NodeState, run_of
from .rules import ClientRule, LocalRound, Update, known_keys, rules_by_key
from .rules.globalmomentum import GlobalMomentum
from .training import SGD, Batch, Epochs, Loss, cross_entropy, local_batches, train

Config = Mapping[str, Any]
Metrics = dict[str, Any]  # numbers
TestSets = Iterable[Batch] | Mapping[str, Iterable[Batch]]


class BNClient(NumPyClient):
    """Trains `model` on `train_data` by SGD and evaluates it on `eval_data`.

    The server decides which arrays travel: the client loads those it is sent, and sends the same ones back.
    What it is not sent (counters of batch norm, say) stays in the node's state.

    Parameters
    ----------
    model
        Any module. Its batch norms are found by type. (Or ModelTensors, for a model that serves many clients:
        its tensors must then stay the ones that it has.)
    train_data, eval_data
        Iterables of (inputs, targets), such as a DataLoader; or, for data whose order is a function of the
        round, an object with `num_examples` and `epoch(server_round, epoch)`. `eval_data` may be several sets
        by name, or a function that makes what is to be evaluated on when it is asked for.
    lr
        The learning rate, or a function of the round.
    epochs, steps
        Length of a round: passes over `train_data`, or optimiser steps. One epoch by default.
    momentum, weight_decay
        Of SGD; momentum buffers are reset each round.
    keep_momentum
        Keep the momentum buffers from round to round, in the node's state.
    loss
        A function of (logits, targets); cross entropy by default (of pixels, without those labelled 255, where the
        model has logits for each).
    channels_last
        Train with images and filters in this memory format: faster convolutions, other last bits.
    precision
        torch.bfloat16: training passes run under PyTorch's autocast, in bfloat16 where it thinks it safe. Weights,
        their gradients, statistics and the steps of SGD stay float32, and so do evaluation and FedTAN's first step.
    seed
        Of what the model draws itself (dropout), and of a DataLoader that shuffles: both become functions of
        (seed, round, client).
    device
        Where to train; that of the model's parameters by default.
    context
        The node's Flower context: its number (`partition-id`), and its state.
    """

    def __init__(
        self,
        model: nn.Module | ModelTensors,
        train_data: Epochs | Iterable[Batch],
        eval_data: TestSets | Callable[[], TestSets] | None = None,
        *,
        lr: float | Callable[[int], float] = 0.1,
        epochs: int | None = None,
        steps: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        keep_momentum: bool = False,
        loss: Loss = cross_entropy,
        channels_last: bool = False,
        precision: torch.dtype | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        context: Context | None = None,
    ) -> None:
        if epochs is not None and steps is not None:
            raise ValueError(f"give epochs ({epochs}) or steps ({steps}), not both")
        self.train_data = train_data
        self.eval_data = eval_data
        self.lr = lr
        self.epochs = 1 if epochs is None and steps is None else epochs
        self.steps = steps
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.keep_momentum = keep_momentum
        self.loss = loss
        self.seed = seed
        self.channels_last = channels_last
        self.precision = precision
        if channels_last and isinstance(model, nn.Module):
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parts = model if isinstance(model, ModelTensors) else ModelTensors(model, device)
        self._is_fixed = isinstance(model, ModelTensors)
        self._state = NodeState(RecordDict() if context is None else context.state)
        self.partition_id = None if context is None else context.node_config.get("partition-id")
        # What draws depend on: a site without a partition has a node id.
        self._number = 0 if context is None else int(context.node_config.get("partition-id", context.node_id))

    @property
    def model(self) -> nn.Module:
        return self._parts.model

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def roles(self) -> Mapping[str, Role]:
        return self._parts.roles

    @property
    def records(self) -> RecordDict:
        """Where Flower keeps what the node remembers; each message of a layer-wise round comes with its own."""
        return self._state.records

    @records.setter
    def records(self, records: RecordDict) -> None:
        self._state.records = records

    # --- by name: what client_app calls ---

    def train_round(
        self,
        arrays: Arrays,
        config: Config,
        extras: Mapping[str, Arrays] | None = None,
        exchange: Exchange | None = None,
    ) -> Update:
        """Load `arrays` and train a round as `config` asks; `extras` are records beside them, by name.

        `exchange` carries a layer-wise step's tensors to the other clients and back.
        """
        wanted = rules_for(config)
        if self.keep_momentum:
            wanted.add(GlobalMomentum)
        with _alone(self.model):
            return self._train_round(arrays, config, {} if extras is None else extras, exchange, wanted)

    def _train_round(
        self,
        arrays: Arrays,
        config: Config,
        extras: Mapping[str, Arrays],
        exchange: Exchange | None,
        wanted: set[type[ClientRule]],
    ) -> Update:
        server_round = int(config.get(protocol.ROUND, 1))
        self._load(arrays, config)
        local = LocalRound(
            config, arrays, extras, self.model, self._state, self.num_examples, self.identity.get(protocol.PARTITION),
            exchange,
        )  # fmt: skip
        rules = sorted((rule(local) for rule in wanted), key=lambda rule: (rule.order, type(rule).__name__))
        lr = self.lr(server_round) if callable(self.lr) else self.lr
        seed = seeding.seed_for(self.seed, "model", server_round, self._number)
        self._parts.set_training()
        waiting = list(rules)  # to begin

        def begin() -> None:
            while waiting:
                waiting.pop(0).begin()

        adjust = [begin, *(rule.adjust for rule in rules)] if rules else []

        with ExitStack() as stack:
            stack.enter_context(seeding.streams(seed, self.device))
            for rule in rules:
                stack.enter_context(rule.around())
            trained = {name: p for name, p in self._parts.parameters.items() if p.requires_grad}
            local.optimizer = SGD(trained, lr, self.momentum, self.weight_decay)
            loss, _, first_batch = train(
                self.model,
                local_batches(self.train_data, server_round, epochs=self.epochs, steps=self.steps),
                local.optimizer,
                self.loss,
                device=self.device,
                adjust=adjust,
                first_step=next((found for rule in rules if (found := rule.first_gradient()) is not None), None),
                channels_last=self.channels_last,
                precision=self.precision,
            )
            begin()  # in a round without any step
        back, came = frozenset[Role]().union(*(rule.returned() for rule in rules)), set(arrays)
        sent = self._parts.taken(key for key, role in self.roles.items() if key in came or role in back)
        metrics: Metrics = {
            protocol.NUM_EXAMPLES: self.num_examples,
            protocol.TRAIN_LOSS: loss,
            protocol.BATCH_EXAMPLES: first_batch,
        }
        update = Update(sent, metrics | self.identity, {})
        # Only now, when nothing can fail any more: a round that is replayed begins where this one began.
        self._state.save("local", self._parts.taken(key for key in self.roles if key not in came))
        for rule in rules:
            rule.finish(update)
        return update

    def evaluate_round(self, arrays: Arrays, config: Config) -> Metrics:
        """Loss and accuracy of `arrays`, with what the node kept of its own, on this client's test data.

        Where there are several sets, the metrics of the second and later ones begin with their name.
        """
        rules_for(config)
        if self.eval_data is None:
            raise MessageError("this client has no data to evaluate on (eval_data was not given)")
        self._load(arrays, config)
        data = self.eval_data() if callable(self.eval_data) else self.eval_data
        sets = data if isinstance(data, Mapping) else {"": data}
        metrics: Metrics = {}
        for name, data in sets.items():
            found = evaluate(self.model, data, self.loss, self.device)
            if not metrics:
                metrics = dict(found)
            else:
                metrics |= {f"{name}-{key}": value for key, value in found.items() if key != protocol.NUM_EXAMPLES}
        return metrics | self.identity

    def statistics_round(self, arrays: Arrays, config: Config) -> Update:
        """Mean batch statistics of this client's training data under `arrays`; `num-examples` counts batches."""
        rules_for(config)
        self._load(arrays, config)
        epoch = local_batches(self.train_data, int(config.get(protocol.ROUND, 0)), epochs=1, steps=None)
        found, batches = reestimate(self.model, epoch, self.device)
        numbers = {key: value.cpu().numpy() for key, value in found.items()}
        return Update(numbers, {protocol.NUM_EXAMPLES: batches} | self.identity, {})

    # --- by position: Flower's NumPyClient ---

    def get_parameters(self, config: Config) -> list[np.ndarray]:
        taken = self._parts.taken(self._sent())
        return [value.copy() for value in taken.values()]

    def fit(self, parameters: list[np.ndarray], config: Config) -> tuple[list[np.ndarray], int, Any]:
        update = self.train_round(self._named(parameters), config)
        metrics = dict(update.metrics)
        return [value.copy() for value in update.arrays.values()], int(metrics.pop(protocol.NUM_EXAMPLES)), metrics

    def evaluate(self, parameters: list[np.ndarray], config: Config) -> tuple[float, int, Any]:
        metrics = self.evaluate_round(self._named(parameters), config)
        return metrics.pop("loss"), int(metrics.pop(protocol.NUM_EXAMPLES)), metrics

    # --- inside ---

    @property
    def identity(self) -> Metrics:
        return {} if self.partition_id is None else {protocol.PARTITION: int(self.partition_id)}

    @property
    def num_examples(self) -> int:
        data = self.train_data
        if isinstance(data, Epochs):
            return data.num_examples
        dataset = getattr(data, "dataset", None)  # a DataLoader
        if isinstance(dataset, Sized):
            return len(dataset)
        if isinstance(data, Sequence):  # batches in a list
            return sum(len(targets) for _, targets in data)
        raise TypeError(
            "how many examples does train_data hold? Give a DataLoader over a sized data set, a list of batches, or an "
            f"object with num_examples and epoch(server_round, epoch); found {type(data).__name__}"
        )

    def _sent(self) -> list[str]:
        return [key for key, role in self.roles.items() if role is not Role.COUNTER]

    def _named(self, parameters: list[np.ndarray]) -> Arrays:
        keys = self._sent()
        if len(parameters) == len(self.roles):
            keys = list(self.roles)
        if len(parameters) != len(keys):
            raise MessageError(f"received {len(parameters)} arrays, the model has {len(keys)}: {keys[0]!r} and on")
        return dict(zip(keys, parameters, strict=True))

    def _load(self, arrays: Arrays, config: Config) -> None:
        """The received arrays, and for all other keys what this node last had (or was built with)."""
        if not (self._is_fixed or self._parts.are_current()):
            self._parts = ModelTensors(self.model, self.device)
        self._state = NodeState(self.records, run_of(config))
        kept = self._state.load("local")
        if not self._parts.fits(arrays, kept):
            self._check(arrays, kept)
            kept = {key: value for key, value in kept.items() if key not in arrays}
        if negative := negative_variance(arrays):
            raise MessageError(
                f"the server sent no model: {negative}. A server optimiser (FedAdam, FedAvgM, ...) must not step "
                "statistics: wrap it as MeanStatistics(FedAdam(...))"
            )
        self._parts.load(kept)
        self._parts.load(arrays)

    def _check(self, arrays: Arrays, kept: Arrays) -> None:
        """That what came and what the node kept make up this client's model."""
        own, came = self._parts.shapes, set(arrays)
        if unknown := [key for key in arrays if key not in own]:
            raise MessageError(
                f"the server sent {unknown[0]!r}, which this client's model does not have; its keys begin "
                f"{list(own)[:3]}. Server and clients must build the same model"
            )
        absent = [key for key in own if key not in came and key not in kept]
        # A message without any array (Standalone) is meant so; one that lacks some is of another model.
        if arrays and (lacking := [key for key in absent if self.roles[key] is Role.WEIGHTS]):
            raise MessageError(
                f"the server did not send {lacking[0]!r} ({len(lacking)} such keys), and this node has none"
            )
        shapes = arrays.layout.shapes if isinstance(arrays, FlatArrays) else {key: arrays[key].shape for key in arrays}
        for key, shape in {**{key: value.shape for key, value in kept.items()}, **shapes}.items():
            if shape != own[key]:
                raise MessageError(f"{key!r} has shape {shape} in the message and {own[key]} in this client's model")


def rules_for(config: Config) -> set[type[ClientRule]]:
    """The rules that a message asks for; it is refused where it has a key of ours that no rule declares."""
    wanted, by_key = set(), rules_by_key()
    for key, value in config.items():
        if key in by_key:
            wanted |= {by_key[key]} if value else set()
        elif key.startswith(protocol.PREFIX) and key not in protocol.RUN_KEYS:
            protocol.check_known(config, known_keys())
    return wanted


_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those in the middle of a round


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Inside, no other client may train this very model: layer-wise rounds run side by side, and would mix."""
    if model in _TRAINED:
        raise MessageError(
            "another client is in the middle of a round with this very model; clients of a layer-wise round train side "
            "by side, so make_client must give each a model of its own"
        )
    _TRAINED.add(model)
    try:
        yield
    finally:
        _TRAINED.discard(model)
