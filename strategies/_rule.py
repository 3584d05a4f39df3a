"""The way of a round: how the outermost rule of a chain makes the rounds of a run from the hooks of all.

Flower calls `start`, which calls `configure_train` and `aggregate_train` in each round. The innermost rule, a
`BaseStrategy`, chooses the clients, and judges their replies.
"""

from __future__ import annotations

import inspect
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result

from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import RoundSkipped, RunFailed, SettingsError, few, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd, are_alike, arrays_problem, initial_problem, is_finite
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply, number_problem, partition_of, with_content
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.messages.votes import arrays_problems, metric_problems, record_problems
from fedbn_flwr.norms.roles import NORM_STATE, Role, roles, split

from ._bounds import InfluenceBounds
from ._hooks import Hooks, Question, Round
from ._roster import Asked, Attendance, Roster, Screening

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# Flower's strategies for differential privacy, which wrap others.
NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))


class Rule(Hooks):
    """A strategy written as hooks, alone or around another one."""

    chain: tuple[Rule, ...]  # this rule, the one inside it, and so on
    base: BaseStrategy  # the innermost rule of the chain, which chooses the clients
    _round: Round | None = None  # the current round
    _name: Mapping[str, str] = {}  # the name of the run, unless `start` started it

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages, by the hooks of the chain. Flower calls this on the outermost strategy."""
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do, or a `start` of the user.
            self._check_outer()
            self.begin(self.num_rounds, arrays)
            self._name = _drawn_name()
        # A rule that makes the statistics itself hides them from a strategy of Flower inside it.
        hidden = NORM_STATE if any("statistics" in rule.restores for rule in self.chain) else frozenset[Role]()
        round = Round(server_round, arrays, self._named(config), grid, hidden)
        for rule in self.chain:
            if (question := rule.question(round)) is not None:
                self.base.ask(round, question)
            round = replace(round, config=ConfigRecord({**round.config, **rule.config(round)}))
        self._round, before = round, {**round.config}
        messages: Sequence[Message] = self.base.messages(round)
        # A strategy of Flower may change the config of all later rounds too, as in its tutorial: config["lr"] *= 0.5
        config.update({key: value for key, value in round.config.items() if before.get(key) != value})
        for rule in reversed(self.chain):
            messages = rule.outgoing(round, messages)
        messages = self.base.exchanged(round, messages)
        records = {name: pack(values) for rule in self.chain for name, values in rule.records(round).items() if values}
        if not records:
            return messages
        return [with_content(message, RecordDict({**message.content, **records})) for message in messages]

    def _check_outer(self) -> None:
        """Raise SettingsError if a strategy of Flower for privacy around this one would clip records of the rule."""
        outside = traceback.walk_stack(inspect.currentframe())  # no strategy knows the one around it
        for frame, _ in outside if self.traits.records else ():
            if isinstance(outer := frame.f_locals.get("self"), NOISED):
                kind = type(outer).__name__
                raise SettingsError(
                    f"{kind} clips each record of a reply as if it were the model, and {self} inside it also sends "
                    f"{self.traits.besides[0]}; use {self} without {kind}, or a strategy that sends only the model"
                )

    def _named(self, config: ConfigRecord, keys: Iterable[str] = ()) -> ConfigRecord:
        """The config with the name of the run, by which clients know their state of it, and with these keys."""
        name = {} if protocol.RUN in config else self._name
        added: dict[str, str | bool] = {**name, **dict.fromkeys(keys, True)}
        return ConfigRecord({**added, **config}) if added.keys() - config.keys() else config

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model, by the hooks of the chain. Flower calls this on the outermost strategy."""
        base, round = self.base, self._round
        base.training = Attendance()
        if round is None or not base.asked.nodes:
            return None, None
        try:
            usable = self._usable(round, gate(replies))
        except RoundSkipped:
            return round.arrays, MetricRecord({"skipped": 1})
        names = "(".join(map(str, self.chain)) + ")" * (len(self.chain) - 1)
        given = self.weights(round, usable)
        if len(given) != len(usable):
            raise RunFailed(f"{names}.weights returned {len(given)} for {len(usable)} replies; expected one for each")
        weights = base.bounded(f"round {server_round}", given)
        combined = self.combine(round, usable, weights)
        if not isinstance(combined, Mapping):
            raise RunFailed(f"{names}.combine returned {shown(combined)}; expected the new model, a dict of arrays")
        if problem := base.model_problem(combined, unpack(round.arrays)):
            raise RunFailed(f"round {server_round}: {names} made a model that cannot be used: {problem}")
        model = pack(combined)
        if list(model) != list(round.arrays):  # arrays that clients do not send back do not change
            if missing := [key for key in usable[0].arrays if key not in model]:
                log_once(f"{names}.combine doesn't return {few(missing, 3)}: what was sent stays")
            model = record_of({**round.arrays, **model})
        for rule in reversed(self.chain):
            rule.after_round(round, usable, weights)
        return model, base.metrics(usable)

    def _usable(self, round: Round, messages: Sequence[Message]) -> Sequence[Reply]:
        """The replies that every rule of the chain can use."""
        base, sent, record_names = self.base, unpack(round.arrays), self.traits.records
        for rule in self.chain:
            messages = rule.incoming(round, messages)
        screening = Screening(messages, base.arrayrecord_key, record_names)
        screening.check(lambda reply: base.form_problem(round, reply, sent))
        for rule in self.chain:
            screening.check(partial(rule.problem, round))
        if not any("compared" in broken(rule) for rule in self.chain):
            problems = {**metric_problems(screening.usable), **base.compare(screening.usable, sent)}
            for name in record_names:
                problems |= record_problems(screening.usable, name, sent)
            screening.leave_out(problems)
        base.training, usable = base.roster.attendance(f"round {round.number}", base.asked, screening)
        replies = base.clipped(round, usable)
        for rule in reversed(self.chain):
            replies = rule.accepted(round, replies)
        return replies

    # --- the run ---

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
        self.base.reply_timeout = timeout
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
        """Configs that name the run, by which clients tell it from others, and `evaluate_fn` of `global_model`."""
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

    # --- the state ---

    def _state(self) -> object:
        """The state that checkpoints save."""
        return vars(self.memory)

    def _load_state(self, values: Any) -> None:
        self.memory = self.Memory(**values)


class BaseStrategy(Rule):
    """The innermost rule of a chain: it chooses the clients, and knows them by their partitions."""

    @dataclass
    class Memory(Hooks.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    breaks = {}
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    weighs: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    bounds: InfluenceBounds | None = None
    # The error for models that track statistics, with a place for the first key of theirs; None accepts them.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs
    min_available_nodes: int = 1  # nodes that must be connected before clients are chosen or queried
    node_timeout: float = 600  # seconds to wait for them
    reply_timeout: float = 3600  # seconds to wait for a reply; `start` sets it

    def __init__(self) -> None:
        self.memory, self.chain, self.base = self.Memory(), (self,), self
        self._unnumbered: set[int] = set()
        # Of this round, of the last one, and of the last evaluation.
        self.asked, self.training, self.evaluation = Asked(), Attendance(), Attendance()

    # --- the clients ---

    @property
    def roster(self) -> Roster:
        return Roster(self.memory.partitions)

    def asked_by(self, messages: Iterable[Message], arrays: ArrayRecord) -> Asked:
        """The nodes that these messages ask; `arrays` is the model that they contain."""
        return Asked([message.metadata.dst_node_id for message in messages], self.min_train_nodes, arrays)

    def connected(self, grid: Grid, needed: int = 0) -> list[int]:
        """All connected nodes, as soon as there are `min_available_nodes`, or `needed` if these are more."""
        hint = "start more SuperNodes, or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
        return wait_for_nodes(grid, max(needed, self.min_available_nodes), self.node_timeout, hint)

    def ask_for_partitions(self, round: Round, nodes: Iterable[int]) -> None:
        """Ask these nodes for their partitions unless they are known, since node ids are random in every run."""
        unknown = [node for node in nodes if node not in self.memory.partitions and node not in self._unnumbered]
        content = RecordDict({self.configrecord_key: ConfigRecord(protocol.run_keys(round.config))})
        asked = [Message(content, node, protocol.PARTITION_QUERY) for node in unknown]
        replies = gate(round.grid.send_and_receive(asked, timeout=self.node_timeout)) if asked else ()
        reported = {r.metadata.src_node_id: partition_of(r.content) for r in replies if r.has_content()}
        self.roster.learn(reported)
        self._unnumbered |= {node for node, number in reported.items() if number is None}

    def ask(self, round: Round, question: Question) -> None:
        """Ask all connected clients without an answer, and add what they answer; RunFailed if nobody ever has."""
        nodes, answers, roster = self.connected(round.grid), question.answers, self.roster
        if answers:  # a client may be back under another node id
            self.ask_for_partitions(round, nodes)
        if not (left := [node for node in nodes if roster.client(node) not in answers]):
            return
        config = ConfigRecord({**round.config, question.key: True, protocol.ROUND: round.number})
        content = RecordDict({**({} if question.model is None else {"arrays": pack(question.model)}), "config": config})
        asked = [Message(content, node, protocol.MEASURE_QUERY) for node in left]
        screening = Screening(gate(round.grid.send_and_receive(asked, timeout=self.reply_timeout)))
        self._screen(question, screening)
        what = f"round {round.number}, measurement"  # no answer is required: others may come later
        attendance, replies = roster.attendance(what, Asked(), screening)
        for reply in replies:
            answers[roster.client(reply.message.metadata.src_node_id)] = reply.arrays
        if not answers:
            listed = "".join(f"\n  - {reason}" for reason in attendance.left_out)
            raise RunFailed(f"{what}: no client sent {question.what}:{listed}")

    def _screen(self, question: Question, screening: Screening) -> None:
        """Leave out new answers that are unusable, also by comparison with all: absurd, or outside of the bounds."""
        screening.check(
            lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or question.problem(reply.arrays)
        )
        screening.leave_out(metric_problems(screening.usable))
        if before := [*question.answers.values()]:
            screening.check(lambda reply: arrays_problem(reply.arrays, before[0]))
        else:
            screening.leave_out(arrays_problems(screening.usable, {}))
        far = self.far([*(reply.arrays for reply in screening.usable.values()), *before], {})
        screening.leave_out({node: far[place] for place, node in enumerate(screening.usable) if place in far})

    def due(self, clients: int) -> int | None:
        """How many clients train in a round when all of these are connected; None if this is not known."""
        return None

    # --- a round of training, in the order in which `Rule` calls these ---

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
        self.memory, self.num_rounds, self._unnumbered = self.Memory(), num_rounds, set()

    def messages(self, round: Round) -> list[Message]:
        """Choose the clients of a round, note them in `asked`, and return their messages."""
        raise NotImplementedError

    def exchanged(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """Run the round's exchanges, if it has any; returns the messages to send."""
        return messages

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why the form of a reply is not the one that the messages of the round ask for, or None."""

    def compare(self, replies: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node.

        Values must not be absurd, and statistics must be within the bounds.
        """
        nodes, cohort = list(replies), [reply.arrays for reply in replies.values()]
        keys = [key for key, role in roles(cohort[0]).items() if role is Role.STATISTICS] if cohort else []
        return {nodes[place]: problem for place, problem in self.far(cohort, sent, keys).items()}

    def far(self, cohort: Sequence[Arrays], sent: Arrays, keys: Sequence[str] | None = None) -> Mapping[int, str]:
        """The problems of clients that are too far from the others, by place; bounds decide on all arrays or `keys`."""
        found = self.bounds.outliers(cohort, [*cohort[0]] if keys is None else keys) if self.bounds and cohort else {}
        return {**absurd(cohort, sent), **found}

    def clipped(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies, with updates that are larger than the bounds allow shortened."""
        if self.bounds is None:
            return replies
        arrays: Sequence[Arrays] = [reply.arrays for reply in replies]
        sent = unpack(round.arrays)
        # What stays on the clients is apart: its distance from the clients' mean is not an update.
        for some in filter(None, split(sent, self.traits.stays(sent))):
            arrays = self.bounds.clipped(arrays, some, f"round {round.number}")
        return [replace(reply, arrays=values) for reply, values in zip(replies, arrays, strict=True)]

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        key = self.weighted_by_key
        known = self.weighs or not any(number_problem(reply.metrics, key) for reply in replies)
        weights = [float(reply.metrics[key]) for reply in replies] if known else []
        return weights if self.weighs or any(weights) else [1.0] * len(replies)

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
        if are_alike(model, sent):
            return None
        for key, value in model.items():
            if key not in sent:
                return f"it has {key!r}, which the clients' model lacks"
            if not isinstance(value, np.ndarray | np.generic) or value.shape != sent[key].shape:
                found = f"{type(value).__name__} of shape {np.shape(value)}"
                return f"{key!r} is {found}; expected an array of shape {sent[key].shape}"
            if not is_finite(value):
                return f"{key!r} is not finite; bound the replies, or use another strategy"
        return None

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, over all clients."""

    # --- an evaluation ---

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        screening = Screening(gate(replies), records=None)
        # A key of training, such as its loss, is missing here; examples weight then. Most replies decide, not one.
        known = [self.weighted_by_key in reply.metrics for reply in screening.usable.values()]
        key = self.weighted_by_key if 2 * sum(known) > len(known) else protocol.NUM_EXAMPLES
        if self.weighs:
            screening.check(lambda reply: number_problem(reply.metrics, key))
        screening.leave_out(metric_problems(screening.usable))
        # Without messages nobody was asked, so no reply is required: a missing evaluation must not end the run.
        self.evaluation, used = self.roster.attendance(f"round {server_round}, evaluation", Asked(), screening)
        return self.evaluated(server_round, used, key)

    def evaluated(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""


# Hooks that may use the replies of single clients.
_OF_SINGLE_REPLIES = ("question", "problem", "combine", "after_round", "incoming", "accepted")


def broken(rule: Rule) -> Mapping[str, str]:
    """The guarantees that a rule breaks by itself, each with the reason.

    These are the ones in `breaks`, and "mean" for a hook that the class, or a base, adds to those of the nearest class
    that declares `breaks`. Other weights break it whatever is declared: a mean is weighted already.
    """
    kind = type(rule)
    nearest = next(place for place, each in enumerate(kind.__mro__) if "breaks" in vars(each))
    own = [hook for hook in _OF_SINGLE_REPLIES if any(hook in vars(each) for each in kind.__mro__[:nearest])]
    if own:
        reason = f"has {own[0]}() of its own, which may use the replies of single clients"
        return {"mean": f"{reason} (if it uses only their mean, declare this: breaks = {{}})", **rule.breaks}
    if kind.weights not in (Rule.weights, BaseStrategy.weights):
        return {"mean": "has weights() of its own, which need the single replies", **rule.breaks}
    return rule.breaks


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}


def state_of(rule: Rule) -> bytes:
    """The state of a rule and of those inside it; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._state()} for each in rule.chain])


def restore(rule: Rule, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, saved in zip(rule.chain, parse(state, list), strict=True):
        each._load_state(saved[str(each)])
