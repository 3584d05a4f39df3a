"""The client: a NumPyClient that trains any PyTorch model as a strategy asks.

    def make_client(context):
        return BNClient(Net(), train_loader, test_loader, lr=0.1, context=context)

`serving.client_app(make_client)` makes a ClientApp of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from torch import nn

from fedbn_flwr import seeding
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.step import Exchange, LayerwiseStep
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, negative_variance
from fedbn_flwr.messages.arrays import FlatArrays
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import reestimate

from .evaluation import evaluate
from .model_tensors import ModelTensors, copied
from .node_state import NodeState
from .training import (
    SGD,
    AdaptiveClip,
    Adjust,
    Batch,
    Correction,
    Epochs,
    Gradient,
    Loss,
    Proximal,
    cross_entropy,
    local_batches,
    train,
)

Config = Mapping[str, Any]
Metrics = dict[str, Any]  # numbers
TestSets = Iterable[Batch] | Mapping[str, Iterable[Batch]]


@dataclass(frozen=True)
class Update:
    """What a client answers: arrays by name, metrics, and records beside the arrays."""

    arrays: Arrays
    metrics: Metrics
    extras: dict[str, Arrays]


class BNClient(NumPyClient):
    """Trains `model` on `train_data` by SGD and evaluates it on `eval_data`.

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
        Of SGD. Momentum starts anew each round, unless
    keep_momentum
        the node keeps its momentum from round to round.
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
        The node's Flower context: its number (`partition-id`), and the home of what it keeps between rounds.

    The server decides which arrays travel: the client loads those it is sent, and sends the same ones back.
    What it is not sent (counters of batch norm, say) stays in the node's state.
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
        self.records = RecordDict() if context is None else context.state
        self.partition_id = None if context is None else context.node_config.get("partition-id")

    @property
    def model(self) -> nn.Module:
        return self._parts.model

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def roles(self) -> Mapping[str, Role]:
        return self._parts.roles

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
        protocol.check_known(config)
        with _alone(self.model):
            return self._train_round(arrays, config, {} if extras is None else extras, exchange)

    def _train_round(
        self, arrays: Arrays, config: Config, extras: Mapping[str, Arrays], exchange: Exchange | None
    ) -> Update:
        server_round = int(config.get(protocol.ROUND, 1))
        run = protocol.run_of(config)
        self._load(arrays, run)
        lr = self.lr(server_round) if callable(self.lr) else self.lr
        seed = seeding.seed_for(self.seed, "model", server_round, int(self.partition_id or 0))
        self._parts.set_training()
        frozen = protocol.frozen_roles(config)
        with seeding.streams(seed, self.device), frozen_norm(self.model, frozen) if frozen else nullcontext():
            named = {name: p for name, p in self._parts.parameters.items() if p.requires_grad}
            optimizer = SGD(named, lr, self.momentum, self.weight_decay)
            adjust: list[Adjust] = []
            control = self._control(named, config, extras, run)
            if control is not None:
                adjust.append(control)
            if mu := float(config.get(protocol.PROXIMAL_MU, 0.0)):
                adjust.append(Proximal(named.values(), mu))
            if clip := float(config.get(protocol.CLIP, 0.0)):
                adjust.append(AdaptiveClip(self._clipped(named), clip))
            if exchange is None:
                self._set_momentum(optimizer, named, config, extras, run)
            else:  # between gradient and step: such a round is sent its records with its last message
                adjust.append(_once(lambda: self._set_momentum(optimizer, named, config, extras, run)))
            loss, _, first_batch = train(
                self.model,
                local_batches(self.train_data, server_round, epochs=self.epochs, steps=self.steps),
                optimizer,
                self.loss,
                device=self.device,
                adjust=adjust,
                first_step=self._first_step(config, exchange),
                channels_last=self.channels_last,
                precision=self.precision,
            )
        back, came = protocol.returned_roles(config), set(arrays)
        sent = self._parts.taken(key for key, role in self.roles.items() if key in came or role in back)
        # Only now, when nothing can fail any more: a round that is replayed begins where this one began.
        state = NodeState(self.records, run)
        state.save("local", self._parts.taken(key for key in self.roles if key not in came))
        more: dict[str, Arrays] = {}
        if control is not None:
            more[protocol.CONTROL_RECORD] = self._finish_control(control, named, extras, state)
        if config.get(protocol.MOMENTUM) or self.keep_momentum:
            buffers = {**state.load("momentum"), **_momentum_of(optimizer, named)}
            if config.get(protocol.MOMENTUM):  # that of parameters that do not travel stays here as they do
                more[protocol.MOMENTUM_RECORD] = {name: buffers.pop(name) for name in named if name in arrays}
            state.save("momentum", buffers)
        metrics: Metrics = {
            protocol.NUM_EXAMPLES: self.num_examples,
            protocol.TRAIN_LOSS: loss,
            protocol.BATCH_EXAMPLES: first_batch,
        }
        return Update(sent, metrics | self.identity, more)

    def evaluate_round(self, arrays: Arrays, config: Config) -> Metrics:
        """Loss and accuracy of `arrays`, with what the node kept of its own, on this client's test data.

        Where there are several sets, the metrics of the second and later ones begin with their name.
        """
        protocol.check_known(config)
        if self.eval_data is None:
            raise MessageError("this client has no data to evaluate on (eval_data was not given)")
        self._load(arrays, protocol.run_of(config))
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
        protocol.check_known(config)
        self._load(arrays, protocol.run_of(config))
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

    # What rules add to a round.

    def _first_step(self, config: Config, exchange: Exchange | None) -> Gradient | None:
        mode = config.get(protocol.COHORT)
        if mode is None:
            return None
        if exchange is None:
            raise MessageError(f"{protocol.COHORT!r} needs a ClientApp made by fedbn_flwr.client_app")
        return LayerwiseStep(
            exchange,
            fused=mode == "fused",
            backward=bool(config.get(protocol.COHORT_BACKWARD, True)),
            examples=self.num_examples,
            partition=None if self.partition_id is None else int(self.partition_id),
        )

    def _control(
        self, named: Mapping[str, nn.Parameter], config: Config, extras: Mapping[str, Arrays], run: str | None
    ) -> Correction | None:
        """SCAFFOLD's correction c - c_i; both are zero at first."""
        if not config.get(protocol.CONTROL):
            return None
        server, own = extras.get(protocol.CONTROL_RECORD, {}), self._own_control(extras, NodeState(self.records, run))
        return Correction({p: _tensor(server.get(name), p) - _tensor(own.get(name), p) for name, p in named.items()})

    def _own_control(self, extras: Mapping[str, Arrays], state: NodeState) -> Arrays:
        """c_i; zero in a first round, when the server has no c: what the node holds then is of another training."""
        return state.load("control") if protocol.CONTROL_RECORD in extras else {}

    def _finish_control(
        self, control: Correction, named: Mapping[str, nn.Parameter], extras: Mapping[str, Arrays], state: NodeState
    ) -> Arrays:
        """Keep the new c_i, and return its change."""
        before = self._own_control(extras, state)
        new = copied({name: control.mean(p) for name, p in named.items()})
        state.save("control", {**before, **new})  # what is frozen now keeps its own
        return {name: value - before[name] if name in before else value for name, value in new.items()}

    def _set_momentum(
        self,
        optimizer: SGD,
        named: Mapping[str, nn.Parameter],
        config: Config,
        extras: Mapping[str, Arrays],
        run: str | None,
    ) -> None:
        if not (config.get(protocol.MOMENTUM) or self.keep_momentum):
            return
        buffers = dict(NodeState(self.records, run).load("momentum"))
        if config.get(protocol.MOMENTUM):
            if not self.momentum:
                raise MessageError("the server maintains momentum, but this client trains without (momentum is 0)")
            buffers.update(extras.get(protocol.MOMENTUM_RECORD, {}))
        for name, parameter in named.items():
            if name in buffers:
                optimizer.buffers[name] = _tensor(buffers[name], parameter)

    def _clipped(self, named: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """All parameters but those of the last linear layer."""
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        exempt = {id(p) for p in linear[-1].parameters()} if linear else set()
        return [p for p in named.values() if id(p) not in exempt]

    def _sent(self) -> list[str]:
        return [key for key, role in self.roles.items() if role is not Role.COUNTER]

    def _named(self, parameters: list[np.ndarray]) -> Arrays:
        keys = self._sent()
        if len(parameters) == len(self.roles):
            keys = list(self.roles)
        if len(parameters) != len(keys):
            raise MessageError(f"received {len(parameters)} arrays, the model has {len(keys)}: {keys[0]!r} and on")
        return dict(zip(keys, parameters, strict=True))

    def _load(self, arrays: Arrays, run: str | None) -> None:
        """The received arrays, and for all other keys what this node last had (or was built with)."""
        if not (self._is_fixed or self._parts.are_current()):
            self._parts = ModelTensors(self.model, self.device)
        kept = NodeState(self.records, run).load("local")
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


def _tensor(value: np.ndarray | None, like: nn.Parameter) -> torch.Tensor:
    """`value` in the form of a parameter; zeros where there is none."""
    if value is None:
        return torch.zeros_like(like)
    return torch.from_numpy(np.array(value)).to(device=like.device, dtype=like.dtype)


def _momentum_of(optimizer: SGD, named: Mapping[str, nn.Parameter]) -> Arrays:
    """Momentum by name; zero where a parameter had no gradient yet."""
    found = optimizer.buffers
    return copied({name: found[name] if name in found else torch.zeros_like(p) for name, p in named.items()})


def _once(action: Adjust) -> Adjust:
    todo = [action]

    def run() -> None:
        if todo:
            todo.pop()()

    return run
