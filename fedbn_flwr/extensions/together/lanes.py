"""Several clients at once on a GPU: each trains a replica of the network on a CUDA stream of its own.

The kernels of a small network occupy a small part of a GPU. Those of several streams run at the same time, and they are
the same kernels, so the results are the same too. That needs `train.compile`, which launches all kernels of a step at
once; otherwise Python is still busy with the first client's step when the GPU has computed it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import map_tensors
from fedbn_flwr.client.training import Training, steps
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.models.identity import plain_attributes

from .waiting import Waiting, fill, leave_alone, tensors_of


@dataclass(eq=False)
class Replica:
    """A copy of a network for one client at a time, and the stream on which it trains."""

    model: nn.Module
    stream: torch.cuda.Stream | None  # None on a CPU
    used: bool = False

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


# Replicas stay for later rounds, whose recorded passes then need no new recording.
_replicas: WeakKeyDictionary[nn.Module, list[Replica]] = WeakKeyDictionary()
_drawing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # networks whose passes draw random numbers


@dataclass(eq=False)
class Lane(Waiting):
    """A round in a replica of its network."""

    replica: Replica
    own: Training = field(init=False)  # the same round, of the replica
    received: list[Tensor] = field(init=False)  # the values of the network that the round begins with

    def __post_init__(self) -> None:
        training, model = self.training, self.replica.model
        with seeding.streams(training.seed, training.device):
            training.batches = [
                (map_tensors(self._to_device, inputs), map_tensors(self._to_device, targets))
                for inputs, targets in training.batches
            ]
        self.received = [tensor.detach().clone() for tensor in tensors_of(training.model)]
        fill(model, self.received)
        own_parameters = zip(training.model.parameters(), model.parameters(), strict=True)
        memo: dict[int, object] = {id(parameter): own for parameter, own in own_parameters}
        self.own = replace(training, model=model, optimizer=copy.deepcopy(training.optimizer, memo))
        self._use(self.own)
        self.replica.used = True  # last, since loading the batches may fail

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.training.device, non_blocking=True)

    def _use(self, training: Training) -> None:
        """Let the client rules see the optimiser of this training."""
        for rule in training.rules:
            rule.local.optimizer = training.optimizer

    def restore(self) -> None:
        self.replica.used = False
        if self.trained is None:
            self._use(self.training)
        fill(self.training.model, self.received if self.trained is None else tensors_of(self.replica.model))


def no_lane(training: Training) -> str | None:
    """Why a round must train alone; None if it may have a lane."""
    if isinstance(training.first_step, LayerwiseStep):
        return "the first step of a round exchanges statistics"
    if any(rule.trains_alone for rule in training.rules):
        return "a client rule has a loss of its own, or changes the model"
    return "its passes draw random numbers" if training.model in _drawing else None


def lane_of(training: Training) -> Lane | str:
    """The round in a lane, or why its client must train alone."""
    return no_lane(training) or Lane(training, _free_replica(training))


def _free_replica(training: Training) -> Replica:
    replicas, kind = _replicas.setdefault(training.model, []), _kind(training.model)
    for known in replicas:
        if not known.used and _kind(known.model) == kind:
            return known
    stream = torch.cuda.Stream(training.device) if training.device.type == "cuda" else None
    replicas.append(Replica(copy.deepcopy(training.model), stream))
    return replicas[-1]


def _kind(model: nn.Module) -> tuple[object, ...]:
    """What decides how a network trains, besides the values of its tensors."""
    return plain_attributes(model), *(parameter.requires_grad for parameter in model.parameters())


def train_lanes(lanes: Sequence[Lane]) -> None:
    """Train the clients of the lanes, each a step in turn; a lane that fails trains alone in `finished`.

    If a network has drawn random numbers, all train alone, because those draws must not depend on the others.
    """
    if not lanes:
        return
    device = lanes[0].training.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), seeding.preserve_rng():
        before = seeding.drawn(device)
        _take_turns(lanes)
        if seeding.drawn(device) != before:
            for lane in lanes:
                lane.trained = None
                _drawing[lane.training.model] = True


def _take_turns(lanes: Sequence[Lane]) -> None:
    streams = [lane.replica.stream for lane in lanes if lane.replica.stream is not None]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    running = {lane: steps(lane.own) for lane in lanes}
    while running:
        for lane in [*running]:
            try:
                with lane.replica.on_stream():
                    next(running[lane])
            except StopIteration as end:
                lane.trained = end.value
            except Exception as error:
                leave_alone([lane], error)
            else:
                continue
            del running[lane]
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
