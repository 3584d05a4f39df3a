"""The optimisers of torch.optim by name, with parameters and state by name.

`SGD` is the default. Creating another one imports PyTorch's compiler, which takes a second or more. An experiment does
it once, when it checks the settings, and its workers are forked after that.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.aggregate import Array

# A function (parameters, lr=...), for instance torch.optim.RMSprop or functools.partial(torch.optim.AdamW, eps=1e-6).
MakeOptimizer = Callable[..., Optimizer]
# What BNClient and `train.optimizer` take: a name, {"name": ..., option: ...}, or a function.
OptimizerSpec = str | Mapping[str, object] | MakeOptimizer


class SGD(torch.optim.SGD):
    """torch.optim.SGD without the decorators of its methods, and without checks of the parameters.

    The decorators import PyTorch's compiler, which takes more than a second in every worker process. The checks, in
    every round, take longer than loading the weights, and the parameters of a module pass them. Nor does it make the
    records for PyTorch's profiler, which take a fifth of a small network's step.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        several = {} if self.defaults["fused"] else {"foreach": self.defaults["foreach"] is not False}
        self.param_groups.append({**self.defaults, **several, **param_group})  # `foreach` is faster on a CPU too

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter.grad)

    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
    vars(step)["hooked"] = True  # else PyTorch would wrap it


class LocalOptimizer:
    """An optimiser of torch.optim, the attribute `torch`, with parameters and state by name.

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
        """What the optimiser remembers, under names that stay the same between rounds."""
        return {
            f"{slot}/{name}": torch.as_tensor(value, device=parameter.device)
            for name, parameter in self.parameters.items()
            for slot, value in self.torch.state.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Begin with a state that `state` returned in an earlier round; other entries are ignored."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        counted = itertools.chain.from_iterable(group["params"] for group in self.torch.param_groups)
        numbers = {names[parameter]: number for number, parameter in enumerate(counted) if parameter in names}
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if name in numbers:
                slots.setdefault(numbers[name], {})[slot] = torch.from_numpy(value.copy())
        if slots:  # casts to each parameter's dtype and device
            self.torch.load_state_dict({**self.torch.state_dict(), "state": slots})


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

    `momentum` above zero and `weight_decay` other than None are passed on; an optimiser without them accepts only zero.
    """
    given = spec if isinstance(spec, Mapping) else {"name": spec}
    options: dict[str, object] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    name: Any = options.pop("name", "sgd")
    make, shown = name if callable(name) else _by_name(str(name)), getattr(name, "__name__", name)
    if keys := sorted(options.keys() & {"lr", "momentum", "weight_decay"}):
        raise SettingsError(f"optimizer: {keys[0]} is not an option of {shown}; it is a key of its own")
    for key, value in (("momentum", momentum or None), ("weight_decay", weight_decay)):
        if named.takes(make, key):
            options |= {} if value is None else {key: value}
        elif value:
            raise SettingsError(f"{key} is {value}, but the optimizer {shown} has none; leave it out, or set it to 0")
    try:
        return LocalOptimizer(make, parameters, clip, lr=lr, **options)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        signature = named.signature_of(make)
        known = f"; its arguments are {', '.join(signature.parameters)}" if signature else ""
        raise SettingsError(f"optimizer {shown} with {options}: {error}{known}") from None


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
    } | {"sgd": SGD}
