"""What the server asks clients before they train: who is connected, their partitions, and what they measure."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.engines.capabilities import wait_for_nodes
from fedbn_flwr.errors import RunFailed, few
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import partition_of

from .base import BaseStrategy
from .hooks import Question, Round
from .roster import Asked


def connected(base: BaseStrategy, grid: Grid, needed: int = 0) -> list[int]:
    """All connected nodes, as soon as there are `min_available_nodes`, or `needed` if these are more."""
    hint = "start more SuperNodes, or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
    least = max(needed, base.min_available_nodes)
    return wait_for_nodes(grid, least, base.node_timeout, hint, lambda nodes: few(base.roster.absent(nodes), 8))


def ask_for_partitions(base: BaseStrategy, round: Round, nodes: Iterable[int]) -> None:
    """Ask these nodes for their partitions unless they are known, since node ids are random in every run."""
    roster = base.roster
    unknown = [node for node in nodes if node not in roster.partitions and node not in roster.unnumbered]
    content = RecordDict({base.configrecord_key: ConfigRecord(protocol.run_keys(round.config))})
    queries = [Message(content, node, protocol.PARTITION_QUERY) for node in unknown]
    replies = gate(round.grid.send_and_receive(queries, timeout=base.node_timeout)) if queries else ()
    roster.learn({reply.metadata.src_node_id: partition_of(reply.content) for reply in replies if reply.has_content()})


def ask(base: BaseStrategy, round: Round, question: Question) -> None:
    """Ask all connected clients without an answer, and add what they answer; RunFailed if nobody ever has."""
    nodes, answers, roster = connected(base, round.grid), question.answers, base.roster
    if answers:  # a client may be back under another node id
        ask_for_partitions(base, round, nodes)
    if not (left := [node for node in nodes if roster.client(node) not in answers]):
        return
    config = ConfigRecord({**round.config, question.key: True, protocol.ROUND: round.number})
    content = RecordDict({**({} if question.model is None else {"arrays": pack(question.model)}), "config": config})
    queries = [Message(content, node, protocol.MEASURE_QUERY) for node in left]
    what, before = f"round {round.number}, measurement", [*answers.values()]
    # No answer is required: others may come later.
    attendance, replies = base.answers_to(
        round, what, queries, Asked(), lambda reply: question.problem(reply.arrays), before
    )
    for reply in replies:
        answers[roster.client(reply.message.metadata.src_node_id)] = reply.arrays
    if not answers:
        listed = "".join(f"\n  - {reason}" for reason in attendance.left_out) or " nobody answered in time"
        raise RunFailed(f"{what}: no client sent {question.what}:{listed}")
