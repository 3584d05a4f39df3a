"""The client half of rules: one file with the name of its strategy, found by the config keys that it registers.

A message names a rule by its key; `BNClient` makes one object of the rule's class for the round and calls its hooks, in
this order: `around` training, `first_gradient`, `begin` between the first gradient and the first step, `adjust` before
each step, `returned` and `finish` once training is over.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from fedbn_flwr.client.node_state import NodeState
from fedbn_flwr.client.training import SGD, Gradient
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Key as Key
from fedbn_flwr.norms.roles import Role


@dataclass(frozen=True)
class Update:
    """What a client sends back: arrays by name, metrics, and records of arrays beside the model."""

    arrays: Arrays
    metrics: dict[str, Any]  # numbers
    extras: dict[str, Arrays]


@dataclass(eq=False)
class LocalRound:
    """A client's round as the client half of a rule sees it."""

    config: Mapping[str, Any]
    received: Arrays  # of the model
    records: Mapping[str, Arrays]  # beside the model; in a layer-wise round those of its last message, from `begin` on
    model: nn.Module
    state: NodeState  # what the node keeps from round to round
    num_examples: int  # that the client has
    partition: int | None
    exchange: Exchange | None = None  # to the other clients, in a layer-wise round
    optimizer: SGD = field(init=False)  # not yet in `around`; it has the parameters that train, by name

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.optimizer.parameters


class ClientRule:
    """What a client does for a rule in one round; a rule overrides the hooks that it needs."""

    keys: ClassVar[Mapping[str, Key]] = {}  # the config keys that ask for it
    order: ClassVar[int] = 0  # of rules in one round, those with the lower number adjust first

    def __init_subclass__(cls) -> None:
        _BY_KEY.update(dict.fromkeys(cls.keys, cls))

    def __init__(self, local: LocalRound) -> None:
        self.local = local

    def around(self) -> AbstractContextManager[None]:
        """What holds while the client trains."""
        return nullcontext()

    def first_gradient(self) -> Gradient | None:
        """Finds loss and gradient of the first batch in place of backpropagation."""
        return None

    def begin(self) -> None:
        """Prepare, once the gradient of the first batch is there and before any step."""

    def adjust(self) -> None:
        """Change the gradients before each step."""

    def returned(self) -> frozenset[Role]:
        """The roles that are sent back beside what was received."""
        return frozenset()

    def finish(self, update: Update) -> None:
        """Add metrics and records to the reply and save what the node keeps; nothing can fail any more."""


_BY_KEY: dict[str, type[ClientRule]] = {}


@functools.cache
def rules_by_key() -> Mapping[str, type[ClientRule]]:
    """All rules by their keys: those of this package, and any other ClientRule that was imported."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return _BY_KEY


def known_keys() -> dict[str, Key]:
    """Every config key that a BNClient honours."""
    return protocol.RUN_KEYS | {key: rule.keys[key] for key, rule in rules_by_key().items()}
