"""Bounds that a user wrote: FedAvg asks them in each round, and rules that they do not bound refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, FixBN, GlobalMomentum, Scaffold, Standalone
from tests.support.bounds import Equal
from tests.support.federations import last_model, near
from tests.support.records import between


def test_a_round_asks_the_bounds(federation: Callable[..., Any], flower_log: pytest.LogCaptureFixture) -> None:
    fed = federation((8, 24, 16))
    sent: dict[int, Any] = {}
    app = between(fed.app(), lambda _, reply, partition: sent.update({partition: dict(unpack(reply["arrays"]))}))
    strategy = FedAvg(bounds=Equal(), fraction_evaluate=0.0)
    found = last_model(fed, strategy, 1, fed.grid(app))
    near(found, {key: (sent[0][key].astype(np.float64) + sent[1][key]) / 2 for key in found}, rtol=1e-6)
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
