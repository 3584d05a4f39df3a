"""The grid for real nodes polls often, stops at the timeout, and names the node that an error is about."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedbn_flwr import LocalGrid
from fedbn_flwr.engines.network import PollingGrid
from tests.support.federations import Federations


class SlowGrid(LocalGrid):
    """A local grid whose replies are available after some polls, as a SuperLink's are; `lost` nodes never answer."""

    def __init__(self, *args: Any, looks: int = 3, lost: Iterable[int] = (), refused: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.looks, self.lost, self.refused = itertools.count(-looks), set(lost), set(refused)
        self.pulled: list[list[str]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:  # type: ignore[override]
        messages = list(messages)
        self._to = dict(zip(super().push_messages(messages), (m.metadata.dst_node_id for m in messages), strict=True))
        return [None if node in self.refused else key for key, node in self._to.items()]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        message_ids = list(message_ids)
        self.pulled.append(message_ids)
        ready = [key for key in message_ids if self._to[key] not in self.lost] if next(self.looks) >= 0 else []
        return list(super().pull_messages(ready))


def questions(*nodes: int) -> Iterable[Message]:
    return (Message(RecordDict({"config": ConfigRecord()}), node, "query.partition") for node in nodes)


def test_each_reply_is_polled_until_it_is_available(federation: Federations, slept: list[float]) -> None:
    grid = SlowGrid(federation((4, 4, 4)).app(), 3, looks=4)
    replies = PollingGrid(grid).send_and_receive(questions(1, 2, 3), timeout=60)
    assert sorted(reply.metadata.src_node_id for reply in replies) == [1, 2, 3]
    assert len(grid.pulled) == 5
    assert slept == [0.05] * 4


def test_polls_become_rarer_but_not_rarer_than_flower_s(federation: Federations, slept: list[float]) -> None:
    grid = SlowGrid(federation((4,)).app(), 1, looks=300)
    PollingGrid(grid).send_and_receive(questions(1))
    assert slept == sorted(slept)
    assert slept[-1] == 3.0
    assert slept[100] < 0.05 * sum(slept[:100]) + 0.05


def test_late_replies_are_left_out(federation: Federations, slept: list[float]) -> None:
    grid = SlowGrid(federation((4, 4)).app(), 2, lost=[2])
    replies = list(PollingGrid(grid).send_and_receive(questions(1, 2), timeout=7))
    assert [reply.metadata.src_node_id for reply in replies] == [1]
    assert sum(slept) == pytest.approx(7)


def test_an_error_of_the_superlink_names_the_node_that_was_asked(federation: Federations, slept: list[float]) -> None:
    class Gone(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if reply.metadata.src_node_id == 2:
                    reply.__dict__["_content"] = None
                    reply.__dict__["_error"] = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
                    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
            return replies

    grid = Gone(federation((4, 4)).app(), 2)
    replies = list(PollingGrid(grid).send_and_receive(questions(2, 1), timeout=7))
    assert {reply.metadata.src_node_id: reply.has_error() for reply in replies} == {1: False, 2: True}


def test_a_message_that_is_refused_is_an_error_of_its_node(federation: Federations, slept: list[float]) -> None:
    grid = SlowGrid(federation((4, 4)).app(), 2, refused=[1])
    replies = list(PollingGrid(grid).send_and_receive(questions(1, 2), timeout=7))
    assert {reply.metadata.src_node_id: reply.has_error() for reply in replies} == {1: True, 2: False}


class SuperLink:
    """A SuperLink's answers to Flower's grid; the last part of node 1's reply is never uploaded."""

    def __init__(self, messages: Sequence[Message], clock: Callable[[], float]) -> None:
        self.clock, self.parts = clock, dict[str, bytes]()
        self.replies = [Message(RecordDict({"config": ConfigRecord()}), reply_to=each) for each in messages]
        for message, reply in zip(messages, self.replies, strict=True):
            reply.metadata.__dict__["_reply_to_message_id"] = message.object_id
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.parts |= {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
        self.parts[self.replies[0].object_id] = b""

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        """The replies of nodes 1 and 2 at once, and node 3's after a minute; each is delivered once."""
        count = 2 if self.clock() < 60 else 3
        ready, self.replies = self.replies[:count], self.replies[count:]
        ready = [reply for reply in ready if reply.metadata.reply_to_message_id in request.message_ids]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in ready],
            message_object_trees=[get_object_tree(reply) for reply in ready],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        part = self.parts[request.object_id]
        return PullObjectResponse(object_found=True, object_available=part != b"", object_content=part)

    def ConfirmMessageReceived(self, request: object) -> None:  # noqa: N802
        """The SuperLink forgets the reply."""


def test_a_reply_whose_upload_was_cut_is_an_error_at_the_timeout(
    federation: Federations, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its node; the replies that came with it and after it arrive. Flower's grid alone waits for up to two hours."""
    federation((4,)).grid()  # in whose process messages can be made
    messages = [*questions(1, 2, 3)]
    grid = HttpGrid(token="a")
    grid._run, grid._client = Run.create_empty(1), SuperLink(messages, lambda: sum(slept))
    monkeypatch.setattr(grid, "push_messages", lambda messages: [message.object_id for message in messages])
    monkeypatch.setattr(grid, "get_nodes", list)
    replies = PollingGrid(grid).send_and_receive(messages, timeout=90)
    assert {reply.metadata.src_node_id: reply.has_error() for reply in replies} == {1: True, 2: False, 3: False}
    assert 90 <= sum(slept) < 92


class Starting(SlowGrid):
    """Nodes as a SuperLink lists them, each with the time of its last start; node 2 restarts before the third poll."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listed = itertools.count(1)

    def get_nodes(self) -> Iterable[NodeInfo]:
        second = "later" if next(self.listed) >= 3 else "once"
        return [NodeInfo(node_id=1, last_activated_at="once"), NodeInfo(node_id=2, last_activated_at=second)]


def test_a_restarted_node_is_not_waited_for(federation: Federations, slept: list[float]) -> None:
    """The SuperLink sees it online and makes no error reply for the message that it has lost."""
    grid = Starting(federation((4, 4)).app(), 2, lost=[2])
    replies = {reply.metadata.src_node_id: reply for reply in PollingGrid(grid).send_and_receive(questions(1, 2))}
    assert replies[1].has_content()
    assert "restarted" in replies[2].error.reason
    assert sum(slept) < 20


def test_a_reply_sent_before_a_restart_counts(federation: Federations, slept: list[float]) -> None:
    class Late(Starting):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.looks = itertools.count(0 if next(self.listed) > 4 else -1)  # available when the new start is seen
            return super().pull_messages(message_ids)

    replies = list(PollingGrid(Late(federation((4, 4)).app(), 2)).send_and_receive(questions(1, 2)))
    assert [reply.has_content() for reply in replies] == [True, True]


class Failing(Starting):
    """The SuperLink answers a request with `status` if `failures` of the request's name has its number."""

    def __init__(self, *args: Any, status: int = 500, failures: Mapping[str, Container[int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.status, self.failures = status, failures
        self.requests: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def _count(self, name: str) -> None:
        if next(self.requests[name]) in self.failures.get(name, ()):
            request = httpx.Request("POST", f"https://superlink:8000/v1/runtime/{name}")
            httpx.Response(self.status, request=request).raise_for_status()

    def get_node_ids(self) -> list[int]:
        self._count("get-node-ids")
        return [*super().get_node_ids()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        self._count("get-nodes")
        return super().get_nodes()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self._count("pull-messages")
        return super().pull_messages(message_ids)


def test_a_superlink_that_fails_for_a_moment_is_asked_again(
    federation: Federations, slept: list[float], flower_log: pytest.LogCaptureFixture
) -> None:
    """Restarted nodes are noticed all the same: internal errors of the SuperLink end SuperNodes."""
    failures = {"get-node-ids": [0], "get-nodes": [0, 2, 3], "pull-messages": [0, 4]}
    grid = PollingGrid(Failing(federation((4, 4)).app(), 2, lost=[2], failures=failures))
    assert grid.get_node_ids() == [1, 2]
    replies = grid.send_and_receive(questions(1, 2), timeout=300)
    assert [reply.has_error() for reply in replies] == [False, True]
    assert sum(slept) < 30
    logged = [record.getMessage() for record in flower_log.records]
    assert logged == ["the SuperLink answered with status 500, its log says why; asking again"] * 6


@pytest.mark.parametrize("name", ["get-nodes", "pull-messages"])
def test_a_superlink_that_keeps_failing_ends_the_round(federation: Federations, slept: list[float], name: str) -> None:
    """Also if it answers the other requests."""
    grid = Failing(federation((4, 4)).app(), 2, lost=[2], failures={name: range(1, 10**6)})
    with pytest.raises(httpx.HTTPStatusError, match=f"500 Internal Server Error.*{name}"):
        PollingGrid(grid).send_and_receive(questions(1, 2))
    assert 60 <= sum(slept) < 70


def test_a_request_that_the_superlink_refuses_ends_the_round(federation: Federations, slept: list[float]) -> None:
    grid = Failing(federation((4, 4)).app(), 2, status=403, failures={"pull-messages": [0]})
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        PollingGrid(grid).send_and_receive(questions(1, 2))
    assert slept == []


def test_the_log_says_what_is_waited_for(
    federation: Federations, slept: list[float], flower_log: pytest.LogCaptureFixture
) -> None:
    grid = SlowGrid(federation((4, 4)).app(), 2, lost=[2])
    list(PollingGrid(grid).send_and_receive(questions(1, 2), timeout=300))
    logged = [record.getMessage() for record in flower_log.records]
    assert len(logged) == 3, "after about 60, 120 and 240 s"
    assert all("waiting for 1 of 2 replies since" in line and "at most 300 s: node 2" in line for line in logged)


class Observer:
    """Records replies, and reports nodes as given up."""

    def __init__(self, *given_up: int) -> None:
        self.errors: dict[int, str | None] = {}
        self.nodes = frozenset(given_up)

    def replied(self, reply: Message) -> None:
        self.errors[reply.metadata.src_node_id] = reply.error.reason if reply.has_error() else None

    def given_up(self) -> frozenset[int]:
        return self.nodes


def test_nodes_that_the_observer_gave_up_are_not_waited_for(federation: Federations, slept: list[float]) -> None:
    """An observer is for one batch of messages."""
    grid = SlowGrid(federation((4, 4)).app(), 2, lost=[2], looks=0)
    polled, observer = PollingGrid(grid), Observer(2)
    polled.observe(observer.replied, observer.given_up)
    assert len(list(polled.send_and_receive(questions(1, 2, 9), timeout=100))) == 2
    assert observer.errors.keys() == {1, 9}
    assert observer.errors[1] is None
    assert "there is no node 9" in str(observer.errors[9])
    assert slept == []
    list(polled.send_and_receive(questions(1, 2), timeout=100))
    assert sum(slept) == pytest.approx(100)


def test_the_observer_sees_a_message_that_the_superlink_refused(federation: Federations, slept: list[float]) -> None:
    polled, observer = PollingGrid(SlowGrid(federation((4, 4)).app(), 2, looks=0, refused=[2])), Observer()
    polled.observe(observer.replied, observer.given_up)
    assert len(list(polled.send_and_receive(questions(1, 2), timeout=100))) == 2
    assert observer.errors.keys() == {1, 2}
    assert "did not accept the message" in str(observer.errors[2])


def test_no_messages_no_waiting(federation: Federations, slept: list[float]) -> None:
    assert list(PollingGrid(SlowGrid(federation((4,)).app(), 1)).send_and_receive([])) == []
