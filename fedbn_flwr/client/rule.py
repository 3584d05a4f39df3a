"""Client rules: what clients do for a strategy. A rule is in the file of its strategy.

A message selects a client rule by a config key, which names its file: a client imports only the files that it needs.
For each round `BNClient` makes an object of the class and calls its hooks in this order: `batches` may change the
batches, `first_gradient` returns how the gradient of the first batch is computed, `loss` may change the loss of each
batch, `begin` runs between the first gradient and the first step, `adjust` before each step, and `finish` after
training. `frozen` has the roles that do not train.

`begin` and `adjust` work on named tensors: w are the parameters, g their gradients, and `memo` is what `begin`
returned. An `adjust` that is marked with `@elementwise` may get the tensors of several clients, stacked along a first
axis, and adjusts them for all. So it uses the operations below, or others that treat each element alone, and reads no
attribute and no config key that differs between clients.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedbn_flwr import extensions
from fedbn_flwr.batch import Batch as Batch
from fedbn_flwr.batch import Inputs, Outputs, Targets, Value
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.protocol import Key as Key
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.norms.roles import Role

from .node_state import NodeState
from .optimizers import LocalOptimizer

Loss = Callable[[Outputs, Targets], Tensor]
# A function (model, inputs, targets, loss) that sets the parameters' gradients and returns the detached loss.
Gradient = Callable[[nn.Module, Value, Value, Loss], Tensor]
Tensors = Mapping[str, Tensor]  # parameters or gradients, by the parameters' names
Memo = Mapping[str, Tensors]  # what a client rule remembers from its `begin` to its `finish`, by name

MODEL = "arrays"  # the record with the model, in messages as in replies

# --- arithmetic on named tensors ---


def clone(x: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in x.items()}


def sub(x: Tensors, y: Tensors) -> Tensors:
    """x - y, for the names that both have."""
    names = [name for name in x if name in y]
    return (
        dict(zip(names, torch._foreach_sub([x[n] for n in names], [y[n] for n in names]), strict=True)) if names else {}
    )


def add_(x: Tensors, y: Tensors, alpha: float = 1.0) -> None:
    """x += alpha y in place, for the names that both have."""
    if names := [name for name in x if name in y]:
        torch._foreach_add_([x[name] for name in names], [y[name] for name in names], alpha=alpha)


# --- the rules ---

Adjust = TypeVar("Adjust", bound=Callable[..., None])


def elementwise(adjust: Adjust) -> Adjust:
    """Mark an `adjust` that treats each element of the gradients alone.

    It must read no attribute and no config key that differs between clients: when several train at once, one client's
    `adjust` is called for all.
    """
    adjust.elementwise = True  # type: ignore[attr-defined]
    return adjust


@dataclass(eq=False)
class LocalRound:
    """A client's round, from which a client rule reads what it needs."""

    config: Config  # the message's
    received: Collection[str]  # the keys of the model's arrays in the message; the model has their values
    # The records of arrays that come with the model. In a layer-wise round they arrive with the last message, so read
    # them in `begin` or later.
    records: dict[str, Arrays]
    state: NodeState  # arrays that the client keeps between rounds
    model: nn.Module
    # One pass over the client's batches (inputs, targets); the order of the examples depends on its number.
    epoch: Callable[[int], Iterator[Batch]]
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the round ends, with the error if it fails
    # Only rounds that train have these; the optimiser, which has the parameters that train, after the rules are made.
    layerwise: Callable[..., LayerwiseStep] = field(init=False)  # makes this client's step with exchanges
    optimizer: LocalOptimizer = field(init=False)


class ClientRule:
    """What a client does for a strategy in one round; a subclass overrides the hooks that it needs."""

    # The config keys that select this rule, unless their value is False, 0 or "". Clients without the rule raise an
    # error for keys with the prefix `fedbn.`, and ignore others. The name of its file in `strategies` follows the
    # prefix, so that clients find the rule.
    keys: ClassVar[Mapping[str, Key]] = {}
    order: ClassVar[int] = 0  # the rules of a round run in ascending order
    # Whether the rule has a `loss` or changes the model: then its rounds are not compiled, and each trains alone.
    trains_alone: bool = False
    frozen: frozenset[Role] = frozenset()  # roles of batch norm's arrays that keep the received values

    def __init_subclass__(cls) -> None:
        cls.trains_alone = cls.trains_alone or cls.loss is not ClientRule.loss
        own = vars(cls).get("keys", {})
        for key in own:
            module, other = module_of(key), BY_KEY.get(key)
            # A module has two names in a checkout, and may be imported anew.
            if module and module.rpartition(".")[2] != cls.__module__.rpartition(".")[2]:
                raise TypeError(f"{cls.__name__} has the key {key!r} of {module}; give it a key of its own")
            if other is not None and other.__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__name__} has the key {key!r} of {other.__name__}; give it a key of its own")
        BY_KEY.update(dict.fromkeys(own, cls))

    def __init__(self, local: LocalRound) -> None:
        self.local = local

    def batches(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The batches (inputs, targets) to train on: the client's own, which may be changed or come after others."""
        return batches

    def first_gradient(self) -> Gradient | None:
        """A function that computes the first batch's loss and gradients; None for ordinary backpropagation."""
        return None

    def loss(self, inputs: Inputs, targets: Targets, outputs: Outputs, loss: Tensor) -> Tensor:
        """The loss of a batch. `loss` is the client's own loss, or what the rule before this one returned."""
        return loss

    def begin(self, w: Tensors) -> Memo:
        """What the rule remembers of w, the parameters that the server has sent, until the end of the round.

        It must not change them; a rule that does sets `trains_alone`.
        """
        return {}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        """Change gradients in place; parameters without a gradient are not among them."""

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        """Add metrics and records to the reply, and save state. Nothing may fail after the state is saved.

        `records` has the trained model as "arrays". To send other values, replace that mapping.
        """


# The client rules by their keys, from the modules that are imported.
BY_KEY: dict[str, type[ClientRule]] = {}
# The files of the keys that do not name them.
_FILES = {"proximal-mu": "fedprox", **dict.fromkeys(protocol.EXCHANGE_KEYS, "fedtan")}


@functools.lru_cache
def module_of(key: str) -> str:
    """The module of this project whose client rule a key selects; empty if there is none.

    A key names the file in `strategies`: `fedbn.fixbn-freeze` is a key of the client rule in `fixbn.py`.
    """
    if key in (of_extensions := extensions.declared("client_keys")):
        return of_extensions[key].partition(":")[0]
    named = re.match(rf"{re.escape(protocol.PREFIX)}(\w+)", key)
    file = _FILES.get(key, named[1] if named else "")
    module = f"fedbn_flwr.strategies.{file}"
    return module if file and importlib.util.find_spec(module) else ""


def rule_of(key: str) -> type[ClientRule] | None:
    """The client rule that a key selects, whose module is imported now, or None."""
    if key not in BY_KEY and (module := module_of(key)):
        importlib.import_module(module)
    return BY_KEY.get(key)


def known_keys() -> dict[str, Key]:
    """Every config key that a BNClient supports; this imports all strategies."""
    for module in ("fedbn_flwr.strategies._names", *map(module_of, extensions.declared("client_keys"))):
        importlib.import_module(module)
    of_mods = {key: extensions.part("client_mods", key).keys[key] for key in extensions.declared("client_mods")}
    return protocol.RUN_KEYS | {key: rule.keys[key] for key, rule in BY_KEY.items()} | of_mods


def rules_for(config: Config) -> list[type[ClientRule]]:
    """The client rules that a message selects; MessageError for a `fedbn.` key that no rule has."""
    if not all(map(supports, config)):
        protocol.check_known(config, known_keys())
    return in_order(rule for key, value in config.items() if value and (rule := rule_of(key)))


def supports(key: str) -> bool:
    """Whether clients support a config key, as far as its own module shows."""
    known = protocol.RUN_KEYS, extensions.declared("client_mods")
    return not key.startswith(protocol.PREFIX) or any(key in keys for keys in known) or rule_of(key) is not None


def in_order(rules: Iterable[type[ClientRule]]) -> list[type[ClientRule]]:
    """Each rule once, in the order in which their hooks are called."""
    return sorted({*rules}, key=lambda rule: (rule.order, rule.__name__))


class KeepOptimizerState(ClientRule):
    """Continues with the optimiser's state from the client's last round (`BNClient.keep_momentum`)."""

    stored = "fedbn.momentum"  # its name in the client's state

    def begin(self, w: Tensors) -> Memo:
        self.local.optimizer.load_state(self.local.state.load(self.stored))
        return {}

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        # A parameter that is frozen now keeps the state that it had.
        new = {**self.local.state.load(self.stored), **copied(self.local.optimizer.state())}
        self.local.state.save(self.stored, new)
