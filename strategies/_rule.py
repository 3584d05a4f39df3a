"""The base class of rules: hooks, fixed properties in `traits`, and the rule's state in `memory`.

A rule may be around another one; together they are a chain, whose innermost rule chooses the clients. The outermost
runs the round for all of them, and calls the hooks of each rule in this order:

- `begin` prepares a run.
- `instructions` are sent to the clients, those of the outermost rule first.
- `problem` refuses single replies.
- `weights` and `combine` make the new model; a rule calls those of the rule inside it by `super()`.
- `after_round` updates the state, that of the innermost rule first.
- `global_model` returns the model to evaluate, and `notes` what the summary reports.

A rule overrides only the hooks whose behaviour it changes; the others are those of the rule inside it.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import LOG, Diverged, MessageError, RunFailed, SettingsError, did_you_mean
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd, initial_fault, is_finite, large_value
from fedbn_flwr.messages.arrays import metrics_in, pack, record_of, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.quote import one_line
from fedbn_flwr.messages.reply import Reply, number_problem, partition_of, read_reply, reason_of, refused
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.messages.votes import odd_metrics, record_problems
from fedbn_flwr.norms.roles import Role, roles, split_by_role

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, eq=False)
class Round:
    """The round in which a hook is called."""

    number: int
    arrays: ArrayRecord  # the global model that the round begins with
    config: Mapping[str, Any]  # of the messages to all clients, without this rule's own instructions
    grid: Grid


@dataclass(frozen=True)
class Traits:
    """The properties of a rule that do not change during a run."""

    # What the clients' steps must be: "linear", so that the mean of their first steps is the step along the mean of
    # their gradients (SGD without clipping), or "momentum" (SGD with momentum).
    steps: frozenset[str] = frozenset()
    client_memory: str | None = None  # the state that clients must keep from round to round, described in words
    # The roles that stay on the client, which the server never sends; and whether the client sends them to the server.
    # If there are any, each client has a model of its own, which is evaluated on that client.
    kept: Mapping[Role, bool] = field(default_factory=dict)
    # Examples that a batch must have for its statistics to be exchanged, so that batch norm is that of all clients; 0:
    # no statistics are exchanged.
    min_batch: int = 0
    # Records of arrays, by name, that each client sends back, with an array for every parameter that it trains; and
    # whether all clients count equally in their mean. The `instructions` of these names are sent as such records.
    records: Mapping[str, bool] = field(default_factory=dict)

    @property
    def unsent(self) -> frozenset[Role]:
        """The roles that are in no message."""
        return frozenset(role for role, is_returned in self.kept.items() if not is_returned)

    @property
    def besides(self) -> list[str]:
        """What is sent besides the model's arrays, in words."""
        exchanged = ["statistics of batches, in each batch norm of a round's first step"] if self.min_batch else []
        size = "as large as the parameters: up in each round, down from round 2 on"
        return [f"record `{name}`, {size}" for name in self.records] + exchanged

    @property
    def has_global_model(self) -> bool:
        """Whether the server's arrays are a trained model."""
        return {*self.kept} != {*Role}


# Flower's strategies for differential privacy, which wrap others.
NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))

# Hooks that may use the replies of single clients.
_OF_SINGLE_REPLIES = ("problem", "weights", "combine", "after_round")


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
    chain: tuple[*tuple[Rule, ...], Leaf]  # this rule, the one inside it, and so on to the innermost
    _inside: Rule  # the one inside it
    # What a rule around this one may need and this one does not have, with the reason (an empty one: it has what those
    # inside it lack). `check_composition` names these properties. A class with a hook that sees the replies of single
    # clients must declare what it lacks. One that lacks "inside" hides these replies from all who read the run.
    lacks: Mapping[str, str] = {}
    compares: bool = True  # whether a reply may be refused for what the other clients sent
    # Numbers in `memory` that only grow and must survive a stop within a round, for instance the privacy spent. In an
    # experiment they are on the disk before the messages that `configure_train` returns are sent.
    promised: Collection[str] = ()
    _rounds: int | None = None  # of the run; None or 0 if it was not started by `Rule.start`
    _round: Round | None = None  # the current one
    _name: Mapping[str, str] = {}  # of a run that was not started by `Rule.start`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]
        own = [hook for hook in _OF_SINGLE_REPLIES if _is_own(cls, hook)]
        if own and "lacks" not in vars(cls):
            reason = f"has {own[0]}() of its own, which may use the replies of single clients"
            cls.lacks = {**cls.lacks, "mean": f"{reason} (if it uses only their mean, declare this: lacks = {{}})"}
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

    def instructions(self, round: Round) -> Mapping[str, Any]:
        """The config keys that ask clients to apply the client rule, and the records of `Traits.records`."""
        return {}

    def problem(self, round: Round, reply: Reply) -> str | None:
        """The reason to refuse a reply, or None."""
        return None

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

    def _begins(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Round:
        """The round whose training is configured."""
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do, or a `start` of the user.
            self._check_outer()
            self.begin(self._rounds or 0, arrays)
            self._name = _drawn_name()
        self._round = Round(server_round, arrays, self._named(config), grid)
        return self._round

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

    def _additions(self, round: Round) -> tuple[dict[str, Any], dict[str, ArrayRecord]]:
        """The config keys and the records for the clients. An empty record is not sent, but required of them."""
        keys = dict(self.instructions(round))
        records = {name: keys.pop(name, None) for name in self.traits.records}
        return keys, {name: pack(values) for name, values in records.items() if values}

    def _accepted(self, round: Round, replies: Iterable[Message]) -> Sequence[Reply]:
        """The replies that every rule of the chain, which this one is the outermost of, can use."""
        leaf, sent, names = self.chain[-1], unpack(round.arrays), self.traits.records
        replies = leaf.arrived(replies)

        def problem(reply: Reply) -> str | None:
            found = leaf.unusable(reply, sent)
            for rule in self.chain:
                found = found or rule.problem(round, reply)
            return found

        def compare(found: Mapping[int, Reply]) -> Mapping[int, str]:
            problems = leaf.compare(found, sent)
            for name in names:
                problems |= record_problems(found, name, sent)
            return problems

        compared = compare if all(rule.compares for rule in self.chain) else None
        found = leaf.screen(f"round {round.number}", replies, leaf.asked, problem, compared, names)
        leaf.used, leaf.refused = found.nodes, found.refused
        return leaf.limited(round, found.replies)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The round of the whole chain, which this rule is the outermost of."""
        leaf, round = self.chain[-1], self._round
        leaf.used = ()
        if round is None or not leaf.asked:
            return None, None
        found = self._accepted(round, replies)
        weights = leaf.bounded(f"round {server_round}", self.weights(round, found))
        combined = self.combine(round, found, weights)
        if problem := leaf.unfit(combined, unpack(round.arrays)):
            names = "(".join(map(str, self.chain)) + ")" * (len(self.chain) - 1)
            raise RunFailed(f"round {server_round}: {names} made a model that cannot be used: {problem}")
        model = pack(combined)
        if list(model) != list(round.arrays):  # arrays that clients do not send back do not change
            model = record_of({**round.arrays, **model})
        for rule in reversed(self.chain):
            rule.after_round(round, found, weights)
        return model, leaf.metrics(found)

    # --- the run ---

    def _kept(self) -> Any:
        """The state that checkpoints save."""
        return vars(self.memory)

    def _keep(self, values: Any) -> None:
        """The inverse of `_kept`."""
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
        self.begin(num_rounds, initial_arrays)
        of_run = self._of_run(grid, train_config, evaluate_config, evaluate_fn)
        return super().start(grid, initial_arrays, num_rounds, timeout, *of_run)

    def _of_run(
        self, grid: Grid, train: ConfigRecord | None, evaluate: ConfigRecord | None, evaluate_fn: EvaluateFn | None
    ) -> tuple[ConfigRecord, ConfigRecord, EvaluateFn | None]:
        """The last arguments of `start`: clients keep no state of an earlier run, and `global_model` is evaluated."""
        given = {**(train or {})}
        name = protocol.run_keys(given) if protocol.RUN in given else _drawn_name()
        train, evaluate = ConfigRecord({**given, **name}), ConfigRecord({**(evaluate or {}), **name})

        def evaluate_model(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(number, self.global_model(Round(number, arrays, train, grid)))

        return train, evaluate, evaluate_fn and evaluate_model

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """The first call of a server of Flower's old API."""
        raise SettingsError(
            f"{self} is not a strategy of Flower's old API, of which ServerApp(server_fn=...) starts a "
            "server; call start() in a function under @app.main() (docs/old-api.md)"
        )


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}


def _is_own(cls: type, hook: str) -> bool:
    """Whether a class has a hook that it does not have from another rule, but perhaps from a class that is none."""
    others = [getattr(base, hook) for base in cls.__bases__ if issubclass(base, Rule)]
    return hook in vars(cls) or getattr(cls, hook) not in others


@dataclass(frozen=True)
class Screened:
    """The replies to the messages of a round, an evaluation or a query."""

    by_node: Mapping[int, Reply]  # the usable ones, in the order of partitions
    refused: Sequence[Message]  # the others, as errors

    @property
    def nodes(self) -> Collection[int]:
        return self.by_node.keys()

    @property
    def replies(self) -> list[Reply]:
        return [*self.by_node.values()]


class Leaf(Rule):
    """The innermost rule of a chain: it chooses the clients, and knows them by their partitions."""

    @dataclass
    class Memory(Rule.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    weighs: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    bounds: Any = None  # on the influence of one client, with the methods of extensions.bounds.strategy.Bounds
    # Why a model that tracks statistics is refused, with a place for the first key of theirs; None: it is not.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs
    hidden: frozenset[Role] = frozenset()  # in this run what a strategy that is not a rule does not see of the model
    asked: Sequence[int] = ()  # the nodes that received the model in this round
    used: Collection[int] = ()  # the nodes whose replies are in the last mean, of training or of evaluation

    def __init__(self) -> None:
        self.memory, self.chain = self.Memory(), (self,)
        self.left_out: list[str] = []  # those that are not in this round's mean: client and reason
        self.refused: Sequence[Message] = ()  # the replies that are not in the last mean, as errors

    def due(self, clients: int) -> int | None:
        """How many of these clients train in a round if all are connected; None if the rule does not say."""
        return None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        if not isinstance(arrays, ArrayRecord):
            raise SettingsError(
                f"initial_arrays is a {type(arrays).__name__}; expected ArrayRecord(model.state_dict())"
            )
        if reason := initial_fault(unpack(arrays)):
            raise SettingsError(f"the initial model cannot be trained: {reason}")
        tracked = [key for key, role in roles(arrays).items() if role is Role.STATISTICS]
        if tracked and self.without_statistics:
            raise SettingsError(self.without_statistics.format(tracked[0]))
        self.memory, self._rounds, self.hidden = self.Memory(), num_rounds, frozenset()

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        return [float(reply.metrics[self.weighted_by_key]) for reply in replies]

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def bounded(self, what: str, weights: list[float]) -> list[float]:
        """The weights, none of which is larger than the bounds allow; RunFailed if all are zero."""
        if not sum(weights) > 0:
            raise RunFailed(
                f"{what}: the sum of the weights of all {len(weights)} clients ({self.weighted_by_key}) is "
                f"{sum(weights)}; expected one above zero"
            )
        return weights if self.bounds is None else list(self.bounds.weights(weights))

    def limited(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies, none of whose updates is larger than the bounds allow."""
        if self.bounds is None:
            return replies
        arrays: Sequence[Arrays] = [reply.arrays for reply in replies]
        sent = unpack(round.arrays)
        # Apart: the distance of what a client keeps from the clients' mean is no update.
        for some in filter(None, split_by_role(sent, roles(sent), {*self.traits.kept})):
            arrays = self.bounds.updated(arrays, some, f"round {round.number}")
        return [replace(reply, arrays=values) for reply, values in zip(replies, arrays, strict=True)]

    def arrived(self, replies: Iterable[Message]) -> Iterable[Message]:
        """The replies of the round, before they are read."""
        return replies

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, of all clients together."""

    def evaluated(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation, of all clients together; the metric `key` weights the replies."""

    def unusable(self, reply: Reply, sent: Arrays) -> str | None:
        """The reason why a reply does not have what the messages of the round ask for, or None."""

    def unfit(self, model: Arrays, sent: Arrays) -> str | None:
        """The reason why the new model must not replace the one that was sent, or None."""
        for key, value in model.items():
            if key not in sent:
                return f"it has {key!r}, which the clients' model lacks"
            if not isinstance(value, np.ndarray | np.generic) or value.shape != sent[key].shape:
                found = f"{type(value).__name__} of shape {np.shape(value)}"
                return f"{key!r} is {found}; expected an array of shape {sent[key].shape}"
            if not is_finite(value):
                return f"{key!r} is not finite; bound the replies, or use another strategy"
        return None

    def compare(self, found: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The reasons to refuse replies that show only beside those of the other clients, by node.

        Values must not be absurd, and statistics within the bounds.
        """
        if not found:
            return {}
        nodes, cohort = list(found), [reply.arrays for reply in found.values()]
        problems = absurd(cohort, sent)
        if self.bounds is not None:
            keys = [key for key, role in roles(cohort[0]).items() if role is Role.STATISTICS]
            problems |= self.bounds.outliers(cohort, keys)
        return {nodes[i]: reason for i, reason in problems.items()}

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        messages = gate(replies)
        answers = [metrics_in(each.content).values() for each in messages if each.has_content()]
        # The training loss and the size of the first batch are in no evaluation. One client must not decide this.
        known = [any(self.weighted_by_key in record for record in records) for records in answers]
        key = self.weighted_by_key if 2 * sum(known) > len(known) else protocol.NUM_EXAMPLES

        def problem(reply: Reply) -> str | None:
            return number_problem(reply.metrics, key) if self.weighs else None

        # A missing evaluation must not end the run, so no reply is required.
        found = self.screen(f"round {server_round}, evaluation", messages, (), problem, records=None, left_out=[])
        self.used, self.refused = found.nodes, found.refused
        return self.evaluated(server_round, found.replies, key)

    def screen(
        self,
        what: str,
        replies: Iterable[Message],
        asked: Collection[int],
        problem: Callable[[Reply], str | None],
        compare: Callable[[Mapping[int, Reply]], Mapping[int, str]] | None = lambda found: {},
        records: Collection[str] | None = (),
        left_out: list[str] | None = None,
    ) -> Screened:
        """The replies that `problem` and `compare` do not refuse. See `admit`.

        With None instead of `compare` no reply is refused for what others sent. `records` are the names of additional
        records of arrays; None: the replies have no arrays at all.
        """
        usable: dict[int, Reply] = {}
        answered: dict[int, int | None] = {}
        problems: list[tuple[int, str]] = []  # not a dict: all errors for lost nodes have the SuperLink's node id
        messages = gate(replies)
        for reply in messages:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise MessageError(reason_of(reply))
                answered[node] = partition_of(reply.content)
                found = read_reply(reply, self.arrayrecord_key, records)
                if reason := problem(found):
                    raise MessageError(reason)
                usable[node] = found
            except MessageError as error:
                problems.append((node, str(error)))
        if compare is not None:
            problems += {**odd_metrics(usable), **compare(usable)}.items()
        left = self.admit(what, answered, problems, asked, left_out)
        reasons = {**dict(problems), **self.learn(answered)}
        errors = [
            refused(reply, reasons[node]) if reply.has_content() else reply
            for reply in messages
            if (node := reply.metadata.src_node_id) not in left
        ]
        return Screened({node: usable[node] for node in left}, errors)

    def admit(
        self,
        what: str,
        answered: Mapping[int, int | None],
        refused: Sequence[tuple[int, str]],
        asked: Collection[int],
        left_out: list[str] | None = None,
    ) -> list[int]:
        """The nodes of `answered` that are not in `refused`, in the order of partitions.

        `answered` maps a node to the partition that it reports, `refused` are pairs of node and reason. The log names
        the clients left out, and they are added to `left_out`, by default that of the round's training. RunFailed lists
        them if fewer than `min_train_nodes` of the nodes `asked` remain; if none was asked, none is required.
        """
        left_out = self.left_out if left_out is None else left_out
        moved = self.learn(answered)  # such a client counts once, whatever else it is refused for
        refused = [*(each for each in refused if each[0] not in moved), *moved.items()]
        known = self.memory.partitions
        # The gate and the client name the client too, for Flower's strategies, which log the reason as it is.
        reasons = sorted(
            f"{self._who(node)}: {reason.removeprefix(f'client {known.get(node)}').lstrip(': ')}"
            for node, reason in refused
        )
        bad = {node for node, _ in refused}
        usable = list(answered.keys() - bad)
        silent = sorted({*asked} - answered.keys() - bad, key=self._position)
        if (count := len(asked) - len(usable) - len(refused)) == len(silent):
            reasons += [f"{self._who(node)}: it did not answer in time" for node in silent]
        elif count > 0:  # the others have errors that name the SuperLink
            reasons.append(f"{count} of {len(asked)} clients did not answer in time")
        left_out += reasons
        needed = max(1, min(self.min_train_nodes, len(asked))) if asked else 0
        if len(usable) < needed:
            listed = "".join(f"\n  - {one_line(reason)}" for reason in left_out) or " no reply"
            few = f"{what}: {len(usable)} of {len(asked)} clients sent a usable reply, {needed} are needed"
            large = None if self._round is None else large_value(unpack(self._round.arrays))
            if large is not None:
                few += f"; they received a model with {large}: it diverged, or a reply was false"
            if left_out and all("diverged?" in reason for reason in left_out):
                advice = "The same run would diverge again; lower the learning rate, or clip gradients"
                raise Diverged(f"{few}:{listed}\n{advice}")
            raise RunFailed(f"{few}:{listed}")
        for reason in reasons:
            LOG.warning("%s: left out %s", what, one_line(reason))
        return sorted(usable, key=self._position)

    def learn(self, reported: Mapping[int, int | None]) -> dict[int, str]:
        """Note the partitions that nodes report; the reasons to refuse those that report another one than before.

        Two nodes may report the same one: a node returns under another id, and of others neither is known to be right.
        """
        known = self.memory.partitions
        numbers = {node: number for node, number in reported.items() if number is not None}
        for node, number in numbers.items():
            known.setdefault(node, number)
        return {
            node: f"its partition-id is {number}, and it reported {known[node]} before"
            for node, number in numbers.items()
            if number != known[node]
        }

    def _position(self, node: int) -> tuple[int, int, int]:
        """The sort key of a node: its partition; nodes that have not reported one follow, sorted by node id."""
        partition = self.memory.partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def _who(self, node: int) -> str:
        partition = self.memory.partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"


def state_of(rule: Rule) -> bytes:
    """The state of a rule and of those inside it; ValueError names an attribute that cannot be saved."""
    return dump([{str(each): each._kept()} for each in rule.chain])


def restore(rule: Rule, state: bytes) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    for each, kept in zip(rule.chain, parse(state, list), strict=True):
        each._keep(kept[str(each)])


def refuse_bounds(rule: Rule) -> None:
    """Raise SettingsError if the rule has bounds that do not bound all that it averages."""
    bounds = rule.chain[-1].bounds
    if bounds is None:
        return
    refused = bounds.of_updates() if rule.traits.records else {}
    reason = f"{rule} averages more than the model, which one client could set to any value"
    if not rule.traits.has_global_model:
        refused, reason = bounds.notes(), f"{rule} has no model of all clients, on which one could have influence"
    for key, value in refused.items():
        raise SettingsError(f"bounds.{key} is {value!r}, but {reason}")


def require_norm(rule: Rule, needed: Collection[Role], arrays: ArrayRecord, use: str, instead: str = "FedAvg") -> None:
    """Refuse a model without arrays of the `needed` roles: the run would be `instead` under another name."""
    if set(needed).isdisjoint(roles(arrays).values()):
        missing = " or ".join(sorted(role.value for role in set(needed) - {Role.COUNTER}))
        raise SettingsError(
            f"{rule} {use}, and the model has none (no array is a batch norm's {missing}); use {instead}, or a model "
            "with model.norm=bn"
        )


# The names that arguments have in Flower's old API (flwr.server.strategy), and those in this one.
OLD_NAMES = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "on_fit_config_fn": "train_config of start()",
    "on_evaluate_config_fn": "evaluate_config of start()",
    "evaluate_fn": "evaluate_fn of start()",
    "initial_parameters": "initial_arrays of start()",
}


def unknown_argument(strategy: type, key: str) -> TypeError:
    known = {name for each in strategy.__mro__ if issubclass(each, Rule) for name in inspect.signature(each).parameters}
    hint = f"did you mean {OLD_NAMES[key]}?" if key in OLD_NAMES else did_you_mean(key, known - {"options"})
    return TypeError(f"{strategy.__name__} has no argument {key!r}; {hint}")
