"""Real nodes: a grid that polls the SuperLink for replies at growing intervals.

Flower's own grid polls every 3 s, which would delay every exchange of a short round.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import LOG, few
from fedbn_flwr.internals import SUPERLINK_NODE_ID, ErrorCode, PullObjectRequest, PullObjectResponse

from .capabilities import Capabilities, GivenUp, GridAround, OnReply

if TYPE_CHECKING:
    from fedbn_flwr.internals import NodeInfo

_PAUSE = 0.05  # seconds before the first polls
_LONGEST_PAUSE = 3.0  # seconds, as in Flower's own grid
_PAUSE_SHARE = 0.05  # the pause before the next poll, as a share of the time that has passed
_RESTART_CHECK = 5.0  # seconds between checks for restarted nodes
_FIRST_WARNING = 60.0  # seconds until the log says how many replies are missing; doubles each time
_OUTAGE = 60.0  # seconds for which the SuperLink may answer a request with an internal error
_PART_PAUSE = 1.0  # seconds between requests for a part of a reply that a site is still uploading

Item = TypeVar("Item")


def poll_often(grid: Grid) -> Grid:
    """Make the grid of a Flower ServerApp poll for replies at short intervals; this package's own don't poll."""
    if isinstance(grid, Capabilities):
        return grid
    if hasattr(grid, "pull_interval"):  # the simulation's, 0.1 s by default
        grid.pull_interval = 0.02
        return grid
    return PollingGrid(grid)


class PollingGrid(GridAround):
    """A grid whose `send_and_receive` polls for replies at growing intervals.

    It also works around four of Flower's faults. Flower's grid waits for 180 s and more, past its own timeout, for the
    rest of a reply if the site lost its connection in mid-upload; here such a reply becomes an error at the timeout,
    and the others arrive. The SuperLink reports a lost node with its own node id; here the
    error has the id of the lost node. If a SuperNode restarts, it has lost its messages, but the SuperLink sees it
    online and Flower's grid waits until its timeout; here the missing reply becomes an error after some seconds. And
    Flower repeats a request after a lost connection, but not after an internal error of the SuperLink, such as a
    database that was locked for 5 s; here all requests but the sending of messages are repeated for a minute.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._observers: list[tuple[OnReply, GivenUp]] = []
        self._end = math.inf  # when the current timeout is over
        self.name: Callable[[int], str] = "node {}".format  # of a node, in the log
        if (client := getattr(grid, "_runtime_client", None)) is not None:  # Flower's, for requests to the SuperLink
            client.PullObject = functools.partial(self._pull_part, client.PullObject)

    def observe(self, on_reply: OnReply, given_up: GivenUp = tuple) -> None:
        self._observers.append((on_reply, given_up))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The replies that arrive within `timeout` seconds, in order of arrival; later ones stay on the SuperLink."""
        messages = list(messages)  # Flower's grid iterates over them twice
        observers, self._observers = self._observers, []
        began = checked = time.monotonic()
        self._end = math.inf if timeout is None else began + timeout
        next_warning = _FIRST_WARNING
        before = now = self._activations()
        asked, new = dict[str, Message](), list[Message]()
        # The id of a rejected message is None; if all messages together are too large, there are no ids.
        for message, key in itertools.zip_longest(messages, self.inner.push_messages(messages)):
            if key:
                asked[key] = message
            else:
                error = Error(ErrorCode.UNKNOWN, "the SuperLink did not accept the message; its log says why")
                new.append(Message(error, reply_to=message))
        replies: list[Message] = []
        while True:
            is_late = time.monotonic() >= self._end  # before the last look
            if time.monotonic() - checked >= _RESTART_CHECK:
                now, checked = self._activations(), time.monotonic()
            restarted = {node for node in before.keys() & now.keys() if before[node] != now[node]}
            # Pull replies only after that check: one that a node sent before its restart still counts.
            for reply in self.pull_messages(list(asked)) if asked else []:
                if (message := asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    by_superlink = reply.has_error() and reply.metadata.src_node_id == SUPERLINK_NODE_ID
                    new.append(Message(reply.error, reply_to=message) if by_superlink else reply)
            for key, message in list(asked.items()):
                if message.metadata.dst_node_id in restarted:
                    error = Error(ErrorCode.NODE_UNAVAILABLE, "its SuperNode was restarted and has lost the message")
                    new.append(Message(error, reply_to=asked.pop(key)))
            for on_reply, given_up in observers:
                for reply in new:
                    on_reply(reply)
                lost = given_up()
                asked = {key: message for key, message in asked.items() if message.metadata.dst_node_id not in lost}
            replies += new
            new.clear()
            passed = time.monotonic() - began
            if not asked or is_late:
                return replies
            if passed >= next_warning:
                limit = "without limit" if timeout is None else f"at most {timeout:g} s"
                nodes = few((self.name(message.metadata.dst_node_id) for message in asked.values()), 5)
                found = len(asked), len(messages), passed, limit, nodes
                LOG.warning("waiting for %d of %d replies since %.0f s, %s: %s", *found)
                next_warning *= 2
            pause = min(max(_PAUSE, _PAUSE_SHARE * passed), _LONGEST_PAUSE)
            time.sleep(max(0.0, min(pause, self._end - time.monotonic())))

    def _pull_part(
        self, pull: Callable[[PullObjectRequest], PullObjectResponse], request: PullObjectRequest
    ) -> PullObjectResponse:
        """A part of a reply, as soon as it is uploaded; at the end of the timeout "not found", which is an error."""
        while not (part := pull(request)).object_available and part.object_found:
            if time.monotonic() >= self._end:
                return PullObjectResponse()
            time.sleep(_PART_PAUSE)
        return part

    def _activations(self) -> dict[int, str]:
        """When each connected node was last started, by the SuperLink's clock. Empty if the SuperLink does not say."""
        return {node.node_id: node.last_activated_at for node in self.get_nodes() if node.last_activated_at}

    # --- repeated after an internal error of the SuperLink ---

    def get_node_ids(self) -> list[int]:
        return _repeated(super().get_node_ids)

    def get_nodes(self) -> list[NodeInfo]:
        return _repeated(super().get_nodes)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies. One that Flower had marked as delivered before an error is lost: it never arrives."""
        return _repeated(functools.partial(super().pull_messages, list(message_ids)))


def _repeated(request: Callable[[], Iterable[Item]]) -> list[Item]:
    """The SuperLink's answer. After an internal error the request is repeated each second, for a minute."""
    began = time.monotonic()
    while True:
        try:
            return list(request())
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", 0)  # of Flower's HTTP client
            if status < 500 or time.monotonic() - began >= _OUTAGE:
                raise
            LOG.warning("the SuperLink answered with status %d, its log says why; asking again", status)
            time.sleep(1)
