"""A round that stops at every exchange: parked or replayed, the numbers are the same."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.layerwise import Session, parked_rounds
from fedbn_flwr.exchange.codec import TIME_LIMIT, Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep


class Dropping(nn.Module):
    """Draws random numbers between two exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.a(x), 0.5)
        y: Tensor = self.last(self.b(dropped * torch.from_numpy(np.random.rand(4)).to(x)))
        return y


def test_a_parked_round_outlasts_the_longest_exchange() -> None:
    assert inspect.signature(Session).parameters["patience"].default > TIME_LIMIT


def test_a_replayed_session_gives_the_numbers_of_a_parked_one() -> None:
    torch.manual_seed(1)
    model = Dropping().double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 5

    def work(m: nn.Module) -> Any:
        def run(exchange: Any) -> Any:
            torch.manual_seed(7)
            np.random.seed(7)
            LayerwiseStep(exchange)(m, x, y, F.cross_entropy)
            return [p.grad for p in m.parameters()]

        return run

    def answer(contribution: Contribution, k: int) -> Agreement:
        return Agreement({key: value * 1.1 + 0.01 * (k + 1) for key, value in contribution.tensors.items()}, 16, 1.0)

    parked = Session(work(copy.deepcopy(model)))
    agreed: list[Agreement] = []
    state, asked = parked.advance(), []
    while state is not None:
        asked.append(state)
        agreed.append(answer(state, len(agreed)))
        torch.rand(3), np.random.rand(3)  # other draws in between
        state = parked.advance(agreed[-1])
    assert len(agreed) == 4
    for known in range(len(agreed)):
        again = Session(work(copy.deepcopy(model)), agreed[:known]).advance()
        assert again is not None
        assert again.kind == asked[known].kind
        assert all(np.array_equal(again.tensors[key], asked[known].tensors[key]) for key in again.tensors)
    final = Session(work(copy.deepcopy(model)), agreed)
    assert final.advance() is None
    assert all(map(torch.equal, final.result.result(), parked.result.result()))


def test_a_failing_round_raises_where_it_is_asked() -> None:
    def work(exchange: Any) -> None:
        raise RuntimeError("no data")

    session = Session(work)
    assert session.advance() is None
    with pytest.raises(RuntimeError, match="no data"):
        session.result.result()


def begun(threads: set[threading.Thread]) -> Session[Contribution, object]:
    """A session that waits at its first exchange; `threads` gets that of each pass through the model."""
    model, x, y = Dropping(), torch.randn(8, 4), torch.arange(8) % 5
    model.register_forward_pre_hook(lambda *_: threads.add(threading.current_thread()))
    session = Session[Contribution, object](lambda exchange: LayerwiseStep(exchange)(model, x, y, F.cross_entropy))
    assert isinstance(session.advance(), Contribution)
    return session


def test_sessions_use_the_threads_of_those_that_have_ended() -> None:
    """A new thread has no plans of cuDNN, no OpenMP threads and no settings of PyTorch's compiler."""
    threads: set[threading.Thread] = set()
    for waiting in [begun(threads), begun(threads)]:
        waiting.abandon()
    assert len(threads) == 2, "they waited at the same time"
    ended = Session[Contribution, object](lambda _: threads.add(threading.current_thread()))
    assert ended.advance() is None
    for waiting in [begun(threads), begun(threads)]:
        waiting.abandon()
    assert len(threads) == 2


def test_a_session_that_has_ended_leaves_nothing_in_memory() -> None:
    model = Dropping()
    session, alive = Session(lambda _, held=model: held.a), weakref.ref(model)
    assert session.advance() is None
    del model, session
    while alive() is not None:  # its thread ends a moment later
        time.sleep(0.01)


def test_a_forked_process_has_threads_of_its_own() -> None:
    waiting: Any = begun(set())  # only the fork matters here, not the round
    assert Session(bool).advance() is None
    parked_rounds["", 0, 0] = waiting
    process = multiprocessing.get_context("fork").Process(target=in_a_fork)
    process.start()
    process.join(300)
    code = process.exitcode
    process.kill()
    parked_rounds.clear()
    assert code == 0


def in_a_fork() -> None:
    assert parked_rounds.take(("", 0, 0)) is None, "its thread is in the parent only"
    assert Session(bool).advance() is None
