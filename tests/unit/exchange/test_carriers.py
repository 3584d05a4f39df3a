"""The server's loop with a carrier in memory: which contributions count, and for how long."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fedbn_flwr.strategies.fedtan import algorithm_3  # type: ignore[import-untyped]
from flwr.app import ArrayRecord, ConfigRecord

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.exchange.carriers import Answers, ExchangesDone, judge
from fedbn_flwr.exchange.codec import END, Agreement, Contribution
from fedbn_flwr.server.poll import Poll
from fedbn_flwr.strategies import FedTAN, Round
from tests.support.federations import same


class Scripted:
    """A carrier whose nodes answer from a script, one entry per exchange; None: no answer."""

    def __init__(self, script: Mapping[int, Sequence[Contribution | str | None]]) -> None:
        self.script = script
        self.asked: list[tuple[list[int], Agreement | None]] = []

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        self.asked.append((list(nodes), agreement))
        answers = {node: self.script[node][step] for node in nodes}
        contributions = {node: answer for node, answer in answers.items() if isinstance(answer, Contribution)}
        return contributions, {node: answer for node, answer in answers.items() if isinstance(answer, str)}


def mean(value: float, *, partition: int, **changes: Any) -> Contribution:
    tensors = {"mean": np.full(2, value)}
    return replace(Contribution("norm", "mean", tensors, 4, 8, examples=10, partition=partition), **changes)


def over(partition: int) -> Contribution:
    return Contribution("", END, {}, 4, 4, examples=10, partition=partition)


def run(script: Mapping[int, Sequence[Contribution | str | None]]) -> tuple[ExchangesDone, Scripted, list[str]]:
    """All exchanges with these nodes, their end, and the clients that were left out."""
    carrier, strategy = Scripted(script), FedTAN(exchange="paper", min_train_nodes=1)
    strategy.training = Poll(strategy.roster, list(script), 1)
    grid: Any = None  # of an engine without capabilities
    done = strategy.run_exchanges(Round(3, ArrayRecord(), ConfigRecord(), grid), carrier)
    return done, carrier, [*strategy.training.left_out]


def two(first: float, partition: int) -> list[Contribution]:
    return [mean(first, partition=partition), mean(first + 1, partition=partition), over(partition)]


def test_each_agreement_but_the_last_is_sent_with_the_next_question() -> None:
    done, carrier, reasons = run({7: two(1.0, 1), 9: two(3.0, 0)})
    assert (done.nodes, done.steps, done.agreement.tensors) == ([9, 7], 3, {})
    by_partition = "in the order of partitions, once they are known"
    assert [nodes for nodes, _ in carrier.asked] == [[7, 9], [9, 7], [9, 7]], by_partition
    first, *others = (agreement for _, agreement in carrier.asked)
    assert first is None
    assert [(each.tensors["mean"].tolist(), each.values) for each in others if each] == [([2, 2], 16), ([3, 3], 16)]
    assert not reasons


@pytest.mark.parametrize("answer", [None, "its disk is full"])
def test_a_client_without_an_answer_is_out_of_the_rest_of_the_round(answer: str | None) -> None:
    done, carrier, reasons = run({7: two(1.0, 0), 8: [two(5.0, 1)[0], answer], 9: two(3.0, 2)})
    assert done.nodes == [7, 9]
    assert [nodes for nodes, _ in carrier.asked] == [[7, 8, 9], [7, 8, 9], [7, 9]]
    last = carrier.asked[-1][1]
    assert last is not None
    assert last.tensors["mean"].tolist() == [3.0, 3.0]
    assert reasons == [f"client 1 (node 8): {answer or 'it did not answer in time'}"]


def test_a_contribution_unlike_most_others_is_refused() -> None:
    other = [mean(9.0, partition=0, tensors={"mean": np.ones(3)})]
    done, _, reasons = run({7: other, 8: two(1.0, 1), 9: two(1.0, 2)})
    assert done.nodes == [8, 9]
    assert reasons[0].startswith("client 0 (node 7): it sent ")
    assert "do all clients have the same model" in reasons[0]


def test_of_two_equally_common_forms_the_first_partition_s_counts() -> None:
    other = [mean(9.0, partition=1, tensors={"mean": np.ones(3)})]
    done, _, _ = run({7: other, 8: two(1.0, 0)})
    assert done.nodes == [8]


def test_the_gradients_of_the_last_unfinished_layer_end_the_exchanges() -> None:
    """Layer a is called twice, and b does not wait for its turn."""
    calls = [("moments", name) for name in "aba"] + [("gradients", name) for name in "aab"]
    one, other = (
        [replace(MOMENTS, kind=kind, layer=name, partition=partition) for kind, name in calls] for partition in (0, 1)
    )
    done, _, _ = run({7: one, 8: other})
    assert done.steps == 6


MOMENTS = Contribution("norm", "moments", {"mean": np.zeros(2), "var": np.ones(2)}, 4, 8, examples=10)


@pytest.mark.parametrize(
    ("contribution", "says"),
    [
        (replace(MOMENTS, kind="gradients"), r"gradients of the layer 'norm'; expected one of \['first'\]"),
        (replace(MOMENTS, batch=0), "0 examples and 8 values per channel; expected one or more"),
        (replace(MOMENTS, values=0), "4 examples and 0 values per channel; expected one or more"),
        (replace(MOMENTS, kind="median"), r"sent 'median' with \['mean', 'var'\]; expected one of moments with"),
        (
            replace(MOMENTS, tensors={"mean": np.zeros(2)}),
            r"sent 'moments' with \['mean'\]; expected one of moments with \['mean', 'var'\], ",
        ),
        (replace(MOMENTS, kind="mean", tensors={"mean": np.zeros(2, np.int64)}), "expected floats"),
        (replace(MOMENTS, kind="mean", tensors={"mean": np.zeros((2, 2))}), "one per channel"),
        (replace(MOMENTS, kind="mean", tensors={"mean": np.zeros(0)}), "one per channel"),
        (
            replace(MOMENTS, tensors={"mean": np.array([np.inf]), "var": np.ones(1)}),
            "'mean' has 1 of 1 values that are not finite",
        ),
        (
            replace(MOMENTS, tensors={"mean": np.zeros(1), "var": -np.ones(1)}),
            r"'var' has negative values \(-1\)",
        ),
    ],
)
def test_what_cannot_be_used_is_named(contribution: Contribution, says: str) -> None:
    (problem,) = judge([1], {1: contribution}, {}, ["first"], FedTAN().outliers)[1]
    assert re.search(says, problem[1])


def test_gradients_with_respect_to_a_variance_may_be_negative() -> None:
    gradients = replace(MOMENTS, kind="gradients", tensors={"mean": -np.ones(2), "var": -np.ones(2)})
    assert judge([1], {1: gradients}, {}, ["norm"], FedTAN().outliers) == ({1: gradients}, [])


def test_moments_agree_to_those_of_the_union() -> None:
    """Two clients of means 0 and 2, variances 1 and 3, equal weights: mean 1, variance 2 + 1."""
    one = replace(MOMENTS, tensors={"mean": np.zeros(1), "var": np.ones(1)}, batch=4, values=8)
    two = replace(MOMENTS, tensors={"mean": np.full(1, 2.0), "var": np.full(1, 3.0)}, batch=6, values=12)
    agreement = algorithm_3([one, two], [1.0, 1.0])
    assert (agreement.tensors["mean"][0], agreement.tensors["var"][0], agreement.values) == (1.0, 3.0, 20)
    assert agreement.per_example == 2


def test_a_contribution_that_would_make_the_mean_overflow_is_left_out() -> None:
    def moments(value: float, partition: int) -> list[Contribution]:
        tensors = {"mean": np.full(2, value, np.float32), "var": np.ones(2, np.float32)}
        return [replace(MOMENTS, tensors=tensors, partition=partition), over(partition)]

    script = {7: moments(1.0, 0), 8: moments(1e30, 1), 9: moments(3.0, 2)}
    done, found, reasons = run(script)
    _, expected, _ = run({7: script[7], 9: script[9]})
    assert done.nodes == [7, 9]
    assert len(reasons) == 1
    assert "(node 8): moments: 'mean' has values of up to 1e+30; expected at most 6.5e+18" in reasons[0]
    agreed, alone = found.asked[-1][1], expected.asked[-1][1]
    assert agreed is not None
    assert alone is not None
    assert same(agreed.tensors, alone.tensors)


def test_a_batch_that_exceeds_its_data_set_does_not_count() -> None:
    done, _, reasons = run({7: two(1.0, 0), 8: two(3.0, 1), 9: [mean(1.0, partition=2, batch=2**31)]})
    assert done.nodes == [7, 8]
    assert reasons == ["client 2 (node 9): its batch has 2147483648 examples, but its data set has 10"]


def test_a_cohort_without_weight_ends_the_run() -> None:
    with pytest.raises(RunFailed, match=r"exchange 1: the sum of the weights of all 1 clients \(num-examples\) is 0"):
        FedTAN().bound_weights("round 3, exchange 1", [0.0])
