"""The optimisers of torch.optim by name; `training.SGD` is the default one.

Creating an optimiser of torch.optim imports PyTorch's compiler, which takes a second or more. An experiment does it
once, when it checks the settings, and its workers are forked after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean

from .training import SGD, LocalOptimizer, TorchOptimizer

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
        if make is SGD:
            return SGD(parameters, lr, other_decay=other_decay, **options)
        return TorchOptimizer(make, parameters, lr, other_decay=other_decay, **options)
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
