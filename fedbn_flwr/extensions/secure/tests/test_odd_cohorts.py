"""Legal but unusual under masks: a negative zero, a useless key, one client."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, Message

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.extensions.secure.client import QUERY
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.reply import partition_of
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.strategies import FedAvg, FixBN, Secure
from tests.federation.test_odd_cohorts import NO_EVALUATION, Changed, grid, net, same, trained


def test_frozen_statistics_keep_the_sign_of_zero_under_secure_aggregation() -> None:
    model = net()
    model[1].running_mean[0] = -0.0  # type: ignore[index,union-attr]
    secure = Secure(FixBN(FedAvg(**NO_EVALUATION), freeze_round=0))
    found = trained(secure, grid(4), model=lambda: model)
    assert np.signbit(found["1.running_mean"][0])


def test_a_client_with_an_unusable_public_key_is_left_out() -> None:
    def zero(replies: list[Message]) -> list[Message]:
        for reply in replies:
            for record in reply.content.array_records.values():
                if reply.metadata.src_node_id == 1 and "secure" in record:
                    record["secure"] = Array(np.zeros_like(record["secure"].numpy()))
        return replies

    found = trained(Secure(FedAvg(**NO_EVALUATION)), Changed(grid(4), QUERY, zero))
    assert not same(found, unpack(pack(initial_arrays(net()))))


def test_each_stage_s_answer_has_the_partition() -> None:
    found: list[int | None] = []

    def noted(replies: list[Message]) -> list[Message]:
        found.extend(partition_of(reply.content) for reply in replies)
        return replies

    trained(Secure(FixBN(FedAvg(**NO_EVALUATION), freeze_round=1)), Changed(grid(4), QUERY, noted), 2)
    assert set(found) == {0, 1, 2, 3}


def test_a_sum_of_one_client_has_a_reason_of_its_own() -> None:
    reason = (
        r"1 of 1 clients answered, 2 are needed to open a sum: all that were asked have answered; let more clients tr"
    )
    with pytest.raises(RunFailed, match=reason):
        trained(Secure(FedAvg(min_available_nodes=1, min_train_nodes=1, **NO_EVALUATION)), grid(1))
