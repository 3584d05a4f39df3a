"""Legal but unusual under masks: a negative zero, a useless key, one client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.extensions.secure.client import QUERY
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.reply import partition_of
from fedbn_flwr.strategies import FedAvg, FixBN, Secure
from tests.support.federations import Changed, Federations, last_model, only, same

SIZES = (8,) * 4
OFF: Any = {"fraction_evaluate": 0.0}


def test_frozen_statistics_keep_the_sign_of_zero_under_secure_aggregation(federation: Federations) -> None:
    fed = federation(SIZES)
    fed.model[1].running_mean[0] = -0.0
    found = last_model(fed, Secure(FixBN(FedAvg(**OFF), freeze_round=0)), 1)
    assert np.signbit(found["1.running_mean"][0])


def test_a_client_with_an_unusable_public_key_is_left_out(federation: Federations) -> None:
    def zero(replies: list[Message]) -> list[Message]:
        for reply in replies:
            for record in reply.content.array_records.values():
                if reply.metadata.src_node_id == 1 and "secure" in record:
                    record["secure"] = Array(np.zeros_like(record["secure"].numpy()))
        return replies

    fed = federation(SIZES)
    found = last_model(fed, Secure(FedAvg(**OFF)), 1, Changed(fed.grid(), only(QUERY, zero)))
    assert not same(found, unpack(fed.arrays()))


def test_each_stage_s_answer_has_the_partition(federation: Federations) -> None:
    found: list[int | None] = []

    def noted(replies: list[Message]) -> list[Message]:
        found.extend(partition_of(reply.content) for reply in replies)
        return replies

    fed = federation(SIZES)
    last_model(fed, Secure(FixBN(FedAvg(**OFF), freeze_round=1)), 2, Changed(fed.grid(), only(QUERY, noted)))
    assert set(found) == {0, 1, 2, 3}


def test_a_sum_of_one_client_has_a_reason_of_its_own(federation: Federations) -> None:
    reason = (
        r"1 of 1 clients answered, 2 are needed to open a sum: all that were asked have answered; let more clients tr"
    )
    with pytest.raises(RunFailed, match=reason):
        last_model(federation((8,)), Secure(FedAvg(min_available_nodes=1, min_train_nodes=1, **OFF)), 1)
