"""Records that are no values of an exchange are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import (
    Contribution,
    agreement_from_records,
    contribution_from_records,
    contribution_to_records,
)


def with_number(key: str, value: Any) -> RecordDict:
    records = contribution_to_records(Contribution("norm", "mean", {"mean": np.ones(2, np.float32)}, 4, 8, examples=9))
    metrics = records["metrics"]
    assert isinstance(metrics, MetricRecord)
    metrics[key] = value
    return records


def test_counts_are_whole_numbers_and_weights_need_not_be() -> None:
    for key in ("batch-examples", "batch-values"):
        with pytest.raises(MessageError, match=f"{key}.*expected a whole number"):
            contribution_from_records(with_number(key, 0.5))
    assert contribution_from_records(with_number("num-examples", 0.5)).examples == 0.5


def test_records_of_another_kind_of_reply_are_refused() -> None:
    with pytest.raises(MessageError, match="not a contribution to an exchange; serve the client with"):
        contribution_from_records(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 3})}))
    with pytest.raises(MessageError, match=r"fedbn\.exchange-values"):
        agreement_from_records(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}))
