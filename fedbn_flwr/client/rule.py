"""Client rules: the client's half of a method, in the file of its strategy.

A message selects a client rule by a config key, and a client imports only the files of the rules that it is asked for.
For each round `BNClient` creates an object of the class and calls its hooks in this order: `around` encloses training,
`first_gradient` computes the gradient of the first batch, `begin` runs between this gradient and the first step,
`adjust` before each step, and `finish` after training.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedbn_flwr import extensions
from fedbn_flwr.client.training import Gradient, LocalOptimizer
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Key as Key


@dataclass(eq=False)
class LocalRound:
    """A client's round, from which a client rule reads what it needs."""

    config: Mapping[str, Any]
    # The message's records of arrays: "arrays" is the model. Of a layer-wise round the last message has the others,
    # so read them in `begin` or later.
    records: Mapping[str, Arrays]
    client: Any  # the BNClient, with its `model`, its `state` between rounds, and its arguments
    exchange: Exchange | None = None  # with the other clients, in a layer-wise round
    optimizer: LocalOptimizer = field(init=False)  # set after `around`; has the trainable parameters by name


class ClientRule:
    """A client's part of a method in one round; a subclass overrides the hooks that it needs."""

    # The config keys that select this rule, by a value that is true: False, 0 and "" do not select it. A key with the
    # prefix `fedbn.` is refused by clients without the rule; a key without it is ignored there.
    keys: ClassVar[Mapping[str, Key]] = {}
    order: ClassVar[int] = 0  # among the rules of a round, those with lower numbers run first

    def __init_subclass__(cls) -> None:
        own = vars(cls).get("keys", {})
        for key in own:
            ours = _OURS.get(key, "").rpartition(".")[2]  # without the package, which a checkout has twice
            if ours not in ("", f"{cls.__module__.rpartition('.')[2]}:{cls.__qualname__}"):
                raise TypeError(f"{cls.__name__} has the key {key!r} of {_OURS[key]}; give it a key of its own")
        BY_KEY.update(dict.fromkeys(own, cls))

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

    def finish(self, metrics: dict[str, Any], records: dict[str, Arrays]) -> None:
        """Add metrics and records to the reply, and save state. The round must not fail after the state is saved."""


# The client rules by their keys: those of all modules that are imported, and before that where the rules of our
# strategies and of extensions are, since a client need not import the other ones.
BY_KEY: dict[str, type[ClientRule] | str] = {
    "proximal-mu": "fedbn_flwr.strategies.fedprox:FedProxClient",
    "fedbn.freeze": "fedbn_flwr.strategies.fixbn:FixBNClient",
    "fedbn.clip": "fedbn_flwr.strategies.fedwon:FedWonClient",
    "fedbn.momentum": "fedbn_flwr.strategies.globalmomentum:GlobalMomentumClient",
    "fedbn.control": "fedbn_flwr.strategies.scaffold:ScaffoldClient",
    "fedbn.control-round": "fedbn_flwr.strategies.scaffold:ScaffoldClient",
    protocol.COHORT: "fedbn_flwr.strategies.fedtan:FedTANClient",
    protocol.COHORT_BACKWARD: "fedbn_flwr.strategies.fedtan:FedTANClient",
    protocol.COHORT_MIN_BATCH: "fedbn_flwr.strategies.fedtan:FedTANClient",
    protocol.COHORT_STEP: "fedbn_flwr.strategies.fedtan:FedTANClient",
    protocol.COHORT_VALUES: "fedbn_flwr.strategies.fedtan:FedTANClient",
    protocol.REPORT_BATCH: "fedbn_flwr.strategies.fedtan:FedTANClient",
    **extensions.declared("client_keys"),
}
_OURS = {key: str(where) for key, where in BY_KEY.items()}


def rule_of(key: str) -> type[ClientRule]:
    """The client rule that a key of `BY_KEY` selects."""
    where = BY_KEY[key]  # the rule itself as soon as its module is imported
    return pkgutil.resolve_name(where) if isinstance(where, str) else where


def known_keys() -> dict[str, Key]:
    """Every config key that a BNClient supports; this imports all strategies."""
    importlib.import_module("fedbn_flwr.strategies._names")
    for key in [*BY_KEY]:
        rule_of(key)  # of an extension, whose module has more keys
    of_mods = {key: extensions.part("client_mods", key).keys[key] for key in extensions.declared("client_mods")}
    return protocol.RUN_KEYS | {key: rule_of(key).keys[key] for key in BY_KEY} | of_mods
