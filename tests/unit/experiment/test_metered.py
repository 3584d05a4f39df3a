"""The ledger: bytes of the arrays that are sent, with figures from the FedTAN paper.

ResNet-20 on CIFAR-10 (FedTAN, Table 3 and Appendix G): float32, five clients, 269,722
elements with group norm, 1,376 statistics more with batch norm, and 6.1734 and 6.2049 MiB per iteration for one
broadcast and five uploads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid, build_model
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.messages.arrays import arrays_in, pack, size_of, unpack
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.strategies import FedAvg
from tests.support.federations import Federations


@pytest.fixture
def resnet(federation: Federations) -> Callable[[str], Any]:
    """Five clients, one step on four random 32 by 32 examples each."""

    def make(norm: str) -> Any:
        fed = federation((4,) * 5, batches=1, model=lambda: build_model("resnet20", 10, norm), steps=1)
        for data in fed.data:
            data.batches = [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))]
        return fed

    return make


@pytest.mark.parametrize(("norm", "count", "mib"), [("bn", 271_098, 6.2049), ("gn", 269_722, 6.1734)])
def test_a_round_of_fedavg_moves_what_the_paper_says(
    resnet: Callable[[str], Any], norm: str, count: int, mib: float
) -> None:
    fed = resnet(norm)
    grid = MeteredGrid(fed.grid())
    FedAvg(fraction_evaluate=0.0).start(grid, fed.arrays(), num_rounds=1)
    round_ = grid.take()
    assert round_.elements_down_per_client == round_.elements_up_per_client == count
    assert round_.bytes_down == round_.bytes_up == 5 * 4 * count
    assert round_.messages_down == round_.messages_up == 5
    assert round_.communication_rounds == 1
    assert round(round_.broadcast_bytes / 2**20, 4) == mib
    assert (round_.other_messages, round_.other_bytes) == (0, 0)


def test_evaluation_is_counted_apart(federation: Federations) -> None:
    fed = federation((4, 4, 4))
    size = sum(array.numpy().nbytes for array in fed.arrays().values())
    grid = MeteredGrid(fed.grid())
    FedAvg().start(grid, fed.arrays(), num_rounds=2)
    traffic = grid.take()
    assert (traffic.messages_down, traffic.messages_up, traffic.communication_rounds) == (6, 6, 2)
    assert traffic.bytes_down == traffic.bytes_up == 6 * size
    assert traffic.other_messages == 12, "three questions and three answers in each of two rounds"
    assert traffic.other_bytes == 6 * size, "the model goes down, only metrics come back"


def test_questions_for_partitions_are_counted_apart(federation: Federations) -> None:
    fed = federation((4, 4, 4))
    grid = MeteredGrid(fed.grid())
    FedAvg(fraction_train=0.5, fraction_evaluate=0.0).start(grid, fed.arrays(), num_rounds=1)
    traffic = grid.take()
    assert (traffic.messages_down, traffic.messages_up, traffic.other_messages) == (2, 2, 6)
    assert grid.take() == Traffic(), "it begins again"


def test_pushed_and_pulled_messages_count_as_sent_ones(federation: Federations) -> None:
    fed = federation((4, 4))

    def messages() -> list[Message]:
        content = RecordDict({"arrays": fed.arrays(), "config": ConfigRecord()})
        return [Message(content, node, "train") for node in (1, 2)]

    sent, pushed = MeteredGrid(fed.grid()), MeteredGrid(fed.grid())
    list(sent.send_and_receive(messages()))
    list(pushed.pull_messages(pushed.push_messages(messages())))
    assert sent.take() == pushed.take()


def test_an_error_reply_is_a_message_without_bytes(federation: Federations) -> None:
    fed = federation((4, 4))
    grid = MeteredGrid(fed.grid())
    list(grid.send_and_receive([Message(RecordDict({"arrays": fed.arrays()}), 9, "train")]))
    traffic = grid.take()
    assert (traffic.messages_up, traffic.bytes_up, traffic.elements_up_per_client) == (1, 0, 0)


def test_bytes_are_elements_times_their_size() -> None:
    content = RecordDict(
        {
            "arrays": pack({"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.int64), "c": np.zeros(0)}),
            "more": pack({"d": np.zeros(5, np.bool_)}),
            "config": ConfigRecord({"text": "counts for nothing"}),
        }
    )
    found = size_of(*map(unpack, arrays_in(content).values()))
    assert found == (6 + 1 + 5, 6 * 2 + 8 + 5)


def test_the_largest_of_different_messages_is_broadcast() -> None:
    grid = MeteredGrid(LocalGrid(ClientApp(), 2))
    grid.count_exchange(*([{"a": np.zeros(count, np.float32)} for count in each] for each in ((1, 2), (3, 5, 4))))
    traffic = grid.take()
    assert (traffic.bytes_down, traffic.bytes_up, traffic.broadcast_bytes) == (4 * 12, 4 * 3, 4 * (5 + 3))
    assert (traffic.elements_down_per_client, traffic.elements_up_per_client) == (5, 2)


def test_traffic_adds_up() -> None:
    total = Traffic(communication_rounds=1, bytes_down=10, elements_down_per_client=7)
    total.add(Traffic(communication_rounds=2, bytes_down=5, elements_down_per_client=3, other_messages=1))
    expected = Traffic(communication_rounds=3, bytes_down=15, elements_down_per_client=7, other_messages=1)
    assert total == expected
