"""The innermost rule of a chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd, are_alike, initial_problem, is_finite
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.messages.votes import metric_problems
from fedbn_flwr.norms.roles import Role, roles, split

from ._hooks import Hooks, Round
from ._roster import Attendance, Roster, Screening


class BaseStrategy(Hooks):
    """The innermost rule of a chain: it chooses the clients, and knows them by their partitions."""

    @dataclass
    class Memory(Hooks.Memory):
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
    min_available_nodes: int = 1  # nodes that must be connected before clients are chosen or queried
    node_timeout: float = 600  # seconds to wait for them
    reply_timeout: float = 3600  # seconds that clients have for an answer; those of a run, which sets it

    def __init__(self) -> None:
        self.memory = self.Memory()
        self.training, self.evaluation = Attendance(), Attendance()  # in the last round and the last evaluation

    # --- the clients ---

    @property
    def roster(self) -> Roster:
        return Roster(self.memory.partitions)

    def client_of(self, node: int) -> int:
        """The number of a node's client: the partition that it has reported or, without one, the node."""
        return self.memory.partitions.get(node, node)

    def attendance(self, what: str, messages: Iterable[Message] = (), arrays: ArrayRecord | None = None) -> Attendance:
        """The nodes that these messages ask, as yet without replies; `arrays` is the model that they contain."""
        asked = [message.metadata.dst_node_id for message in messages]
        return Attendance(what, self.roster, self.min_train_nodes, arrays, asked)

    def connected(self, grid: Grid, needed: int = 0) -> list[int]:
        """All connected nodes, as soon as there are `min_available_nodes`, or `needed` if these are more."""
        hint = "start more SuperNodes, or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
        return wait_for_nodes(grid, max(needed, self.min_available_nodes), self.node_timeout, hint)

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
        self.memory, self._rounds = self.Memory(), num_rounds

    def messages(self, round: Round) -> list[Message]:
        """Choose the clients of a round, note them in `training`, and return their messages."""
        raise NotImplementedError

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        """Why the form of a reply is not the one that the messages of the round ask for, or None."""

    def compare(self, replies: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        """The problems that only a comparison with the other replies shows, by node.

        Values must not be absurd, and statistics must be within the bounds.
        """
        if not replies:
            return {}
        nodes, cohort = list(replies), [reply.arrays for reply in replies.values()]
        problems = absurd(cohort, sent)
        if self.bounds is not None:
            keys = [key for key, role in roles(cohort[0]).items() if role is Role.STATISTICS]
            problems |= self.bounds.outliers(cohort, keys)
        return {nodes[i]: problem for i, problem in problems.items()}

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
        self.evaluation = self.attendance(f"round {server_round}, evaluation")
        return self.evaluated(server_round, self.evaluation.used_of(screening), key)

    def evaluated(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The metrics of an evaluation over all clients, whose replies have the metric `key` as weights."""
