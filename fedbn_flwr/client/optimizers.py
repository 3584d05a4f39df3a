"""The optimisers of torch.optim by name, with their parameters and state by name; `training.SGD` is the default one.

Creating an optimiser of torch.optim imports PyTorch's compiler, which takes a second or more. An experiment does it
once, when it checks the settings, and its workers are forked after that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.aggregate import Array

from .training import SGD, LocalOptimizer, by_decay

# Called with the parameters (or groups of them, as torch.optim's classes) and lr=, for instance
# torch.optim.RMSprop or functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)).
MakeOptimizer = Callable[..., torch.optim.Optimizer]
# As BNClient and `train.optimizer` have it: a name, {"name": ..., option: ...}, or a function.
OptimizerSpec = str | Mapping[str, Any] | MakeOptimizer

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_OF_OTHER_KEYS = ("lr", "momentum", "weight_decay")
_NOT_OPTIONS = {*_OF_OTHER_KEYS, "params", "parameters", "other_decay", "maximize", "differentiable"}


class TorchOptimizer:
    """An optimiser of torch.optim, with its parameters and state by name."""

    def __init__(
        self,
        make: MakeOptimizer,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        *,
        other_decay: Mapping[str, float] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.parameters = dict(parameters)
        groups: Any = list(self.parameters.values())
        if other_decay:
            groups = [
                {"params": [*group.values()]} | ({} if decay is None else {"weight_decay": decay})
                for decay, group in by_decay(self.parameters, None, other_decay).items()
            ]
        self.optimizer = make(groups, lr=lr, **options)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned a {type(self.optimizer).__name__}; expected a torch.optim.Optimizer")
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(self.optimizer).__name__} evaluates the loss several times in a step, and a local step does it "
                "once"
            )
        self.zero_grad, self.step = self.optimizer.zero_grad, self.optimizer.step
        own = {parameter: name for name, parameter in self.parameters.items()}
        # The optimiser numbers the parameters in the order of its groups.
        self._names = [own[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def state(self) -> Mapping[str, Tensor]:
        found = {
            f"{slot}/{self._names[number]}": value
            for number, slots in self.optimizer.state_dict()["state"].items()
            for slot, value in slots.items()
        }
        for key, value in found.items():
            if not isinstance(value, Tensor):
                raise SettingsError(
                    f"keep_momentum cannot save the state of {type(self.optimizer).__name__}: "
                    f"{key.partition('/')[0]!r} is a {type(value).__name__}; expected tensors only"
                )
        device = next((parameter.device for parameter in self.parameters.values()), None)
        return {key: value.to(device) for key, value in found.items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if name in self.parameters:
                slots.setdefault(self._names.index(name), {})[slot] = torch.from_numpy(value.copy())
        if slots:  # casts to each parameter's dtype and device
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})


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
    shown = getattr(make, "__name__", name) if callable(name) else name
    known = _arguments(make)
    for key, value in options.items():
        if key in _OF_OTHER_KEYS:
            raise SettingsError(f"optimizer: {key} (= {value!r}) is not given here, since it is a key of its own")
        if known is not None and key not in known - _NOT_OPTIONS:
            raise SettingsError(
                f"optimizer: {key} (= {value!r}) is not an option of {shown}; {did_you_mean(key, known - _NOT_OPTIONS)}"
            )
    of_keys = {"momentum": momentum or None, "weight_decay": weight_decay}
    for key, setting in (*of_keys.items(), ("weight_decay", other_decay)):
        if setting and known is not None and key not in known:
            raise SettingsError(f"optimizer {shown} has no {key}, but one is set ({setting}); leave it out")
    passed = {key: v for key, v in of_keys.items() if v is not None and (known is None or key in known)}
    try:
        if make is SGD:
            return SGD(parameters, lr, other_decay=other_decay, **options | passed)
        return TorchOptimizer(make, parameters, lr, other_decay=other_decay, **options | passed)
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
    known: dict[str, Callable[..., Any]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known = {"adam": known.pop("Adam"), "adamw": known.pop("AdamW"), **known, "SGD": SGD}
    if (found := next((make for key, make in known.items() if key.lower() == name.lower()), None)) is None:
        raise SettingsError(f"optimizer is {name!r}; {did_you_mean(name, known)}, or module:name for your own")
    return found


def decay_of(model: nn.Module, *, norm: float | None, bias: float | None) -> dict[str, float]:
    """The weight decay of the parameters that have their own: those of normalisers, and biases of other layers."""
    found: dict[str, float] = {}
    for prefix, module in model.named_modules():
        decay = norm if isinstance(module, _NORMS) else bias
        for name, _ in module.named_parameters(prefix, recurse=False):
            if decay is not None and (isinstance(module, _NORMS) or name.rpartition(".")[2] == "bias"):
                found[name] = decay
    return found


def _arguments(make: Callable[..., Any]) -> set[str] | None:
    """The names of the arguments of `make`; None if they are unknown or any."""
    signature = named.signature_of(make)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return set(signature.parameters)
