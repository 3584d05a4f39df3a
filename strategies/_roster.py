"""The clients as the server knows them, and what becomes of their replies in a round, an evaluation or a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message

from fedbn_flwr.errors import LOG, Diverged, MessageError, RunFailed
from fedbn_flwr.messages.aggregate import large_value
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.quote import one_line
from fedbn_flwr.messages.reply import Reply, partition_of, reason_of, refused


@dataclass(frozen=True)
class Roster:
    """The partitions that nodes have reported, by which clients are known: node ids are random in every run."""

    partitions: dict[int, int] = field(default_factory=dict)  # by node id

    def learn(self, reported: Mapping[int, int | None]) -> dict[int, str]:
        """Note the partitions that nodes report; returns the problems of those that reported another one before.

        Two nodes may report the same one: a node may return under another id, and it is not known which one is right.
        """
        numbers = {node: number for node, number in reported.items() if number is not None}
        known = {node: self.partitions.setdefault(node, number) for node, number in numbers.items()}
        return {
            node: f"its partition-id is {number}, and it reported {known[node]} before"
            for node, number in numbers.items()
            if number != known[node]
        }

    def position(self, node: int) -> tuple[int, int, int]:
        """The sort key of a node: its partition; nodes that have not reported one follow, sorted by node id."""
        partition = self.partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def name(self, node: int) -> str:
        partition = self.partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"


@dataclass
class Attendance:
    """The nodes that were asked in a round, an evaluation or a query, and those that were left out."""

    what: str = ""  # its name in messages
    roster: Roster = field(default_factory=Roster)
    needed: int = 1  # usable replies, if any node is asked
    arrays: ArrayRecord | None = None  # the model that the nodes receive
    asked: Sequence[int] = ()  # the nodes, without those that are left out so far
    used: Sequence[int] = ()  # the nodes whose replies are used, in the order of partitions
    left_out: list[str] = field(default_factory=list)  # client and problem
    refused: Sequence[Message] = ()  # the replies that are not used, as errors

    def screen(
        self,
        messages: Sequence[Message],
        read: Callable[[Message], Reply],
        problem: Callable[[Reply], str | None],
        compare: Callable[[Mapping[int, Reply]], Mapping[int, str]],
    ) -> list[Reply]:
        """The usable ones of these replies, which have passed the gate, in the order of partitions.

        `read` returns a reply's content, `problem` what is wrong with it, and `compare` what is wrong with some of them
        in comparison, by node. RunFailed if too few are left, see `admit`.
        """
        usable: dict[int, Reply] = {}
        answered: dict[int, int | None] = {}
        problems: list[tuple[int, str]] = []  # not a dict: all errors for lost nodes have the SuperLink's node id
        for message in messages:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise MessageError(reason_of(message))
                answered[node] = partition_of(message.content)
                reply = read(message)
                if reason := problem(reply):
                    raise MessageError(reason)
                usable[node] = reply
            except MessageError as error:
                problems.append((node, str(error)))
        problems += compare(usable).items()
        self.used = self.admit(self.what, answered, problems)
        reasons = {**dict(problems), **self.roster.learn(answered)}
        self.refused = [
            refused(message, reasons[node]) if message.has_content() else message
            for message in messages
            if (node := message.metadata.src_node_id) not in self.used
        ]
        return [usable[node] for node in self.used]

    def admit(
        self, what: str, answered: Mapping[int, int | None], problems: Sequence[tuple[int, str]]
    ) -> Sequence[int]:
        """The nodes that answered without a problem, in the order of partitions; only they are `asked` from now on.

        `what` names the exchange or the round in messages. `answered` has the partition that each node reported, and
        `problems` are pairs of node and text. The log names the clients that are left out; RunFailed lists them if
        fewer than `needed` of the nodes that were asked remain.
        """
        moved = self.roster.learn(answered)  # such a client counts once, whatever other problem it has
        problems = [*(each for each in problems if each[0] not in moved), *moved.items()]
        known = self.roster.partitions
        # The gate and the client name the client too, for Flower's strategies, which log the reason as it is.
        reasons = sorted(
            f"{self.roster.name(node)}: {reason.removeprefix(f'client {known.get(node)}').lstrip(': ')}"
            for node, reason in problems
        )
        bad = {node for node, _ in problems}
        usable = sorted(answered.keys() - bad, key=self.roster.position)
        silent = sorted({*self.asked} - answered.keys() - bad, key=self.roster.position)
        if (count := len(self.asked) - len(usable) - len(problems)) == len(silent):
            reasons += [f"{self.roster.name(node)}: it did not answer in time" for node in silent]
        elif count > 0:  # the others have errors that name the SuperLink
            reasons.append(f"{count} of {len(self.asked)} clients did not answer in time")
        self.left_out += reasons
        if self.asked and len(usable) < (needed := max(1, min(self.needed, len(self.asked)))):
            raise self._too_few(f"{what}: {len(usable)} of {len(self.asked)} clients sent a usable reply, {needed}")
        for reason in reasons:
            LOG.warning("%s: left out %s", what, one_line(reason))
        self.asked = usable
        return usable

    def _too_few(self, what: str) -> RunFailed:
        listed = "".join(f"\n  - {one_line(reason)}" for reason in self.left_out) or " no reply"
        what += " are needed"
        if self.arrays is not None and (large := large_value(unpack(self.arrays))) is not None:
            what += f"; they received a model with {large}: it diverged, or a reply was false"
        if self.left_out and all("diverged?" in reason for reason in self.left_out):
            advice = "The same run would diverge again; lower the learning rate, or clip gradients"
            return Diverged(f"{what}:{listed}\n{advice}")
        return RunFailed(f"{what}:{listed}")
