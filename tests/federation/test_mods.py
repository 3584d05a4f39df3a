"""Flower's mods around our client: which messages they see, clipping with and without the state of batch norm."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod

from fedbn_flwr import client_app
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import FedAvg, FedBN, FixBN, Secure, SiloBN, Standalone
from tests.support.command import ROOT, python_blocks
from tests.support.federations import Federations
from tests.support.plugin import RecordingGrid
from tests.support.smallbatches import FedTAN

KINDS = {"train": "train", "evaluate": "evaluate", "query.exchange": "query"}


class Seen:
    """A mod that notes the messages."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        self.kinds.append(message.metadata.message_type)
        reply = call_next(message, context)
        assert isinstance(reply, Message)
        return reply


@pytest.mark.parametrize("strategy", [lambda: FixBN(FedAvg(), freeze_round=1), FedTAN])
@pytest.mark.parametrize("only", [None, "train", "evaluate", "query"])
def test_a_mod_sees_every_message_of_its_kind(federation: Federations, strategy: Any, only: str | None) -> None:
    fed, mod = federation(), Seen()
    grid = RecordingGrid(client_app(fed.make_client, mods=[mod] if only is None else {only: [mod]}), 2)
    strategy().start(grid, fed.arrays(), num_rounds=2)
    assert grid.errors() == []
    sent = Counter(message.kind for message in grid.sent)
    assert Counter(mod.kinds) == {kind: count for kind, count in sent.items() if only in (None, KINDS[kind])}


def test_the_first_mod_is_outermost(federation: Federations) -> None:
    fed, order = federation(), []

    def named(name: str) -> Any:
        def mod(message: Message, context: Context, call_next: Any) -> Any:
            order.append(name)
            return call_next(message, context)

        return mod

    FedAvg(fraction_evaluate=0.0).start(
        fed.grid(client_app(fed.make_client, mods=[named("outer"), named("inner")])), fed.arrays(), num_rounds=1
    )
    assert order == ["outer", "inner"] * 2


def test_an_unknown_kind_of_message_is_refused(federation: Federations) -> None:
    with pytest.raises(ValueError, match="did you mean 'train'"):
        client_app(federation().make_client, mods={"trian": []})


@pytest.mark.parametrize(
    "strategy",
    [
        Standalone,
        lambda: SiloBN(global_norm="initial"),
        lambda: FixBN(FedBN(global_norm="initial"), freeze_round=1),
        lambda: Secure(FedAvg()),
    ],
)
def test_message_size_mod_measures_the_messages_of_every_strategy(federation: Federations, strategy: Any) -> None:
    """It fails on a value of a config that is empty."""
    fed = federation((4, 4, 4))
    grid = RecordingGrid(client_app(fed.make_client, mods={"train": [message_size_mod]}), 3)
    strategy().start(grid, fed.arrays(), num_rounds=2)
    assert grid.errors() == []


# --- clipping ----------------------------------------------------------------

CLIP = 0.05


def change(fed: Any, app: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What was sent to client 0 under Flower's client-side clipping, and its reply, as float64."""
    grid = RecordingGrid(app, 2)
    strategy = flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(), noise_multiplier=0.0, clipping_norm=CLIP, num_sampled_clients=2
    )
    whole = ArrayRecord(fed.model.state_dict())
    replies = grid.send_and_receive(strategy.configure_train(1, whole, ConfigRecord(), grid))
    (reply,) = [reply for reply in replies if reply.metadata.src_node_id == 1]
    assert grid.errors() == []
    return (
        {key: value.astype(np.float64) for key, value in unpack(whole).items()},
        {key: value.astype(np.float64) for key, value in unpack(reply.content["arrays"]).items()},
    )


def norm(sent: dict[str, np.ndarray], reply: dict[str, np.ndarray], keys: list[str]) -> float:
    return float(np.sqrt(sum(np.sum((reply[key] - sent[key]) ** 2) for key in keys)))


def documented(fed: Any) -> dict[str, Any]:
    """What docs/flower.md defines for mods."""
    (code,) = [code for code in python_blocks((ROOT / "docs" / "flower.md").read_text()) if "mods=" in code]
    names: dict[str, Any] = {"make_client": fed.make_client}
    exec(code, names)
    return names


def test_clipping_counts_counters_and_statistics_unless_it_sees_weights_only(
    federation: Federations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weights_only` is an example, which docs/privacy.md names."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    weights_only = importlib.import_module("weights_only").weights_only
    fed = federation((8, 12), dtype=torch.float64, lr=0.1)
    free = client_app(fed.make_client)
    bare = client_app(fed.make_client, mods={"train": [fixedclipping_mod]})
    ours = client_app(fed.make_client, mods={"train": [weights_only(fixedclipping_mod)]})
    sent, trained = change(fed, free)
    of_norms = [key for key, role in roles(fed.model).items() if role in (Role.STATISTICS, Role.COUNTER)]
    weights = [key for key in sent if key not in of_norms]
    length = norm(sent, trained, weights)
    assert length > CLIP
    _, clipped = change(fed, ours)
    for key in weights:
        expected = sent[key] + (trained[key] - sent[key]) * CLIP / length
        np.testing.assert_allclose(clipped[key], expected, rtol=1e-9, atol=1e-12)
    for key in of_norms:
        np.testing.assert_array_equal(clipped[key], trained[key])
    _, squeezed = change(fed, bare)
    assert norm(sent, squeezed, weights) < CLIP / 2, "the counter and the statistics take most of the norm"


def test_noise_spares_statistics_that_the_mod_does_not_see(
    federation: Federations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/hospital.md does; noise on all arrays makes running variances negative."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    weights_only = importlib.import_module("weights_only").weights_only
    fed, noise = federation((8, 12), lr=0.1), LocalDpMod(10.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    _, trained = change(fed, client_app(fed.make_client))
    np.random.seed(0)
    _, ours = change(fed, client_app(fed.make_client, mods={"train": [weights_only(noise)]}))
    _, all_noisy = change(fed, client_app(fed.make_client, mods={"train": [noise]}))
    for key, role in roles(fed.model).items():
        assert np.array_equal(ours[key], trained[key]) is (role in (Role.STATISTICS, Role.COUNTER)), key
    assert min(values.min() for key, values in all_noisy.items() if key.endswith("running_var")) < 0


def test_the_documented_mods_work(federation: Federations) -> None:
    fed = federation()
    app = documented(fed)["app"]
    sent, reply = change(fed, app)
    assert (sent["0.weight"] != reply["0.weight"]).any()
    with pytest.raises(RunFailed, match="clipping_norm"):  # the reason, without the strategy that the mod needs
        FedAvg().start(fed.grid(app), fed.arrays(), num_rounds=1)
