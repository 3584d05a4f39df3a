"""Cohorts that are legal but unusual: clients that leave, report nothing or answer with other forms; second runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import Context
from flwr.serverapp.strategy import FedAdam, FedAvgM, Krum
from torch import nn

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.norms.convert import convert_norm
from fedbn_flwr.strategies import FedBN, FedBS, HeteroBN, MeanStatistics, Round, Scaffold
from tests.support.command import ROOT, python
from tests.support.federations import Changed, Federations, last_model, only, same
from tests.support.fixtures import small_net
from tests.support.records import between

OFF: Any = {"fraction_evaluate": 0.0}


def reporting(fed: Any, *counts: int) -> Any:
    """The federation's app, whose clients report these numbers of examples."""

    def change(message: RecordDict, reply: RecordDict, partition: int) -> None:
        reply["metrics"]["num-examples"] = counts[partition]  # type: ignore[index]

    return between(fed.app(), change)


def test_scaffold_s_nodes_may_leave_after_their_answers(federation: Federations) -> None:
    class Left(Changed):
        gone = False

        def get_node_ids(self) -> Iterable[int]:
            return [] if self.gone else super().get_node_ids()

    def leave(replies: list[Message]) -> list[Message]:
        grid.gone = True
        return replies

    fed = federation((8, 8))
    grid = Left(fed.grid(), only("train", leave))
    assert same(last_model(fed, Scaffold(**OFF), 1, grid), last_model(fed, Scaffold(**OFF), 1))


@pytest.mark.parametrize("empty", range(5))
def test_a_client_without_examples_is_left_out_of_flower_s_krum(federation: Federations, empty: int) -> None:
    fed, krum = federation((8,) * 5), MeanStatistics(Krum(num_malicious_nodes=1, **OFF), statistics="median")
    last_model(fed, krum, 1, fed.grid(reporting(fed, *(0 if i == empty else 8 for i in range(5)))))


def test_statistics_have_a_mean_also_if_no_client_reports_examples(federation: Federations) -> None:
    fed = federation((8, 8))
    found = [
        last_model(fed, MeanStatistics(FedBS(**OFF)), 1, fed.grid(reporting(fed, *counts)))
        for counts in ((0, 0), (8, 8))
    ]
    assert same(*found)


def test_a_flower_strategy_whose_clients_are_silent_ends_the_run(federation: Federations) -> None:
    fed = federation((8, 8))
    silent = Changed(fed.grid(), only("train", lambda replies: []))
    with pytest.raises(RunFailed, match="- node 1, node 2: it did not answer in time"):
        last_model(fed, MeanStatistics(FedAdam(**OFF)), 1, silent)


def test_of_two_answers_of_one_node_a_flower_strategy_gets_the_last(federation: Federations) -> None:
    def twice(replies: list[Message]) -> list[Message]:
        first = Message(replies[0].content.copy(), reply_to=replies[0])
        first.metadata.__dict__["_src_node_id"] = replies[0].metadata.src_node_id
        huge = {key: Array(np.full_like(value.numpy(), 1e9)) for key, value in replies[0].content["arrays"].items()}
        first.content["arrays"] = ArrayRecord(huge)
        return [first, *replies]

    fed = federation((8, 8))
    grids = Changed(fed.grid(), only("train", twice)), fed.grid()
    assert same(*(last_model(fed, MeanStatistics(FedAvgM(**OFF)), 1, grid) for grid in grids))


@pytest.mark.parametrize("bad", [1, 2])
def test_statistics_of_other_layers_are_refused(federation: Federations, bad: int) -> None:
    fed = federation((8, 8), model=lambda: convert_norm(small_net(), "sbn"))

    def asked(key: str) -> list[str]:
        def rename(replies: list[Message]) -> list[Message]:
            for reply in replies:
                if reply.metadata.src_node_id == bad:
                    reply.content["arrays"] = ArrayRecord({key: Array(np.ones(4, np.float32))})
            return replies

        grid = Changed(fed.grid(), only(protocol.STATISTICS_QUERY, rename))
        strategy = HeteroBN(statistics="query", min_train_nodes=1, **OFF)
        return list(strategy.global_model(Round(1, fed.arrays(), ConfigRecord(), grid)))

    assert "1.running_mean" in asked("zzz")
    assert "1.running_var" in asked("1.running_mean"), "the reply with the most layers counts"


class Counts(nn.Module):
    """A layer that scales by the number of its passes, which is not in its state dict."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        return x * self.passes


@pytest.mark.parametrize("parts", [nn.Module.train, ModelTensors], ids=["module", "tensors"])
@pytest.mark.parametrize("model", [small_net, lambda: nn.Sequential(Counts(), *small_net())], ids=["FedBN", "counts"])
def test_what_stays_on_a_client_or_is_not_in_the_state_dict_does_not_pass_to_another_one(
    federation: Federations, parts: Callable[[nn.Module], Any], model: Callable[[], nn.Module]
) -> None:
    """Where one model serves them all."""
    if parts is nn.Module.train and model is not small_net:
        pytest.skip("only ModelTensors knows the first values of other buffers")
    fed = federation((8, 8, 8), model=model)
    shared = parts(copy.deepcopy(fed.model))

    def make(context: Context) -> BNClient:
        return BNClient(shared, fed.data[int(context.node_config["partition-id"])], context=context)

    for _ in range(2):  # nor to the next run
        found = last_model(fed, FedBN(**OFF), 2, fed.grid(client_app(make), workers=0))
        assert same(found, last_model(fed, FedBN(**OFF), 2))


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
