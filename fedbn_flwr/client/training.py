"""The local training loop `train` that all client rules share, and its batches.

A loaded round is a value, `Training`, and `train` returns its result. An engine may set another `Trainer`, which trains
the rounds of several clients at once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Outputs, Value, count, first, map_tensors
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import frozen_norm

from .optimizers import LocalOptimizer
from .rule import Batch, ClientRule, Gradient, Loss, Memo, Tensors

Forward = Callable[[nn.Module, Value, Value, Loss], Tensor]  # (model, inputs, targets, loss): returns the loss

ONE_VALUE = "more than 1 value per channel"  # in PyTorch's error for batch norm with one example


class Epochs(Protocol):
    """Training data whose order depends on round and epoch; any iterable, such as a DataLoader, works too."""

    num_examples: int

    def epoch(self, server_round: int, epoch: int) -> Iterator[Batch]: ...


def count_examples(data: Epochs | Iterable[Batch], pairs: Callable[[Iterable[Batch]], Iterable[Batch]]) -> int:
    """The number of examples in training data; `pairs` turns its batches into (inputs, targets)."""
    if hasattr(data, "num_examples"):
        return int(data.num_examples)
    # A sampler may choose some of the examples. With a batch_sampler, the loader's own sampler has the whole data set.
    batches = None if getattr(data, "batch_size", None) else getattr(data, "batch_sampler", None)
    places = [(batches, "sampler")] if batches is not None else [(data, "sampler"), (data, "dataset")]
    if batches is None and getattr(data, "batch_size", 1) is None:  # the data set consists of batches
        places = []
    for owner, attribute in places:
        if isinstance(sized := getattr(owner, attribute, None), Sized):
            return len(sized)
    if isinstance(data, Sequence):  # batches in a list
        return sum(count(inputs) for inputs, _ in pairs(data))
    raise TypeError(
        f"the number of examples in train_data, a {type(data).__name__}, is unknown; expected a DataLoader over a "
        "data set of examples with a length (its batch_sampler, if any, needs a `sampler` with a length), a list of "
        "batches, or an object with num_examples, which a DataLoader may have too, and epoch(server_round, epoch)"
    )


def epoch_of(data: Epochs | Iterable[Batch], server_round: int, epoch: int) -> Iterable[Batch]:
    """One pass over the data; the numbers of a round's passes begin at 0."""
    return data.epoch(server_round, epoch) if hasattr(data, "epoch") else data


def reseed(loader: object, seed: int) -> None:
    """Seed the generators of a DataLoader and its samplers; other data have none."""
    batches = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            generator.manual_seed(seed)


def local_batches(
    data: Epochs | Iterable[Batch], server_round: int, *, epochs: int | None, steps: int | None
) -> Iterator[Batch]:
    """The batches of one round: `epochs` passes over the data, or `steps` batches over any number of passes."""

    def batches() -> Iterator[Batch]:
        for epoch in itertools.count() if epochs is None else range(epochs):
            batch = None
            for batch in epoch_of(data, server_round, epoch):
                yield batch
            if batch is None:
                raise ValueError("the training data yielded no batch")

    return itertools.islice(batches(), steps)


def compute_loss(model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss) -> Tensor:
    return loss_fn(model(inputs), targets)


def backpropagate(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss_fn: Loss,
    *,
    precision: torch.dtype | None = None,
    forward: Forward = compute_loss,
) -> Tensor:
    """Set the gradients of the parameters, and return the detached loss.

    With a `precision` (bfloat16) PyTorch's autocast selects the operations that run in it; weights, statistics and
    steps stay as they are. `forward` computes the loss.
    """
    with nullcontext() if precision is None else torch.autocast(first(inputs).device.type, precision):
        loss = forward(model, inputs, targets, loss_fn)
    loss.backward()
    return loss.detach()


@dataclass(eq=False)
class Training:
    """A client's round between loading the model and replying: all that its training needs, and nothing of Flower.

    Parameters
    ----------
    model, device
        The model, in training mode and with the values that the round begins with, and where it is.
    batches
        Returns the pairs (inputs, targets) of the round, one for each step. Every call returns the same ones if the
        global generators are seeded in the same way.
    optimizer
        Has the parameters that train, by name (none of the roles `frozen`), and may clip the gradients.
    rules
        Client rules, which change the gradients before each step in this order.
    gradient, first_step
        `gradient` computes the loss and gradients of a batch. `first_step`, if it is given, does so for the first batch
        (FedTAN exchanges with the other clients there).
    records
        The records of arrays that the rules have; the last message of a layer-wise round adds some.
    seed
        For all random draws, including the order of the examples.
    """

    model: nn.Module
    batches: Callable[[], Iterable[Batch]]
    optimizer: LocalOptimizer
    loss: Loss
    device: torch.device
    rules: Sequence[ClientRule] = ()
    frozen: frozenset[Role] = frozenset()
    gradient: Gradient = backpropagate
    first_step: Gradient | None = None
    records: dict[str, Arrays] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The result of a `Training`, in addition to the new values of its model's tensors."""

    loss: float  # the mean over examples
    first_batch: int  # the number of examples in the first batch
    steps: int
    memos: Sequence[Memo]  # one for each rule


def train(training: Training) -> Trained:
    """Take one optimiser step per batch."""
    optimizer, gradient = training.optimizer, training.first_step or training.gradient
    changing = [rule for rule in training.rules if type(rule).loss is not ClientRule.loss]
    frozen = frozen_norm(training.model, training.frozen) if training.frozen else nullcontext()
    # On the device: reading the loss would make the host wait for the device at every step.
    total = torch.zeros((), device=training.device, dtype=torch.float64)
    to_device = operator.methodcaller("to", training.device, non_blocking=True)
    done = examples = first_batch = 0
    with seeding.streams(training.seed, training.device), frozen:
        for inputs, targets in training.batches():
            inputs, targets = map_tensors(to_device, inputs), map_tensors(to_device, targets)
            optimizer.zero_grad()
            size = count(inputs)
            loss = _loss_with_rules(training.loss, changing, inputs) if changing else training.loss
            total += gradient(training.model, inputs, targets, loss) * size
            if not done:
                memos, first_batch, gradient = _memos(training), size, training.gradient
            if training.rules:
                _adjust(training, memos)
            optimizer.step()
            done, examples = done + 1, examples + size
        optimizer.zero_grad()  # frees the gradients, which take as much memory as the model
        return Trained(float(total) / max(examples, 1), first_batch, done, memos if done else _memos(training))


def _loss_with_rules(loss_fn: Loss, rules: Sequence[ClientRule], inputs: Value) -> Loss:
    """The loss function for a batch with these inputs: the client's own, as the rules change it."""

    def compute_loss(outputs: Outputs, targets: Value) -> Tensor:
        loss = loss_fn(outputs, targets)
        for rule in rules:
            loss = rule.loss(inputs, targets, outputs, loss)
        return loss

    return compute_loss


@torch.no_grad()
def _memos(training: Training) -> list[Memo]:
    return [begun(rule, training.optimizer.parameters) for rule in training.rules]


def begun(rule: ClientRule, w: Tensors) -> Memo:
    """What the rule's `begin` returns for the received ones of these parameters; TypeError if it is no memo."""
    memo = rule.begin({name: value for name, value in w.items() if name in rule.local.received})
    if not isinstance(memo, Mapping):
        raise TypeError(f"{type(rule).__name__}.begin returned {memo!r}; expected a dict, which may be empty")
    return memo


@torch.no_grad()
def _adjust(training: Training, memos: Sequence[Memo]) -> None:
    """A function of its own, so that no name holds the gradients while the next ones are computed."""
    w = training.optimizer.parameters
    g = {name: parameter.grad for name, parameter in w.items() if parameter.grad is not None}
    for rule, memo in zip(training.rules, memos, strict=True):
        rule.adjust(w, g, memo)


Trainer = Callable[[Training], Trained]  # trains, and leaves the new values in the model's tensors

# The trainer of the current thread, which an engine may replace while it serves a message.
TRAINER: ContextVar[Trainer] = ContextVar("trainer", default=train)
