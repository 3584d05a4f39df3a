"""deploy/supernode.py: Flower's own loop of a SuperNode, with a server and ClientApps that tests play step by step.

With Flower's functions as they are, each play ends with a node that is healthy and waits for ever.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from tests.support.command import ROOT

RUN = 5


class ClientApp:
    """The calls that Flower's program makes for a ClientApp, up to the one where the test stops."""

    def __init__(self, state: InMemoryNodeState) -> None:
        (task,) = state.get_tasks(statuses=["pending"])
        self.state, self.task = state, task.task_id
        assert state.claim_task(self.task)
        assert state.activate_task(self.task)

    def read(self) -> ClientApp:
        (self.message,) = self.state.get_messages_legacy(run_ids=[RUN], is_reply=False, limit=1)
        return self

    def reply(self, *, whole: bool = True) -> ClientApp:
        reply = Message(RecordDict({"config": ConfigRecord()}), reply_to=self.message)
        loop._insert_message(reply, self.state, self.state.object_store)
        if not whole:
            self.state.object_store.delete(reply.object_id)
            self.state.object_store.preregister(RUN, get_object_tree(reply))
        return self

    def end(self, status: str = SubStatus.COMPLETED) -> None:
        assert self.state.finish_task(self.task, status, "")

    def killed(self) -> None:
        """And a minute without heartbeats has passed."""
        self.state.task_token_store[self.task].active_until = datetime.min.replace(tzinfo=UTC)


class Node:
    """A SuperNode whose server sends what is in `inbox`. In each sleep of its loop a step of the play takes place."""

    def __init__(self, steps: Callable[[Node], Iterator[None]]) -> None:
        self.steps, self.slept, self.parts = steps(self), 0.0, dict[str, bytes]()
        self.inbox, self.sent = list[Message](), list[tuple[str, bool]]()
        self.factory = NodeStateFactory(ObjectStoreFactory())
        self.state = self.factory.state()
        self.state.store_run(run := Run.create_empty(RUN))
        self.state.set_run_series_context(run.series_id, Context(RUN, 1, {}, RecordDict(), {}))

    def gets(self, name: str) -> None:
        with mock.patch.multiple(TaskIdentity, _task_id=1, _run_id=RUN, _node_id=1):  # of the server's process
            message = Message(RecordDict({"config": ConfigRecord({"name": name})}), 1, "train", group_id=name)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.parts |= {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        self.inbox.append(message)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        next(self.steps)

    def receive(self) -> tuple[Message, Any] | None:
        return (message := self.inbox.pop(), get_object_tree(message)) if self.inbox else None

    def send(self, message: Message, tree: Any, _: float) -> tuple[set[str], str]:
        self.sent.append((message.metadata.group_id, message.has_error()))
        return {each.object_id for each in iterate_object_tree(tree)}, "session"

    @contextmanager
    def connection(self, **_: object) -> Iterator[tuple[Any, ...]]:
        pull, done = (lambda run, key: self.parts[key]), (lambda *_: None)
        yield (1, self.receive, self.send, None, None, pull, done, done)


Play = Callable[[Callable[[Node], Iterator[None]]], Node]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs the loop of a node to the end of the play."""
    for name in ("_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(loop, name, getattr(loop, name))
    monkeypatch.setattr(InMemoryNodeState, "get_messages_legacy", InMemoryNodeState.get_messages_legacy)

    def run(steps: Callable[[Node], Iterator[None]]) -> Node:
        node = Node(steps)
        clock = SimpleNamespace(sleep=node.sleep, monotonic=lambda: node.slept)
        monkeypatch.setattr(loop, "time", clock)
        monkeypatch.setattr(loop, "_init_connection", node.connection)
        monkeypatch.setattr(loop, "register_signal_handlers", lambda *_, **__: None)  # they would stay in this process
        mend = runpy.run_path(str(ROOT / "deploy" / "supernode.py"))["mend"]
        mend.__globals__["time"] = clock
        mend()
        with pytest.raises(StopIteration):
            loop.start_client_internal(
                state_factory=node.factory, server_address="127.0.0.1:1", node_config={}, isolation="process"
            )
        return node

    return run


def answered(node: Node, message: str) -> Iterator[None]:
    node.gets(message)
    yield
    ClientApp(node.state).read().reply().end()
    yield


def test_a_late_reply_does_not_delay_the_next_ones(play: Play) -> None:
    """Flower gives up one ClientApp when another one has read its message, and this one gets the error."""

    def steps(node: Node) -> Iterator[None]:
        node.gets("one")
        yield
        first = ClientApp(node.state).read().reply()
        yield
        node.gets("two")
        yield
        second = ClientApp(node.state).read()
        first.killed()
        yield
        assert node.sent == [("one", False), ("two", True)]
        second.reply().end()
        yield
        yield
        yield from answered(node, "three")
        yield

    assert play(steps).sent[-2:] == [("two", False), ("three", False)]


@pytest.mark.parametrize(
    "end",
    [
        lambda app: app.read().end(SubStatus.FAILED),  # SIGTERM
        lambda app: app.killed(),  # between two requests, before it has read the message
    ],
)
def test_a_clientapp_that_ended_without_a_reply_is_an_error(end: Callable[[ClientApp], None], play: Play) -> None:
    def steps(node: Node) -> Iterator[None]:
        node.gets("one")
        yield
        end(ClientApp(node.state))
        yield
        yield from answered(node, "two")

    assert play(steps).sent == [("one", True), ("two", False)]


def test_a_reply_of_which_a_part_is_missing_is_given_up(play: Play, flower_log: pytest.LogCaptureFixture) -> None:
    def steps(node: Node) -> Iterator[None]:
        node.gets("one")
        yield
        app = ClientApp(node.state).read().reply(whole=False)
        yield
        app.killed()
        yield
        yield from answered(node, "two")

    assert play(steps).sent == [("one", False), ("two", False)]
    assert "its ClientApp ended before it had handed over the whole reply" in flower_log.text


def test_the_log_says_what_the_node_waits_for(play: Play, flower_log: pytest.LogCaptureFixture) -> None:
    def steps(node: Node) -> Iterator[None]:
        node.gets("one")
        yield
        yield from [None] * 150  # half a second each
        app = ClientApp(node.state).read()
        yield from [None] * 150
        app.reply().end()
        yield from [None] * 45  # three seconds each

    flower_log.set_level("INFO", logger="flwr")
    play(steps)
    last = "train message of run 5"
    assert [line for record in flower_log.records if (line := record.getMessage()).startswith("waiting")] == [
        f"waiting for a ClientApp to begin (is superexec-clientapp running?): {last} since 60 s",
        f"waiting for its ClientApp: {last} since 60 s",
        f"waiting for messages of the server (the last one: {last}) since 60 s",
        f"waiting for messages of the server (the last one: {last}) since 120 s",
    ]
