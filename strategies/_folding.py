"""Adds the replies of a round to their mean while others still train, so that the server need not keep all of them.

Replies are added in the order of partitions, as `aggregate_train` does: the bits of the mean do not depend on the order
of their arrival. A reply waits for those before it. It is added only after all checks; where the outcome of one depends
on replies that have not arrived, it and those after it wait for `aggregate_train`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import Message, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.arrays import AddedArrays, FlatArrays, pack
from fedbn_flwr.messages.gate import Reply, arrays_of, gate, is_settled, partition_of

from ._rule import Rule
from .fedavg import FedAvg, mean_of_metrics

# What reads the replies of a round together: a rule that changes one of these may need all of their arrays.
_METHODS = (
    "configure_train", "aggregate_train", "screen", "admit", "read", "problem", "weights", "combine", "after_round",
)  # fmt: skip


class Folding:
    """The observer of a round's replies, where `partitions` are those of all nodes."""

    def __init__(self, rule: FedAvg, messages: Sequence[Message], partitions: Mapping[int, int]) -> None:
        self._rule = rule
        self._partitions = partitions
        self._missing = sorted((message.metadata.dst_node_id for message in messages), key=partitions.__getitem__)
        self._missing.reverse()  # the next one is the last
        self._early: dict[int, Message] = {}

    def replied(self, reply: Message) -> None:
        self._early[reply.metadata.src_node_id] = reply
        while self._missing and self._missing[-1] in self._early:
            node = self._missing.pop()
            if not self._take(self._early.pop(node)):
                self._missing.clear()

    def given_up(self) -> frozenset[int]:
        return frozenset()

    def _take(self, message: Message) -> bool:
        """Add a reply, unless it is refused; False if that is not yet known."""
        passed = gate([message])[0]
        if passed.has_error():
            return True
        node = message.metadata.src_node_id
        if not is_settled(passed.content) or partition_of(passed.content) != self._partitions[node]:
            return False
        try:
            reply = self._rule.read(passed)
        except MessageError:
            return True
        return self._add(message, reply)

    def _add(self, message: Message, reply: Reply) -> bool:
        arrays, sums = reply.arrays, self._rule.sums
        if not (isinstance(arrays, FlatArrays) and sums.takes(arrays)):
            return False
        sums.add(arrays, reply.number(self._rule.weighted_by_key))
        record = arrays_of(message.content, self._rule.arrayrecord_key)
        added = pack(AddedArrays(arrays.layout))
        message.content = RecordDict({k: added if v is record else v for k, v in message.content.items()})
        return True


def folding_of(rule: Rule, messages: Sequence[Message], nodes: Mapping[int, int]) -> Folding | None:
    """The observer of the replies to these messages; None if the rule needs them all. `nodes` are by partition."""
    if not isinstance(rule, FedAvg) or rule.robust is not None or rule.round is None or rule.records(rule.round):
        return None
    if rule.train_metrics_aggr_fn is not mean_of_metrics:  # which may read the arrays
        return None
    if any(getattr(type(rule), name) is not getattr(FedAvg, name) for name in _METHODS):
        return None
    partitions = {node: partition for partition, node in nodes.items()}
    if any(message.metadata.dst_node_id not in partitions for message in messages):
        return None
    return Folding(rule, messages, partitions)
