"""The hooks of a strategy, for those who write one (docs/write-a-strategy.md).

A rule may be around another one. Together they are a chain: the innermost rule chooses the clients, and the outermost
one runs the round and calls the hooks of all (`round`) in this order:

- `begin` prepares a run.
- `question` asks clients what they measure, and `config` has keys for the clients, those of the outermost rule first.
- `outgoing` may change the messages, the innermost rule first. Then FedTAN exchanges statistics, and the `records` of
  all are added.
- `incoming` may change the replies, the outermost rule first.
- `problem` judges single replies. `accepted` gets the usable ones and may change them, the innermost rule first.
- `weights` and `combine` make the new model; a rule calls those of the rule inside it by `super()`.
- `after_round` updates the state, the innermost rule first.
- `global_model` returns the model to evaluate, and `notes` the entries of the summary.

A rule overrides only the hooks whose behaviour it changes. Subclass `FedAvg`, or `Wrapper` for any other strategy.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import RunFailed, SettingsError, log_once
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Config as Config
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.roles import Role, roles, selected
from fedbn_flwr.trees import Json as Json


@dataclass(frozen=True, eq=False)
class Round:
    """The round in which a hook is called."""

    number: int
    arrays: ArrayRecord  # the global model that the round begins with
    config: ConfigRecord  # of the messages to all clients; in `config()` without the keys of the rules inside
    grid: Grid
    hidden: frozenset[Role] = frozenset()  # the roles that a strategy of Flower does not see


@dataclass(frozen=True, eq=False)
class Question:
    """What each client measures on its data before it first trains, by the `measure` of a client rule."""

    key: str  # the config key that selects the client rule
    what: str  # what clients measure, in words
    problem: Callable[[Arrays], str | None]  # why an answer cannot be used, or None
    answers: dict[int, Arrays]  # so far, by client: the others are asked, and their answers added
    model: Arrays | None = None  # that clients measure with


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that do not change during a run.

    A class adds those that it declares to those of its bases, and a wrapper adds its own to those inside.
    """

    # What the clients' steps must be: "linear", so that the mean of their first steps is the step along the mean of
    # their gradients (SGD without clipping), "momentum" (SGD with momentum), or "sgd".
    steps: frozenset[str] = frozenset()
    client_memory: str | None = None  # the state that clients must keep from round to round, described in words
    # What stays on the client, which the server never sends: names as in `norms.roles.selected`. If there are any, each
    # client has a model of its own, which is evaluated on that client.
    kept: frozenset[str] = frozenset()
    returned: bool = True  # whether clients send it to the server all the same, for the global model
    # The smallest batch whose statistics clients exchange; 0 if the strategy exchanges none.
    min_batch: int = 0
    # Records of arrays, by name, that each client sends back, with an array for every parameter that it trains; and
    # whether all clients count equally in their mean. The hook `records` returns what is sent to the clients.
    records: Mapping[str, bool] = field(default_factory=dict)
    pooled: bool = False  # whether variances have the part between the clients (`aggregate.pooled_mean`)
    # The config keys whose client rules change each client's inputs when it is tested (`ClientRule.own_inputs`).
    own_inputs: tuple[str, ...] = ()
    own_models: bool = False  # whether the server sends each client a model of its own
    compared: bool = True  # whether a reply may be left out because of what the other clients sent
    measured: tuple[str, ...] = ()  # what each client measures on its data and sends once, in words

    def __or__(self, other: Traits) -> Traits:
        texts = filter(None, [self.client_memory, other.client_memory])
        return Traits(
            steps=self.steps | other.steps,
            client_memory=" and ".join(dict.fromkeys(" and ".join(texts).split(" and "))) or None,
            kept=self.kept | other.kept,
            returned=self.returned and other.returned,
            min_batch=max(self.min_batch, other.min_batch),
            records={**self.records, **other.records},
            pooled=self.pooled or other.pooled,
            own_inputs=(*dict.fromkeys(self.own_inputs + other.own_inputs),),
            own_models=self.own_models or other.own_models,
            compared=self.compared and other.compared,
            measured=(*dict.fromkeys(self.measured + other.measured),),
        )

    @property
    def personalises(self) -> bool:
        """Whether clients keep a part of the model or of what leads to it, so that each is tested on its own."""
        return bool(self.kept or self.own_inputs or self.own_models)

    @property
    def unsent(self) -> frozenset[str]:
        """What neither the server nor the clients send, by name."""
        return frozenset() if self.returned else self.kept

    def stays(self, arrays: Mapping[str, object]) -> set[str]:
        """The keys of a model's arrays that stay on the client."""
        return selected(roles(arrays), self.kept) if self.kept else set()

    @property
    def besides(self) -> list[str]:
        """What travels along with the model's arrays, in words."""
        exchanged = ["statistics of batches, in each batch norm of a round's first step"] if self.min_batch else []
        size = "as large as the parameters: up in each round, down from round 2 on"
        return [*(f"record `{name}`, {size}" for name in self.records), *exchanged, *self.measured]

    @property
    def has_global_model(self) -> bool:
        """Whether the server's arrays are a trained model."""
        return not self.kept.issuperset(Role)


_Hook = TypeVar("_Hook", bound=Callable[..., object])


def mean_is_enough(hook: _Hook) -> _Hook:
    """Mark a hook that would do the same if each reply were the mean of all: it does not need the single ones."""
    hook.mean_is_enough = True  # type: ignore[attr-defined]
    return hook


class Hooks(Strategy):
    """The hooks of a strategy, with their defaults, which pass on to the strategy inside or change nothing."""

    @dataclass
    class Memory:
        """The state of the strategy: `begin` resets it, a checkpoint saves it, and a resumed run restores it.

        A strategy with state declares a dataclass of this name, derived from its base's. All fields have defaults; they
        are numbers, strings, arrays, and lists and dicts of these.
        """

        # The first round after the one in which the rule froze or switched, which schedules of clients follow.
        switch_round: int | None = None

    traits: Traits = Traits()
    memory: Memory
    # The guarantees (see `composition`) that this rule breaks, each with the reason, and those it restores; `broken`
    # adds those that its hooks break. A rule that restores "statistics" makes them itself: a strategy of Flower inside
    # it receives neither statistics nor counters.
    breaks: Mapping[str, str] = {}
    restores: frozenset[str] = frozenset()
    # Numbers in `memory` that only grow and must survive a stop within a round, for instance the privacy spent. In an
    # experiment they are on the disk before the messages that `configure_train` returns are sent.
    promised: Collection[str] = ()
    chain: tuple[Hooks, ...]  # this rule, the one inside it, and so on
    _inside: Hooks  # the rule inside this one
    num_rounds: int = 0  # of the run; 0, for unknown, unless `Rule.start` started it

    # --- the hooks ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Prepare for a run that begins with this model; raise SettingsError if the strategy cannot train it.

        `num_rounds` is 0, for unknown, if a strategy without hooks has started the run, as Flower's do.
        """
        self.memory, self.num_rounds = self.Memory(), num_rounds
        self._inside.begin(num_rounds, arrays)

    def question(self, round: Round) -> Question | None:
        """What connected clients are asked before the round, unless they have answered; RunFailed if nobody ever has.

        They measure with the config of the rules around this one.
        """
        return None

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
        return self._inside.weights(round, replies)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model."""
        return self._inside.combine(round, replies, weights)

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Update the state from the replies that were combined into the new model."""

    def global_model(self, round: Round) -> ArrayRecord:
        """The model for use outside the federation, where `round.arrays` is the result of the round."""
        return self._inside.global_model(round)

    def notes(self) -> Json:
        """The entries in the run's summary, for instance the round in which the strategy froze batch norm."""
        return self._inside.notes()

    # --- the state ---

    def _state(self) -> object:
        """The state that checkpoints save."""
        return vars(self.memory)

    def _load_state(self, values: Any) -> None:
        self.memory = self.Memory(**values)

    # --- what a subclass gets without writing it ---

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(cls.traits, Traits):
            raise TypeError(f"{cls.__name__}.traits is a {type(cls.traits).__name__}; expected Traits(...)")
        declared = [vars(kind)["traits"] for kind in reversed(cls.__mro__) if "traits" in vars(kind)]
        cls.traits = functools.reduce(operator.or_, declared)
        if "__init__" in vars(cls):
            cls.__init__ = _calling_super(cls, checked(cls.__init__))  # type: ignore[method-assign]
        for name, hook in [*vars(cls).items()]:
            if name in _RETURNING and inspect.isfunction(hook):
                setattr(cls, name, _returning(hook, f"{cls.__name__}.{name}"))
        _warn_of_misspelt_hooks(cls)
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


def _calling_super(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that raises an error unless it has called the one of the base class."""

    @functools.wraps(init)
    def call(self: Hooks, *args: object, **options: object) -> None:
        init(self, *args, **options)
        if "memory" not in vars(self):
            raise TypeError(f"{cls.__name__}.__init__ doesn't call super().__init__(**options)")

    return call


# Hooks that always return something; `combine` has an error of its own.
_RETURNING = {"config", "records", "outgoing", "incoming", "accepted", "weights", "global_model", "notes"}


def _returning(hook: Callable[..., object], name: str) -> Callable[..., object]:
    """A hook that raises an error if it returns None."""

    @functools.wraps(hook)
    def call(*args: object, **options: object) -> object:
        if (result := hook(*args, **options)) is None:
            raise RunFailed(f"{name} returned None; end it with `return` and its result")
        return result

    return call


_HOOKS = {name: [*inspect.signature(hook).parameters] for name, hook in vars(Hooks).items() if inspect.isfunction(hook)}


def _warn_of_misspelt_hooks(cls: type) -> None:
    """Warn of methods with the parameters of a hook and nearly its name: training would go on without them."""
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not any(hasattr(base, name) for base in cls.__bases__):
            parameters = [*inspect.signature(method).parameters]
            alike = [hook for hook, its in _HOOKS.items() if its == parameters and hook not in vars(cls)]
            if meant := difflib.get_close_matches(name, alike, 1, 0.85):
                log_once(f"{cls.__name__}.{name} isn't a hook; did you mean {meant[0]}?")


def require_norm(rule: Hooks, needed: Collection[Role], arrays: ArrayRecord, use: str, instead: str = "FedAvg") -> None:
    """Raise SettingsError if the model has no arrays of the `needed` roles: the run would equal that of `instead`."""
    if set(needed).isdisjoint(roles(arrays).values()):
        missing = " or ".join(sorted(role.value for role in set(needed) - {Role.COUNTER}))
        raise SettingsError(
            f"{rule} {use}, and no array of the model is a batch norm's {missing}. In a Flower app, add batch norm "
            "to the network or, if it has some, send the whole state dict: ArrayRecord(model.state_dict()). In an "
            f"experiment, set model.norm=bn. Or use {instead}"
        )
