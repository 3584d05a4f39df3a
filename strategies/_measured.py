"""Asks clients for what they measure on their data, before they train (`query.measure`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import number_problem
from fedbn_flwr.messages.votes import arrays_problems, metric_problems

from ._hooks import Round
from ._roster import Screening
from ._rule import BaseStrategy


def ask(
    base: BaseStrategy,
    round: Round,
    nodes: Sequence[int],
    key: str,
    what: str,
    problem: Callable[[Arrays], str | None],
    known: dict[int, Arrays],
    model: Arrays | None = None,
) -> list[int]:
    """Add what these nodes measure to `known`, by client, and return the nodes whose answers can be used.

    `key` selects the client rule, `problem` judges a single answer, and clients receive the `model`, if any. Answers
    are compared with all known ones: one that is absurd or outside of the bounds is left out. RunFailed if nobody has
    ever sent `what` it is.
    """
    if not nodes:
        return []
    config = ConfigRecord({**protocol.run_keys(round.config), key: True, protocol.ROUND: round.number})
    content = RecordDict({**({} if model is None else {"arrays": pack(model)}), "config": config})
    queries = [Message(content, node, protocol.MEASURE_QUERY) for node in nodes]
    before = [*known.values()]
    screening = Screening(gate(round.grid.send_and_receive(queries, timeout=base.reply_timeout)))
    screening.check(lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or problem(reply.arrays))
    screening.leave_out(metric_problems(screening.usable))
    screening.leave_out(arrays_problems(screening.usable, before[0] if before else {}))
    cohort = before + [reply.arrays for reply in screening.usable.values()]
    far = absurd(cohort, {})
    if base.bounds is not None and screening.usable:
        far |= base.bounds.outliers(cohort, [*cohort[0]])
    places = enumerate([*screening.usable], len(before))
    screening.leave_out({node: far[place] for place, node in places if place in far})
    attendance = base.attendance(f"round {round.number}, measurement")  # none is required: others may answer later
    replies = attendance.used_of(screening)
    answered = [reply.message.metadata.src_node_id for reply in replies]
    known |= {base.client_of(node): reply.arrays for node, reply in zip(answered, replies, strict=True)}
    if not known:
        listed = "".join(f"\n  - {reason}" for reason in attendance.left_out)
        raise RunFailed(f"{attendance.what}: no client sent {what}:{listed}")
    return answered
