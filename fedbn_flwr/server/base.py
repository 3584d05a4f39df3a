"""What the innermost rule of a chain has in addition to hooks: the clients, and what their replies must be."""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.engines.capabilities import wait_for_nodes
from fedbn_flwr.errors import RunFailed, SettingsError, few
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import count_problems, form_problems, record_problems
from fedbn_flwr.messages.limits import initial_problem, size_problem, values_problems
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.norms.roles import Role, roles, split
from fedbn_flwr.storage import temporary_folder
from fedbn_flwr.trees import Tree

from .hooks import Hooks, evaluation_round
from .poll import Poll, Roster, arrays_by_node
from .traits import InfluenceBounds, Round


class Base(Hooks):
    """What the innermost rule of a chain has in addition to hooks. It knows clients by their partitions.

    A base must define `train_messages`, `evaluate_messages`, `combine` and `summary`; all else has defaults.
    """

    @dataclass
    class Memory(Hooks.Memory):
        partitions: dict[int, int | None] = field(default_factory=dict)  # by node id; None is a node without one

    memory: Memory
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    needs_weights: bool = True  # whether replies must have this metric
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    bounds: InfluenceBounds | None = None
    hidden: frozenset[Role] = frozenset()  # roles that a rule around it combines, and a strategy of Flower doesn't see
    has_single_replies: bool = True  # whether it gets the clients' replies, and not their mean in place of each
    # The error for a model that tracks statistics, with a place for its first such key; None accepts these models.
    without_statistics: ClassVar[str | None] = None
    min_train_nodes: int = 1  # usable replies that a round needs
    min_available_nodes: int = 1  # nodes that must be connected before clients are chosen or queried
    node_timeout: float = 600  # seconds to wait for them
    reply_timeout: float = 3600  # seconds to wait for a reply; `start` sets it

    def __init__(self) -> None:
        self.memory, self.chain = self.Memory(), (self,)
        self.training, self.evaluation = Poll(), Poll()  # of the last round, and of the last evaluation

    @functools.cached_property
    def folder(self) -> Path:
        """Where the strategy stores what its memory and each checkpoint shouldn't hold.

        An experiment sets one in the folder of its run. Without it, what is stored there ends with this process.
        """
        temporary = temporary_folder("strategy")
        weakref.finalize(self, temporary.cleanup)  # left to Python, it would warn of it
        return Path(temporary.name)

    # --- the clients ---

    @property
    def roster(self) -> Roster:
        """The clients of the run; their partitions are in `memory`, so that a checkpoint has them."""
        return Roster(self.memory.partitions)

    def poll_of(self, messages: Iterable[Message], arrays: ArrayRecord) -> Poll:
        """A poll of the nodes that these messages ask; `min_train_nodes` must answer. `arrays` is the model in them."""
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
        unknown = [node for node in nodes if node not in roster.partitions]
        content, poll = RecordDict({self.configrecord_key: ConfigRecord(protocol.run_keys(round.config))}), Poll()
        queries = [Message(content, node, protocol.PARTITION_QUERY) for node in unknown]
        poll.read(round.grid.send_and_receive(queries, timeout=self.node_timeout) if queries else (), records=None)
        roster.learn(poll.partitions)  # a ClientApp without an answer to this question trains as well

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
        self._remember()

    def global_model(self, round: Round) -> ArrayRecord:
        return round.arrays

    def notes(self) -> Tree:
        return {}

    # --- a round of training, in the order in which `Rule` calls these ---

    @abstractmethod
    def train_messages(self, round: Round) -> list[Message]:
        """Choose the clients of a round, and return their messages."""

    def with_exchanges(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """Run the round's exchanges, if it has any, and return the messages to send."""
        return messages

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why the form of a reply is not the one that the messages of the round ask for, or None."""

    def compare(self, replies: Mapping[int, Reply], sent: Arrays, records: Iterable[str]) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node; `records` names the round's.

        They are absurd numbers of examples, statistics outside of the bounds, and records of another form.
        """
        statistics = [key for key, role in roles(_first(replies)).items() if role is Role.STATISTICS]
        problems = {**count_problems(replies), **self.outliers(arrays_by_node(replies), statistics)}
        for name in records:
            problems |= record_problems(replies, name, sent)
        return problems

    def outliers(self, cohort: Mapping[int, Arrays], keys: Sequence[str]) -> Mapping[int, str]:
        """Why values of these arrays are further from the other clients' than the bounds allow, by node."""
        return {} if self.bounds is None else self.bounds.outliers(cohort, keys)

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
        """The weights, reduced as far as the bounds ask; RunFailed if all are zero."""
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
        return poll.ask(
            round.grid, what, queries, self.reply_timeout,
            lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or problem(reply),
            lambda answers: form_problems(arrays_by_node(answers), {}),
            lambda answers: values_problems(arrays_by_node(answers), {}),
            lambda answers: self.outliers(arrays_by_node(answers), [*_first(answers)]),
            name=self.arrayrecord_key,
        )  # fmt: skip

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
        poll.check(poll.impossible)
        poll.leave_out(count_problems(poll.usable))
        return self.mean_evaluation(server_round, poll.close(f"round {server_round}, evaluation"), key)

    def mean_evaluation(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""


def _first(replies: Mapping[int, Reply]) -> Arrays:
    """The arrays of the first reply, whose keys the others share."""
    return next((reply.arrays for reply in replies.values()), {})
