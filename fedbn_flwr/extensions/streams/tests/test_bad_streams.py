"""One hostile client of five on a stream: the run is, bit for bit, that of an absent client, and the log names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.exchange.codec import Contribution
from fedbn_flwr.extensions.streams import client
from fedbn_flwr.extensions.streams.client import to_bytes
from tests.support.attacks import BAD
from tests.support.federations import Arrays, Federations, models_of, same
from tests.support.hostile import CLIENTS, kept_log
from tests.support.smallbatches import FedTAN


def changed(**fields: Any) -> Callable[[Contribution], bytes]:
    return lambda sent: to_bytes(replace(sent, **fields))


def tensors(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Contribution], bytes]:
    return lambda sent: to_bytes(replace(sent, tensors={key: change(value) for key, value in sent.tensors.items()}))


def cut(sent: Contribution) -> bytes:
    return to_bytes(sent)[:-3]


STREAMED: dict[str, Callable[[Contribution], bytes]] = {
    "garbage": lambda sent: b"\xff" * 200,
    "1e30": tensors(lambda a: np.full_like(a, 1e30)),
    "nothing": lambda sent: b"",
    "cut": cut,
    "a header of 2**60 bytes": lambda sent: (2**60).to_bytes(8, "little") + b"{}",
    "10 MB": lambda sent: bytes(10 << 20),
    "nested": lambda sent: (12_000).to_bytes(8, "little") + b"[" * 12_000,
    "NaN": tensors(lambda a: np.full_like(a, np.nan)),
    "another shape": tensors(lambda a: a[:-1]),
    "float64": tensors(lambda a: a.astype(np.float64)),
    "integers": tensors(lambda a: a.astype(np.int64)),
    "no tensors": changed(tensors={}),
    "kind": changed(kind="nonsense"),
    "another kind": changed(kind="mean"),
    "remaining": changed(remaining=10**9),
    "batch": changed(batch=2**40),
    "values": changed(values=2**40),
    "no values": changed(values=0),
    "examples": changed(examples=1e15),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in ("garbage", "1e30") else pytest.param(n, marks=pytest.mark.nightly) for n in STREAMED]
)
def test_a_hostile_client_on_a_stream_is_as_good_as_absent(
    federation: Federations, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fed = federation((4, 5, 6, 4, 5), batches=1)

    def run(spoil: Callable[[Contribution], bytes]) -> tuple[Arrays, list[str]]:
        def encode(value: Any) -> bytes:
            hostile = isinstance(value, Contribution) and value.partition == BAD
            return spoil(value) if hostile else to_bytes(value)

        monkeypatch.setattr(client, "to_bytes", encode)  # the client's side, in its own process
        monkeypatch.setenv("FEDBN_EXCHANGE_ADDRESS", "127.0.0.1:0")  # any free port
        strategy = FedTAN(fraction_evaluate=0.0, exchange_timeout=60)
        with kept_log() as log, LocalGrid(client_app(fed.make_client), CLIENTS, workers=CLIENTS) as grid:
            return models_of(fed, strategy, 2, grid=grid)[-1], log

    absent, _ = run(lambda _: b"absent")
    found, log = run(STREAMED[name])
    assert same(found, absent)
    named = [line for line in log if "left out" in line]
    assert len(named) == 2, log
    assert all(f"node {BAD + 1}" in line for line in named), log
