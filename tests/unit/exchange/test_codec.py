"""The codec: values arrive bit for bit, and all other records are one kind of error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import (
    Contribution,
    agreement_from_records,
    contribution_from_records,
    contribution_to_records,
)
from tests.support.exchanges import arrays_of, assert_same, counts, described


@given(described, counts, counts, counts, counts, st.none() | st.integers(0, 10_000))
def test_contributions_arrive_as_they_were(
    described: dict[str, Any], batch: int, values: int, remaining: int, examples: int, partition: int | None
) -> None:
    sent = Contribution("moments", arrays_of(described), batch, values, remaining, examples, partition)
    found = contribution_from_records(contribution_to_records(sent))
    assert (found.kind, found.batch, found.values, found.remaining) == ("moments", batch, values, remaining)
    assert (found.examples, found.partition) == (examples, partition)
    assert_same(found.tensors, sent.tensors)


def with_number(key: str, value: Any) -> RecordDict:
    records = contribution_to_records(Contribution("mean", {"mean": np.ones(2, np.float32)}, 4, 8, 1, examples=9))
    metrics = records["metrics"]
    assert isinstance(metrics, MetricRecord)
    metrics[key] = value
    return records


def test_counts_are_whole_numbers_and_weights_need_not_be() -> None:
    for key in ("batch-examples", "batch-values", "exchanges-left"):
        with pytest.raises(MessageError, match=f"{key}.*expected a whole number"):
            contribution_from_records(with_number(key, 0.5))
    assert contribution_from_records(with_number("num-examples", 0.5)).examples == 0.5


def test_records_of_another_kind_of_reply_are_refused() -> None:
    with pytest.raises(MessageError, match="not a contribution to an exchange; serve the client with"):
        contribution_from_records(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 3})}))
    with pytest.raises(MessageError, match=r"fedbn\.exchange-values"):
        agreement_from_records(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}))
