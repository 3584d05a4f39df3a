"""Optimisers beside `training.SGD`: Adam and AdamW by PyTorch's functions, and every other class of torch.optim.

Adam and AdamW have the options and the arithmetic of torch.optim's classes. As with SGD, creating one does not import
PyTorch's compiler; creating an optimiser of torch.optim does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.adam import adam

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.aggregate import Array

from .model_tensors import tensor_like
from .training import SGD, LocalOptimizer, by_decay

# Called with the parameters (or groups of them, as torch.optim's classes) and lr=, for instance
# torch.optim.RMSprop or functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)).
MakeOptimizer = Callable[..., torch.optim.Optimizer]
# As BNClient and `train.optimizer` have it: a name, {"name": ..., option: ...}, or a function.
OptimizerSpec = str | Mapping[str, Any] | MakeOptimizer

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Adam:
    """The arithmetic and options of torch.optim.Adam."""

    decoupled = False  # weight decay shrinks the weights instead of adding to the gradients (AdamW)
    default_decay = 0.0

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        *,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        other_decay: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas is {list(betas)}; expected two numbers from 0 to below 1, for instance [0.9, 0.999]"
            )
        if not eps >= 0:
            raise ValueError(f"eps is {eps}; expected zero or more")
        self.parameters = dict(parameters)
        self.lr = lr
        self.betas = tuple(betas)
        self.eps = eps
        self.amsgrad = amsgrad
        decay = self.default_decay if weight_decay is None else weight_decay
        self._groups = by_decay(self.parameters, decay, other_decay)
        self._moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        self._of: dict[str, dict[str, Tensor]] = {}  # the state of each parameter, with torch.optim's names

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for weight_decay, group in self._groups.items():
            trained = {name: parameter for name, parameter in group.items() if parameter.grad is not None}
            states = [self._state_of(name) for name in trained]
            adam(
                list(trained.values()),
                [parameter.grad for parameter in trained.values() if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if self.amsgrad else [],
                [state["step"] for state in states],
                # As torch.optim chooses it, for the same bits.
                foreach=all(parameter.is_cuda for parameter in trained.values()),
                decoupled_weight_decay=self.decoupled,
                amsgrad=self.amsgrad,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=self.lr,
                weight_decay=weight_decay,
                eps=self.eps,
                maximize=False,
            )

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._of:
            parameter = self.parameters[name]
            like = partial(torch.zeros_like, parameter, memory_format=torch.preserve_format)
            # The step is on the CPU, where the arithmetic needs it.
            self._of[name] = {"step": torch.tensor(0.0)} | {moment: like() for moment in self._moments}
        return self._of[name]

    def state(self) -> Mapping[str, Tensor]:
        return {
            f"{slot}/{name}": value.to(self.parameters[name].device)
            for name, state in self._of.items()
            for slot, value in state.items()
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        for name, parameter in self.parameters.items():
            if f"step/{name}" in state:
                own = self._state_of(name)
                own["step"] = torch.tensor(float(state[f"step/{name}"]))
                own |= {moment: tensor_like(state[f"{moment}/{name}"], parameter) for moment in self._moments}


class AdamW(Adam):
    """The arithmetic and options of torch.optim.AdamW."""

    decoupled = True
    default_decay = 1e-2


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
            plain = [parameter for name, parameter in self.parameters.items() if name not in other_decay]
            others = by_decay({n: p for n, p in self.parameters.items() if n in other_decay}, 0.0, other_decay)
            groups = [{"params": plain}, *({"params": [*g.values()], "weight_decay": d} for d, g in others.items())]
        self.optimizer = make(groups, lr=lr, **options)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned a {type(self.optimizer).__name__}; expected a torch.optim.Optimizer")
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(self.optimizer).__name__} evaluates the loss several times in a step, and a local step does it "
                "once"
            )
        own = {id(parameter): name for name, parameter in self.parameters.items()}
        # The optimiser numbers the parameters in the order of its groups.
        self._names = [own[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def state(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self._names:
            parameter = self.parameters[name]
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise SettingsError(
                        f"keep_momentum cannot save the state of {type(self.optimizer).__name__}: {slot!r} is a "
                        f"{type(value).__name__}; expected tensors only"
                    )
                found[f"{slot}/{name}"] = value.to(parameter.device)
        return found

    def load_state(self, state: Mapping[str, Array]) -> None:
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if name in self.parameters:
                slots.setdefault(self._names.index(name), {})[slot] = torch.from_numpy(value.copy())
        if slots:  # casts to each parameter's dtype and device
            self.optimizer.load_state_dict(
                {"state": slots, "param_groups": self.optimizer.state_dict()["param_groups"]}
            )


# --- by name -----------------------------------------------------------------

OWN: Mapping[str, Callable[..., LocalOptimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}

_OF_OTHER_KEYS = ("lr", "momentum", "weight_decay")
_NOT_OPTIONS = {*_OF_OTHER_KEYS, "params", "parameters", "other_decay", "maximize", "differentiable"}


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """The other optimisers of torch.optim by name."""
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    found = {cls.__name__: cls for cls in classes if issubclass(cls, torch.optim.Optimizer)}
    return {name: cls for name, cls in found.items() if name != "Optimizer" and name.lower() not in OWN}


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
    options: dict[str, Any] = {}
    name: Any = spec
    if isinstance(spec, Mapping):
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
        name = options.pop("name", "sgd")
    make: Callable[..., Any] = name if callable(name) else _by_name(str(name))
    shown = getattr(make, "__name__", str(name)) if callable(name) else str(name)
    known = _arguments(make)
    for key in options:
        if key in _OF_OTHER_KEYS:
            raise SettingsError(
                f"optimizer: {key} (= {options[key]!r}) is not given here, since it is a key of its own"
            )
        if known is not None and key not in known - _NOT_OPTIONS:
            raise SettingsError(
                f"optimizer: {key} (= {options[key]!r}) is not an option of {shown}; "
                f"{did_you_mean(key, known - _NOT_OPTIONS)}"
            )
    if momentum:
        options["momentum"] = momentum
    if weight_decay is not None and (weight_decay or known is None or "weight_decay" in known):
        options["weight_decay"] = weight_decay
    for key, value in (("momentum", momentum), ("weight_decay", weight_decay), ("weight_decay", other_decay or None)):
        if known is not None and key not in known and value not in (0.0, None):
            raise SettingsError(f"optimizer {shown} has no {key}, but one is set ({value}); leave it out")
    try:
        if make in OWN.values():
            own: LocalOptimizer = make(parameters, lr, other_decay=other_decay, **options)
            return own
        return TorchOptimizer(make, parameters, lr, other_decay=other_decay, **options)
    except (TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"optimizer {shown}: {error}") from None


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
    known: dict[str, Callable[..., Any]] = {cls.lower(): make for cls, make in torch_optimizers().items()}
    known |= OWN
    if name.lower() not in known:
        raise SettingsError(
            f"optimizer is {name!r}; {did_you_mean(name, [*OWN, *torch_optimizers()])}, or module:name for your own"
        )
    return known[name.lower()]


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
