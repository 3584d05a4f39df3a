"""The clients as the server knows them, and what becomes of the nodes that a round, an evaluation or a query asks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import LOG, Diverged, MessageError, RunFailed, by_reason, log_once
from fedbn_flwr.messages.arrays import Arrays, unpack
from fedbn_flwr.messages.gate import count_problems, gate
from fedbn_flwr.messages.limits import large_value
from fedbn_flwr.messages.quote import one_line
from fedbn_flwr.messages.reply import Reply, has_mean, metric_name, partition_of, read_reply, reason_of, refusal
from fedbn_flwr.tasks import METRICS


@dataclass(frozen=True)
class Roster:
    """The partitions that nodes have reported, by which clients are known: node ids are random in every run."""

    partitions: dict[int, int | None] = field(default_factory=dict)  # by node id; None is a node without one

    def learn(self, reported: Mapping[int, int | None]) -> dict[int, str]:
        """Add what nodes report, and return the problems of those that no client of the run can be.

        All clients have a number, or none has, as most of the first replies do. Two nodes may report the same one: a
        client may return under another node id, and it is not known which one is right.
        """
        known = [*self.partitions.values()] or [*reported.values()]
        numbered = 2 * known.count(None) <= len(known)
        problems: dict[int, str] = {}
        for node, number in sorted(reported.items()):
            if node not in self.partitions and (number is not None) != numbered:
                odd, most = ("no", "one") if numbered else ("a", "none")
                problems[node] = f"it has {odd} partition-id, and most clients have {most}"
            elif number not in (None, before := self.partitions.setdefault(node, number)):
                problems[node] = f"its partition-id is {number}, and it reported {before} before"
        return problems

    @property
    def numbers(self) -> dict[int, int]:
        """The partitions by node id, without the nodes that have none."""
        return {node: number for node, number in self.partitions.items() if number is not None}

    def client(self, node: int) -> int:
        """The number of a node's client, as `client_number` on the client: its partition or, without one, the node."""
        number = self.partitions.get(node)
        return node if number is None else number

    def position(self, node: int) -> tuple[bool, int]:
        """The sort key of a node: its partition; nodes that have not reported one follow, sorted by node id."""
        return self.partitions.get(node) is None, self.client(node)

    def name(self, node: int) -> str:
        number = self.partitions.get(node)
        return f"node {node}" if number is None else f"client {number} (node {node})"

    def absent(self, nodes: Iterable[int]) -> list[str]:
        """The names of the clients that none of these nodes serves; one that is back may have another node id."""
        here = {*map(self.client, nodes)}
        away = [node for node, client in self.numbers.items() if client not in here]
        return [self.name(node) for node in sorted(away, key=self.position)]


@dataclass
class Poll:
    """The nodes that a question goes to, and their replies, which one check after another leaves out."""

    roster: Roster = field(default_factory=Roster)
    asked: Sequence[int] = ()
    needed: int = 0  # usable replies
    arrays: ArrayRecord | None = None  # the model that the nodes receive
    lost: dict[int, str] = field(default_factory=dict)  # the nodes that are left out, with the reasons
    left_out: list[str] = field(default_factory=list)  # their names and problems
    usable: dict[int, Reply] = field(default_factory=dict)  # so far, by node
    partitions: dict[int, int | None] = field(default_factory=dict)  # that nodes report, by node
    # Not a dict: all errors for lost nodes have the SuperLink's node id.
    problems: list[tuple[int, str]] = field(default_factory=list)
    impossible: Callable[[Reply], str | None] = lambda reply: None  # why the asker knows that an answer is wrong
    messages: Sequence[Message] = ()

    @property
    def left(self) -> list[int]:
        """The nodes that are not left out, in the order of partitions: in the end, those whose replies are used."""
        return sorted({*self.asked} - self.lost.keys(), key=self.roster.position)

    @property
    def refused(self) -> list[Message]:
        """The replies that are not used, as errors."""
        return [
            refusal(message, self.lost.get(node, "it was not asked")) if message.has_content() else message
            for message in self.messages
            if (node := message.metadata.src_node_id) not in self.left
        ]

    def ask(
        self,
        grid: Grid,
        what: str,
        questions: Sequence[Message],
        timeout: float,
        problem: Callable[[Reply], str | None],
        *compare: Callable[[Mapping[int, Reply]], Mapping[int, str]],
        name: str = "arrays",
        records: Collection[str] | None = (),
    ) -> list[Reply]:
        """Send the questions, and return the answers to use; `what` names them in messages.

        `problem` judges single answers, and `compare` the rest of them, as their numbers of examples are; see
        `read_reply` for `name` and `records`.
        """
        self.read(grid.send_and_receive(questions, timeout=timeout), name, records)
        self.check(problem)
        for found in (count_problems, *compare):
            self.leave_out(found(self.usable))
        return self.close(what)

    def read(self, messages: Iterable[Message], name: str = "arrays", records: Collection[str] | None = ()) -> None:
        """Read the replies, see `read_reply`; they pass the gate first."""
        self.messages = gate(messages)
        for message in self.messages:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise MessageError(reason_of(message))
                self.partitions[node] = partition_of(message.content)
                self.usable[node] = read_reply(message, name, records)
            except MessageError as error:
                self.problems.append((node, str(error)))

    def check(self, problem: Callable[[Reply], str | None]) -> None:
        """Leave out each reply that has a problem by itself."""
        problems: dict[int, str] = {}
        for node, reply in self.usable.items():
            try:
                reason = problem(reply)
            except MessageError as error:
                reason = str(error)
            if reason:
                problems[node] = reason
        self.leave_out(problems)

    def leave_out(self, problems: Mapping[int, str]) -> None:
        """Leave out the replies of these nodes, with the reasons."""
        self.problems += problems.items()
        self.usable = {node: reply for node, reply in self.usable.items() if node not in problems}

    def close(self, what: str) -> list[Reply]:
        """The replies to use, in the order of partitions; RunFailed if they are too few."""
        nodes = self.admit(what, self.partitions, self.problems)
        replies = [self.usable[node] for node in nodes]
        for one, other in pairwise(nodes):  # a client that is back has another node id, but answers once
            if self.roster.client(one) == (client := self.roster.client(other)):
                log_once(f"nodes {one} and {other} report the same partition-id {client}; give each node its own")
        self._warn_of_metrics(replies)
        return replies

    def answers(self) -> dict[int, Reply]:
        """The replies that are used, by client; none of a skipped round, which reads none."""
        return {self.roster.client(node): self.usable[node] for node in self.left if node in self.usable}

    def admit(self, what: str, answered: Mapping[int, int | None], problems: Sequence[tuple[int, str]]) -> list[int]:
        """Leave out the nodes that did not answer or have a problem, and return the others.

        `what` names the exchange or the round in messages. `answered` has the partition that each node reported, and
        `problems` are pairs of node and text. The log names the clients that are left out; RunFailed lists them if
        fewer than `needed` of the nodes that were asked remain.
        """
        name, asked = self.roster.name, self.left
        moved = self.roster.learn(answered)  # such a client counts once, whatever other problem it has
        problems = [*(problem for problem in problems if problem[0] not in moved), *moved.items()]
        # The gate and the client name the client too, for Flower's strategies, which log the reason as it is.
        reasons = sorted(
            f"{name(node)}: {_without_number(reason, self.roster.partitions.get(node))}" for node, reason in problems
        )
        bad = dict(problems)
        silent = {node: "it did not answer in time" for node in asked if node not in answered and node not in bad}
        self.lost |= silent | bad
        left = self.left
        if (count := len(asked) - len(left) - len(problems)) == len(silent):
            reasons += [f"{name(node)}: {reason}" for node, reason in silent.items()]
        elif count > 0:  # the others have errors that name the SuperLink
            reasons.append(f"{count} of {len(asked)} clients did not answer in time")
        self.left_out = [*self.left_out, *reasons]
        if len(left) < (needed := min(self.needed, len(asked))):
            raise self._too_few(f"{what}: {len(left)} of {len(asked)} clients sent a usable reply, {needed}")
        for reason in reasons:
            LOG.warning("%s: left out %s", what, one_line(reason))
        return left

    def _too_few(self, what: str) -> RunFailed:
        reasons = by_reason(one_line(reason).partition(": ")[::2] for reason in self.left_out)
        listed = "".join(f"\n  - {reason}" for reason in reasons) or " no reply"
        what += " are needed"
        if self.arrays is not None and (large := large_value(unpack(self.arrays))) is not None:
            what += f"; they received a model with {large}: it diverged, or a client sent bogus values"
        if self.left_out and all("diverged?" in reason for reason in self.left_out):
            advice = "The same run would diverge again; lower the learning rate, or clip gradients"
            return Diverged(f"{what}:{listed}\n{advice}")
        return RunFailed(f"{what}:{listed}")

    def _warn_of_metrics(self, replies: Sequence[Reply]) -> None:
        """Name the clients that report no metric where most others do, once: its mean is over the others.

        Where most clients lack a metric of this library, one of them is named.
        """
        nodes, counts = self.left, Counter(key for reply in replies for key in reply.metrics if has_mean(key))
        for key, count in counts.items():
            lacking = [self.roster.name(node) for node in nodes if key not in self.usable[node].metrics]
            if 2 * count > len(replies):
                for name in lacking:
                    log_once(f"{name} reports no {one_line(key)}: the mean is over the other clients")
            elif metric_name(key).rpartition("-")[2] in _LAST_WORDS and "@" not in key:
                log_once(
                    f"most clients report no {key}, such as {lacking[0]}: its mean is over the others, and needs two "
                    "of them, or half of all; an AUC needs examples of both kinds at a client"
                )


_LAST_WORDS = frozenset(name.rpartition("_")[2] for name in METRICS)


def arrays_by_node(replies: Mapping[int, Reply]) -> dict[int, Arrays]:
    return {node: reply.arrays for node, reply in replies.items()}


def _without_number(reason: str, client: int | None) -> str:
    return re.sub(rf"^client {client}\b[: ]*", "", reason)
