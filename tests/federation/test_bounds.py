"""Bounds that a user wrote: FedAvg asks them in each round, and rules that they do not bound refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, FedBN, FixBN, GlobalMomentum, Scaffold, Standalone
from tests.support.bounds import Equal
from tests.support.federations import last_model
from tests.support.records import between


def test_a_round_asks_the_bounds(federation: Callable[..., Any], flower_log: pytest.LogCaptureFixture) -> None:
    fed = federation((8, 24, 16))
    sent: dict[int, Any] = {}
    app = between(fed.app(), lambda _, reply, partition: sent.update({partition: dict(unpack(reply["arrays"]))}))
    strategy = FedAvg(bounds=Equal(), fraction_evaluate=0.0)
    found = last_model(fed, strategy, 1, fed.grid(app))
    for key, value in found.items():
        np.testing.assert_allclose(value, (sent[0][key].astype(np.float64) + sent[1][key]) / 2, rtol=1e-6)
    (line,) = [text for record in flower_log.records if "left out" in (text := record.getMessage())]
    assert "round 1: left out client 2" in line
    assert "it is the last one" in line
    assert FixBN(strategy, freeze_round=1).notes()["bounds"] == {"equal": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scaffold(bounds=Equal()), "bounds.equal is True, but Scaffold averages more than the model"),
        (
            lambda: GlobalMomentum(FedAvg(bounds=Equal())),
            "bounds.equal is True, but GlobalMomentum averages more",
        ),
        (lambda: Standalone(bounds=Equal()), "bounds.equal is True, but Standalone trains no shared model"),
    ],
)
def test_bounds_that_do_not_suit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        make()
    assert str(error.value).startswith(message)


def test_batch_norm_that_a_client_keeps_does_not_shorten_its_update(federation: Callable[..., Any]) -> None:
    """`global_norm` decides what the server stores of the clients' batch norm, which none of them uses."""
    found = [
        last_model(
            federation((8, 24, 16)),
            FedBN(global_norm=kind, fraction_evaluate=0.0, bounds={"clip_norm": 0.05}),
            6,
        )
        for kind in ("average", "initial")
    ]
    for key in ("0.weight", "4.weight"):
        np.testing.assert_array_equal(found[0][key], found[1][key])
