"""The client's side of the direct exchange: one stream for one round."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import torch

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol

from .config import KEEPALIVE, METHOD, TOKEN
from .frames import Frame, decode, encode
from .step import Answer

CONNECT_SECONDS = 30
SLACK_SECONDS = 15  # the server keeps the time; a client gives up a little later
FAILED = "failed"  # a frame that says why a client cannot go on
AGREED = "agreed"


@dataclass(frozen=True)
class ExchangeAddress:
    """Where and how to connect, as the server's train message says."""

    address: str
    token: str
    ca: str | None  # None: this machine's own root certificates
    insecure: bool
    timeout: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExchangeAddress:
        try:
            ca = config.get(protocol.DIRECT_CA)
            return cls(
                str(config[protocol.DIRECT]),
                str(config[protocol.DIRECT_TOKEN]),
                None if ca is None else str(ca),
                bool(config.get(protocol.DIRECT_INSECURE, False)),
                float(config[protocol.DIRECT_TIMEOUT]),
            )
        except KeyError as error:
            raise MessageError(f"the message has {protocol.DIRECT!r} but no {error.args[0]!r}") from None


class ExchangeStream:
    """A stream to the exchange service, opened at once; use as a context manager.

    Leaving it by an exception tells the server what went wrong, so that nobody waits for this client.
    """

    def __init__(self, place: ExchangeAddress) -> None:
        self._place = place
        self._late = False
        if place.insecure:
            self._channel = grpc.insecure_channel(place.address, options=KEEPALIVE)
        else:
            credentials = grpc.ssl_channel_credentials(None if place.ca is None else place.ca.encode())
            self._channel = grpc.secure_channel(place.address, credentials, options=KEEPALIVE)
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise

    def exchange(self, frame: Frame) -> Answer:
        """Send a frame and wait for what the cohort agreed on."""
        self._requests.put(encode(frame))
        limit = self._place.timeout + SLACK_SECONDS
        answer = decode(self._wait(lambda: next(self._call), limit))
        sent = {name: (array.shape, array.dtype) for name, array in frame.arrays.items()}
        got = {name: (array.shape, array.dtype) for name, array in answer.arrays.items()}
        images = answer.numbers.get(protocol.COHORT_BATCH)
        if answer.what != AGREED or got != sent or images is None:
            raise MessageError(
                f"the answer to the exchange of {frame.what} does not fit: it has {got}, expected {sent}"
            )
        return Answer({name: torch.from_numpy(array) for name, array in answer.arrays.items()}, int(images))

    def close(self) -> None:
        self._requests.put(None)
        # The server ends the stream when it has sent its last answer.
        with contextlib.suppress(MessageError, StopIteration):
            self._wait(lambda: next(self._call), SLACK_SECONDS)
        self._channel.close()

    def __enter__(self) -> ExchangeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._requests.put(encode(Frame(FAILED, text=f"{type(error).__name__}: {error}")))
        self.close()

    # --- inside ---

    def _connect(self) -> None:
        """Open a stream that the service has taken; try again for a while where nobody answers."""
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            # A queue for each try: a call that has failed may still be reading from its own.
            self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            frames = iter(self._requests.get, None)
            self._call = self._channel.stream_stream(METHOD)(frames, metadata=((TOKEN, self._place.token),))
            try:
                self._wait(self._call.initial_metadata, max(1.0, end - time.monotonic()))
                if self._call.is_active():
                    return
                # It has ended instead; taking something from it raises why.
                self._wait(lambda: next(self._call), 5)
            except _Unreachable:
                self._requests.put(None)
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
            except StopIteration:
                raise MessageError(f"the exchange service at {self._place.address} ended the stream at once") from None

    def _wait(self, what: Callable[[], Any], seconds: float) -> Any:
        """`what()`, given up after so many seconds."""
        call = self._call

        def stop() -> None:
            self._late = True
            call.cancel()

        self._late = False
        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            return what()
        except grpc.RpcError as error:
            raise self._explained(error, seconds) from None
        finally:
            timer.cancel()

    def _explained(self, error: Any, seconds: float) -> MessageError:
        where, code, details = f"the exchange service at {self._place.address}", error.code(), error.details()
        if self._late:
            return MessageError(f"{where} did not answer within {seconds:g} s")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MessageError(f"{where} does not take this node's token, which is good once and for one round")
        if code is grpc.StatusCode.ABORTED:
            return MessageError(f"{where} ended the exchange: {details}")
        if code is grpc.StatusCode.CANCELLED:
            return MessageError(f"{where} ended the exchange: the round went on without this client, or has failed")
        if code is grpc.StatusCode.UNAVAILABLE:
            return _Unreachable(f"{where} cannot be reached, or is gone: {details}")
        return MessageError(f"{where}: {code.name}: {details}")


class _Unreachable(MessageError):
    pass
