"""The local training loop `train` that all client rules share, its batches and its optimisers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedbn_flwr.batch import Value, count, each, first
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Array
from fedbn_flwr.models.tensors import tensor_like

Batch = Any  # what the loader yields: (inputs, targets), see fedbn_flwr.batch
Loss = Callable[[Any, Any], Tensor]  # of what the model returns, and the targets
# (model, inputs, targets, loss_fn): sets the gradients of the parameters and returns the detached loss.
Gradient = Callable[[nn.Module, Value, Value, Loss], Tensor]
Adjust = Callable[[], Any]
Compiled = Callable[[Value, Value], Tensor]  # (inputs, targets): the loss


class Epochs(Protocol):
    """Training data whose order is a function of round and epoch; a plain iterable (a DataLoader) works too."""

    num_examples: int

    def epoch(self, server_round: int, epoch: int) -> Iterator[Batch]: ...


def by_decay(
    parameters: Mapping[str, nn.Parameter], weight_decay: float | None, other_decay: Mapping[str, float]
) -> dict[float | None, dict[str, nn.Parameter]]:
    """The parameters in groups of one weight decay; `other_decay` is that of some parameters, by name."""
    groups: dict[float | None, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(other_decay.get(name, weight_decay), {})[name] = parameter
    return groups


class SGD:
    """Gives the same bits as torch.optim.SGD; has `parameters` by name and their momentum in `buffers` by name.

    It calls PyTorch's functional SGD, since creating an optimizer of torch.optim imports PyTorch's compiler, which
    takes more than a second in every worker process.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float | None = None,
        *,
        dampening: float = 0.0,
        nesterov: bool = False,
        other_decay: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if nesterov and (not momentum or dampening):
            raise ValueError(f"nesterov needs a momentum (found {momentum}) and no dampening (found {dampening})")
        if not 0 <= dampening <= 1:
            raise ValueError(f"dampening is {dampening}; expected 0 to 1")
        self.parameters, self.momentum = dict(parameters), momentum
        self.buffers: dict[str, Tensor] = {}
        self._options: Any = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        self._groups = by_decay(self.parameters, weight_decay, other_decay)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for weight_decay, group in self._groups.items():
            trained = {name: parameter for name, parameter in group.items() if parameter.grad is not None}
            buffers = [self.buffers.get(name) for name in trained]
            sgd(
                list(trained.values()),
                [parameter.grad for parameter in trained.values() if parameter.grad is not None],
                buffers,  # None entries are replaced by new buffers
                foreach=True,
                weight_decay=weight_decay or 0.0,
                maximize=False,
                **self._options,
            )
            self.buffers |= {name: buffer for name, buffer in zip(trained, buffers, strict=True) if buffer is not None}

    def state(self) -> Mapping[str, Tensor]:
        """What the optimiser remembers, by a name that does not change between rounds."""
        return self.buffers

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Begin with a state that `state` returned in an earlier round; other entries are ignored."""
        self.buffers |= {name: tensor_like(state[name], p) for name, p in self.parameters.items() if name in state}


class TorchOptimizer:
    """An optimiser of torch.optim, with its parameters and state by name, as SGD has them."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        *,
        other_decay: Mapping[str, float] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.parameters = dict(parameters)
        groups: Any = [
            {"params": [*group.values()]} | ({} if decay is None else {"weight_decay": decay})
            for decay, group in by_decay(self.parameters, None, other_decay).items()
        ]
        self.optimizer = make(groups if other_decay else [*self.parameters.values()], lr=lr, **options)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned a {type(self.optimizer).__name__}; expected a torch.optim.Optimizer")
        self.zero_grad, self.step = self.optimizer.zero_grad, self.optimizer.step
        own = {parameter: name for name, parameter in self.parameters.items()}
        # The optimiser numbers the parameters in the order of its groups.
        self._names = [own[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def state(self) -> Mapping[str, Tensor]:
        """What the optimiser remembers, by a name that does not change between rounds."""
        state = self.optimizer.state_dict()["state"].items()
        found = {f"{slot}/{self._names[i]}": value for i, slots in state for slot, value in slots.items()}
        if wrong := {key: value for key, value in found.items() if not isinstance(value, Tensor)}:
            key, value = wrong.popitem()
            raise SettingsError(
                f"keep_momentum cannot save the state of {type(self.optimizer).__name__}: "
                f"{key.partition('/')[0]!r} is a {type(value).__name__}; expected tensors only"
            )
        return {key: value.to(self.parameters[key.partition("/")[2]].device) for key, value in found.items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Begin with a state that `state` returned in an earlier round; other entries are ignored."""
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if name in self.parameters:
                slots.setdefault(self._names.index(name), {})[slot] = torch.from_numpy(value.copy())
        if slots:  # casts to each parameter's dtype and device
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})


LocalOptimizer = SGD | TorchOptimizer


def size_of(data: Epochs | Iterable[Any], pairs: Callable[[Iterable[Any]], Iterable[Batch]]) -> int:
    """The number of examples in training data; `pairs` turns its batches into (inputs, targets)."""
    if hasattr(data, "num_examples"):
        return int(data.num_examples)
    for part in ("sampler", "dataset"):  # of a DataLoader; a sampler may choose some of the examples
        if isinstance(sized := getattr(data, part, None), Sized):
            return len(sized)
    if isinstance(data, Sequence):  # batches in a list
        return sum(count(inputs) for inputs, _ in pairs(data))
    raise TypeError(
        f"the number of examples in train_data, a {type(data).__name__}, is unknown; expected a DataLoader over a "
        "data set with a length, a list of batches, or an object with num_examples and epoch(server_round, epoch)"
    )


def local_batches(
    data: Epochs | Iterable[Batch], server_round: int, *, epochs: int | None, steps: int | None
) -> Iterator[Batch]:
    """The batches of one round: `epochs` passes over the data, or `steps` batches over any number of passes."""

    def batches() -> Iterator[Batch]:
        for epoch in itertools.count() if epochs is None else range(epochs):
            batch = None
            for batch in data.epoch(server_round, epoch) if hasattr(data, "epoch") else data:
                yield batch
            if batch is None:
                raise ValueError("the training data yielded no batch")

    return itertools.islice(batches(), steps)


def backpropagate(
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss_fn: Loss,
    *,
    precision: torch.dtype | None = None,
    compiled: Compiled | None = None,
) -> Tensor:
    """Set the gradients of the parameters, and return the detached loss.

    With a `precision` (bfloat16) PyTorch's autocast selects the operations that run in it; weights, statistics and
    steps stay as they are. `compiled` computes the loss instead of calling the model and `loss_fn`.
    """
    with nullcontext() if precision is None else torch.autocast(first(inputs).device.type, precision):
        loss = compiled(inputs, targets) if compiled else loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: LocalOptimizer | torch.optim.Optimizer,
    loss_fn: Loss,
    *,
    device: torch.device,
    adjust: Sequence[Adjust] = (),
    first_step: Gradient | None = None,
    gradient: Gradient = backpropagate,
) -> tuple[float, int]:
    """One optimiser step per batch; returns the mean loss over examples, and the first batch's size.

    `adjust` are functions that change the gradients between the backward pass and the step, in this order (a proximal
    term, control variates, clipping). `first_step` computes loss and gradients of the first batch instead of `gradient`
    (FedTAN's exchange with the other clients). The caller sets the model to training mode and freezes parts of it.
    """
    # On the device: reading the loss would make the host wait for the device at every step.
    total = torch.zeros((), device=device, dtype=torch.float64)
    examples = first = 0
    to_device = operator.methodcaller("to", device, non_blocking=True)
    for inputs, targets in batches:
        inputs, targets = each(to_device, inputs), each(to_device, targets)
        optimizer.zero_grad()
        size = count(inputs)
        total += (gradient if examples or not first_step else first_step)(model, inputs, targets, loss_fn) * size
        for change in adjust:
            change()
        optimizer.step()
        examples += size
        first = first or examples
    optimizer.zero_grad()  # frees the gradients, which take as much memory as the model
    return float(total) / max(examples, 1), first
