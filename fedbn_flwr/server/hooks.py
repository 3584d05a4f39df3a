"""The hooks of rules; a strategy is a chain of rules.

Rules wrap one another and form a chain. The innermost, a `Base`, chooses the clients and judges their replies; the
outermost runs the round (`round.Rule`) by calling every rule's hooks in this order:

- `begin` prepares a run.
- `config` returns keys for the clients, beginning with the outermost rule.
- `outgoing` may change the messages, the innermost rule first. Then FedTAN exchanges statistics, and every rule's
  `records` are added.
- `incoming` may change the replies, the outermost rule first.
- `problem` judges single replies. `accepted` gets the usable ones and may change them, the innermost rule first.
- `weights` and `combine` make the new model; `super()` calls them on the wrapped rule.
- `after_round` updates the state, the innermost rule first.
- `global_model` returns the model to evaluate, and `notes` the entries of the summary.

A rule overrides only the hooks whose behaviour it changes. Subclass `FedAvg`, or `Wrapper` for any other strategy
(docs/write-a-strategy.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.trees import Tree

from .traits import Round, Traits


class Hooks(Strategy):
    """The hooks of a rule, whose defaults pass on to the rule it wraps or change nothing."""

    @dataclass
    class Memory:
        """The state of the strategy: `begin` resets it, a checkpoint saves it, and a resumed run restores it.

        A strategy with state declares a dataclass of this name, derived from its base's. All fields have defaults; they
        are numbers, strings, arrays, and lists and dicts of these.
        """

        # The first round after the strategy froze or switched; the clients' schedules count from it.
        switch_round: int | None = None

        def __setattr__(self, name: str, value: object) -> None:
            if name not in (declared := [each.name for each in fields(self)]):
                raise AttributeError(
                    f"{type(self).__qualname__} doesn't declare {name!r}; it has {', '.join(declared)}", name=name
                )
            super().__setattr__(name, value)

    traits: Traits = Traits()
    memory: Memory
    # The guarantees (see `wrapper`) that this rule breaks, each with the reason, and those it restores;
    # `broken_guarantees` adds those that its hooks break. A rule that restores "statistics" makes them itself: a
    # strategy of Flower that it wraps receives neither statistics nor counters.
    breaks: Mapping[str, str] = {}
    restores: frozenset[str] = frozenset()
    # Numbers in `memory` that only grow and must survive a stop within a round, for instance the privacy spent. In an
    # experiment they are on the disk before the messages that `configure_train` returns are sent.
    promised: Collection[str] = ()
    chain: tuple[Hooks, ...]  # this rule, the one it wraps, and so on
    _name: Mapping[str, str] = {}  # the name of the run, unless `start` started it

    # --- the hooks ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Prepare for a run that begins with this model; raise SettingsError if the strategy cannot train it.

        `num_rounds` is 0, for unknown, if a strategy without hooks has started the run, as Flower's do.
        """
        self._remember()
        self.chain[1].begin(num_rounds, arrays)

    def config(self, round: Round) -> Config:
        """The config keys that ask clients to apply the client rule.

        They replace equal keys of the rules around this one, whose values are in `round.config`.
        """
        return {}

    def records(self, round: Round) -> Mapping[str, Arrays]:
        """Arrays for the clients, by record; an empty one is not sent. Clients send those in `Traits.records` back."""
        return {}

    def outgoing(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages to the clients, which may be changed but not left out."""
        return messages

    def incoming(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The replies that have passed the gate, before their arrays are read.

        RoundSkipped ends the round without a new model, and the run goes on.
        """
        return messages

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Why a reply cannot be used, or None."""
        return None

    def accepted(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """What the hooks that follow, and the strategies around this one, see of the usable replies."""
        return replies

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        """p_i, the weight of each reply, up to scale: by default the client's number of examples."""
        return self.chain[1].weights(round, replies)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model."""
        return self.chain[1].combine(round, replies, weights)

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Update the state from the replies that were combined into the new model."""

    def global_model(self, round: Round) -> ArrayRecord:
        """The model for use outside the federation, where `round.arrays` is the result of the round."""
        return self.chain[1].global_model(round)

    def notes(self) -> Tree:
        """The entries in the run's summary, for instance the round in which the strategy froze batch norm."""
        return self.chain[1].notes()

    # --- the state ---

    def _remember(self) -> None:
        """Begin a run without memory; SettingsError names a value that a checkpoint could not save."""
        self.memory = self.Memory()
        try:
            dump([vars(self.memory)])
        except ValueError as error:
            raise SettingsError(f"{self}.Memory cannot be saved: {error}") from None

    def _state(self) -> object:
        """The state that checkpoints save."""
        return vars(self.memory)

    def _load_state(self, values: Any) -> None:
        self.memory = self.Memory(**values)

    def _named(self, config: ConfigRecord) -> ConfigRecord:
        """The config with the name of the run, by which clients know their state of it."""
        return config if protocol.RUN in config or not self._name else ConfigRecord({**self._name, **config})

    # --- what a subclass gets without writing it ---

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(cls.traits, Traits):
            raise TypeError(f"{cls.__name__}.traits is a {type(cls.traits).__name__}; expected Traits(...)")
        declared = [vars(kind)["traits"] for kind in reversed(cls.__mro__) if "traits" in vars(kind)]
        cls.traits = functools.reduce(operator.or_, declared)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]
        if "Memory" in vars(cls) and "__dataclass_params__" not in vars(cls.Memory):  # the decorator may be left out
            cls.Memory = dataclass(cls.Memory)  # type: ignore[misc]
        for base in cls.__bases__:
            if issubclass(base, Hooks) and not issubclass(cls.Memory, base.Memory):
                name = base.__name__
                raise TypeError(
                    f"{cls.__name__}.Memory lacks the state of {name}; write `class Memory({name}.Memory):`"
                )

    def __str__(self) -> str:
        """The strategy's name in messages."""
        return type(self).__name__


def evaluation_round(rule: Hooks, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Round:
    """The round in which this model is tested."""
    return Round(number, arrays, rule._named(config), grid)


# --- what strategies and experiments use ---


def state_of(rule: Hooks) -> bytes:
    """The state of a rule and of those it wraps; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._state()} for each in rule.chain])


def restore(rule: Hooks, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, saved in zip(rule.chain, parse(state, list), strict=True):
        each._load_state(saved[str(each)])


def require_norm(rule: Hooks, needed: Collection[Role], arrays: ArrayRecord, use: str, instead: str = "FedAvg") -> None:
    """Raise SettingsError if the model has no arrays of the `needed` roles: a run of `instead` would equal this one."""
    if set(needed).isdisjoint(roles(arrays).values()):
        missing = " or ".join(sorted(role.value for role in set(needed) - {Role.COUNTER}))
        raise SettingsError(
            f"{rule} {use}, and no array of the model is a batch norm's {missing}. In a Flower app, add batch norm "
            "to the network or, if it has some, send the whole state dict: ArrayRecord(model.state_dict()). In an "
            f"experiment, set model.norm=bn. Or use {instead}"
        )
