"""The direct exchange: the numbers and the ledger of the exchange over messages, and nothing that can stall it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr import build_model, client_app
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.exchange.config import METHOD, TOKEN, Direct
from fedbn_flwr.exchange.frames import Frame, WireError, decode, encode
from fedbn_flwr.exchange.step import Answer
from fedbn_flwr.exchange.stream_client import AGREED, ExchangeAddress, ExchangeStream
from fedbn_flwr.exchange.stream_server import ExchangeService, Lost
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.ledger import MeteredGrid, Traffic
from fedbn_flwr.strategies import FedAvgGlobalStats, FedTAN, FedTANII, FixBN, GlobalMomentum
from tests.federation.test_fedtan import two_norms
from tests.support.network import make_keys, missing_tools

Federations = Callable[..., Any]
HERE = Direct("127.0.0.1:0")  # any free port


def with_dropout() -> nn.Module:
    return nn.Sequential(two_norms()[:4], nn.Dropout(0.3), *two_norms()[4:])


def train(fed: Any, strategy: Any, rounds: int, **grid: Any) -> tuple[dict[str, np.ndarray], list[Traffic]]:
    models: list[ArrayRecord] = []
    pages: list[Traffic] = []
    with fed.grid(**grid) as local:
        metered = MeteredGrid(local)

        def note(_: int, arrays: ArrayRecord) -> None:
            models.append(arrays)
            pages.append(metered.take())

        strategy.start(metered, fed.arrays(), num_rounds=rounds, evaluate_fn=note)
    return unpack(models[-1]), pages


STRATEGIES: dict[str, Callable[..., Any]] = {
    "fused": lambda **k: FedTAN(fraction_evaluate=0.0, **k),
    "paper, by batch": lambda **k: FedTAN(fraction_evaluate=0.0, exchange="paper", weights="batch", **k),
    "forward only": lambda **k: FedAvgGlobalStats(fraction_evaluate=0.0, **k),
    "FedTANII": lambda **k: FedTANII(fraction_evaluate=0.0, fedtan_rounds=2, **k),
    "FixBN": lambda **k: FixBN(FedTAN(fraction_evaluate=0.0, **k), freeze_round=1, freeze=["statistics", "affine"]),
    "GlobalMomentum": lambda **k: GlobalMomentum(FedTAN(fraction_evaluate=0.0, **k)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_streams_give_the_arrays_and_the_ledger_of_messages_bit_for_bit(federation: Federations, name: str) -> None:
    fed = federation((6, 9, 4), model=with_dropout, lr=0.1, momentum=0.9, steps=2)
    make = STRATEGIES[name]
    by_messages, told = train(fed, make(direct=False), 3)
    by_streams, counted = train(fed, make(direct=HERE), 3, workers=3)
    assert by_messages.keys() == by_streams.keys()
    assert all(by_messages[key].tobytes() == by_streams[key].tobytes() for key in by_messages)
    if name == "GlobalMomentum":  # here the momentum rides with the model, there with the last answer
        counted = [replace(page, elements_down_per_client=0) for page in counted]
        told = [replace(page, elements_down_per_client=0) for page in told]
    assert told == counted
    assert told[1].communication_rounds > 1, "there was something to exchange"


def test_communication_rounds_and_bytes_of_resnet20_are_the_papers(federation: Federations) -> None:
    """As over messages (test_fedtan.py): 39 rounds fused, and 4 x 1,376 floats more than FedAvg's."""
    fed = federation((2,) * 5, batches=1, model=lambda: build_model("resnet20", 10, in_channels=2), steps=1)
    _, (_, page) = train(fed, FedTAN(fraction_evaluate=0.0, direct=HERE), 1, workers=5)
    assert page.communication_rounds == 39
    assert page.bytes_down == page.bytes_up == 4 * 5 * (271_098 - 144 + 2 * 1_376)
    assert page.messages_down == page.messages_up == 5 * 39


def test_one_client_needs_no_worker(federation: Federations) -> None:
    fed = federation((6,), model=two_norms, dtype=torch.float64)
    alone = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
    by_messages, _ = train(fed, FedTAN(direct=False, **alone), 2)
    by_streams, _ = train(fed, FedTAN(direct=HERE, **alone), 2)
    assert all(by_messages[key].tobytes() == by_streams[key].tobytes() for key in by_messages)


def test_clients_that_cannot_be_alive_at_once_are_refused(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)
    with pytest.raises(SettingsError, match=r"all 3 clients alive at once.*serves 2 at a time.*engine\.workers"):
        train(fed, FedTAN(fraction_evaluate=0.0, direct=HERE), 1, workers=2)


# --- clients that fail ---


def spoiled(fed: Any, partition: int, spoil: Callable[[Any], None]) -> Any:
    """The federation's ClientApp, where the model of one client calls `spoil` between its first and second exchange."""

    def make(context: Any) -> Any:
        client = fed.make_client(context)
        if context.node_config["partition-id"] == partition:
            client.model[2].register_forward_pre_hook(second_time(lambda: spoil(client)))
        return client

    return client_app(make)


def second_time(act: Callable[[], None]) -> Callable[..., None]:
    """A hook for a forward pass that is not the first one, which counts the batch norms."""
    calls = iter([lambda: None, act])
    return lambda *_: next(calls)()


def killed(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed(_: Any) -> None:
    raise OSError("the disk is gone")


def diverged(client: Any) -> None:
    client.model[3].weight.data.fill_(torch.nan)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(killed, "its connection to the exchange service broke"), (failed, "the disk is gone"), (diverged, "not finite")],
)
def test_a_client_lost_in_the_middle_is_left_out_and_the_others_weighted_anew(
    federation: Federations, flower_log: pytest.LogCaptureFixture, spoil: Callable[[Any], None], says: str
) -> None:
    """Client 1 takes part in the first exchange and in no other: streams lose it as messages do."""
    fed = federation((6, 8, 5), batches=1, model=two_norms, dtype=torch.float64, lr=0.1, steps=1)
    results = []
    for direct in (False, HERE):
        strategy = FedTAN(fraction_evaluate=0.0, direct=direct)
        results.append(train(fed, strategy, 1, app=spoiled(fed, 1, spoil), workers=3)[0])
        assert len(strategy.shares) == 2
    assert "exchange 2: left out client 1" in flower_log.text
    assert says in flower_log.text
    by_messages, by_streams = results
    assert all(by_messages[key].tobytes() == by_streams[key].tobytes() for key in by_messages)


def test_too_few_clients_end_the_run_with_all_reasons(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)
    strategy = FedTAN(fraction_evaluate=0.0, min_train_nodes=3, direct=HERE)
    with pytest.raises(RunFailed, match=r"(?s)exchange 2: 2 of 3 .*client 1 .*the disk is gone"):
        train(fed, strategy, 1, app=spoiled(fed, 1, failed), workers=3)


def test_reasons_of_earlier_exchanges_are_told_as_well(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)

    def make(context: Any) -> Any:
        client = fed.make_client(context)
        match context.node_config["partition-id"]:
            case 0:
                raise OSError("no such folder")
            case 1:
                client.model[2].register_forward_pre_hook(second_time(lambda: failed(client)))
        return client

    strategy = FedTAN(fraction_evaluate=0.0, min_train_nodes=2, direct=HERE)
    with pytest.raises(RunFailed, match=r"(?s)exchange 2: 1 of 2 .*no such folder"):
        train(fed, strategy, 1, app=client_app(make), workers=3)


def test_a_client_that_stalls_is_left_out_when_its_time_is_over(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """It goes on in the end, to find that the others have; what it trained is not used."""
    fed = federation((6, 8, 5), batches=1, model=two_norms, steps=1)
    strategy = FedTAN(fraction_evaluate=0.0, direct=HERE, exchange_timeout=2)
    train(fed, strategy, 1, app=spoiled(fed, 1, lambda _: time.sleep(4)), workers=3)
    assert len(strategy.shares) == 2
    assert "client 1" in flower_log.text
    assert "sent nothing to the exchange service within 2 s" in flower_log.text


def test_who_answers_without_taking_part_is_not_waited_for(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """With a grid that tells at once: a client that knows nothing of the exchange, and a process that dies early."""
    fed = federation((6, 8, 5, 4), batches=1, model=two_norms, steps=1)
    ours, foreign = fed.app(), ClientApp()

    @foreign.train()
    def plain(message: Message, context: Context) -> Message:
        match context.node_config["partition-id"]:
            case 0:
                killed(None)
            case 1:
                arrays, metrics = message.content.array_records["arrays"], MetricRecord({protocol.NUM_EXAMPLES: 8})
                return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
        return ours(message, context)

    with fed.grid(foreign, workers=4) as local:
        local.start()
        # Were it waited for, this test would not end in time.
        strategy = FedTAN(fraction_evaluate=0.0, direct=HERE, exchange_timeout=3000)
        strategy.start(PollingGrid(local), fed.arrays(), num_rounds=1)
    assert len(strategy.shares) == 2
    assert "node 1: the client's process died (signal 9)" in flower_log.text
    assert "node 2: it trained without meeting the others" in flower_log.text


# --- the service and its door ---


@pytest.fixture
def service() -> Iterator[ExchangeService]:
    with ExchangeService(HERE, [7, 8], limit=10_000, seconds=60) as opened:
        yield opened


def place(service: ExchangeService, node: int, timeout: float = 20) -> ExchangeAddress:
    return ExchangeAddress(service.address, service.tokens[node], None, True, timeout)


def moments(value: float = 1.0) -> Frame:
    arrays = {"mean": np.full(3, value, np.float32), "var": np.ones(3, np.float32)}
    return Frame("moments", arrays, {protocol.EXCHANGES_LEFT: 0})


def agreed(value: float = 2.0) -> bytes:
    return encode(Frame(AGREED, moments(value).arrays, {protocol.COHORT_BATCH: 12}))


@contextlib.contextmanager
def clients(service: ExchangeService, *nodes: int) -> Iterator[list[Any]]:
    """Each node's outcome of one exchange: a future of an Answer or an error."""

    def meet(node: int) -> Answer:
        with ExchangeStream(place(service, node)) as line:
            return line.exchange(moments(node))

    with ThreadPoolExecutor(len(nodes)) as pool:
        yield [pool.submit(meet, node) for node in nodes]


def finish(service: ExchangeService, outcomes: list[Any], nodes: list[int]) -> None:
    """The rest of an exchange in which nothing else goes wrong."""
    frames = service.collect(nodes, 20)
    for node in nodes:
        assert isinstance(frame := frames[node], bytes), frame
        assert decode(frame).arrays["mean"][0] == node
    service.answer(nodes, agreed(), last=True)
    for outcome in outcomes:
        assert outcome.result(20).images == 12


def raw(service: ExchangeService, token: str | None, frames: list[bytes], method: str = METHOD) -> grpc.StatusCode:
    """What becomes of a call that sends these bytes."""
    with grpc.insecure_channel(service.address) as channel:
        metadata = () if token is None else ((TOKEN, token),)
        call = channel.stream_stream(method)(iter(frames), metadata=metadata, timeout=10)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code()


def test_strangers_are_turned_away_and_disturb_nobody(service: ExchangeService) -> None:
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
        assert threading.active_count() - before < 25, "a stranger costs no thread that stays"
        with clients(service, 7, 8) as outcomes:
            finish(service, outcomes, [7, 8])


def test_a_token_is_good_once(service: ExchangeService) -> None:
    with clients(service, 7, 8) as outcomes:
        finish(service, outcomes, [7, 8])
    with pytest.raises(MessageError, match="does not take this node's token"):
        ExchangeStream(place(service, 7))


def test_a_service_does_not_take_the_tokens_of_another_round(service: ExchangeService) -> None:
    with ExchangeService(HERE, [7, 8], limit=10_000, seconds=60) as other:
        assert raw(other, service.tokens[7], [b"x"]) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("content", [b"x" * 20_000, None], ids=["too much", "nothing, and gone"])
def test_a_client_that_sends_too_much_or_leaves_loses_its_place(
    service: ExchangeService, content: bytes | None
) -> None:
    with clients(service, 8) as outcomes:
        raw(service, service.tokens[7], [] if content is None else [content])
        frames = service.collect([7, 8], 20)
        assert isinstance(frames[7], Lost)
        assert "broke" in frames[7].reason
        assert isinstance(frames[8], bytes)
        service.answer([8], agreed(), last=True)
        assert outcomes[0].result(20).images == 12


def test_a_client_that_never_connects_or_says_nothing_is_given_up(service: ExchangeService) -> None:
    with ExchangeStream(place(service, 7, timeout=1)) as silent, clients(service, 8) as outcomes:
        frames = service.collect([7, 8], 1)
        assert frames[7] == Lost("it sent nothing to the exchange service within 1 s")
        service.answer([8], agreed(), last=True)
        assert outcomes[0].result(20).images == 12
        with pytest.raises(MessageError, match="sent nothing"):
            silent.exchange(moments())
    with ExchangeService(HERE, [7], limit=1000, seconds=60) as alone:
        assert alone.collect([7], 0.2)[7] == Lost("it did not connect to the exchange service within 0.2 s")


def test_a_round_ends_when_its_time_is_over() -> None:
    with ExchangeService(HERE, [7], limit=1000, seconds=1) as short:
        with ExchangeStream(place(short, 7)) as line, pytest.raises(MessageError, match="ended the exchange"):
            line.exchange(moments())
        assert isinstance(short.collect([7], 60)[7], bytes | Lost)


def test_a_client_whose_server_is_gone_or_never_answers_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.exchange.stream_client.SLACK_SECONDS", 0.5)
    monkeypatch.setattr("fedbn_flwr.exchange.stream_client.CONNECT_SECONDS", 1)
    with ExchangeService(HERE, [7, 8], limit=10_000, seconds=60) as service:
        with (
            ExchangeStream(place(service, 7, timeout=0.5)) as line,
            pytest.raises(MessageError, match="did not answer within 1 s"),
        ):
            line.exchange(moments())
        last = ExchangeStream(place(service, 8))
    with pytest.raises(MessageError, match="ended the exchange: the round went on without"):
        last.exchange(moments())
    last.close()
    with pytest.raises(MessageError, match=rf"{service.address} cannot be reached"):
        ExchangeStream(place(service, 8))


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\0", encode(Frame("agreed", {"mean": np.ones(4, np.float32)}))])
def test_an_answer_that_does_not_fit_is_an_error(service: ExchangeService, answer: bytes) -> None:
    with ExchangeStream(place(service, 7)) as line, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(line.exchange, moments())
        service.collect([7], 20)
        service.answer([7], answer)
        with pytest.raises(MessageError):
            outcome.result(20)


def test_two_rounds_in_a_row_take_the_same_port(service: ExchangeService) -> None:
    with ExchangeService(HERE, [1], limit=1000, seconds=60) as first:
        address = first.address
    for _ in range(3):
        with ExchangeService(Direct(address), [1], limit=1000, seconds=60) as again:
            assert raw(again, None, [b"x"]) is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_is_an_error_with_the_setting_that_helps(
    service: ExchangeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.exchange.stream_server._BIND_SECONDS", 0)
    with pytest.raises(RunFailed, match=r"cannot listen on .*FEDBN_EXCHANGE_ADDRESS"):
        ExchangeService(Direct(service.address), [1], limit=1000, seconds=60)


@pytest.mark.skipif(bool(missing_tools()), reason="openssl is not installed")
def test_tls_with_the_deployments_certificate(federation: Federations, tmp_path: Path) -> None:
    for name in ("ours", "other"):
        assert make_keys(tmp_path / name).returncode == 0
    keys = tmp_path / "ours" / "exchange"
    files = {"certificate": str(keys / "server.pem"), "key": str(keys / "server.key")}
    direct = Direct("127.0.0.1:0", ca=str(keys / "ca.crt"), **files)
    direct.check()
    fed = federation((6, 6), model=two_norms)
    by_messages, _ = train(fed, FedTAN(fraction_evaluate=0.0, direct=False), 2)
    by_streams, _ = train(fed, FedTAN(fraction_evaluate=0.0, direct=direct), 2, workers=2)
    assert all(by_messages[key].tobytes() == by_streams[key].tobytes() for key in by_messages)


@pytest.mark.skipif(bool(missing_tools()), reason="openssl is not installed")
def test_a_client_that_does_not_trust_the_certificate_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.exchange.stream_client.CONNECT_SECONDS", 0)
    for name in ("ours", "other"):
        assert make_keys(tmp_path / name).returncode == 0
    keys = tmp_path / "ours" / "exchange"
    direct = Direct("127.0.0.1:0", certificate=str(keys / "server.pem"), key=str(keys / "server.key"))
    with ExchangeService(direct, [7], limit=1000, seconds=60) as service:
        for ca in ((tmp_path / "other" / "ca.crt").read_text(), None):
            with pytest.raises(MessageError, match="cannot be reached"):
                ExchangeStream(ExchangeAddress(service.address, service.tokens[7], ca, False, 5))
        with pytest.raises(MessageError):
            ExchangeStream(place(service, 7))  # without TLS
        assert service.collect([7], 0) == {7: Lost("it did not connect to the exchange service within 0 s")}


# --- frames ---


arrays = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(["float16", "float32", "float64"]), st.lists(st.integers(0, 3), max_size=3), st.binary()),
    max_size=3,
)


@given(arrays, st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9), max_size=3))
def test_frames_arrive_as_they_were(described: dict[str, Any], numbers: dict[str, float]) -> None:
    made = {}
    for name, (dtype, shape, content) in described.items():
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        made[name] = np.frombuffer((content * (size + 1) or b"\0" * size)[:size], dtype).reshape(shape)
    found = decode(encode(Frame("moments", made, numbers, "text")))
    assert (found.what, found.text, found.numbers) == ("moments", "text", numbers)
    assert list(found.arrays) == list(made)
    for name, array in made.items():
        assert (found.arrays[name].shape, found.arrays[name].dtype) == (array.shape, array.dtype)
        assert found.arrays[name].tobytes() == array.tobytes()


def header(text: str, values: bytes = b"") -> bytes:
    return len(text).to_bytes(4, "little") + text.encode() + values


def whole(tensors: str, numbers: str = "{}") -> str:
    return f'{{"what": "moments", "text": "", "numbers": {numbers}, "tensors": {tensors}}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff\xff\xff",
        header("{}"),
        header("[" * 5000),
        header("not json"),
        header(whole('[["mean", "float32", [2]]]'), b"\0" * 7),
        header(whole('[["mean", "float32", [2]]]'), b"\0" * 9),
        header(whole('[["mean", "float32", [-1]]]')),
        header(whole('[["mean", "float32", [true]]]'), b"\0" * 4),
        header(whole('[["mean", "float32", [9007199254740992, 9007199254740992]]]')),
        header(whole('[["mean", "object", [1]]]'), b"\0" * 8),
        header(whole('[["mean", "float32", [1]], ["mean", "float32", [1]]]'), b"\0" * 8),
        header(whole("3")),
        header(whole("[]", '{"images": NaN}')),
        header(whole("[]", '{"images": 1e400}')),
        header(whole("[]", '{"images": "3"}')),
        header(whole("[]", f'{{"images": {"9" * 400}}}')),
        header(whole("[]", f'{{"images": {"9" * 5000}}}')),
    ],
)
def test_bytes_that_are_no_frame_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        decode(content)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(content: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(content)


def test_integers_do_not_travel() -> None:
    with pytest.raises(WireError, match="int64"):
        encode(Frame("moments", {"mean": np.ones(2, np.int64)}))


# --- settings ---


def test_without_an_address_there_is_no_service() -> None:
    assert Direct.from_environment({"FEDBN_OUT": "/runs"}) is None
    assert Direct.from_environment({"FEDBN_EXCHANGE_ADDRESS": ""}) is None
    assert FedTAN()._service() is None


def test_the_environment_of_the_serverapp_opens_it(federation: Federations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_EXCHANGE_ADDRESS", "127.0.0.1:0")
    fed = federation((6, 6), model=two_norms)
    with pytest.raises(SettingsError, match="alive at once"):
        train(fed, FedTAN(fraction_evaluate=0.0), 1)
    train(fed, FedTAN(fraction_evaluate=0.0), 1, workers=2)
    train(fed, FedTAN(fraction_evaluate=0.0, direct=False), 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ADDRESS": "example.org"}, r"ADDRESS is 'example\.org'; expected HOST:PORT"),
        ({"ADDRESS": "example.org:70000"}, "expected HOST:PORT"),
        ({"ADDRESS": "example.org:8001"}, "FEDBN_EXCHANGE_INSECURE=1"),
        ({"ADDRESS": "127.0.0.1:8001", "LISTEN": "0.0.0.0:8001"}, "beyond this machine"),
        ({"ADDRESS": "localhost:1", "KEY": "/key"}, "belong together"),
        ({"ADDRESS": "localhost:1", "CA": "/not/there"}, "CA is '/not/there', which cannot be read"),
        ({"ADDRESS": "localhost:1", "INSECURE": "maybe"}, "INSECURE is 'maybe'"),
        ({"ADRESS": "localhost:1"}, "did you mean 'FEDBN_EXCHANGE_ADDRESS'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Direct.from_environment({f"FEDBN_EXCHANGE_{key}": value for key, value in given.items()})


def test_plaintext_must_be_asked_for_and_is_warned_of(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    direct = Direct.from_environment({"FEDBN_EXCHANGE_ADDRESS": "example.org:8001", "FEDBN_EXCHANGE_INSECURE": "1"})
    assert direct is not None
    assert direct.listens_on == "0.0.0.0:8001"
    FedTAN(direct=direct).begin(1, federation((4, 4)).arrays())
    assert "example.org:8001 has no TLS" in flower_log.text


def test_an_experiment_cannot_name_an_address() -> None:
    with pytest.raises(SettingsError, match="FEDBN_EXCHANGE_ADDRESS"):
        FedTAN(direct="10.0.0.1:8001")  # type: ignore[arg-type]
