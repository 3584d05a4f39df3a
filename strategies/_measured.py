"""What clients measure on their data before they train (`query.measure`): the queries, and which answers are usable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import absurd
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import number_problem
from fedbn_flwr.messages.votes import arrays_problems, metric_problems

from ._bounds import InfluenceBounds
from ._hooks import Question, Round
from ._roster import Screening


def queries(question: Question, round: Round, nodes: Sequence[int]) -> list[Message]:
    config = ConfigRecord({**round.config, question.key: True, protocol.ROUND: round.number})
    model = {} if question.model is None else {"arrays": pack(question.model)}
    content = RecordDict({**model, "config": config})
    return [Message(content, node, protocol.MEASURE_QUERY) for node in nodes]


def screened(question: Question, replies: Iterable[Message], bounds: InfluenceBounds | None) -> Screening:
    """The new answers, compared with all: one that is absurd or outside of the bounds is left out."""
    before, screening = [*question.answers.values()], Screening(gate(replies))
    screening.check(
        lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES) or question.problem(reply.arrays)
    )
    screening.leave_out(metric_problems(screening.usable))
    screening.leave_out(arrays_problems(screening.usable, before[0] if before else {}))
    cohort = before + [reply.arrays for reply in screening.usable.values()]
    far = absurd(cohort, {})
    if bounds is not None and screening.usable:
        far |= bounds.outliers(cohort, [*cohort[0]])
    places = enumerate([*screening.usable], len(before))
    screening.leave_out({node: far[place] for place, node in places if place in far})
    return screening
