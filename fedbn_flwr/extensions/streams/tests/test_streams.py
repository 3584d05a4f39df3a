"""The exchange service and its clients: no client can stop the others."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.exchange.codec import (
    TEXT_LIMIT,
    Agreement,
    Contribution,
    contribution_from_records,
)
from fedbn_flwr.extensions.streams.client import CONTRIBUTE, FAILED, TOKEN, from_bytes, service_at, to_bytes
from fedbn_flwr.extensions.streams.config import ExchangeConfig
from fedbn_flwr.extensions.streams.server import ExchangeService
from tests.support.network import make_keys, missing_tools

HERE = ExchangeConfig("127.0.0.1:0")  # any free port


@pytest.fixture
def service() -> Iterator[ExchangeService]:
    with ExchangeService(HERE, [7, 8]) as opened:
        yield opened


def called(service: ExchangeService, node: int, timeout: float = 20) -> Any:
    return service_at(service.address, service.tokens[node], timeout, insecure=True)


def moments(value: float = 1.0) -> Contribution:
    return Contribution("0", "moments", {"mean": np.full(3, value, np.float32), "var": np.ones(3, np.float32)}, 4, 4)


def agreed(value: float = 2.0) -> bytes:
    return to_bytes(Agreement(moments(value).tensors, 12, 1.0))


@contextlib.contextmanager
def clients(service: ExchangeService, *nodes: int) -> Iterator[list[Any]]:
    """Each node's outcome of one exchange: a future of an Agreement or an error."""

    def exchange(node: int) -> Agreement:
        with called(service, node) as exchange:
            return exchange(moments(node))

    with ThreadPoolExecutor(len(nodes)) as pool:
        yield [pool.submit(exchange, node) for node in nodes]


def finish(service: ExchangeService, outcomes: list[Any], nodes: list[int]) -> None:
    """Complete the exchange without further errors."""
    received = service.collect(nodes, 20)
    for node in nodes:
        assert contribution_from_records(from_bytes(received[node])).tensors["mean"][0] == node
    service.answer(nodes, agreed(), last=True)
    for outcome in outcomes:
        assert outcome.result(20).values == 12


def raw(
    service: ExchangeService, token: str | None, messages: list[bytes], method: str = CONTRIBUTE
) -> grpc.StatusCode:
    """The status of a call that sends these bytes."""
    with grpc.insecure_channel(service.address) as channel:
        metadata = () if token is None else ((TOKEN, token),)
        call = channel.stream_stream(method)(iter(messages), metadata=metadata, timeout=10)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code()


def sending(service: ExchangeService, channel: grpc.Channel, node: int) -> Any:
    """A call with a contribution, which the service has read."""
    call = channel.unary_unary(CONTRIBUTE).future(to_bytes(moments()), 20, ((TOKEN, service.tokens[node]),))
    wait_for_call(service, node)
    return call


def wait_for_call(service: ExchangeService, node: int) -> None:
    while service._clients[node].call is None:
        time.sleep(0.01)


def test_calls_without_a_token_are_rejected_and_disturb_no_client(service: ExchangeService) -> None:
    assert raw(service, None, [b"x"]) is grpc.StatusCode.UNIMPLEMENTED
    assert raw(service, "0" * 64, [b"x" * 100_000]) is grpc.StatusCode.UNIMPLEMENTED
    assert raw(service, "", []) is grpc.StatusCode.UNIMPLEMENTED
    assert raw(service, service.tokens[7], [b"x"], "/other/Method") is grpc.StatusCode.UNIMPLEMENTED
    host, port = service.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for content in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(OSError):
                stranger.sendall(content)
        before = threading.active_count()
        for _ in range(50):
            raw(service, "1" * 64, [b"x"])
        assert threading.active_count() - before < 25, "a rejected call leaves no thread"
        with clients(service, 7, 8) as outcomes:
            finish(service, outcomes, [7, 8])


def test_a_token_is_good_for_one_call_at_a_time_and_to_the_last_answer(service: ExchangeService) -> None:
    with grpc.insecure_channel(service.address) as channel:
        call = sending(service, channel, 7)
        assert raw(service, service.tokens[7], [b"x"]) is grpc.StatusCode.ABORTED
        assert service.collect([7], 20)[7] == to_bytes(moments())
        service.answer([7], agreed(), last=True)
        assert call.result() == agreed()
    assert raw(service, service.tokens[7], [b"x"]) is grpc.StatusCode.ABORTED


def test_a_service_does_not_accept_the_tokens_of_another_round(service: ExchangeService) -> None:
    with ExchangeService(HERE, [7, 8]) as other:
        assert raw(other, service.tokens[7], [b"x"]) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow
def test_a_message_that_is_too_large_is_not_read(service: ExchangeService) -> None:
    with clients(service, 8) as outcomes:
        assert raw(service, service.tokens[7], [b"x" * 5_000_000]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        wait_for_call(service, 8)
        assert [*service.collect([7, 8], 1)] == [8]
        assert service.lost[7] == "it sent nothing to the exchange service within 1 s"
        service.answer([8], agreed(), last=True)
        assert outcomes[0].result(20).values == 12


def test_a_client_that_fails_is_lost_at_once_and_its_reason_is_cut(service: ExchangeService) -> None:
    with pytest.raises(OSError, match="gone"), called(service, 7):
        raise OSError("gone \U0001f4a5" + "x" * 3000)
    assert not service.collect([7], 20)
    assert service.lost[7] == ("OSError: gone \U0001f4a5" + "x" * 3000)[:TEXT_LIMIT]
    assert raw(service, service.tokens[8], [b"\xff" * 100], FAILED) is grpc.StatusCode.OK
    assert service.lost[8] == "\ufffd" * 100


def test_a_client_that_is_lost_after_its_message_does_not_count(service: ExchangeService) -> None:
    """It dies while the message of another client is waited for."""
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(service.collect, [7, 8], 20)
        with grpc.insecure_channel(service.address) as channel:
            sending(service, channel, 7).cancel()
            while 7 not in service.lost:
                time.sleep(0.01)
        with clients(service, 8) as outcomes:
            assert [*collected.result(20)] == [8]
            assert "broke" in service.lost[7]
            service.answer([8], agreed(), last=True)
            assert outcomes[0].result(20).values == 12


def test_a_client_that_never_connects_or_sends_nothing_is_given_up(service: ExchangeService) -> None:
    with clients(service, 8) as outcomes:
        wait_for_call(service, 8)
        service.collect([7, 8], 1)
        assert service.lost[7] == "it sent nothing to the exchange service within 1 s"
        service.answer([8], agreed(), last=True)
        assert outcomes[0].result(20).values == 12
        with called(service, 7, timeout=1) as late, pytest.raises(MessageError, match="sent nothing"):
            late(moments())


@pytest.mark.slow
def test_a_client_whose_server_is_gone_or_never_answers_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.extensions.streams.client.SLACK_SECONDS", 0.5)
    monkeypatch.setattr("fedbn_flwr.extensions.streams.client.CONNECT_SECONDS", 1)
    with contextlib.ExitStack() as stack:
        with ExchangeService(HERE, [7, 8, 9]) as service:
            with (
                called(service, 7, timeout=0.5) as exchange,
                pytest.raises(MessageError, match="did not answer within 1 s"),
            ):
                exchange(moments())
            last = stack.enter_context(called(service, 8))
            waiting = stack.enter_context(ThreadPoolExecutor(1)).submit(last, moments())
            wait_for_call(service, 8)
        with pytest.raises(MessageError, match="ended the exchange: the round's exchanges are over"):
            waiting.result(20)
        with pytest.raises(MessageError, match=rf"{service.address} cannot be reached"):
            last(moments())
    with called(service, 9) as never, pytest.raises(MessageError, match=rf"{service.address} cannot be reached"):
        never(moments())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0" * 8,
        to_bytes(moments()),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error(service: ExchangeService, answer: bytes) -> None:
    with called(service, 7) as exchange, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(exchange, moments())
        service.collect([7], 20)
        service.answer([7], answer)
        with pytest.raises(MessageError):
            outcome.result(20)


def test_two_rounds_in_a_row_take_the_same_port(service: ExchangeService) -> None:
    with ExchangeService(HERE, [1]) as first:
        address = first.address
    for _ in range(3):
        with ExchangeService(ExchangeConfig(address), [1]) as again:
            assert raw(again, None, [b"x"]) is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_is_an_error_with_the_setting_that_helps(service: ExchangeService) -> None:
    with pytest.raises(RunFailed, match=r"cannot listen on .*FEDBN_EXCHANGE_ADDRESS"):
        ExchangeService(ExchangeConfig(service.address), [1], bind_seconds=0)


@pytest.mark.skipif(bool(missing_tools()), reason="openssl is not installed")
def test_a_client_that_does_not_trust_the_certificate_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.extensions.streams.client.CONNECT_SECONDS", 0)
    for name in ("ours", "other"):
        assert make_keys(tmp_path / name).returncode == 0
    keys = tmp_path / "ours" / "exchange"
    direct = ExchangeConfig("127.0.0.1:0", certificate=str(keys / "server.pem"), key=str(keys / "server.key"))
    with ExchangeService(direct, [7]) as service:
        for ca in ((tmp_path / "other" / "ca.crt").read_text(), None):
            trusting = service_at(service.address, service.tokens[7], 5, ca=ca)
            with trusting as exchange, pytest.raises(MessageError, match="cannot be reached"):
                exchange(moments())
        with called(service, 7) as plain, pytest.raises(MessageError):
            plain(moments())
        service.collect([7], 0)
        assert service.lost == {7: "it sent nothing to the exchange service within 0 s"}
