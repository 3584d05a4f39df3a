"""Any environment of the exchange service and any frame of a stream: a valid value, or one kind of error."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.codec import (
    Agreement,
    Contribution,
    agreement_from_records,
    contribution_from_records,
    from_bytes,
    to_bytes,
)
from fedbn_flwr.extensions.streams.config import PREFIX, ExchangeConfig
from tests.support.command import ROOT
from tests.support.fuzz import cases, frames

paths = st.sampled_from(["/dev/null", "/", "missing.pem", str(ROOT / "pyproject.toml"), "x" * 5000])
addresses = st.sampled_from(
    ["localhost:1", "0.0.0.0:80", ":", "a:b", "[::1]:9", "127.0.0.1:" + "1" * 5000, "host:٣", ""]
)
values = addresses | paths | st.sampled_from(["1", "0", "yes", "TRUE"]) | st.text(max_size=6)
names = st.sampled_from(["ADDRESS", "LISTEN", "CERTIFICATE", "KEY", "CA", "ADRESS"])


@settings(max_examples=cases(150))
@given(st.dictionaries(names.map(PREFIX.__add__), values.filter(lambda value: "\0" not in value), max_size=5))
def test_any_environment_of_the_exchange(environment: dict[str, str]) -> None:
    with contextlib.suppress(SettingsError):
        if (config := ExchangeConfig.from_environment(environment)) is not None:
            config.prepare()


MOMENTS = {"mean": np.zeros(3), "var": np.ones(3)}
FRAMES = [
    to_bytes(Contribution("0", "moments", MOMENTS, batch=4, values=8, examples=9, partition=1)),
    to_bytes(Agreement(MOMENTS, 8, 2.0)),
]  # fmt: skip


@settings(max_examples=cases(200))
@given(frames(FRAMES))
def test_any_frame_of_an_exchange(data: bytes) -> None:
    for read in (contribution_from_records, agreement_from_records):
        with contextlib.suppress(MessageError):
            read(from_bytes(data))
