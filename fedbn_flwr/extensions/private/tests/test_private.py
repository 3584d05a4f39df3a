"""Private: what is clipped, noised, sent and accounted for."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from scipy.stats import kstest
from torch import nn

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.client.client import Update
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import parse_yaml, read_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.registry import build_strategy
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.extensions.private.noise import change_of, epsilon_of, parts_of
from fedbn_flwr.messages.arrays import Arrays, pack, unpack
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedBS,
    FixBN,
    GlobalMomentum,
    HeteroBN,
    MeanStatistics,
    Private,
    Scaffold,
    Secure,
    SiloBN,
    Standalone,
)
from tests.support.bounds import Equal
from tests.support.command import ROOT, python_blocks
from tests.support.federations import Changed, Federations, last_model, models_of, near, same
from tests.support.plugin import RecordingGrid
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII

KEEP = functools.partial(SiloBN, global_norm="initial")  # statistics stay on the client
WIDE = {"clip": 1e9, "statistics_clip": 1e9, "noise": 0}  # neither clips nor adds noise


def spent(strategy: Private) -> dict[str, Any]:
    report = strategy.notes()["privacy"]
    assert isinstance(report, dict)
    return report


def changed(fed: Any, change: Callable[[int, RecordDict], object]) -> Changed:
    """Replies that `change(node, content)` has changed; nodes have the numbers of their clients."""

    def apply(sent: list[Message], replies: list[Message]) -> list[Message]:
        for reply in replies:
            change(reply.metadata.src_node_id, reply.content)
        return replies

    return Changed(fed.grid(node_ids=[*range(len(fed.data))]), apply)


def replying(fed: Any, change: Callable[[int, dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Changed:
    """The arrays of the replies changed."""

    def apply(client: int, content: RecordDict) -> None:
        if "arrays" in content:
            content["arrays"] = pack(change(client, dict(unpack(content["arrays"]))))

    return changed(fed, apply)


def one_round(strategy: Private, grid: Any, arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """The model after a round."""
    strategy.begin(1, arrays)
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    model, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert model is not None
    return dict(unpack(model))


# --- clipping ----------------------------------------------------------------


def test_without_clipping_and_noise_it_is_the_uniform_mean(federation: Federations) -> None:
    fed = federation((8, 8), dtype=torch.float64)
    ours = last_model(fed, Private(FedAvg(), **WIDE), 2)
    twin = last_model(fed, FedAvg(), 2)
    for key, value in twin.items():
        if not key.endswith("running_var"):  # whose mean is geometric
            np.testing.assert_allclose(ours[key], value, rtol=1e-9, atol=1e-12)


def test_twenty_counters_and_variances_do_not_shrink_an_update(federation: Federations) -> None:
    """Twenty batch norms of 50 steps: with Flower's wrapper an update of norm 0.55 keeps 0.0045 of itself."""
    before = {f"bn{i}.{key}": np.asarray(value) for i in range(20) for key, value in
              {"running_mean": np.zeros(2), "running_var": np.ones(2), "num_batches_tracked": 0}.items()}  # fmt: skip
    before["weight"], step = np.zeros(100), np.full(100, 0.055)  # of norm 0.55
    arrays = pack({key: value + (step if key == "weight" else 50) for key, value in before.items()})

    def grown(sent: list[Message], _: object) -> list[Message]:
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})}
        return [Message(RecordDict(content), reply_to=message) for message in sent]

    grid = Changed(federation().grid(), grown)
    model = one_round(Private(FedAvg(), clip=1.0, noise=0), grid, pack(before))
    np.testing.assert_allclose(model["weight"], step, rtol=1e-12)
    assert all(int(model[f"bn{i}.num_batches_tracked"]) == 0 for i in range(20))


@pytest.mark.parametrize("statistics", ["noise", "keep", "freeze"])
def test_replacing_a_client_changes_the_sum_by_at_most_the_sensitivity(
    federation: Federations, statistics: str
) -> None:
    """The mean of m clients moves by 2 C / m if a client sends anything else, and by C / m if it sends nothing."""
    fed, clip, draw = federation((8, 8, 8), dtype=torch.float64), 0.3, np.random.default_rng(0)
    arrays = pack({key: value.astype(np.float64) for key, value in unpack(fed.arrays()).items()})
    parts = parts_of(unpack(arrays), roles(arrays))
    before = unpack(arrays)

    def mean(change: Any) -> Any:
        bases = {"noise": FedAvg(), "keep": KEEP(), "freeze": FixBN(FedAvg(), freeze_round=0)}
        private = Private(bases[statistics], clip=clip, statistics_clip=clip, noise=0)
        model = one_round(private, replying(fed, change), arrays)
        return change_of(parts, before, {**before, **model})

    def others(client: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays

    plain = mean(others)
    kinds: list[Callable[[Any, float], Any]] = [
        lambda values, size: values + size,
        lambda values, size: values * size,
        lambda values, size: draw.normal(0, size, values.shape) ** 2,
        lambda values, size: values * math.nan,  # refused, which is a change of zero
    ]
    for sent, size in itertools.product(kinds, (0.0, 1e-3, 1.0, 1e6)):

        def replaced(
            client: int, arrays: dict[str, np.ndarray], sent: Any = sent, size: float = size
        ) -> dict[str, np.ndarray]:
            fixed = {key for key in arrays if client != 1 or (statistics == "freeze" and "running" in key)}
            return {key: value if key in fixed else sent(value, size) for key, value in arrays.items()}

        other = mean(replaced)
        assert np.linalg.norm(other["weights"] - plain["weights"]) <= 2 * clip / 3 * (1 + 1e-9)
        assert np.linalg.norm(other["statistics"] - plain["statistics"]) <= 2 * clip / 3 * (1 + 1e-9)
        if statistics != "noise":
            assert not other["statistics"].any()


def test_a_client_that_does_not_answer_counts_as_a_change_of_zero(federation: Federations) -> None:
    """The sum is divided by the clients asked: the noise does not grow, and their number reveals nothing."""
    fed = federation((8, 8, 8), dtype=torch.float64)
    arrays = fed.arrays()
    refused, zero = (
        one_round(Private(FedAvg(), clip=0.1, noise=0.5, noise_seed=4), replying(fed, change), arrays)
        for change in (
            lambda client, sent: {k: v * math.nan for k, v in sent.items()} if client == 1 else sent,
            lambda client, sent: dict(unpack(arrays)) if client == 1 else sent,
        )
    )
    near(refused, zero, rtol=0, atol=1e-15)


def test_configs_of_a_client_do_not_replace_records_of_the_server(federation: Federations) -> None:
    def renamed(client: int, content: RecordDict) -> None:
        if client == 1:
            content["other"], content["model"] = content.pop("metrics"), content.pop("arrays")
            content["metrics"] = content["arrays"] = ConfigRecord({"what": 1})

    fed = federation((8, 8, 8))
    honest, odd = (
        one_round(Private(FedAvg(), noise=0.5, noise_seed=4), changed(fed, change), fed.arrays())
        for change in (lambda client, content: None, renamed)
    )
    assert same(honest, odd)


# --- noise -------------------------------------------------------------------


def test_the_noise_in_the_model_has_the_declared_size(federation: Federations) -> None:
    """Of four clients: z C / 4 in the mean."""
    fed = federation((4,) * 4, dtype=torch.float64, model=lambda: torch.nn.Sequential(
        torch.nn.Conv2d(2, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.Flatten(), torch.nn.Linear(256, 3)
    ), lr=0.0)  # fmt: skip
    before = unpack(fed.arrays())
    silent = replying(fed, lambda client, arrays: {key: before[key] for key in arrays})  # so the new model is the noise
    private = Private(FedAvg(), clip=0.5, noise=2.0, statistics_clip=0.25, statistics_noise=1.0, noise_seed=2)
    change = change_of(parts_of(before, roles(before)), before, one_round(private, silent, fed.arrays()))
    assert change["weights"].size > 1800
    assert kstest(change["weights"] / (2.0 * 0.5 / 4), "norm").pvalue > 1e-3
    assert change["statistics"].size == 128
    assert kstest(change["statistics"] / (1.0 * 0.25 / 4), "norm").pvalue > 1e-3


def test_only_secret_noise_is_called_private_and_it_differs(federation: Federations) -> None:
    fed = federation()
    secret = [Private(FedAvg()) for _ in range(2)]
    fixed = [Private(FedAvg(), noise_seed=3) for _ in range(2)]
    first, second, third, fourth = (last_model(fed, rule, 1) for rule in (*secret, *fixed))
    assert not same(first, second)
    assert same(third, fourth)
    assert spent(secret[0])["private"] is True
    assert spent(fixed[0])["private"] is False
    assert "noise_seed is 3" in spent(fixed[0])["not_private_because"]
    bare = Private(FedAvg(), noise=0)
    last_model(fed, bare, 1)
    assert (spent(bare)["epsilon"], spent(bare)["private"]) == (None, False)


def test_rounds_have_noise_of_their_own(federation: Federations) -> None:
    fed = federation(lr=0.0)
    zero, one, two = models_of(fed, Private(KEEP(), noise_seed=3, clip=0.1), 2)
    assert abs((one["0.weight"] - zero["0.weight"]) - (two["0.weight"] - one["0.weight"])).max() > 1e-3


# --- what is sent ------------------------------------------------------------


@pytest.mark.parametrize(
    "base",
    [FedAvg, FedBN, SiloBN, KEEP, lambda: MeanStatistics(flower.FedAdam()), lambda: FixBN(FedAvg(), freeze_round=0)],
)
def test_only_what_is_accounted_for_changes(federation: Federations, base: Any) -> None:
    fed = federation()
    grid = RecordingGrid(fed.app(), 2)
    start = ArrayRecord(fed.model.state_dict())
    rule = Private(base())
    models: list[dict[str, np.ndarray]] = []
    rule.start(grid, start, num_rounds=2, evaluate_fn=lambda _, arrays: models.append(dict(unpack(arrays))))
    assert grid.errors() == []
    role_of = roles(start)
    sent = {key for message in grid.sent for key in message.arrays}
    sent |= {key for reply in grid.replies for record in reply.content.array_records.values() for key in record}
    assert (Role.STATISTICS in {role_of[key] for key in sent}) == (base is not KEEP)
    assert list(models[-1]) == list(start)
    changed = {role_of[key] for key in start if models[-1][key].tobytes() != models[0][key].tobytes()}
    assert Role.WEIGHTS in changed
    assert Role.COUNTER not in changed
    assert (Role.STATISTICS in changed) <= (base is not KEEP)
    for key, value in models[-1].items():
        assert value.dtype == models[0][key].dtype


def test_the_wrapped_strategy_sees_no_metrics(federation: Federations) -> None:
    fed = federation()
    for metrics, keys in ((False, set()), (True, {"train-loss"})):
        private = Private(FedAvg(fraction_evaluate=0.0), metrics=metrics)
        result = private.start(fed.grid(), fed.arrays(), num_rounds=1)
        assert set(result.train_metrics_clientapp[1]) == keys
        assert spent(private).get("not_accounted", []) == (["metrics of the clients' training"] if metrics else [])


# --- epsilon -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "costs"),
    [
        ({}, [1 / 4 + 1 / 4] * 3),
        ({"statistics_noise": 4.0}, [1 / 4 + 1 / 16] * 3),
        ({"base": {"name": "SiloBN", "global_norm": "initial"}}, [1 / 4] * 3),
        ({"base": {"name": "FixBN", "freeze_round": 0}}, [1 / 4] * 3),
        ({"base": {"name": "FixBN", "freeze_round": 1}}, [1 / 2, 1 / 4, 1 / 4]),
        ({"base": {"name": "FedBN", "global_norm": "initial"}}, [1 / 4] * 3),
    ],
)
def test_every_release_is_accounted_for(federation: Federations, options: dict[str, Any], costs: list[float]) -> None:
    fed = federation()
    private: Any = build_strategy({"name": "Private", "noise": 2.0, "delta": 1e-6, **options})
    private.start(fed.grid(), fed.arrays(), num_rounds=3)
    mu = math.sqrt(sum(costs))
    assert spent(private)["epsilon"] == pytest.approx(epsilon_of(mu, 1e-6))
    assert spent(private)["epsilon_replace_one"] == pytest.approx(epsilon_of(2 * mu, 1e-6))
    assert (spent(private)["delta"], spent(private)["releases"]) == (1e-6, 3)


@pytest.mark.parametrize("named", [True, False])
def test_a_client_pays_for_the_rounds_in_which_it_was_asked_or_may_have_been(
    federation: Federations, named: bool
) -> None:
    """Clients that report no partition may be any client, so all pay for all rounds."""
    fed, asked = federation((8,) * 4), Counter[int]()

    def noted(client: int, content: RecordDict) -> None:
        if "arrays" in content:
            asked[client] += 1
        if not named:
            content.get("client", {}).pop("partition-id", None)
            content["metrics"].pop("partition-id", None)

    private = Private(KEEP(fraction_train=0.5, fraction_evaluate=0.0), noise=3.0)
    private.start(changed(fed, noted), fed.arrays(), num_rounds=6)
    assert (asked.total(), max(asked.values()) < 6) == (12, True)
    rounds = max(asked.values()) if named else 6
    assert spent(private)["epsilon"] == pytest.approx(epsilon_of(math.sqrt(rounds) / 3.0, 1e-5))


def test_the_end_of_a_run_shows_epsilon(federation: Federations, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    fed, private = federation(), Private(FedAvg(), noise=3.0)
    private.start(fed.grid(), fed.arrays(), num_rounds=2)
    (line,) = [record.message for record in caplog.records if record.message.startswith("privacy: ")]
    assert f"epsilon {spent(private)['epsilon']:.4g} at delta 1e-05 against all who see the model" in line
    assert "not accounted for: metrics of evaluations on clients" in line
    assert spent(private)["not_accounted"] == ["metrics of evaluations on clients"]


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Private(Scaffold()), "Scaffold sends something that Private does not account for: record `control`"),
        (lambda: Private(FedTAN()), "FedTAN sends something .*: statistics of batches"),
        (lambda: Private(FedTANII(fedtan_rounds=1)), "FedTANII sends something"),
        (lambda: Private(FedAvgGlobalStats()), "FedAvgGlobalStats sends something"),
        (lambda: Private(GlobalMomentum(FedAvg())), "GlobalMomentum sends something .*momentum"),
        (lambda: Private(FixBN(Scaffold(), freeze_round=1)), "record `control`"),
        (lambda: Private(FedBS()), "FedBS weights the clients by the loss"),
        (lambda: Private(FixBN(FedBS(), freeze_round=1)), "FedBS weights"),
        (lambda: Private(MeanStatistics(flower.QFedAvg(client_learning_rate=0.1))), "QFedAvg weights the clients"),
        (lambda: Private(HeteroBN(statistics="query")), "HeteroBN queries the statistics"),
        (lambda: Private(Standalone()), "Standalone sends no model"),
        (lambda: Private(Private(FedAvg())), "Private adds noise to the mean, and Private must clip"),
        (lambda: Private(Secure(FedAvg())), "Secure hides the replies of single clients, and Private must clip"),
        (lambda: Secure(Private(FedAvg())), "Private adds noise to the mean, and Secure hides the single replies"),
        (lambda: FixBN(Private(FedAvg()), freeze_round=1), r"expected Private\(FixBN\(...\), ...\)"),
        (lambda: MeanStatistics(Private(FedAvg())), "MeanStatistics cannot wrap it"),
        (lambda: Private(flower.FedAdam()), r"Private\(MeanStatistics\(FedAdam"),
        (lambda: Private(build_strategy({"name": "Krum"})), "Krum compares the clients' models"),
        (lambda: Private(flower.FedMedian()), "FedMedian compares the clients' models"),
        (lambda: Private(FedAvg(bounds=Equal())), r"FedAvg compares the replies of single clients \(bounds\)"),
        (
            lambda: Private(flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 2)),
            "clips the changes of the clients and adds noise",
        ),
        (lambda: Private(FedAvg(), clip=0), "clip is 0; expected a norm above zero"),
        (lambda: Private(FedAvg(), clip=math.inf), "clip is inf"),
        (lambda: Private(FedAvg(), clip=math.nan), "clip is nan"),
        (lambda: Private(FedAvg(), statistics_clip="1"), "statistics_clip is '1'"),
        (lambda: Private(FedAvg(), noise=-1.0), "noise is -1.0; expected a multiple of the norm"),
        (lambda: Private(FedAvg(), noise=1e-9), "0.01 or more, or 0 for none"),
        (lambda: Private(FedAvg(), statistics_noise=True), "statistics_noise is True"),
        (lambda: Private(FedAvg(), delta=0), "delta is 0; expected a number between 0 and 1"),
        (lambda: Private(FedAvg(), delta=1.0), "delta is 1.0"),
        (lambda: Private(FedAvg(), noise_seed=1.5), "noise_seed is 1.5; expected an integer"),
    ],
)  # fmt: skip
def test_what_would_not_be_accounted_for_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_a_client_that_ignores_the_freeze_is_refused(federation: Federations) -> None:
    fed = federation()
    grid = replying(fed, lambda client, arrays: {key: value + 0.1 for key, value in arrays.items()})
    with pytest.raises(RunFailed, match=r"it changed '1.running_mean', which is frozen"):
        one_round(Private(FixBN(FedAvg(), freeze_round=0)), grid, fed.arrays())


def test_what_it_cannot_protect_is_refused(federation: Federations) -> None:
    with pytest.raises(SettingsError, match="real and imaginary parts"):
        Private(FedAvg()).start(federation().grid(), pack({"weight": np.ones(2, np.complex64)}), num_rounds=1)
    text = EXPERIMENT.replace("BASE", "{name: FedProx}") + "evaluate: {dynamics: true}\n"
    with pytest.raises(SettingsError, match=r"evaluate.dynamics is true .* Private.* adds noise"):
        prepare(read_experiment(parse_yaml(text)))


# --- experiments -------------------------------------------------------------

EXPERIMENT = """
rounds: 3
clients: 3
model: {name: cnn}
train: {lr: 0.05, steps: 1}
strategy: {name: Private, noise: 2.0, noise_seed: 1, base: BASE}
engine: {workers: 0, device: cpu}
"""


@pytest.mark.parametrize(("base", "releases"), [("{name: FedProx}", 2), ("{name: SiloBN, global_norm: initial}", 1)])
def test_an_experiment_s_summary_has_epsilon(
    tmp_path: Path, base: str, releases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = read_experiment(parse_yaml(EXPERIMENT.replace("BASE", base)))
    carry_out(experiment, tmp_path, resume=False)
    (file,) = tmp_path.glob("*/summary.json")
    privacy = json.loads(file.read_text())["privacy"]
    assert privacy["epsilon"] == pytest.approx(epsilon_of(math.sqrt(3 * releases / 4), 1e-5))
    assert ("not_accounted" in privacy) == ("SiloBN" in base)  # the clients' own models are evaluated on them
    lines = [json.loads(line) for line in (file.parent / "history.jsonl").read_text().splitlines()]
    assert not any("train_loss" in line for line in lines)
    assert f"privacy: epsilon {privacy['epsilon']:.4g} at delta 1e-05 against all who see the model" in (
        capsys.readouterr().out
    )


def test_the_page_s_examples_work(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "strategies" / "private.md").read_text(encoding="utf-8")
    *_, epsilon = python_blocks(page)
    exec(epsilon, {})
    assert float(capsys.readouterr().out) == pytest.approx(epsilon_of(math.sqrt(30 * (1 / 4 + 1 / 16)), 1e-5))


class Reporting(BNClient):
    """Three clients go up by 5, the others go down, and report absurd numbers of examples."""

    def train_round(self, arrays: Arrays, config: Any, *rest: Any, **more: Any) -> Update:
        step, examples = (5.0, 10) if self.identity["partition-id"] < 3 else (-5.0, 2 * 10**7)
        changed = {key: value + step for key, value in arrays.items()}
        return Update(changed, {"num-examples": examples}, {})


def reported(strategy: flower.Strategy, count: int) -> float:
    """The weight after a round of so many clients; it was 0."""
    app = client_app(lambda context: Reporting(nn.Linear(1, 1, bias=False), ()))
    result = strategy.start(LocalGrid(app, count), pack({"weight": np.zeros((1, 1))}), num_rounds=1)
    return float(unpack(result.arrays)["weight"].item())


def test_what_a_client_reports_does_not_decide_whether_the_change_of_another_one_counts() -> None:
    """One client moves the sum of the changes by at most `clip`."""
    make = functools.partial(FedAvg, fraction_evaluate=0.0)
    sums = [count * reported(Private(make(), clip=1.0, noise=0.0), count) for count in (5, 6, 7)]
    assert np.diff(sums).tolist() == pytest.approx([-1.0, -1.0])


def test_the_wrapped_strategy_still_compares_replies_when_it_is_used_on_its_own() -> None:
    """The two clients of five with absurd numbers of examples are left out."""
    base = FedAvg(fraction_evaluate=0.0)
    assert reported(Private(base, **WIDE), 5) == pytest.approx(1.0)
    assert reported(base, 5) == 5.0
