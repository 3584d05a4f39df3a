"""Bounds in whole rounds: with FixBN, FedBN and FedTAN's exchanges, beside the screening of NaN."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbn_flwr import client_app, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.codec import Contribution, contribution_from_records, contribution_to_records
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.extensions.bounds.strategy import Bounds
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import configs_in, pack, unpack
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FixBN,
    HeteroBN,
    Round,
)
from tests.support.command import ROOT
from tests.support.experiments import read
from tests.support.federations import Federations, last_model, models_of, same
from tests.support.fixtures import small_net
from tests.support.models import two_norms
from tests.support.records import between
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII

Arrays = dict[str, np.ndarray]
SIZES = (8, 8, 8, 8, 8)
LOOSE = {"max_share": 0.9, "clip_norm": 1e9, "plausible": 1e9}


def replies_of(fed: Any, strategy: Any, app: Any = None) -> list[Arrays]:
    """What the clients send in one round."""
    found: dict[int, Arrays] = {}

    def keep(sent: RecordDict, reply: RecordDict, partition: int) -> None:
        found[partition] = {key: value.copy() for key, value in unpack(reply["arrays"]).items()}

    last_model(fed, strategy, 1, fed.grid(between(app or fed.app(), keep)))
    return [found[i] for i in sorted(found)]


def spoiling(fed: Any, change: Callable[[str, np.ndarray], np.ndarray], bad: tuple[int, ...] = (0,)) -> Any:
    """The federation's app, with the arrays of some clients' train replies changed."""

    def hook(sent: RecordDict, reply: RecordDict, partition: int) -> None:
        if partition in bad:
            arrays = {key: change(key, value) for key, value in unpack(reply["arrays"]).items()}
            reply["arrays"] = pack({key: arrays[key].astype(np.float32) for key in arrays})

    return between(fed.app(), hook)


def huge(key: str, value: np.ndarray) -> np.ndarray:
    return np.full_like(value, 1e12)  # larger values are left out without bounds


def test_off_is_the_plain_mean_bit_for_bit(federation: Federations) -> None:
    fed = federation(SIZES[:3])
    plain = last_model(fed, FedAvg(), 2)
    assert same(plain, last_model(fed, FedAvg(bounds=LOOSE), 2))

    class Looks(FedAvg):
        def accepted(self, round: Round, replies: Any) -> Any:
            return replies

    bounded, own = (last_model(fed, make(bounds={"clip_norm": 1e-3}), 2) for make in (FedAvg, Looks))
    assert not same(plain, bounded)
    assert same(bounded, own), "a hook of the user's own does not switch them off"
    fed = federation(SIZES[:3], batches=1, model=two_norms)
    assert same(last_model(fed, FedTAN(), 2), last_model(fed, FedTAN(bounds=LOOSE), 2))


def test_one_client_cannot_move_the_model(federation: Federations) -> None:
    fed = federation(SIZES)
    found = last_model(fed, FedAvg(bounds={"clip_factor": 2, "plausible": 10}), 3, fed.grid(spoiling(fed, huge)))
    assert max(float(np.abs(value).max()) for value in found.values()) < 100
    assert float(np.abs(last_model(fed, FedAvg(), 1, fed.grid(spoiling(fed, huge)))["4.bias"]).max()) > 1e10


def test_frozen_statistics_stay_bit_for_bit(federation: Federations) -> None:
    fed = federation(SIZES)
    base = FedAvg(bounds={"clip_factor": 0.5, "plausible": 10.0}, fraction_evaluate=0.0)
    models = models_of(fed, FixBN(base, freeze_round=1), 4)
    for key in ("1.running_mean", "1.running_var"):
        assert {model[key].tobytes() for model in models[1:]} == {models[1][key].tobytes()}
    assert not same(models[3], models[4])


def test_fedbn_keeps_batch_norm_on_the_client(federation: Federations) -> None:
    fed = federation(SIZES)
    bounds = {"clip_norm": 0.1, "plausible": 10}
    strategy = FedBN(bounds=bounds, global_norm="initial", fraction_evaluate=0.0)
    replies = replies_of(fed, strategy)
    assert not [key for key in replies[0] if key.startswith("1.")]
    found = last_model(fed, FedBN(bounds=bounds, fraction_evaluate=0.0), 2, fed.grid(spoiling(fed, huge)))
    assert max(float(np.abs(value).max()) for value in found.values()) < 100
    assert strategy.notes() == {"global_norm": "initial", "bounds": bounds}


# --- statistics ---


def false_statistics(key: str, value: np.ndarray) -> np.ndarray:
    return value + 1e6 if "running" in key else value


def test_an_implausible_client_is_absent_and_one_line_names_it(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation(SIZES)
    replies = replies_of(fed, FedAvg())[1:]
    app = spoiling(fed, false_statistics)
    found = last_model(fed, FedAvg(bounds=Bounds(plausible=10), fraction_evaluate=0.0), 1, fed.grid(app))
    for key, value in found.items():
        rows = np.stack([reply[key] for reply in replies]).astype(np.float64)
        np.testing.assert_allclose(value, rows.mean(axis=0), rtol=1e-6)
    (line,) = [record.getMessage() for record in flower_log.records if "left out" in record.getMessage()]
    assert "round 1: left out client 0" in line
    assert "'1.running_mean' has the value 1e+06 where the clients' median is" in line


def test_no_share_of_the_weight_is_above_the_bound(federation: Federations) -> None:
    fed = federation(SIZES[:3])
    replies = replies_of(fed, FedAvg())

    def many(sent: RecordDict, reply: RecordDict, partition: int) -> None:
        if partition == 0:
            reply["metrics"]["num-examples"] = 10**6

    strategy = FedAvg(bounds={"max_share": 0.5}, fraction_evaluate=0.0)
    found = last_model(fed, strategy, 1, fed.grid(between(fed.app(), many)))
    rows = np.stack([reply["4.bias"] for reply in replies]).astype(np.float64)
    np.testing.assert_allclose(found["4.bias"], 0.5 * rows[0] + 0.25 * (rows[1] + rows[2]), rtol=1e-6)


# --- FedTAN's exchanges ---


def contributions(kind: str, names: tuple[str, ...], count: int = 7) -> list[Contribution]:
    rng = np.random.default_rng(3)
    tensors = [{name: rng.uniform(0.5, 2, size=4) for name in names} for _ in range(count)]
    return [Contribution("0", kind, each, 4, 4, examples=10, partition=i) for i, each in enumerate(tensors)]


@pytest.mark.parametrize(
    ("kind", "names", "change"),
    [("gradients", ("mean", "var"), {"examples": 2**30}), ("mean", ("mean",), {"values": 2**30})],
    ids=["many examples", "long series"],
)
def test_exchanges_cap_the_share_of_one_client(kind: str, names: tuple[str, ...], change: dict[str, int]) -> None:
    clients = contributions(kind, names)
    clients[0] = replace(clients[0], **change)
    found = FedTAN(bounds=Bounds(max_share=0.4)).agree("exchange", clients)
    for name in names:
        rows = np.stack([each.tensors[name] for each in clients])
        np.testing.assert_allclose(found.tensors[name], 0.4 * rows[0] + 0.1 * rows[1:].sum(axis=0), rtol=1e-14)
    if kind == "mean":
        assert found.per_example == pytest.approx((6 * 1 + 4) / 7)  # those of client 0 have 0.4 of all values
    else:
        assert found.values == 28


def exchanging(fed: Any, value: float) -> Any:
    """The federation's app, where client 0 adds `value` to the tensors of its exchanges."""

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        if (
            context.node_config["partition-id"] == 0
            and reply.has_content()
            and "what" in str(configs_in(reply.content))
        ):
            each = contribution_from_records(reply.content)
            tensors = {name: np.asarray(array + np.float32(value)) for name, array in each.tensors.items()}
            return Message(contribution_to_records(replace(each, tensors=tensors)), reply_to=message)
        return reply

    return client_app(fed.make_client, mods=[mod])


@pytest.mark.parametrize("cls", [FedTAN, FedAvgGlobalStats, functools.partial(FedTANII, fedtan_rounds=2)])
def test_one_client_cannot_set_what_clients_agree_on(cls: Any, federation: Federations) -> None:
    fed = federation(SIZES, batches=1, model=two_norms)
    found = last_model(fed, cls(fraction_evaluate=0.0, bounds={"plausible": 10.0}), 2, fed.grid(exchanging(fed, 1e4)))
    honest = last_model(fed, cls(fraction_evaluate=0.0), 2)
    statistics = [key for key in found if "running" in key]
    assert max(float(np.abs(found[key] - honest[key]).max()) for key in statistics) < 5
    plain = last_model(fed, cls(fraction_evaluate=0.0), 2, fed.grid(exchanging(fed, 1e4)))
    assert max(float(np.abs(plain[key]).max()) for key in statistics) > 1e2


def test_an_implausible_contribution_is_named(federation: Federations, flower_log: pytest.LogCaptureFixture) -> None:
    fed = federation(SIZES, batches=1, model=two_norms)
    without = last_model(
        fed, FedTAN(bounds={"plausible": 10}, fraction_evaluate=0.0), 1, fed.grid(exchanging(fed, 1e4))
    )
    lines = [record.getMessage() for record in flower_log.records if "left out" in record.getMessage()]
    assert len(lines) == 1, "it takes no further part in the round"
    assert "round 1, exchange 1: left out client 0" in lines[0]
    assert "moments: 'mean' has the value 1e+04 where the clients' median is" in lines[0]
    assert max(float(np.abs(value).max()) for value in without.values()) < 100


def test_one_client_cannot_set_the_statistics_that_heterobn_queries(federation: Federations) -> None:
    fed = federation(SIZES, model=lambda: convert_norm(small_net(), "sbn"))

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0 and reply.metadata.message_type == protocol.STATISTICS_QUERY:
            reply.content["arrays"] = pack({key: value + 1e9 for key, value in unpack(reply.content["arrays"]).items()})
        return reply

    grid = fed.grid(client_app(fed.make_client, mods=[mod]))
    for bounds, large in ((None, True), ({"plausible": 10}, False)):
        rule = HeteroBN(statistics="query", bounds=bounds)
        found = unpack(rule.global_model(Round(1, fed.arrays(), ConfigRecord(), grid)))
        assert (float(found["1.running_var"].max()) > 1e7) == large


# --- the page ---


def test_the_experiments_of_the_page_are_valid() -> None:
    page = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    rules = [make_rule(read(block)) for block in blocks]
    assert all({"clip_factor", "plausible", "max_share"} == rule.notes()["bounds"].keys() for rule in rules)


# --- what is refused ---


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "{name: Standalone, bounds: {max_share: 0.5}}",
            r"strategy: bounds\.max_share is 0\.5, but Standalone trains no shared model",
        ),
        (
            "{name: Scaffold, bounds: {clip_norm: 1}}",
            r"strategy: bounds\.clip_norm is 1, but Scaffold averages more than the model",
        ),
        (
            "{name: GlobalMomentum, base: {name: FedAvg, bounds: {clip_factor: 2}}}",
            r"bounds\.clip_factor is 2, but GlobalMomentum averages more than the model",
        ),
        ("{name: FedAvg, bounds: {max_share: 2}}", r"strategy: bounds\.max_share is 2; expected a share above 0"),
        (
            "{name: FedAvg, bounds: {plausibl: 2}}",
            r"strategy: bounds\.plausibl is not a bound; did you mean 'plausible'",
        ),
        ("{name: FedAvg, bounds: 0.2}", r"strategy: bounds is 0\.2; expected settings"),
        (
            "{name: FixBN, freeze_round: 2, bounds: {plausible: 10}}",
            r"strategy\.bounds .* of FixBN; give it to its base: base: \{name: FedAvg, bounds: ",
        ),
    ],
)
def test_an_experiment_is_refused_before_training(strategy: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_rule(read(f"{{rounds: 4, clients: 5, strategy: {strategy}}}"))


def test_an_experiment_has_the_options() -> None:
    spec = "{name: FixBN, freeze_round: 2, base: {name: FedTAN, bounds: {max_share: 0.3, clip_factor: 3}}}"
    rule = make_rule(read(f"{{rounds: 4, clients: 5, strategy: {spec}}}"))
    assert rule.notes()["bounds"] == {"max_share": 0.3, "clip_factor": 3}
