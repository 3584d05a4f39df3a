"""The base of a chain: the innermost rule chooses the clients of a round, and judges their replies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd, are_alike, arrays_problem, initial_problem, is_finite
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.messages.votes import arrays_problems, metric_problems, record_problems
from fedbn_flwr.norms.roles import Role, roles, split

from .bounds import InfluenceBounds
from .hooks import Hooks, Json, Round
from .roster import Asked, Attendance, Roster, Screening


class BaseStrategy(Hooks):
    """What the innermost rule of a chain has in addition to hooks. It knows clients by their partitions.

    A base must define `train_messages`, `combine`, `configure_evaluate` and `summary`; all else has defaults.
    """

    @dataclass
    class Memory(Hooks.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    needs_weights: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    bounds: InfluenceBounds | None = None
    # The error for a model that tracks statistics, with a place for its first such key; None accepts these models.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs
    min_available_nodes: int = 1  # nodes that must be connected before clients are chosen or queried
    node_timeout: float = 600  # seconds to wait for them
    reply_timeout: float = 3600  # seconds to wait for a reply; `start` sets it

    def __init__(self) -> None:
        self.memory, self.chain, self.base = self.Memory(), (self,), self
        self._unnumbered = set[int]()  # the nodes that have reported that they have no partition; not saved
        # Who is asked in this round, and what became of those asked in the last round and the last evaluation.
        self.asked, self.training, self.evaluation = Asked(), Attendance(), Attendance()

    # --- the clients ---

    @property
    def roster(self) -> Roster:
        """The clients of the run; their partitions are in `memory`, so that a checkpoint has them."""
        return Roster(self.memory.partitions, self._unnumbered)

    def asked_by(self, messages: Iterable[Message], arrays: ArrayRecord) -> Asked:
        """The nodes that these messages ask; `arrays` is the model that they contain."""
        return Asked([message.metadata.dst_node_id for message in messages], self.min_train_nodes, arrays)

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
        self.memory, self.num_rounds, self._unnumbered = self.Memory(), num_rounds, set()

    def end(self) -> None:
        """Note that a run has ended, perhaps by an error; only `start` calls this."""

    def notes(self) -> Json:
        return {}

    # --- a round of training, in the order in which `Rule` calls these ---

    @abstractmethod
    def train_messages(self, round: Round) -> list[Message]:
        """Choose the clients of a round, and return their messages."""

    def with_exchanges(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """Run the round's exchanges, if it has any, and return the messages to send."""
        return messages

    def usable_replies(self, chain: Sequence[Hooks], round: Round, messages: Sequence[Message]) -> Sequence[Reply]:
        """The replies that every rule of the chain can use, with updates clipped by the bounds.

        Each reply is checked by itself, and then against the others.
        """
        sent, traits = unpack(round.arrays), chain[0].traits
        screening = Screening(messages, self.arrayrecord_key, traits.records)
        screening.check(lambda reply: self.form_problem(round, reply, sent))
        for rule in chain:
            screening.check(partial(rule.problem, round))
        if traits.compared:
            problems = {**metric_problems(screening.usable), **self.compare(screening.usable, sent)}
            for name in traits.records:
                problems |= record_problems(screening.usable, name, sent)
            screening.leave_out(problems)
        self.training, usable = self.roster.attendance(f"round {round.number}", self.asked, screening)
        return self.clip_updates(round, usable)

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why the form of a reply is not the one that the messages of the round ask for, or None."""

    def compare(self, replies: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node.

        Values must not be absurd, and statistics must be within the bounds.
        """
        first: Arrays = next((reply.arrays for reply in replies.values()), {})
        return self.outliers(replies, sent, [key for key, role in roles(first).items() if role is Role.STATISTICS])

    def outliers(
        self, replies: Mapping[int, Reply], sent: Arrays, keys: Sequence[str], others: Sequence[Arrays] = ()
    ) -> dict[int, str]:
        """The problems of replies that are too far from one another and from `others`, by node.

        Bounds decide on the arrays `keys`.
        """
        nodes, cohort = [*replies], [*(reply.arrays for reply in replies.values()), *others]
        problems = {**absurd(cohort, sent), **(self.bounds.outliers(cohort, keys) if self.bounds and cohort else {})}
        return {nodes[place]: problem for place, problem in problems.items() if place < len(nodes)}

    def clip_updates(self, round: Round, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies, with updates that are larger than the bounds allow shortened."""
        if self.bounds is None:
            return replies
        arrays: Sequence[Arrays] = [reply.arrays for reply in replies]
        sent = unpack(round.arrays)
        # What stays on the clients is apart: its distance from the clients' mean is not an update.
        for some in filter(None, split(sent, self.traits.stays(sent))):
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
        if are_alike(model, sent):
            return None
        for key, value in model.items():
            if key not in sent:
                return f"it has {key!r}, which the clients' model lacks"
            if not isinstance(value, np.ndarray | np.generic) or value.shape != sent[key].shape:
                return (
                    f"{key!r} is {type(value).__name__} of shape {np.shape(value)}; expected an array of shape "
                    f"{sent[key].shape}"
                )
            if not is_finite(value):
                return f"{key!r} is not finite; bound the replies, or use another strategy"
        return None

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, over all clients."""

    # --- a query of clients ---

    def answers_to(
        self,
        round: Round,
        what: str,
        queries: Sequence[Message],
        asked: Asked,
        problem: Callable[[Reply], str | None],
        before: Sequence[Arrays] = (),
    ) -> tuple[Attendance, list[Reply]]:
        """Send queries, and return who has answered and the usable answers; for `what` and `asked` see `Roster.admit`.

        Answers are also compared with one another and with those `before`: they must have the same form, and must be
        neither absurd nor outside of the bounds.
        """
        screening = Screening(
            gate(round.grid.send_and_receive(queries, timeout=self.reply_timeout)), self.arrayrecord_key
        )
        screening.check(lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or problem(reply))
        screening.leave_out(metric_problems(screening.usable))
        if before:
            screening.check(lambda reply: arrays_problem(reply.arrays, before[0]))
        else:
            screening.leave_out(arrays_problems(screening.usable, {}))
        keys = [*next((reply.arrays for reply in screening.usable.values()), {})]
        screening.leave_out(self.outliers(screening.usable, {}, keys, before))
        return self.roster.attendance(what, asked, screening)

    # --- an evaluation ---

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        screening = Screening(gate(replies), records=None)
        # A key of training, such as its loss, is missing here; examples weight then. Most replies decide, not one.
        known = [self.weighted_by_key in reply.metrics for reply in screening.usable.values()]
        key = self.weighted_by_key if 2 * sum(known) > len(known) else protocol.NUM_EXAMPLES
        if self.needs_weights:
            screening.check(lambda reply: number_problem(reply.metrics, key))
        screening.leave_out(metric_problems(screening.usable))
        # Without messages nobody was asked, so no reply is required: a missing evaluation must not end the run.
        self.evaluation, used = self.roster.attendance(f"round {server_round}, evaluation", Asked(), screening)
        return self.mean_evaluation(server_round, used, key)

    def mean_evaluation(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""
