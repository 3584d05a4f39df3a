"""Cohorts that are legal but unusual: clients that leave, report nothing or answer with other forms; second runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.common import Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvgM, Krum, Strategy
from torch import nn

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.norms.convert import convert_norm
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedBS,
    FixBN,
    HeteroBN,
    MeanStatistics,
    Round,
    Scaffold,
)
from tests.support.command import ROOT, python

Answers = Callable[[list[Message]], list[Message]]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def data(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 1, 6, 6, generator=random), torch.randint(0, 2, (8,), generator=random)) for _ in range(2)]


def client(context: Context) -> BNClient:
    return BNClient(net(), data(int(context.node_config["partition-id"])), context=context)


class Changed(GridAround):
    """A grid whose answers to messages of one kind are changed."""

    def __init__(self, inner: Grid, kind: str, change: Answers) -> None:
        super().__init__(inner)
        self.kind, self.change, self.sent = kind, change, list[Message]()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.sent += messages
        replies = list(super().send_and_receive(messages, timeout=timeout))
        return self.change(replies) if messages and messages[0].metadata.message_type == self.kind else replies


def grid(clients: int = 2, make: Any = client) -> LocalGrid:
    return LocalGrid(client_app(make), clients)


def trained(strategy: Strategy, on: Grid, rounds: int = 1, model: Callable[[], nn.Module] = net) -> dict[str, Any]:
    return unpack(strategy.start(on, pack(initial_arrays(model())), num_rounds=rounds).arrays)


def set_examples(*counts: int) -> Answers:
    def change(replies: list[Message]) -> list[Message]:
        for reply in replies:
            reply.content["metrics"]["num-examples"] = counts[reply.metadata.src_node_id - 1]  # type: ignore[index]
        return replies

    return change


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


NO_EVALUATION: Any = {"fraction_evaluate": 0.0}


def test_scaffold_s_nodes_may_leave_after_their_answers() -> None:
    class Left(Changed):
        def get_node_ids(self) -> Iterable[int]:
            gone = self.sent and self.sent[-1].metadata.message_type == "train"
            return [] if gone else super().get_node_ids()

    whole = trained(Scaffold(**NO_EVALUATION), grid())
    assert same(trained(Scaffold(**NO_EVALUATION), Left(grid(), "none", list)), whole)


def test_a_client_without_examples_is_left_out_of_flower_s_krum() -> None:
    def krum() -> Strategy:
        return MeanStatistics(Krum(num_malicious_nodes=1, **NO_EVALUATION), statistics="median")

    for empty in range(5):
        counts = [16] * 5
        counts[empty] = 0
        trained(krum(), Changed(grid(5), "train", set_examples(*counts)))


def test_statistics_have_a_mean_also_if_no_client_reports_examples() -> None:
    def strategy() -> Strategy:
        return MeanStatistics(FedBS(**NO_EVALUATION))

    assert same(
        trained(strategy(), Changed(grid(), "train", set_examples(0, 0))),
        trained(strategy(), Changed(grid(), "train", set_examples(16, 16))),
    )


def test_a_flower_strategy_whose_clients_are_silent_ends_the_run() -> None:
    silent = Changed(grid(), "train", lambda replies: [])
    with pytest.raises(RunFailed, match=r"- node 1: it did not answer in time\n  - node 2: it did not answer in time"):
        trained(MeanStatistics(FedAdam(**NO_EVALUATION)), silent)


def test_of_two_answers_of_one_node_a_flower_strategy_gets_the_last() -> None:
    def twice(replies: list[Message]) -> list[Message]:
        first = Message(replies[0].content.copy(), reply_to=replies[0])
        first.metadata.__dict__["_src_node_id"] = replies[0].metadata.src_node_id
        huge = {key: Array(np.full_like(value.numpy(), 1e9)) for key, value in replies[0].content["arrays"].items()}
        first.content["arrays"] = ArrayRecord(huge)
        return [first, *replies]

    def strategy() -> Strategy:
        return MeanStatistics(FedAvgM(**NO_EVALUATION))

    assert same(trained(strategy(), Changed(grid(), "train", twice)), trained(strategy(), grid()))


@pytest.mark.parametrize("bad", [1, 2])
def test_statistics_of_other_layers_are_refused(bad: int) -> None:
    def static() -> nn.Module:
        return convert_norm(net(), "sbn")

    def make(context: Context) -> BNClient:
        return BNClient(static(), data(int(context.node_config["partition-id"])), context=context)

    def renamed(key: str) -> Answers:
        def change(replies: list[Message]) -> list[Message]:
            for reply in replies:
                if reply.metadata.src_node_id == bad:
                    reply.content["arrays"] = ArrayRecord({key: Array(np.ones(4, np.float32))})
            return replies

        return change

    def asked(key: str) -> list[str]:
        on = Changed(grid(make=make), protocol.STATISTICS_QUERY, renamed(key))
        strategy = HeteroBN(statistics="query", min_train_nodes=1, **NO_EVALUATION)
        arrays = strategy.start(on, pack(initial_arrays(static())), num_rounds=1).arrays
        return list(strategy.global_model(Round(1, arrays, ConfigRecord(), on)))

    assert "1.running_mean" in asked("zzz")
    assert "1.running_var" in asked("1.running_mean"), "the reply with the most layers counts"


def test_fixbn_around_fixbn() -> None:
    inner = FixBN(FedAvg(**NO_EVALUATION), freeze_round=1, freeze="affine")
    trained(FixBN(inner, freeze_round=3), grid(), 4)


@pytest.mark.parametrize("shared", ["module", "tensors"])
def test_arrays_that_stay_on_a_client_do_not_pass_to_another_one(shared: str) -> None:
    module = net()
    parts = ModelTensors(module) if shared == "tensors" else module

    def make(context: Context) -> BNClient:
        return BNClient(parts, data(int(context.node_config["partition-id"])), context=context)

    for _ in range(2):  # nor to the next run
        found = trained(FedBN(**NO_EVALUATION), LocalGrid(client_app(make), 3, workers=0), 2)
        assert same(found, trained(FedBN(**NO_EVALUATION), grid(3), 2))


class Counts(nn.Module):
    """A layer that scales by the number of its passes, which is not in its state dict."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        return x * self.passes


def test_buffers_outside_of_the_state_dict_do_not_pass_to_another_client() -> None:
    def counting() -> nn.Module:
        return nn.Sequential(Counts(), *net())

    parts = ModelTensors(counting())

    def shared(context: Context) -> BNClient:
        return BNClient(parts, data(int(context.node_config["partition-id"])), context=context)

    def separate(context: Context) -> BNClient:
        return BNClient(counting(), data(int(context.node_config["partition-id"])), context=context)

    both = (
        trained(FedAvg(**NO_EVALUATION), LocalGrid(client_app(make), 3, workers=0), 2, counting)
        for make in (shared, separate)
    )
    assert same(*both)


ABANDONED = """
import torch
from torch import nn
from fedbn_flwr.exchange.codec import Contribution
from fedbn_flwr.client.layerwise import Session, parked_rounds

class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        ctx.exchange(Contribution("0", "gradients", {}, 1, 1))
        return gradient, None

def work(exchange):
    Waiting.apply(torch.ones(2, requires_grad=True), exchange).sum().backward()

parked = Session(work)
parked.advance()
parked_rounds["", 0, 0] = parked
print("waiting")
"""


@pytest.mark.slow
def test_a_process_with_a_round_that_waits_inside_pytorch_ends() -> None:
    done = python(ABANDONED, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "waiting\n", "")
