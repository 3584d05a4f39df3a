"""Passes of a model in several threads: in order, at the same time, and each with modules of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.batch import map_batches
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.norms.statistics import reestimate
from tests.support.nets import net, some_batches

CPU = torch.device("cpu")


class Remembering(nn.Module):
    """Sets an attribute in `forward` and reads it when another thread has had the time to set it too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        time.sleep(0.002)
        return self.kept * self.scale


class Locked(Remembering):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def call(model: nn.Module, batch: Tensor) -> float:
    return float(model(batch).detach())


@pytest.mark.parametrize("make", [Remembering, Locked])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_batch_meets_its_own_attributes(make: type[Remembering], threads: int) -> None:
    found = list(map_batches(call, make(), map(torch.tensor, range(12)), threads))
    assert found == [2.0 * i for i in range(12)]
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")], "threads end with the pass"


def test_results_keep_the_order_of_the_batches_though_later_ones_are_ready_first() -> None:
    later = threading.Event()

    def wait(model: nn.Module, batch: int) -> int:
        if batch == 0:
            assert later.wait(10), "batch 1 must run while batch 0 waits"
        else:
            later.set()
        return batch

    assert list(map_batches(wait, net(), range(4), 2)) == [0, 1, 2, 3]


def test_the_threads_have_the_tensors_and_one_pytorch_thread_each() -> None:
    model = net()

    def inspect(found: nn.Module, batch: int) -> tuple[int, int]:
        return torch.get_num_threads(), next(found.parameters()).data_ptr()

    assert set(map_batches(inspect, model, range(4), 2)) == {(1, next(model.parameters()).data_ptr())}


def test_only_a_few_batches_are_gathered_ahead() -> None:
    gathered, done = 0, 0

    def batches() -> Iterator[int]:
        nonlocal gathered
        for number in range(20):
            gathered += 1
            assert gathered <= done + 4, "two that are computed, and two that wait"
            yield number

    for _ in map_batches(lambda model, batch: batch, net(), batches(), 2):
        done += 1
    assert done == 20


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(model: nn.Module, batch: int) -> int:
        raise ValueError(f"batch {batch}")

    with pytest.raises(ValueError, match="batch 0"):
        list(map_batches(fail, net(), range(3), 2))


@pytest.mark.parametrize("threads", [2, 3])
def test_evaluation_is_that_of_one_thread(threads: int) -> None:
    model, batches = net(), some_batches()
    metrics = ("auc", "macro_f1")
    one = evaluate(model, batches, F.cross_entropy, CPU, metrics)
    assert evaluate(model, batches, F.cross_entropy, CPU, metrics, threads=threads) == one
    assert one.keys() >= {"auc", "macro-f1"}


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("threads", [2, 3])
def test_reestimated_statistics_are_those_of_one_thread(threads: int, pooled: bool) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (one, count), (several, again) = (
        reestimate(model, some_batches(), CPU, pooled=pooled, threads=n) for n in (1, threads)
    )
    assert count == again == len(some_batches())
    assert one.keys() == several.keys()
    assert all(torch.equal(one[key], several[key]) for key in one)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
