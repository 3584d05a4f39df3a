"""Rules, of which strategies are made, and the way of a round.

Rules wrap one another and form a chain. The innermost, a `Base`, chooses the clients and judges their replies; the
outermost runs the round (`prepare` and `finish`) by calling every rule's hooks in this order:

- `begin` prepares a run.
- `config` has keys for the clients, those of the outermost rule first.
- `outgoing` may change the messages, the innermost rule first. Then FedTAN exchanges statistics, and every rule's
  `records` are added.
- `incoming` may change the replies, the outermost rule first.
- `problem` judges single replies. `accepted` gets the usable ones and may change them, the innermost rule first.
- `weights` and `combine` make the new model; a rule calls those of the rule it wraps by `super()`.
- `after_round` updates the state, the innermost rule first.
- `global_model` returns the model to evaluate, and `notes` the entries of the summary.

A rule overrides only the hooks whose behaviour it changes. Subclass `FedAvg`, or `Wrapper` for any other strategy
(docs/write-a-strategy.md).
"""

from __future__ import annotations

import functools
import math
import operator
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.declared import checked
from fedbn_flwr.engines.capabilities import wait_for_nodes
from fedbn_flwr.errors import RoundSkipped, RunFailed, SettingsError, few, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.messages.gate import form_problems, gate, metric_problems, record_problems
from fedbn_flwr.messages.limits import initial_problem, size_problem, values_problems
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply, number_problem, partition_of, with_content
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.norms.roles import Role, roles, split
from fedbn_flwr.trees import Json

from .poll import Poll, Roster
from .traits import InfluenceBounds, Round, Traits

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Rule(Strategy):
    """A strategy written as hooks, whose defaults pass on to the rule it wraps or change nothing."""

    @dataclass
    class Memory:
        """The state of the strategy: `begin` resets it, a checkpoint saves it, and a resumed run restores it.

        A strategy with state declares a dataclass of this name, derived from its base's. All fields have defaults; they
        are numbers, strings, arrays, and lists and dicts of these.
        """

        # The first round after the one in which the rule froze or switched, which schedules of clients follow.
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
    chain: tuple[Rule, ...]  # this rule, the one it wraps, and so on
    base: Base  # the innermost rule of the chain
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

    def notes(self) -> Json:
        """The entries in the run's summary, for instance the round in which the strategy froze batch norm."""
        return self.chain[1].notes()

    # --- what Flower calls on the outermost rule ---

    @checked
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
        """Run the federation, with configs that name the run, by which clients tell it from others."""
        self.base.reply_timeout = timeout
        self.begin(num_rounds, initial_arrays)
        given = {**(train_config or {})}
        name = protocol.run_keys(given) if protocol.RUN in given else _drawn_name()
        train, evaluate = ConfigRecord({**given, **name}), ConfigRecord({**(evaluate_config or {}), **name})

        def evaluate_model(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(number, self.global_model(evaluation_round(self, number, arrays, train, grid)))

        return super().start(grid, initial_arrays, num_rounds, timeout, train, evaluate, evaluate_fn and evaluate_model)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do.
            self.begin(0, arrays)
            self._name = _drawn_name()
        return prepare(self.chain, self.base, Round(server_round, arrays, self._named(config), grid), config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        round = self.base.round
        return (None, None) if round is None else finish(self.chain, self.base, round, replies)

    def _named(self, config: ConfigRecord) -> ConfigRecord:
        """The config with the name of the run, by which clients know their state of it."""
        return config if protocol.RUN in config or not self._name else ConfigRecord({**self._name, **config})

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
            if issubclass(base, Rule) and not issubclass(cls.Memory, base.Memory):
                name = base.__name__
                raise TypeError(
                    f"{cls.__name__}.Memory lacks the state of {name}; write `class Memory({name}.Memory):`"
                )

    def __str__(self) -> str:
        """The strategy's name in messages."""
        return type(self).__name__


class Base(Rule):
    """What the innermost rule of a chain has in addition to hooks. It knows clients by their partitions.

    A base must define `train_messages`, `evaluate_messages`, `combine` and `summary`; all else has defaults.
    """

    @dataclass
    class Memory(Rule.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    needs_weights: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    bounds: InfluenceBounds | None = None
    hidden: frozenset[Role] = frozenset()  # roles that a rule around it combines, and a strategy of Flower doesn't see
    # The error for a model that tracks statistics, with a place for its first such key; None accepts these models.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs
    min_available_nodes: int = 1  # nodes that must be connected before clients are chosen or queried
    node_timeout: float = 600  # seconds to wait for them
    reply_timeout: float = 3600  # seconds to wait for a reply; `start` sets it
    round: Round | None = None  # the current round of training

    def __init__(self) -> None:
        self.memory, self.chain, self.base = self.Memory(), (self,), self
        self._unnumbered = set[int]()  # the nodes that have reported that they have no partition; not saved
        self.training, self.evaluation = Poll(), Poll()  # of the last round, and of the last evaluation

    # --- the clients ---

    @property
    def roster(self) -> Roster:
        """The clients of the run; their partitions are in `memory`, so that a checkpoint has them."""
        return Roster(self.memory.partitions, self._unnumbered)

    def poll_of(self, messages: Iterable[Message], arrays: ArrayRecord) -> Poll:
        """The nodes that these messages ask, of which `min_train_nodes` must answer; `arrays` is the model in them."""
        nodes = [message.metadata.dst_node_id for message in messages]
        return Poll(self.roster, nodes, max(1, self.min_train_nodes), arrays)

    def connected(self, grid: Grid, needed: int = 0) -> list[int]:
        """All connected nodes, as soon as there are `min_available_nodes`, or `needed` if these are more."""
        hint = "start more SuperNodes, or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
        least = max(needed, self.min_available_nodes)
        return wait_for_nodes(grid, least, self.node_timeout, hint, lambda nodes: few(self.roster.absent(nodes), 8))

    def ask_for_partitions(self, round: Round, nodes: Iterable[int]) -> None:
        """Ask these nodes for their partitions unless they are known, since node ids are random in every run."""
        roster = self.roster
        unknown = [node for node in nodes if node not in roster.partitions and node not in roster.unnumbered]
        content = RecordDict({self.configrecord_key: ConfigRecord(protocol.run_keys(round.config))})
        queries = [Message(content, node, protocol.PARTITION_QUERY) for node in unknown]
        replies = gate(round.grid.send_and_receive(queries, timeout=self.node_timeout)) if queries else ()
        roster.learn({each.metadata.src_node_id: partition_of(each.content) for each in replies if each.has_content()})

    def num_training(self, clients: int) -> int | None:
        """How many clients train in a round when all of these are connected; None if this is not known."""
        return None

    # --- a run ---

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
        self._unnumbered = set()
        self._remember()

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def notes(self) -> Json:
        return {}

    # --- a round of training, in the order in which `prepare` and `finish` call these ---

    @abstractmethod
    def train_messages(self, round: Round) -> list[Message]:
        """Choose the clients of a round, and return their messages."""

    def with_exchanges(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """Run the round's exchanges, if it has any, and return the messages to send."""
        return messages

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why the form of a reply is not the one that the messages of the round ask for, or None."""

    def compare(self, replies: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node: statistics outside of bounds."""
        first: Arrays = next((reply.arrays for reply in replies.values()), {})
        return self.outliers(replies, [key for key, role in roles(first).items() if role is Role.STATISTICS])

    def outliers(self, replies: Mapping[int, Reply], keys: Sequence[str]) -> dict[int, str]:
        """The problems of replies whose arrays `keys` are further from one another than the bounds allow, by node."""
        nodes, cohort = [*replies], [reply.arrays for reply in replies.values()]
        problems = self.bounds.outliers(cohort, keys) if self.bounds and cohort else {}
        return {nodes[place]: problem for place, problem in problems.items()}

    def clip_updates(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies, with updates that are larger than the bounds allow shortened."""
        if self.bounds is None:
            return replies
        arrays: Sequence[Arrays] = [reply.arrays for reply in replies]
        sent = unpack(round.arrays)
        # What stays on the clients is apart: its distance from the clients' mean is not an update.
        for some in filter(None, split(sent, self.traits.local_keys(sent))):
            arrays = self.bounds.clip(arrays, some, f"round {round.number}")
        return [replace(reply, arrays=values) for reply, values in zip(replies, arrays, strict=True)]

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        key = self.weighted_by_key
        if not self.needs_weights and any(number_problem(reply.metrics, key) for reply in replies):
            return [1.0] * len(replies)
        weights = [float(reply.metrics[key]) for reply in replies]
        return weights if self.needs_weights or any(weights) else [1.0] * len(replies)

    def bound_weights(self, what: str, weights: list[float]) -> list[float]:
        """The weights, none of which is larger than the bounds allow; RunFailed if all are zero."""
        if not sum(weights) > 0:
            raise RunFailed(
                f"{what}: the sum of the weights of all {len(weights)} clients ({self.weighted_by_key}) is "
                f"{sum(weights)}; expected one above zero"
            )
        return weights if self.bounds is None else list(self.bounds.weights(weights))

    @abstractmethod
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model."""

    def model_problem(self, model: Arrays, sent: Arrays) -> str | None:
        """Why the new model must not replace the one that was sent, or None."""
        for key, value in model.items():
            if key not in sent:
                return f"it has {key!r}, which the clients' model lacks"
            if not isinstance(value, np.ndarray | np.generic) or value.shape != sent[key].shape:
                return (
                    f"{key!r} is {type(value).__name__} of shape {np.shape(value)}; expected an array of shape "
                    f"{sent[key].shape}"
                )
        problem = size_problem(model)
        return f"{problem}; bound the replies, or use another strategy" if problem else None

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, over all clients."""

    # --- a query of clients ---

    def query(
        self,
        round: Round,
        what: str,
        poll: Poll,
        queries: Sequence[Message],
        problem: Callable[[Reply], str | None],
    ) -> list[Reply]:
        """Send queries, and return the usable answers; `what` names them in messages.

        Answers are also compared with one another: they must have the same form, and must be neither absurd nor outside
        of the bounds.
        """
        poll.read(round.grid.send_and_receive(queries, timeout=self.reply_timeout), self.arrayrecord_key)
        poll.check(lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or problem(reply))
        poll.leave_out(metric_problems(poll.usable))
        poll.leave_out(form_problems(poll.arrays_of_usable(), {}))
        poll.leave_out(values_problems(poll.arrays_of_usable(), {}))
        poll.leave_out(self.outliers(poll.usable, [*next(iter(poll.arrays_of_usable().values()), {})]))
        return poll.close(what)

    # --- an evaluation ---

    @abstractmethod
    def evaluate_messages(self, round: Round) -> list[Message]:
        """Choose the clients of an evaluation, and return their messages."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = self.evaluate_messages(evaluation_round(self, server_round, arrays, config, grid))
        # No reply is required: a missing evaluation must not end the run.
        self.evaluation = Poll(self.roster, [message.metadata.dst_node_id for message in messages])
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        poll = self.evaluation
        poll.read(replies, records=None)
        # A key of training, such as its loss, is missing here; examples weight then. Most replies decide, not one.
        known = [self.weighted_by_key in reply.metrics for reply in poll.usable.values()]
        key = self.weighted_by_key if 2 * sum(known) > len(known) else protocol.NUM_EXAMPLES
        if self.needs_weights:
            poll.check(lambda reply: number_problem(reply.metrics, key))
        poll.leave_out(metric_problems(poll.usable))
        return self.mean_evaluation(server_round, poll.close(f"round {server_round}, evaluation"), key)

    def mean_evaluation(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""


# --- the way of a round ---


def prepare(chain: Sequence[Rule], base: Base, round: Round, config: ConfigRecord) -> Sequence[Message]:
    """The round's messages; `config` is Flower's, which a strategy may change for all later rounds."""
    for rule in chain:
        round = replace(round, config=ConfigRecord({**round.config, **rule.config(round)}))
    base.round, before = round, {**round.config}
    messages: Sequence[Message] = base.train_messages(round)
    base.training = base.poll_of(messages, round.arrays)
    # As in Flower's tutorial: config["lr"] *= 0.5
    config.update({key: value for key, value in round.config.items() if before.get(key) != value})
    for rule in reversed(chain):
        messages = rule.outgoing(round, messages)
    messages = base.with_exchanges(round, messages)
    records = {name: pack(values) for rule in chain for name, values in rule.records(round).items() if values}
    if not records:
        return messages
    return [with_content(message, RecordDict({**message.content, **records})) for message in messages]


def finish(
    chain: Sequence[Rule], base: Base, round: Round, messages: Iterable[Message]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """The new model and the metrics, from the replies."""
    poll, traits, sent = base.training, chain[0].traits, unpack(round.arrays)
    if not poll.nodes:
        return None, None
    replies: Sequence[Message] = gate(messages)
    try:
        for rule in chain:
            replies = rule.incoming(round, replies)
    except RoundSkipped:
        return round.arrays, MetricRecord({"skipped": 1})
    poll.read(replies, base.arrayrecord_key, traits.records)
    poll.check(lambda reply: base.form_problem(round, reply, sent))
    poll.leave_out(values_problems(poll.arrays_of_usable(), sent, compared=traits.may_be_outlier))
    for rule in chain:
        poll.check(partial(rule.problem, round))
    if traits.may_be_outlier:
        problems = {**metric_problems(poll.usable), **base.compare(poll.usable, sent)}
        for name in traits.records:
            problems |= record_problems(poll.usable, name, sent)
        poll.leave_out(problems)
    usable = base.clip_updates(round, poll.close(f"round {round.number}"))
    for rule in reversed(chain):
        usable = rule.accepted(round, usable)
    weights = base.bound_weights(f"round {round.number}", checked_weights(chain, round, usable))
    model = checked_model(chain, base, round, chain[0].combine(round, usable, weights), usable[0].arrays)
    for rule in reversed(chain):
        rule.after_round(round, usable, weights)
    return model, base.metrics(usable)


def checked_weights(chain: Sequence[Rule], round: Round, replies: Sequence[Reply]) -> list[float]:
    """The weights of the replies; RunFailed names the rule whose hook returns something else."""
    given: Any = chain[0].weights(round, replies)
    are_numbers = isinstance(given, Sequence | np.ndarray) and all(
        isinstance(w, int | float | np.number) for w in given
    )
    weights = [float(weight) for weight in given] if are_numbers else []
    author = next(rule for rule in chain if type(rule).weights is not Rule.weights)
    is_right = len(weights) == len(replies) and all(0 <= weight < math.inf for weight in weights)
    if not is_right or (sum(weights) == 0 and type(author).weights is not Base.weights):
        raise RunFailed(
            f"{author}.weights returned {shown(given)} for {len(replies)} replies; expected a number for each, zero or "
            "more, and one above zero"
        )
    return weights


def checked_model(chain: Sequence[Rule], base: Base, round: Round, combined: object, reply: Arrays) -> ArrayRecord:
    """The new model; arrays that clients do not send back do not change. RunFailed if it cannot be used."""
    names = "(".join(map(str, chain)) + ")" * (len(chain) - 1)
    if not isinstance(combined, Mapping):
        raise RunFailed(f"{names}.combine returned {shown(combined)}; expected the new model, a dict of arrays")
    if problem := base.model_problem(combined, unpack(round.arrays)):
        raise RunFailed(f"round {round.number}: {names} made a model that cannot be used: {problem}")
    model = pack(combined)
    if list(model) == list(round.arrays):
        return model
    if missing := [key for key in reply if key not in model]:
        log_once(f"{names}.combine doesn't return {few(missing, 3)}: what was sent stays")
    return record_of({**round.arrays, **model})


def evaluation_round(rule: Rule, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Round:
    """The round in which this model is tested."""
    return Round(number, arrays, rule._named(config), grid)


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}


# --- what strategies and experiments use ---


def state_of(rule: Rule) -> bytes:
    """The state of a rule and of those it wraps; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._state()} for each in rule.chain])


def restore(rule: Rule, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, saved in zip(rule.chain, parse(state, list), strict=True):
        each._load_state(saved[str(each)])


def require_norm(rule: Rule, needed: Collection[Role], arrays: ArrayRecord, use: str, instead: str = "FedAvg") -> None:
    """Raise SettingsError if the model has no arrays of the `needed` roles: the run would equal that of `instead`."""
    if set(needed).isdisjoint(roles(arrays).values()):
        missing = " or ".join(sorted(role.value for role in set(needed) - {Role.COUNTER}))
        raise SettingsError(
            f"{rule} {use}, and no array of the model is a batch norm's {missing}. In a Flower app, add batch norm "
            "to the network or, if it has some, send the whole state dict: ArrayRecord(model.state_dict()). In an "
            f"experiment, set model.norm=bn. Or use {instead}"
        )
