"""The local training loop `train` that all client rules share, its batches and its optimisers.

`SGD` is the default optimiser. Creating one of torch.optim imports PyTorch's compiler, which takes a second or more. An
experiment does it once, when it checks the settings, and its workers are forked after that.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from inspect import Parameter
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.sgd import sgd

from fedbn_flwr import named
from fedbn_flwr.batch import Value, count, each, first
from fedbn_flwr.errors import SettingsError, did_you_mean
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


# --- optimisers ---


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
        return {
            f"{slot}/{self._names[i]}": torch.as_tensor(value, device=self.parameters[self._names[i]].device)
            for i, slots in state
            for slot, value in slots.items()
        }

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

# --- by name ---

# Called with the parameters (or groups of them, as torch.optim's classes) and lr=, for instance
# torch.optim.RMSprop or functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)).
MakeOptimizer = Callable[..., torch.optim.Optimizer]
# As BNClient and `train.optimizer` have it: a name, {"name": ..., option: ...}, or a function.
OptimizerSpec = str | Mapping[str, Any] | MakeOptimizer

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_OF_OTHER_KEYS = ("lr", "momentum", "weight_decay")
_NOT_OPTIONS = {*_OF_OTHER_KEYS, "params", "parameters", "other_decay", "maximize", "differentiable"}


def make_optimizer(
    spec: OptimizerSpec,
    parameters: Mapping[str, nn.Parameter],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float | None = None,
    other_decay: Mapping[str, float] = MappingProxyType({}),
) -> LocalOptimizer:
    """The optimiser that `spec` describes: a name, a mapping of `name` and options, or a function that makes one.

    `momentum` above zero, `weight_decay` other than None and `other_decay` (that of some parameters, by name) are
    passed on; an optimiser that does not have them is refused.
    """
    given = spec if isinstance(spec, Mapping) else {"name": spec}
    options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    name: Any = options.pop("name", "sgd")
    make = name if callable(name) else _by_name(str(name))
    shown, known = getattr(name, "__name__", name), _arguments(make)
    for key, value in options.items():
        if key in _OF_OTHER_KEYS or (known and key not in known - _NOT_OPTIONS):
            hint = "it is a key of its own" if key in _OF_OTHER_KEYS else did_you_mean(key, known - _NOT_OPTIONS)
            raise SettingsError(f"optimizer: {key} (= {value!r}) is not an option of {shown}; {hint}")
    of_keys = {"momentum": momentum or None, "weight_decay": weight_decay}
    for key, setting in (*of_keys.items(), ("weight_decay", other_decay)):
        if setting and known and key not in known:
            raise SettingsError(f"optimizer {shown} has no {key}, but one is set ({setting}); leave it out")
    options |= {key: v for key, v in of_keys.items() if v is not None and (not known or key in known)}
    try:
        cls: Any = SGD if make is SGD else functools.partial(TorchOptimizer, make)
        return cls(parameters, lr, other_decay=other_decay, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise SettingsError(f"optimizer {shown}{f' with {options}' if options else ''}: {error}") from None


def check_optimizer(spec: OptimizerSpec, parameters: Mapping[str, nn.Parameter], **options: Any) -> None:
    """Raise SettingsError if the optimiser cannot be made for these parameters, or cannot take a step."""
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(spec, copies, 0.1, **options)
    try:
        optimizer.step()
    except Exception as error:
        raise SettingsError(f"optimizer {spec!r} cannot take a step: {type(error).__name__}: {error}") from error


def _by_name(name: str) -> Callable[..., Any]:
    if ":" in name:
        return named.load("optimizer", name)
    base = torch.optim.Optimizer
    known: dict[str, Callable[..., Any]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    } | {"sgd": SGD}
    if name.lower() not in known:
        raise SettingsError(f"optimizer is {name!r}; {did_you_mean(name, known)}, or module:name for your own")
    return known[name.lower()]


def decay_of(model: nn.Module, *, norm: float | None, bias: float | None) -> dict[str, float]:
    """The weight decay of the parameters that have their own: those of normalisers, and biases of other layers."""
    layers = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
    owners = {name: name.rpartition(".") for name, _ in model.named_parameters()}
    found = {name: bias for name, (_, _, own) in owners.items() if own == "bias"}
    found |= {name: norm for name, (layer, _, _) in owners.items() if layer in layers}
    return {name: decay for name, decay in found.items() if decay is not None}


def _arguments(make: Callable[..., Any]) -> set[str]:
    """The names of the arguments of `make`; none if they are unknown or any."""
    known = named.signature_of(make)
    has_any = known is None or any(each.kind is Parameter.VAR_KEYWORD for each in known.parameters.values())
    return set() if known is None or has_any else set(known.parameters)
