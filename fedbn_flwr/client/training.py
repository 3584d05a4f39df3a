"""The local training loop `train` that all client rules share, its batches, learning rates and optimisers.

A loaded round is a value, `Training`, and `train` returns its result. An engine may set another `Trainer`, which trains
the rounds of several clients at once.

`SGD` is the default optimiser. Creating another one imports PyTorch's compiler, which takes a second or more. An
experiment does it once, when it checks the settings, and its workers are forked after that.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import Value, count, each, first
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.extensions import part
from fedbn_flwr.messages.aggregate import Array
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import frozen_norm

Batch = Any  # what the loader yields: (inputs, targets), see fedbn_flwr.batch
Loss = Callable[[Any, Any], Tensor]  # of what the model returns, and the targets
# (model, inputs, targets, loss_fn): the loss. `Gradient` also sets the gradients of the parameters, and detaches it.
Forward = Callable[[nn.Module, Value, Value, Loss], Tensor]
Gradient = Callable[[nn.Module, Value, Value, Loss], Tensor]
Tensors = Mapping[str, Tensor]  # by the names of parameters
Memo = Mapping[str, Tensors]  # what a client rule remembers from its `begin` to its `finish`, by name

ONE_VALUE = "more than 1 value per channel"  # PyTorch's words on batch norm of one example


class Epochs(Protocol):
    """Training data whose order is a function of round and epoch; a plain iterable (a DataLoader) works too."""

    num_examples: int

    def epoch(self, server_round: int, epoch: int) -> Iterator[Batch]: ...


def size_of(data: Epochs | Iterable[Batch], pairs: Callable[[Iterable[Batch]], Iterable[Batch]]) -> int:
    """The number of examples in training data; `pairs` turns its batches into (inputs, targets)."""
    if hasattr(data, "num_examples"):
        return int(data.num_examples)
    # A sampler may choose some of the examples. One of batches hides the other, which then has the whole data set.
    batches = None if getattr(data, "batch_size", None) else getattr(data, "batch_sampler", None)
    places = [(batches, "sampler")] if batches is not None else [(data, "sampler"), (data, "dataset")]
    if batches is None and getattr(data, "batch_size", 1) is None:  # a data set of batches
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


def loss_of(model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss) -> Tensor:
    return loss_fn(model(inputs), targets)


def backpropagate(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss_fn: Loss,
    *,
    precision: torch.dtype | None = None,
    forward: Forward = loss_of,
) -> Tensor:
    """Set the gradients of the parameters, and return the detached loss.

    With a `precision` (bfloat16) PyTorch's autocast selects the operations that run in it; weights, statistics and
    steps stay as they are. `forward` computes the loss.
    """
    with nullcontext() if precision is None else torch.autocast(first(inputs).device.type, precision):
        loss = forward(model, inputs, targets, loss_fn)
    loss.backward()
    return loss.detach()


class Rule(Protocol):
    """What training needs of a client rule, which describes it (`fedbn_flwr.client.rule.ClientRule`)."""

    elementwise: ClassVar[bool]
    alone: bool

    def loss(self, inputs: Any, targets: Any, outputs: Any, loss: Tensor) -> Tensor: ...

    def begin(self, w: Tensors) -> Memo: ...

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None: ...


@dataclass(eq=False)
class Training:
    """A client's round between loading the model and replying: all that its training needs, and nothing of Flower.

    Parameters
    ----------
    model, device
        In training mode, with the values that the round begins with; `device` has it.
    batches
        Pairs (inputs, targets); one step each.
    optimizer
        It has the parameters that train, by name, without those of the roles `frozen`, and may clip the gradients.
    rules
        Client rules, which change the gradients before each step in this order.
    gradient, first_step
        How loss and gradients of a batch are computed, and perhaps in another way for the first one (FedTAN's
        exchange with the other clients).
    seed
        For all random draws, also of the batches.
    """

    model: nn.Module
    batches: Iterable[Batch]
    optimizer: LocalOptimizer
    loss: Loss
    device: torch.device
    rules: Sequence[Rule] = ()
    frozen: frozenset[Role] = frozenset()
    gradient: Gradient = backpropagate
    first_step: Gradient | None = None
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The result of a `Training`, besides the values of its model's tensors."""

    loss: float  # the mean over examples
    first_batch: int  # the examples in it
    steps: int
    memos: Sequence[Memo]  # of each rule


def train(training: Training) -> Trained:
    """One optimiser step per batch."""
    running = steps(training)
    with seeding.streams(training.seed, training.device):
        while True:
            try:
                next(running)
            except StopIteration as end:
                return cast(Trained, end.value)


def steps(training: Training) -> Generator[None, None, Trained]:
    """Train, and pause after each step, so that a trainer can take the steps of several clients in turn.

    The caller seeds the global random generators.
    """
    optimizer, gradient = training.optimizer, training.first_step or training.gradient
    changing = [rule for rule in training.rules if rule.alone]
    frozen = frozen_norm(training.model, training.frozen) if training.frozen else nullcontext()
    # On the device: reading the loss would make the host wait for the device at every step.
    total = torch.zeros((), device=training.device, dtype=torch.float64)
    to_device = operator.methodcaller("to", training.device, non_blocking=True)
    done = examples = first_batch = 0
    with frozen:
        for inputs, targets in training.batches:
            inputs, targets = each(to_device, inputs), each(to_device, targets)
            optimizer.zero_grad()
            size = count(inputs)
            loss = _changed(training.loss, changing, inputs) if changing else training.loss
            total += gradient(training.model, inputs, targets, loss) * size
            if not done:
                memos, first_batch, gradient = _memos(training), size, training.gradient
            if training.rules:
                _adjust(training, memos)
            optimizer.step()
            done, examples = done + 1, examples + size
            yield
        optimizer.zero_grad()  # frees the gradients, which take as much memory as the model
        return Trained(float(total) / max(examples, 1), first_batch, done, memos if done else _memos(training))


def _changed(loss_fn: Loss, rules: Sequence[Rule], inputs: Value) -> Loss:
    """The loss of a batch with these inputs, as the rules change it."""

    def loss_of(outputs: Any, targets: Value) -> Tensor:
        loss = loss_fn(outputs, targets)
        for rule in rules:
            loss = rule.loss(inputs, targets, outputs, loss)
        return loss

    return loss_of


@torch.no_grad()
def _memos(training: Training) -> list[Memo]:
    return [rule.begin(training.optimizer.parameters) for rule in training.rules]


@torch.no_grad()
def _adjust(training: Training, memos: Sequence[Memo]) -> None:
    """A function of its own, so that no name holds the gradients while the next ones are computed."""
    w = training.optimizer.parameters
    g = {name: parameter.grad for name, parameter in w.items() if parameter.grad is not None}
    for rule, memo in zip(training.rules, memos, strict=True):
        rule.adjust(w, g, memo)


Trainer = Callable[[Training], Trained]  # leaves the new values in the model's tensors

# The trainer of the current thread, which an engine may replace while it serves a message.
TRAINER: ContextVar[Trainer] = ContextVar("trainer", default=train)


# --- learning rates of a round, by its number and the number of rounds ---


def step_rate(now: int, rounds: int, lr: float, milestones: Sequence[float], gamma: float) -> float:
    """`lr`, multiplied by `gamma` after each milestone, which is a round or, below 1, a fraction of all rounds."""
    # 0.29 * 100 is 28.999999999999996; without the correction round 29 would come after the milestone.
    ends = [end * rounds + 1e-9 if end < 1 else end for end in milestones]
    return lr * float(gamma ** sum(now > end for end in ends))


def cosine_rate(now: int, rounds: int, lr: float) -> float:
    """Half a cosine from `lr` in the first round to zero in the round after the last."""
    return lr * 0.5 * (1 + math.cos(math.pi * (now - 1) / rounds))


# --- optimisers ---


class SGD(torch.optim.SGD):
    """torch.optim.SGD without the decorators of its methods, and without checks of the parameters.

    The decorators import PyTorch's compiler, which takes more than a second in every worker process. The checks, in
    every round, take longer than loading the weights, and the parameters of a module pass them.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group})

    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class LocalOptimizer:
    """An optimiser of torch.optim as `torch`, with its parameters and its state by name.

    `clip` is the largest norm of the gradients in a step, if any.
    """

    def __init__(
        self, make: MakeOptimizer, parameters: Mapping[str, nn.Parameter], clip: float | None, /, **options: object
    ) -> None:
        self.parameters, self.clip = dict(parameters), clip
        self.torch = make([*self.parameters.values()] or [{"params": []}], **options)
        if not isinstance(self.torch, Optimizer):
            raise TypeError(f"it returned a {type(self.torch).__name__}; expected a torch.optim.Optimizer")
        self.zero_grad = self.torch.zero_grad

    def step(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.torch.step()

    def state(self) -> Mapping[str, Tensor]:
        """What the optimiser remembers, by a name that does not change between rounds."""
        return {
            f"{slot}/{name}": torch.as_tensor(value, device=parameter.device)
            for name, parameter in self.parameters.items()
            for slot, value in self.torch.state.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Begin with a state that `state` returned in an earlier round; other entries are ignored."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        counted = itertools.chain.from_iterable(group["params"] for group in self.torch.param_groups)  # by torch.optim
        numbers = {names[parameter]: number for number, parameter in enumerate(counted) if parameter in names}
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if name in numbers:
                slots.setdefault(numbers[name], {})[slot] = torch.from_numpy(value.copy())
        if slots:  # casts to each parameter's dtype and device
            self.torch.load_state_dict({**self.torch.state_dict(), "state": slots})


# --- by name ---

# Called with the parameters and lr=, for instance
# torch.optim.RMSprop or functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)).
MakeOptimizer = Callable[..., Optimizer]
# As BNClient and `train.optimizer` have it: a name, {"name": ..., option: ...}, or a function.
OptimizerSpec = str | Mapping[str, object] | MakeOptimizer


def make_optimizer(
    spec: OptimizerSpec,
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float | None = None,
    clip: float | None = None,
) -> LocalOptimizer:
    """The optimiser that `spec` describes: a name, a mapping of `name` and options, or a function that makes one.

    `momentum` above zero and `weight_decay` other than None are passed on; an optimiser that does not have them is
    refused.
    """
    given = spec if isinstance(spec, Mapping) else {"name": spec}
    options: dict[str, object] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    name: Any = options.pop("name", "sgd")
    make, shown = name if callable(name) else _by_name(str(name)), getattr(name, "__name__", name)
    if keys := sorted(options.keys() & {"lr", "momentum", "weight_decay"}):
        raise SettingsError(f"optimizer: {keys[0]} is not an option of {shown}; it is a key of its own")
    options |= {"momentum": momentum} if momentum else {}
    options |= {} if weight_decay is None else {"weight_decay": weight_decay}
    try:
        return LocalOptimizer(make, parameters, clip, lr=lr, **options)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        signature = named.signature_of(make)
        known = f"; its arguments are {', '.join(signature.parameters)}" if signature else ""
        raise SettingsError(f"optimizer {shown} with {options}: {error}{known}") from None


def check_optimizer(spec: OptimizerSpec, parameters: Mapping[str, nn.Parameter], **options: Any) -> None:
    """Raise SettingsError if the optimiser cannot be made for these parameters, or cannot take a step."""
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(spec, copies, 0.1, **options)
    try:
        optimizer.step()
    except (Exception, SystemExit) as error:
        raise SettingsError(f"optimizer {spec!r} cannot take a step: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a client trains in each of its rounds: the arguments of `BNClient` with these names."""

    lr: float | Callable[[int], float]
    epochs: int | None
    steps: int | None
    optimizer: OptimizerSpec
    momentum: float
    weight_decay: float | None
    keep_momentum: bool
    clip: float | None
    precision: torch.dtype | None
    compile: bool

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give epochs ({self.epochs}) or steps ({self.steps}), not both")
        for name, given in (("epochs", self.epochs), ("steps", self.steps)):
            if given is not None and (not isinstance(given, int | np.integer) or given < 0):
                raise ValueError(f"{name} is {given!r}; expected an integer, zero or more")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip!r}; expected a norm above zero, or None")

    @property
    def makes_steps(self) -> bool:
        return 0 not in (self.epochs, self.steps)

    def batches(self, data: Epochs | Iterable[Batch], server_round: int) -> Iterator[Batch]:
        """The batches of a round; one epoch by default."""
        epochs = 1 if self.epochs is None and self.steps is None else self.epochs
        return local_batches(data, server_round, epochs=epochs, steps=self.steps)

    def optimizer_of(
        self, parameters: Mapping[str, nn.Parameter], server_round: int, factor: float = 1.0
    ) -> LocalOptimizer:
        """The optimiser of a round; `factor` scales its learning rate."""
        lr = self.lr(server_round) if callable(self.lr) else self.lr
        return make_optimizer(
            self.optimizer,
            parameters,
            lr * factor,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip,
        )

    def gradient(self, batch_size: int | None, *, plain: bool) -> Gradient:
        """How passes compute gradients, compiled if the recipe says so and they need not be `plain`."""
        gradient = functools.partial(backpropagate, precision=self.precision)
        return part("passes", "compiled")(gradient, batch_size) if self.compile and not plain else gradient


def _by_name(name: str) -> MakeOptimizer:
    if ":" in name:
        return named.load("optimizer", name)
    if name.lower() not in (known := _optimizers()):
        raise SettingsError(f"optimizer is {name!r}; {did_you_mean(name, known)}, or module:name for your own")
    return known[name.lower()]


@functools.cache
def _optimizers() -> Mapping[str, MakeOptimizer]:
    """The optimisers of torch.optim, by name in lower case."""
    return {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    } | {"sgd": functools.partial(SGD, foreach=True)}  # fewer operations also on a CPU
