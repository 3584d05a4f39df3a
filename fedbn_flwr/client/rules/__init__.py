"""Client rules, the client's half of each method: one file with the name of its strategy.

A message selects a client rule by a config key. For each round `BNClient` creates an object of the class and calls its
hooks in this order: `around` encloses training, `first_gradient` computes the gradient of the first batch, `begin`
runs between this gradient and the first step, `adjust` before each step, and `returned` and `finish` after training.
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
from fedbn_flwr.client.training import Gradient, LocalOptimizer
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.extensions import declared, part
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Key as Key
from fedbn_flwr.norms.roles import Role


@dataclass(eq=False)
class Update:
    """A client's result of a round: the arrays of the model, metrics, and additional records of arrays by name."""

    arrays: Arrays
    metrics: dict[str, Any]  # numbers
    extras: dict[str, Arrays]


@dataclass(eq=False)
class LocalRound:
    """A client's round, from which a client rule reads what it needs."""

    config: Mapping[str, Any]
    received: Arrays  # the arrays of the model in the message
    # The message's other records of arrays. The last message of a layer-wise round contains them, so read them in
    # `begin` or later.
    records: Mapping[str, Arrays]
    model: nn.Module
    state: NodeState
    num_examples: int  # in the client's training data
    partition: int | None
    exchange: Exchange | None = None  # with the other clients, in a layer-wise round
    clip: float | None = None  # the client's limit for the norm of gradients
    min_batch: int = 1  # the client's own limit for the images in a batch whose statistics it exchanges
    optimizer: LocalOptimizer = field(init=False)  # set after `around`; has the trainable parameters by name

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.optimizer.parameters


class ClientRule:
    """A client's part of a method in one round; a subclass overrides the hooks that it needs."""

    # The config keys that select this rule. A key with the prefix `fedbn.` is refused by clients without the rule; a
    # key without it is ignored there.
    keys: ClassVar[Mapping[str, Key]] = {}
    order: ClassVar[int] = 0  # among the rules of a round, those with lower numbers run first

    def __init_subclass__(cls) -> None:
        _BY_KEY.update(dict.fromkeys(cls.keys, cls))

    def __init__(self, local: LocalRound) -> None:
        self.local = local

    def around(self) -> AbstractContextManager[None]:
        """A context manager that encloses training."""
        return nullcontext()

    def first_gradient(self) -> Gradient | None:
        """A function that computes loss and gradient of the first batch instead of backpropagation, or None."""
        return None

    def begin(self) -> None:
        """Prepare the round, after the gradient of the first batch and before the first step."""

    def adjust(self) -> None:
        """Change the gradients before each step."""

    def returned(self) -> frozenset[Role]:
        """Roles to send back in addition to the arrays received."""
        return frozenset()

    def finish(self, update: Update) -> None:
        """Add metrics and records to the reply, and save state. The round must not fail after the state is saved."""


_BY_KEY: dict[str, type[ClientRule]] = {}


@functools.cache
def rules_by_key() -> Mapping[str, type[ClientRule]]:
    """All client rules by their keys: those of this package, and every other subclass that is imported."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    importlib.import_module("fedbn_flwr.strategies")
    for key in declared("client_keys"):
        part("client_keys", key)
    return _BY_KEY


# Keys that no rule declares.
ALWAYS_KNOWN = protocol.RUN_KEYS | protocol.EVALUATION_KEYS | protocol.SECURE_KEYS


def known_keys() -> dict[str, Key]:
    """Every config key that a BNClient supports."""
    return ALWAYS_KNOWN | {key: rule.keys[key] for key, rule in rules_by_key().items()}
