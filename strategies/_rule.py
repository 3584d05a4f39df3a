"""The base class of rules: hooks, fixed properties in `traits`, and the rule's state in `memory`.

A rule may be around another one. Together they are a chain: the innermost rule chooses the clients, and the outermost
one runs the round and calls the hooks of all in this order:

- `begin` prepares a run.
- `config` has keys for the clients, those of the outermost rule first.
- `outgoing` may change the messages, the innermost rule first; then the `records` of all are added.
- `incoming` may change the replies, the outermost rule first.
- `problem` judges single replies. `accepted` gets the usable ones and may change them, the innermost rule first.
- `weights` and `combine` make the new model; a rule calls those of the rule inside it by `super()`.
- `after_round` updates the state, the innermost rule first.
- `global_model` returns the model to evaluate, and `notes` the entries of the summary.

A rule overrides only the hooks whose behaviour it changes.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd, initial_problem, is_finite
from fedbn_flwr.messages.arrays import metrics_in, pack, record_of, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import Reply, number_problem, read_reply, with_content
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.messages.votes import metric_problems, record_problems
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._roster import Attendance, Roster

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, eq=False)
class Round:
    """The round in which a hook is called."""

    number: int
    arrays: ArrayRecord  # the global model that the round begins with
    config: Mapping[str, Any]  # of the messages to all clients; `config()` does not see those of the rules inside
    grid: Grid
    _hidden: frozenset[Role] = frozenset()  # the roles that a strategy of Flower does not see


@dataclass(frozen=True)
class Traits:
    """The properties of a rule that do not change during a run."""

    # What the clients' steps must be: "linear", so that the mean of their first steps is the step along the mean of
    # their gradients (SGD without clipping), "momentum" (SGD with momentum), or "sgd".
    steps: frozenset[str] = frozenset()
    client_memory: str | None = None  # the state that clients must keep from round to round, described in words
    # The roles that stay on the client, which the server never sends; and whether the client sends them to the server.
    # If there are any, each client has a model of its own, which is evaluated on that client.
    local_roles: Mapping[Role, bool] = field(default_factory=dict)
    # Examples that a batch must have for its statistics to be exchanged, so that batch norm is that of all clients; 0:
    # no statistics are exchanged.
    min_batch: int = 0
    # Records of arrays, by name, that each client sends back, with an array for every parameter that it trains; and
    # whether all clients count equally in their mean. The hook `records` returns what is sent to the clients.
    records: Mapping[str, bool] = field(default_factory=dict)
    pooled: bool = False  # whether variances have the part between the clients (`aggregate.pooled_mean`)

    @property
    def unsent(self) -> frozenset[Role]:
        """The roles that neither the server nor the clients send."""
        return frozenset(role for role, is_returned in self.local_roles.items() if not is_returned)

    @property
    def besides(self) -> list[str]:
        """What travels along with the model's arrays, in words."""
        exchanged = ["statistics of batches, in each batch norm of a round's first step"] if self.min_batch else []
        size = "as large as the parameters: up in each round, down from round 2 on"
        return [f"record `{name}`, {size}" for name in self.records] + exchanged

    @property
    def has_global_model(self) -> bool:
        """Whether the server's arrays are a trained model."""
        return {*self.local_roles} != {*Role}


# Flower's strategies for differential privacy, which wrap others.
NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))

# Hooks that may use the replies of single clients.
_OF_SINGLE_REPLIES = ("problem", "weights", "combine", "after_round", "incoming", "accepted")


class Rule(Strategy):
    """A strategy written as hooks; `FedAvg` and `Wrapper` call them."""

    @dataclass
    class Memory:
        """The state of the rule: `begin` resets it, a checkpoint saves it, and a resumed run restores it.

        A rule with state declares a dataclass of this name, derived from its base's. All fields have defaults; they
        are numbers, strings, arrays, and lists and dicts of these.
        """

        # The first round after the one in which the rule froze or switched, which schedules of clients follow.
        switch_round: int | None = None

    traits: Traits = Traits()
    memory: Memory
    chain: tuple[Rule, ...]  # this rule, the one inside it, and so on
    base: BaseStrategy  # the innermost rule of the chain, which chooses the clients
    # The guarantees (see `_composition`) that this rule breaks, each with the reason, and those it restores. A class
    # with a hook that sees the replies of single clients must declare what it breaks.
    breaks: Mapping[str, str] = {}
    restores: frozenset[str] = frozenset()
    # Numbers in `memory` that only grow and must survive a stop within a round, for instance the privacy spent. In an
    # experiment they are on the disk before the messages that `configure_train` returns are sent.
    promised: Collection[str] = ()
    _inside: Rule  # the next one in the chain
    _hides: frozenset[Role] = frozenset()  # the roles that a strategy of Flower inside this rule does not see
    _rounds: int | None = None  # the number of rounds; None or 0 unless `Rule.start` started the run
    _round: Round | None = None  # the current round
    _name: Mapping[str, str] = {}  # the name of the run, unless `Rule.start` started it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]
        own = [hook for hook in _OF_SINGLE_REPLIES if _is_own(cls, hook)]
        if own and "breaks" not in vars(cls):
            reason = f"has {own[0]}() of its own, which may use the replies of single clients"
            cls.breaks = {**cls.breaks, "mean": f"{reason} (if it uses only their mean, declare this: breaks = {{}})"}
        if "Memory" in vars(cls) and "__dataclass_params__" not in vars(cls.Memory):  # the decorator may be left out
            cls.Memory = dataclass(cls.Memory)  # type: ignore[misc]

    def __str__(self) -> str:
        """The strategy's name in messages."""
        return type(self).__name__

    # --- the hooks ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Prepare for a run that begins with this model; raise SettingsError if the rule cannot train it.

        `num_rounds` is 0 if a strategy that is not a rule has started the run: then it is not known.
        """
        self.memory, self._rounds = self.Memory(), num_rounds
        self._inside.begin(num_rounds, arrays)

    def config(self, round: Round) -> Mapping[str, Any]:
        """The config keys that ask clients to apply the client rule."""
        return {}

    def records(self, round: Round) -> Mapping[str, Arrays]:
        """The arrays that clients receive in the records of `Traits.records`; one without arrays is not sent."""
        return {}

    def outgoing(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages to the clients, which may be changed, or exchange something first."""
        return messages

    def incoming(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The replies that have passed the gate, before their arrays are read."""
        return messages

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Why a reply cannot be used, or None."""
        return None

    def accepted(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """What the hooks that follow, and the rules around this one, see of the usable replies."""
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

    def notes(self) -> Mapping[str, Any]:
        """The entries in the run's summary, for instance the round in which the rule froze batch norm."""
        return self._inside.notes()

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the whole chain; this rule is the outermost one."""
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do, or a `start` of the user.
            self._check_outer()
            self.begin(self._rounds or 0, arrays)
            self._name = _drawn_name()
        hidden = frozenset[Role]().union(*(rule._hides for rule in self.chain))
        round = Round(server_round, arrays, self._named(config), grid, hidden)
        # A user's class with a `configure_train` of its own makes the messages of all rules from there on.
        chain = [self, *takewhile(lambda rule: type(rule).configure_train is Rule.configure_train, self.chain[1:])]
        for rule in chain:
            round = replace(round, config={**round.config, **rule.config(round)})
        self._round, passed = round, ConfigRecord({**round.config})
        own = self.chain[len(chain) :]
        messages: Sequence[Message] = (
            [*own[0].configure_train(server_round, arrays, passed, grid)] if own else self.base.messages(round, passed)
        )
        # They may change the config of this round and all later ones, as in Flower's tutorial: config["lr"] *= 0.5
        config.update({key: value for key, value in passed.items() if round.config.get(key) != value})
        for rule in reversed(chain):
            messages = rule.outgoing(round, messages)
        records = {name: pack(values) for rule in chain for name, values in rule.records(round).items() if values}
        if not records:
            return messages
        return [with_content(message, RecordDict({**message.content, **records})) for message in messages]

    def _check_outer(self) -> None:
        """Raise SettingsError if a strategy of Flower for privacy around this one would clip records of the rule."""
        frame = inspect.currentframe() if self.traits.records else None
        while frame is not None:  # no strategy knows the one around it
            if isinstance(outer := frame.f_locals.get("self"), NOISED):
                kind = type(outer).__name__
                raise SettingsError(
                    f"{kind} clips each record of a reply as if it were the model, and {self} inside it also sends "
                    f"{self.traits.besides[0]}; use {self} without {kind}, or a strategy that sends only the model"
                )
            frame = frame.f_back

    def _named(self, config: ConfigRecord) -> ConfigRecord:
        """The config with the name of the run, by which clients know their state of it."""
        return config if protocol.RUN in config else ConfigRecord({**self._name, **config})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model, by the hooks of the whole chain; this rule is the outermost one."""
        base, round = self.base, self._round
        if round is None or not base.training.asked:
            return None, None
        found = self._usable(round, gate(replies))
        weights = base.bounded(f"round {server_round}", self.weights(round, found))
        combined = self.combine(round, found, weights)
        if problem := base.model_problem(combined, unpack(round.arrays)):
            names = "(".join(map(str, self.chain)) + ")" * (len(self.chain) - 1)
            raise RunFailed(f"round {server_round}: {names} made a model that cannot be used: {problem}")
        model = pack(combined)
        if list(model) != list(round.arrays):  # arrays that clients do not send back do not change
            model = record_of({**round.arrays, **model})
        for rule in reversed(self.chain):
            rule.after_round(round, found, weights)
        return model, base.metrics(found)

    def _usable(self, round: Round, messages: Sequence[Message]) -> Sequence[Reply]:
        """The replies that every rule of the chain can use."""
        base, sent, names = self.base, unpack(round.arrays), self.traits.records
        for rule in self.chain:
            messages = rule.incoming(round, messages)

        def problem(reply: Reply) -> str | None:
            problems = (rule.problem(round, reply) for rule in self.chain)
            return base.form_problem(round, reply, sent) or next(filter(None, problems), None)

        def compare(found: Mapping[int, Reply]) -> Mapping[int, str]:
            if any("compared" in rule.breaks for rule in self.chain):
                return {}
            problems = {**metric_problems(found), **base.compare(found, sent)}
            for name in names:
                problems |= record_problems(found, name, sent)
            return problems

        read = partial(read_reply, name=base.arrayrecord_key, records=names)
        replies = base.within_bounds(round, base.training.screen(messages, read, problem, compare))
        for rule in reversed(self.chain):
            replies = rule.accepted(round, replies)
        return replies

    # --- the run ---

    def _state(self) -> Any:
        """The state that checkpoints save."""
        return vars(self.memory)

    def _load_state(self, values: Any) -> None:
        self.memory = self.Memory(**values)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the federation by Flower's `start`, or by that of a wrapped strategy, which may be the user's own."""
        self.begin(num_rounds, initial_arrays)
        train, evaluate, evaluate_model = self._run_arguments(grid, train_config, evaluate_config, evaluate_fn)
        return self._start()(
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train,
            evaluate_config=evaluate,
            evaluate_fn=evaluate_model,
        )

    def _start(self) -> Callable[..., Result]:
        return super().start

    def _run_arguments(
        self, grid: Grid, train: ConfigRecord | None, evaluate: ConfigRecord | None, evaluate_fn: EvaluateFn | None
    ) -> tuple[ConfigRecord, ConfigRecord, EvaluateFn | None]:
        """The last arguments: configs that name the run, by which clients forget earlier ones, and an `evaluate_fn`."""
        given = {**(train or {})}
        name = protocol.run_keys(given) if protocol.RUN in given else _drawn_name()
        train, evaluate = ConfigRecord({**given, **name}), ConfigRecord({**(evaluate or {}), **name})

        def evaluate_model(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(number, self.global_model(Round(number, arrays, train, grid)))

        return train, evaluate, evaluate_fn and evaluate_model

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """A server of Flower's old API calls this first."""
        raise SettingsError(
            f"{self} is not a strategy of Flower's old API, of which ServerApp(server_fn=...) starts a "
            "server; call start() in a function under @app.main() (docs/old-api.md)"
        )


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}


def _is_own(cls: type, hook: str) -> bool:
    """Whether a class defines a hook, or inherits it from a class that is not a rule."""
    others = [getattr(base, hook) for base in cls.__bases__ if issubclass(base, Rule)]
    return hook in vars(cls) or getattr(cls, hook) not in others


class BaseStrategy(Rule):
    """The innermost rule of a chain: it chooses the clients, and knows them by their partitions."""

    @dataclass
    class Memory(Rule.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    breaks = {}
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    weighs: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    bounds: Any = None  # on the influence of one client, with the methods of extensions.bounds.strategy.Bounds
    # The error for models that track statistics, with a place for the first key of theirs; None accepts them.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs

    def __init__(self) -> None:
        self.memory, self.chain, self.base = self.Memory(), (self,), self
        self.training, self.evaluation = Attendance(), Attendance()  # in the last round and the last evaluation

    @property
    def roster(self) -> Roster:
        return Roster(self.memory.partitions)

    def attendance(self, what: str, messages: Iterable[Message] = (), arrays: ArrayRecord | None = None) -> Attendance:
        """The attendance of the nodes that receive these messages, and a model with these arrays."""
        asked = [message.metadata.dst_node_id for message in messages]
        return Attendance(what, self.roster, self.min_train_nodes, arrays, asked)

    def due(self, clients: int) -> int | None:
        """How many clients train in a round when all of these are connected; None if this is not known."""
        return None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        if not isinstance(arrays, ArrayRecord):
            raise SettingsError(
                f"initial_arrays is a {type(arrays).__name__}; expected ArrayRecord(model.state_dict())"
            )
        if problem := initial_problem(unpack(arrays)):
            raise SettingsError(f"the initial model cannot be trained: {problem}")
        tracked = [key for key, role in roles(arrays).items() if role is Role.STATISTICS]
        if tracked and self.without_statistics:
            raise SettingsError(self.without_statistics.format(tracked[0]))
        self.memory, self._rounds = self.Memory(), num_rounds

    def messages(self, round: Round, config: ConfigRecord) -> list[Message]:
        """Choose the clients of a round, note them in `training`, and return their messages; may change `config`."""
        raise NotImplementedError

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why a reply lacks what the messages of the round ask for, or None."""

    def compare(self, found: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node.

        Values must not be absurd, and statistics must be within the bounds.
        """
        if not found:
            return {}
        nodes, cohort = list(found), [reply.arrays for reply in found.values()]
        problems = absurd(cohort, sent)
        if self.bounds is not None:
            keys = [key for key, role in roles(cohort[0]).items() if role is Role.STATISTICS]
            problems |= self.bounds.outliers(cohort, keys)
        return {nodes[i]: problem for i, problem in problems.items()}

    def within_bounds(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies, with updates that are larger than the bounds allow shortened."""
        if self.bounds is None:
            return replies
        arrays: Sequence[Arrays] = [reply.arrays for reply in replies]
        sent = unpack(round.arrays)
        # Local roles are apart: their distance from the clients' mean is not an update.
        for some in filter(None, split_by_role(sent, roles(sent), {*self.traits.local_roles})):
            arrays = self.bounds.updated(arrays, some, f"round {round.number}")
        return [replace(reply, arrays=values) for reply, values in zip(replies, arrays, strict=True)]

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        return [float(reply.metrics[self.weighted_by_key]) for reply in replies]

    def bounded(self, what: str, weights: list[float]) -> list[float]:
        """The weights, none of which is larger than the bounds allow; RunFailed if all are zero."""
        if not sum(weights) > 0:
            raise RunFailed(
                f"{what}: the sum of the weights of all {len(weights)} clients ({self.weighted_by_key}) is "
                f"{sum(weights)}; expected one above zero"
            )
        return weights if self.bounds is None else list(self.bounds.weights(weights))

    def model_problem(self, model: Arrays, sent: Arrays) -> str | None:
        """Why the new model must not replace the one that was sent, or None."""
        for key, value in model.items():
            if key not in sent:
                return f"it has {key!r}, which the clients' model lacks"
            if not isinstance(value, np.ndarray | np.generic) or value.shape != sent[key].shape:
                found = f"{type(value).__name__} of shape {np.shape(value)}"
                return f"{key!r} is {found}; expected an array of shape {sent[key].shape}"
            if not is_finite(value):
                return f"{key!r} is not finite; bound the replies, or use another strategy"
        return None

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, over all clients."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        messages = gate(replies)
        answers = [metrics_in(each.content).values() for each in messages if each.has_content()]
        # Evaluations lack the training loss and the size of the first batch. One client must not decide the key.
        known = [any(self.weighted_by_key in record for record in records) for records in answers]
        key = self.weighted_by_key if 2 * sum(known) > len(known) else protocol.NUM_EXAMPLES

        def problem(reply: Reply) -> str | None:
            return number_problem(reply.metrics, key) if self.weighs else None

        # Without messages nobody was asked, so no reply is required: a missing evaluation must not end the run.
        self.evaluation = self.attendance(f"round {server_round}, evaluation")
        found = self.evaluation.screen(messages, partial(read_reply, records=None), problem, metric_problems)
        return self.evaluated(server_round, found, key)

    def evaluated(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""


def state_of(rule: Rule) -> bytes:
    """The state of a rule and of those inside it; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._state()} for each in rule.chain])


def restore(rule: Rule, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, saved in zip(rule.chain, parse(state, list), strict=True):
        each._load_state(saved[str(each)])


def refuse_bounds(rule: Rule) -> None:
    """Raise SettingsError if the rule averages something that its bounds do not limit."""
    bounds = rule.base.bounds
    if bounds is None:
        return
    refused = bounds.of_updates() if rule.traits.records else {}
    reason = f"{rule} averages more than the model, which one client could set to any value"
    if not rule.traits.has_global_model:
        refused, reason = bounds.notes(), f"{rule} has no model of all clients, on which one could have influence"
    for key, value in refused.items():
        raise SettingsError(f"bounds.{key} is {value!r}, but {reason}")


def require_norm(rule: Rule, needed: Collection[Role], arrays: ArrayRecord, use: str, instead: str = "FedAvg") -> None:
    """Raise SettingsError if the model has no arrays of the `needed` roles: the run would equal that of `instead`."""
    if set(needed).isdisjoint(roles(arrays).values()):
        missing = " or ".join(sorted(role.value for role in set(needed) - {Role.COUNTER}))
        raise SettingsError(
            f"{rule} {use}, and the model has none (no array is a batch norm's {missing}); use {instead}, or a model "
            "with model.norm=bn"
        )
