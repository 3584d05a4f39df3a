"""The local engine: an answer to every message, in order, even where clients fail."""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.engines import local
from fedbn_flwr.engines.pool import Pool
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import Arrays, pack, unpack
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg
from tests.support.command import ROOT, python
from tests.support.federations import same
from tests.support.records import content

Handler = Callable[[Message, Context], Any]
WORKERS = pytest.mark.parametrize("workers", [0, 2])
GO = multiprocessing.get_context("fork").Event()  # of all processes: a client that is told to wait waits for it


def app_of(handler: Handler) -> ClientApp:
    app = ClientApp()
    app.train()(handler)
    return app


def answer(message: Message, **metrics: Any) -> Message:
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def who(message: Message, context: Context) -> Message:
    return answer(message, partition=context.node_config["partition-id"], process=os.getpid())


def count(message: Message, context: Context) -> Message:
    """Count this node's messages, after what the config asks for."""
    config = message.content.config_records.get("config", ConfigRecord())
    match config.get("do"):
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit(4)
        case "wait":
            GO.wait(300)
        case "go":
            GO.set()
        case "raise":
            raise ValueError("no such thing")
        case "nothing":
            return None  # type: ignore[return-value]
    had = context.state.metric_records.get("had", MetricRecord({"count": 0}))["count"]
    assert isinstance(had, int)
    context.state["had"] = MetricRecord({"count": had + 1})
    return answer(message, count=had + 1, node=context.node_id)


def to(node: int, do: str = "", kind: str = "train") -> Message:
    return Message(RecordDict({"config": ConfigRecord({"do": do})}), node, kind)


def metrics(replies: Any, key: str) -> list[Any]:
    return [reply.content["metrics"][key] for reply in replies]


# --- the interface -----------------------------------------------------------


def test_it_is_a_grid() -> None:
    grid = LocalGrid(app_of(who), 3)
    assert isinstance(grid, Grid)
    assert grid.get_node_ids() == [1, 2, 3]
    assert LocalGrid(app_of(who), 2, node_ids=[70, 30]).get_node_ids() == [70, 30]


@WORKERS
def test_replies_come_in_the_order_of_the_messages(workers: int) -> None:
    nodes = [4, 1, 3, 3, 2]
    with LocalGrid(app_of(who), 4, workers=workers) as grid:
        messages = [to(node) for node in nodes]
        replies = list(grid.send_and_receive(iter(messages)))
    assert metrics(replies, "partition") == [node - 1 for node in nodes]
    assert [reply.metadata.src_node_id for reply in replies] == nodes
    assert [r.metadata.reply_to_message_id for r in replies] == [m.metadata.message_id for m in messages]
    assert len({message.metadata.message_id for message in messages}) == 5


@WORKERS
def test_push_and_pull_give_each_reply_once(workers: int) -> None:
    with LocalGrid(app_of(who), 3, workers=workers) as grid:
        left = list(grid.push_messages([to(1), to(2), to(3)]))
        replies = []
        while left:
            new = list(grid.pull_messages(left))
            replies += new
            left = [key for key in left if key not in {reply.metadata.reply_to_message_id for reply in new}]
        assert sorted(metrics(replies, "partition")) == [0, 1, 2]
        assert list(grid.pull_messages([r.metadata.reply_to_message_id for r in replies])) == []


def test_a_free_worker_takes_the_next_message() -> None:
    def who_waits(message: Message, context: Context) -> Message:
        if context.node_id == 1:
            assert GO.wait(300), "the other worker has not served node 5"
        elif context.node_id == 5:
            GO.set()
        return who(message, context)

    GO.clear()

    with LocalGrid(app_of(who_waits), 5, workers=2) as grid:
        first, *others = metrics(grid.send_and_receive([to(n) for n in range(1, 6)]), "process")
    assert len(set(others)) == 1
    assert first not in {*others, os.getpid()}


@WORKERS
def test_a_state_follows_its_node_to_every_worker(workers: int) -> None:
    with LocalGrid(app_of(count), 3, workers=workers) as grid:
        for round in range(1, 7):  # three nodes on two workers change places
            assert metrics(grid.send_and_receive([to(n) for n in (1, 2, 3)]), "count") == [round] * 3
            assert [grid.contexts()[n].state["had"]["count"] for n in (1, 2, 3)] == [round] * 3


def test_workers_leave_a_signal_to_the_whole_job_to_their_parent() -> None:
    """A queue sends SIGTERM to every process of a job; the round must end as after Ctrl-C."""
    with LocalGrid(app_of(who), 1, workers=1) as grid:
        (worker,) = metrics(grid.send_and_receive([to(1)]), "process")
        os.kill(worker, signal.SIGTERM)
        assert metrics(grid.send_and_receive([to(1)]), "process") == [worker]


UNCLOSED = """
from fedbn_flwr import LocalGrid
from tests.unit.engines.test_local_grid import app_of, to, who

grid = LocalGrid(app_of(who), 1, workers=1)
print(len(list(grid.send_and_receive([to(1)]))))
"""


@pytest.mark.slow
def test_a_grid_that_is_not_closed_does_not_keep_its_process_from_ending() -> None:
    assert python(UNCLOSED, cwd=ROOT).stdout == "1\n"


def test_two_messages_to_a_node_are_handled_in_their_order() -> None:
    GO.clear()
    with LocalGrid(app_of(count), 2, workers=2) as grid:
        messages = [to(1, "wait"), to(1), to(2, "go"), to(1)]
        assert metrics(grid.send_and_receive(messages), "count") == [1, 2, 1, 3]


def test_without_workers_this_process_serves() -> None:
    assert set(metrics(LocalGrid(app_of(who), 2).send_and_receive([to(1), to(2)]), "process")) == {os.getpid()}


def test_a_node_finds_its_configuration() -> None:
    seen: dict[int, Context] = {}

    def look(message: Message, context: Context) -> Message:
        seen[context.node_id] = context
        return answer(message, done=1)

    each = [{"data": "a"}, {"data": "b"}]
    grid = LocalGrid(app_of(look), 2, run_config={"lr": 0.5}, node_config=each, node_ids=[8, 9])
    list(grid.send_and_receive([to(8), to(9)]))
    assert seen[8].node_config == {"partition-id": 0, "num-partitions": 2, "data": "a"}
    assert seen[9].node_config == {"partition-id": 1, "num-partitions": 2, "data": "b"}
    assert seen[9].run_config == {"lr": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes is 0; expected an integer >= 1"),
        ({"workers": -1}, "workers is -1; expected an integer >= 0"),
        ({"node_ids": [1, 1]}, "different numbers"),
        ({"node_ids": [1]}, "node_ids has 1 entries for 2 nodes"),
        ({"work": [1.0]}, "work has 1 entries for 2 nodes"),
        ({"workers": 1, "threads": 2}, "threads is 2"),
        ({"workers": 1, "pool": Pool}, "workers is 1, but pool is given too"),
        ({"node_config": [{}]}, "1 entries for 2 nodes"),
    ],
)
def test_impossible_grids_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalGrid(app_of(who), **({"num_nodes": 2} | options))


def test_an_observer_of_a_pass_that_failed_sees_no_later_one() -> None:
    grid = LocalGrid(app_of(who), 1)
    grid.observe(lambda reply: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        grid.send_and_receive([to(1)])
    assert len(list(grid.send_and_receive([to(1)]))) == 1


# --- the same numbers --------------------------------------------------------


def test_workers_change_nothing_in_two_rounds_of_fedavg(federation: Callable[..., Any]) -> None:
    fed = federation((8, 12, 6), momentum=0.9, lr=0.2)
    results = []
    for workers in (0, 2):
        with fed.grid(workers=workers, threads=1) as grid:
            results.append(unpack(FedAvg().start(grid, fed.arrays(), num_rounds=2).arrays))
    assert list(results[0]) == list(results[1])
    assert same(results[0], results[1])
    assert any(value.tobytes() != unpack(fed.arrays())[key].tobytes() for key, value in results[0].items())


def test_two_grids_share_no_state() -> None:
    one, two = (LocalGrid(app_of(count), 1) for _ in range(2))
    list(one.send_and_receive([to(1)]))
    assert metrics(two.send_and_receive([to(1)]), "count") == [1]
    assert metrics(one.send_and_receive([to(1)]), "count") == [2]


@WORKERS
def test_a_client_that_changes_its_message_affects_no_other(workers: int) -> None:
    """The messages of a round share their content."""

    def spoil(message: Message, context: Context) -> Message:
        arrays, config = message.content["arrays"], message.content["config"]
        found = {"sum": float(arrays["w"].numpy().sum()), "keys": len(config), "records": len(message.content)}
        arrays["w"].numpy()[:] = 100
        arrays["w"] = pack({"w": np.full(3, 100.0)})["w"]
        config["spoilt"] = True
        message.content["more"] = ConfigRecord()
        return answer(message, **found)

    content = RecordDict({"arrays": pack({"w": np.ones(3)}), "config": ConfigRecord({"a": 1})})
    with LocalGrid(app_of(spoil), 3, workers=workers) as grid:
        for _ in range(2):
            replies = list(grid.send_and_receive([Message(content, node, "train") for node in (1, 2, 3)]))
            assert [dict(reply.content["metrics"]) for reply in replies] == [{"sum": 3, "keys": 1, "records": 2}] * 3
    assert unpack(content["arrays"])["w"].tolist() == [1, 1, 1]
    assert dict(content["config"]) == {"a": 1}


# --- faults ------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        ((9,), ErrorCode.NODE_UNAVAILABLE, "there is no node 9; the grid has [1, 2]"),
        (
            (1, "raise"),
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            "ValueError: no such thing (test_local_grid.py, line ",
        ),
        ((1, "nothing"), None, "returned NoneType instead of a Message"),
        ((1, "leave"), None, ""),  # a ClientApp of another project must not end the run
        ((1, "", "query.anything"), None, "anything"),
    ],
    ids=["an unknown node", "raise", "return nothing", "sys.exit", "no handler"],
)
def test_a_message_that_cannot_be_handled_gives_an_error_reply(
    bad: tuple[Any, ...], code: int | None, words: str, workers: int
) -> None:
    with LocalGrid(app_of(count), 2, workers=workers) as grid:
        error, good = grid.send_and_receive([to(*bad), to(2)])
        assert code in (None, error.error.code)
        assert words in error.error.reason
        assert error.metadata.src_node_id == bad[0]
        assert not good.has_error()
        assert metrics(grid.send_and_receive([to(1)]), "count") == [1]


def test_a_loader_may_have_processes_in_a_worker(federation: Callable[..., Any]) -> None:
    fed = federation((8, 8), batches=1)
    data = [TensorDataset(*own.batches[0]) for own in fed.data]

    def make_client(processes: int, context: Context) -> BNClient:
        loader = DataLoader(data[int(context.node_config["partition-id"])], 4, shuffle=True, num_workers=processes)
        return BNClient(copy.deepcopy(fed.model), loader, context=context)

    found = []
    for processes, workers in ((0, 0), (1, 2)):
        with LocalGrid(client_app(functools.partial(make_client, processes)), 2, workers=workers) as grid:
            strategy = FedAvg(fraction_evaluate=0.0)
            found.append(unpack(strategy.start(grid, fed.arrays(), num_rounds=2).arrays))
    assert same(*found)


@pytest.mark.parametrize(("do", "how"), [("die", "signal 9"), ("exit", "exit code 3")])
def test_a_client_that_ends_its_process_gives_an_error_reply(do: str, how: str) -> None:
    with LocalGrid(app_of(count), 4, workers=2) as grid:
        assert metrics(grid.send_and_receive([to(n) for n in (1, 2, 3, 4)]), "count") == [1, 1, 1, 1]
        one, two, three, four = grid.send_and_receive([to(1), to(2, do), to(3), to(4)])
        assert two.error.code == ErrorCode.CLIENT_APP_CRASHED
        assert how in two.error.reason
        assert two.metadata.src_node_id == 2
        assert metrics([one, three, four], "count") == [2, 2, 2]
        assert metrics(grid.send_and_receive([to(n) for n in (1, 2, 3, 4)]), "count") == [3, 2, 3, 3]


def test_workers_that_were_idle_answer_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.engines.worker._IDLE", 0.05)  # before the processes are forked
    with LocalGrid(app_of(count), 2, workers=2) as grid:
        for times in (1, 2):
            assert metrics(grid.send_and_receive([to(1), to(2)]), "count") == [times, times]
            time.sleep(0.2)


def test_a_process_that_died_between_rounds_is_replaced() -> None:
    with LocalGrid(app_of(count), 1, workers=1) as grid:
        list(grid.send_and_receive([to(1)]))
        (child,) = multiprocessing.active_children()
        child.kill()
        child.join(5)
        (lost,) = grid.send_and_receive([to(1)])
        assert lost.error.code == ErrorCode.CLIENT_APP_CRASHED
        assert metrics(grid.send_and_receive([to(1)]), "count") == [2]


def answers_before_time(grid: LocalGrid, messages: Iterable[Message], count: int) -> list[Message]:
    """The replies of a pass whose time is over when `count` of them have arrived."""
    with pytest.MonkeyPatch.context() as patch:
        replies = grid._replies
        patch.setattr(local, "time", SimpleNamespace(monotonic=lambda: sum(map(bool, replies.values())) // count * 100))
        return list(grid.send_and_receive(messages, timeout=10))


def test_a_timeout_leaves_late_replies_out_and_the_next_round_is_right() -> None:
    GO.clear()
    with LocalGrid(app_of(count), 3, workers=3) as grid:
        list(grid.send_and_receive([to(1), to(2), to(3)]))
        late = [to(1), to(2, "wait"), to(3)]
        assert metrics(answers_before_time(grid, late, 2), "node") == [1, 3]
        GO.set()
        messages = [to(n) for n in (1, 2, 3)]
        replies = list(grid.send_and_receive(messages))
        assert [r.metadata.reply_to_message_id for r in replies] == [m.metadata.message_id for m in messages]
        assert metrics(replies, "count") == [3, 3, 3], "node 2 trained in the second round, too late"
        assert list(grid.pull_messages([message.metadata.message_id for message in late])) == [], "and is not kept"


def test_messages_still_waiting_at_a_timeout_are_dropped() -> None:
    with LocalGrid(app_of(count), 2, workers=1) as grid:
        grid.start()
        assert list(grid.send_and_receive([to(1), to(2)], timeout=0)) == []
        assert metrics(grid.send_and_receive([to(1), to(2)]), "count") == [2, 1]


def test_states_can_be_read_while_a_client_is_late() -> None:
    """A checkpoint follows a round whose time is over; the late client's state is that of before the message."""
    GO.clear()
    with LocalGrid(app_of(count), 2, workers=2) as grid:
        list(grid.send_and_receive([to(1), to(2)]))
        before = content(grid.contexts()[2].state)
        assert len(answers_before_time(grid, [to(1), to(2, "wait")], 1)) == 1
        assert content(grid.contexts()[2].state) == before != content(grid.contexts()[1].state)
        GO.set()
        assert metrics(grid.send_and_receive([to(2)]), "count") == [3]


def test_closing_ends_the_processes_without_force() -> None:
    with LocalGrid(app_of(who), 3, workers=3) as grid:
        list(grid.send_and_receive([to(1), to(2), to(3)]))
        children = multiprocessing.active_children()
        assert len(children) == 3
    for child in children:
        child.join(5)
    assert [child.exitcode for child in children] == [0, 0, 0]


def test_closing_ends_a_client_that_is_still_at_work_with_the_programs_it_has_started() -> None:
    ours, theirs = os.pipe()

    def start(message: Message, context: Context) -> Message:
        subprocess.Popen(["sleep", "600"], pass_fds=[theirs])
        os.write(theirs, b"begun")
        time.sleep(600)
        return answer(message)

    with LocalGrid(app_of(start), 1, workers=1) as grid:
        grid.push_messages([to(1)])
        while not wait([ours], 0):
            grid.pull_messages([])
        (child,) = multiprocessing.active_children()
    os.close(theirs)
    assert not child.is_alive()
    assert os.read(ours, 9) == b"begun"
    assert wait([ours], 30), "a program still has its end of the pipe"
    assert os.read(ours, 9) == b""


def test_a_client_that_finishes_while_the_grid_closes_does_not_complain(capfd: pytest.CaptureFixture[str]) -> None:
    """Its reply is not read any more; a traceback on the terminal would look like a failure."""

    def nap(message: Message, context: Context) -> Message:
        time.sleep(0.3)
        return answer(message, done=1)

    with LocalGrid(app_of(nap), 1, workers=1) as grid:
        grid.start()
        assert list(grid.send_and_receive([to(1)], timeout=0)) == []
    assert "Traceback" not in capfd.readouterr().err


def draw(message: Message, context: Context) -> Message:
    return answer(message, drawn=float(torch.rand(1)))


@pytest.mark.slow
def test_workers_start_while_another_thread_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.engines.worker.START_TIMEOUT", 1)
    # The thread locks PyTorch's generator for as long as it takes to draw all of these numbers.
    thread = threading.Thread(target=torch.randn, args=(20_000_000,))
    with LocalGrid(app_of(draw), 2, workers=2) as grid:
        thread.start()
        replies = list(grid.send_and_receive(map(to, (1, 2))))
        thread.join()
    assert [reply.has_error() for reply in replies] == [False, False]


@pytest.fixture
def _own_handler() -> Iterator[None]:
    """A command has set a handler for SIGTERM, which forked processes inherit."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_own_handler")
def test_workers_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, here = threading.Lock(), os.getpid()

    class Output(io.StringIO):
        """Output that a thread of this process is writing to at every fork."""

        def flush(self) -> None:
            if os.getpid() != here:
                lock.acquire()

    monkeypatch.setattr("fedbn_flwr.engines.worker.START_TIMEOUT", 0.1)
    monkeypatch.setattr(sys, "stdout", Output())
    with lock, LocalGrid(app_of(draw), 1, workers=1) as grid, pytest.raises(RunFailed, match="use workers=0"):
        grid.start()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("threads", [None, 4])
def test_workers_train_after_this_process_used_several_threads(threads: int | None) -> None:
    """A fork after parallel arithmetic inherits a pool of threads without the threads, and must not wait for them.

    Some networks set their own number of threads, as for another device.
    """

    def convolve() -> None:
        image = torch.randn(8, 8, 32, 32, requires_grad=True)
        torch.relu(torch.nn.functional.conv2d(image, torch.randn(8, 8, 3, 3))).sum().backward()

    def train(message: Message, context: Context) -> Message:
        began_with = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        convolve()
        return answer(message, began_with=began_with, used=torch.get_num_threads())

    torch.set_num_threads(2)
    convolve()
    with LocalGrid(app_of(train), 1, workers=1) as grid:
        replies = [*grid.send_and_receive([to(1)]), *grid.send_and_receive([to(1)])]
    assert metrics(replies, "began_with") == [1, 1]
    assert metrics(replies, "used") == [threads or 1] * 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("_reply_to_message_id", "9", "it replied to message '9' instead of '1.1'"),
        ("_src_node_id", 2, "its reply says that it is from node 2 instead of 1"),
    ],
)
def test_a_reply_to_another_message_or_from_another_node_is_refused_at_once(
    workers: int, key: str, value: Any, reason: str
) -> None:
    def handler(message: Message, context: Context) -> Message:
        reply = answer(message)
        if context.node_id == 1:
            reply.metadata.__dict__[key] = value
        return reply

    with LocalGrid(app_of(handler), 2, workers=workers) as grid:
        first, second = grid.send_and_receive([to(1), to(2)])
    assert first.error.reason == reason
    assert first.metadata.src_node_id == 1
    assert second.has_content()


def test_the_reason_of_an_error_that_a_mod_made_is_passed_on() -> None:
    """Mods of Flower make it as a reply to the reply."""

    def handler(message: Message, context: Context) -> Message:
        return Message(Error(code=7, reason="too large"), reply_to=answer(message))

    with LocalGrid(app_of(handler), 1) as grid:
        (reply,) = grid.send_and_receive([to(1)])
    assert reply.error.reason == "too large"


def test_a_signal_during_a_fork_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread receives it, so that the handler runs in the main thread before the process is known there."""
    forked, real, over = list[int](), os.fork, threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()

    def fork() -> int:
        if process := real():
            forked.append(process)
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGTERM)
            time.sleep(0.05)  # a handler that does not wait runs here
        return process

    monkeypatch.setattr(os, "fork", fork)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), LocalGrid(app_of(who), 1, workers=1) as grid:
            grid.send_and_receive([to(1)])
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
    assert len(forked) == 1
    with pytest.raises(ChildProcessError):  # it has ended, and its exit code was read
        os.waitpid(forked[0], os.WNOHANG)


# --- memory ---


RECEIVED: list[weakref.ref[np.ndarray]] = []  # arrays of the model that a client has loaded


class Watching:
    """One batch; meanwhile the client has no copy of the model except the one that it trains."""

    num_examples = 2

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert RECEIVED
        assert not any(array() is not None for array in RECEIVED)
        yield torch.randn(2, 3), torch.tensor([0, 1])


def test_a_worker_does_not_keep_the_received_model_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    load_all = ModelTensors.load_all

    def noted(self: ModelTensors, arrays: Arrays, *rest: Any) -> None:
        RECEIVED[:] = map(weakref.ref, arrays.values())
        load_all(self, arrays, *rest)

    monkeypatch.setattr(ModelTensors, "load_all", noted)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))

    def make_client(context: Context) -> BNClient:
        return BNClient(model(), Watching(), lr=0.1, context=context)

    with LocalGrid(client_app(make_client), 2, workers=1) as grid:
        result = FedAvg().start(grid, pack(initial_arrays(model())), 2)
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_grid_leaves_the_identity_that_flower_gave_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("run", 7), ("node", 8), ("task", 9)):
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", value)
    with LocalGrid(ClientApp(), 2) as grid:
        (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    assert reply.metadata.src_node_id == 1
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (7, 8, 9)
