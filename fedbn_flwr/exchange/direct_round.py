"""The exchanges of one FedTAN round over streams, while Flower waits for the replies to its train messages.

What an exchange means is FedTAN's; here is who carries it: a service open for this round, and a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr.errors import FedbnError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack

from .config import Direct
from .frames import Frame, WireError, decode, encode
from .stream_client import AGREED, FAILED
from .stream_server import ExchangeService, Lost

# Nodes, the number of exchanges so far, and what the last one came to: the cohort's tensors and images.
Outgoing = tuple[Sequence[int], int, ArrayRecord, int]
Ask = Callable[[Sequence[int], int, ArrayRecord, int], list[Message]]  # tells all of that, and returns the next replies

_JOIN_SECONDS = 60  # after the last reply came: only the streams' ends are left


class Meeting:
    """Runs `meet(ask)`, which ends with the nodes that are left and their last answer, over streams to `nodes`.

    Parameters
    ----------
    count
        Counts an exchange for the ledger: its messages up and down.
    frame_limit
        Bytes that one client's frame may have.
    exchange_seconds, seconds
        What one exchange may take, and all of them.
    """

    def __init__(
        self,
        direct: Direct,
        nodes: Sequence[int],
        meet: Callable[[Ask], Outgoing],
        *,
        count: Callable[[Sequence[RecordDict], Sequence[RecordDict]], None],
        frame_limit: int,
        exchange_seconds: float,
        seconds: float,
    ) -> None:
        self._count = count
        self.nodes = frozenset(nodes)
        self._meet = meet
        self._brought: list[RecordDict] = []  # to the exchange under way
        self._seconds = exchange_seconds
        self._left: frozenset[int] | None = None  # the nodes that took part to the end
        self._error: BaseException | None = None
        self._service = ExchangeService(direct, nodes, limit=frame_limit, seconds=seconds)
        self._thread = threading.Thread(target=self._run, daemon=True, name="fedbn-meeting")
        self._thread.start()

    def told(self, node: int, direct: Direct) -> dict[str, str | bool | float]:
        """What the train message of a node says about the way here."""
        told: dict[str, str | bool | float] = {
            protocol.DIRECT: self._service.address,
            protocol.DIRECT_TOKEN: self._service.tokens[node],
            protocol.DIRECT_TIMEOUT: float(self._seconds),
        }
        if not direct.encrypted:
            told[protocol.DIRECT_INSECURE] = True
        elif (ca := direct.read("ca")) is not None:
            told[protocol.DIRECT_CA] = ca.decode()
        return told

    def finish(self, replies: Sequence[Message]) -> frozenset[int]:
        """The nodes that took part in all exchanges, now that the round's replies are in; raises what ended them."""
        for reply in replies:
            self.replied(reply)
        if self._left is None:
            self._thread.join(1)
            self._service.lose(
                self.nodes, "its train message was answered, or given up, before the exchanges were over"
            )
        self._thread.join(_JOIN_SECONDS)
        if self._error is not None:
            raise self._error
        if self._left is None:
            raise FedbnError("the round's exchanges did not end")
        return self._left

    # --- what a grid that watches asks ---

    def replied(self, reply: Message) -> None:
        """Who has answered the round's message already takes part in no more exchanges."""
        reason = "it trained without meeting the others; serve the client by fedbn_flwr.client_app"
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
        self._service.lose([reply.metadata.src_node_id], reason)

    def given_up(self) -> frozenset[int]:
        return self.nodes if self._error is not None else frozenset(self._service.lost)

    # --- the thread ---

    def _run(self) -> None:
        try:
            with self._service:
                nodes, _, agreed, images = self._meet(self._ask)
                self._tell(nodes, agreed, images, last=True)
                self._left = frozenset(nodes)
        except BaseException as error:
            self._error = error

    def _ask(self, nodes: Sequence[int], step: int, agreed: ArrayRecord, images: int) -> list[Message]:
        if step:
            self._tell(nodes, agreed, images, last=False)
        frames = self._service.collect(nodes, self._seconds)
        replies = [_as_reply(node, frame) for node, frame in frames.items()]
        self._brought = [reply.content for reply in replies if reply.has_content()]
        return replies

    def _tell(self, nodes: Sequence[int], agreed: ArrayRecord, images: int, *, last: bool) -> None:
        """Send what an exchange came to."""
        frame = encode(Frame(AGREED, unpack(agreed), {protocol.COHORT_BATCH: images}))
        self._count(self._brought, [RecordDict({"arrays": agreed})] * len(nodes))
        self._service.answer(nodes, frame, last=last)


def _as_reply(node: int, frame: bytes | Lost) -> Message:
    """A frame as the reply to a query that would have asked for it."""
    question = Message(RecordDict(), node, protocol.COHORT_QUERY)
    if isinstance(frame, bytes):
        try:
            found = decode(frame)
        except WireError as error:
            frame = Lost(f"what it sent cannot be read: {error}")
        else:
            if found.what != FAILED:
                content = RecordDict(
                    {
                        "arrays": pack(found.arrays),
                        "metrics": MetricRecord(dict(found.numbers)),
                        "config": ConfigRecord({"what": found.what}),
                    }
                )
                return Message(content, reply_to=question)
            frame = Lost(found.text)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, frame.reason), reply_to=question)
