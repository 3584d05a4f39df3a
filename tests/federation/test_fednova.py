"""FedNova against a twin in float64 that the paper's recursions give, and against FedAvg."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr import BNClient, LocalGrid, Role, client_app, roles
from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, FedNova, FedProx, FixBN, GlobalMomentum, Secure
from strategies.fednova import effective_steps
from tests.support.federations import Federations, last_model, near
from tests.support.records import between

Arrays = dict[str, np.ndarray]
STEPS = (1, 4)


def coefficients(tau: int, rho: float, alpha: float) -> list[float]:
    """The coefficient of each step's gradient in the change, by running the update on gradients that are unit vectors.

    One step is v <- rho v + g, y <- y - (v + alpha (y - y_0)), in units of the learning rate.
    """
    change, momentum = np.zeros(tau), np.zeros(tau)
    for step in range(tau):
        momentum = rho * momentum + np.eye(tau)[step]
        change = change - momentum - alpha * change
    return [float(-value) for value in change]


@pytest.mark.parametrize("tau", [1, 2, 7, 100])
@pytest.mark.parametrize(("rho", "alpha"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.0), (0.0, 0.05), (0.0, 1e-12)])
def test_the_closed_forms_are_the_sums_of_the_coefficients(tau: int, rho: float, alpha: float) -> None:
    assert effective_steps(tau, momentum=rho, alpha=alpha) == pytest.approx(
        sum(coefficients(tau, rho, alpha)), rel=1e-12
    )


def grid(fed: Any, steps: tuple[int, ...] = STEPS, **options: Any) -> LocalGrid:
    def make(context: Context) -> BNClient:
        i = int(context.node_config["partition-id"])
        data = fed.data[i]
        return BNClient(copy.deepcopy(fed.model), data, **{"lr": 0.1, "steps": steps[i], **options}, context=context)

    return LocalGrid(client_app(make), len(steps))


def ends(fed: Any, config: dict[str, Any], **options: Any) -> list[Arrays]:
    """The clients' models after one round, each by itself."""
    before, options = dict(unpack(fed.arrays())), {"lr": 0.1, **options}
    clients = [BNClient(copy.deepcopy(fed.model), fed.data[i], steps=STEPS[i], **options) for i in (0, 1)]
    return [dict(client.train_round(before, config).arrays) for client in clients]


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_a_round_is_the_paper_s_formula(federation: Federations, rho: float, mu: float) -> None:
    """x - tau_eff sum_i p_i (x - x_i) / |a_i|, p = (8, 16) / 24; statistics are averaged by p_i."""
    fed = federation((8, 16), dtype=torch.float64)
    rule = FedNova(proximal_mu=mu, fraction_evaluate=0.0)
    found = last_model(fed, rule, 1, grid=grid(fed, momentum=rho))
    x, (one, two) = unpack(fed.arrays()), ends(fed, {"proximal-mu": mu}, momentum=rho)
    a = [sum(coefficients(tau, rho, 0.1 * mu)) for tau in STEPS]
    tau_eff = a[0] / 3 + a[1] * 2 / 3
    for key, role in roles(x).items():
        if role is Role.STATISTICS:
            expected = one[key] / 3 + two[key] * 2 / 3
        else:
            expected = x[key] - tau_eff * ((x[key] - one[key]) / a[0] / 3 + (x[key] - two[key]) / a[1] * 2 / 3)
        np.testing.assert_allclose(found[key], expected, rtol=1e-12, atol=1e-13, err_msg=key)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_with_equal_steps_it_is_fedavg(federation: Federations, rho: float, mu: float) -> None:
    fed = federation((8, 12), dtype=torch.float64, steps=3, lr=0.1, momentum=rho)
    plain = last_model(fed, FedProx(proximal_mu=mu) if mu else FedAvg(), 2)
    near(last_model(fed, FedNova(proximal_mu=mu), 2), plain, rtol=1e-12, atol=1e-14)


class Falling(SGD):
    """Its rate falls at each step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer": "adam"}, "needs SGD .* found Adam with"),
        ({"optimizer": lambda parameters, lr: Falling(parameters, lr)}, "change within a round, from .0.1, 0.0."),
        (
            {"optimizer": {"name": "sgd", "nesterov": True}, "momentum": 0.9},
            "without nesterov and dampening, .*; found SGD with .*'nesterov': True",
        ),
        ({"optimizer": {"name": "sgd", "dampening": 0.5}, "momentum": 0.9}, "'dampening': 0.5"),
        ({"momentum": 0.9}, "not both; found SGD with .*'momentum': 0.9, .* and proximal-mu 0.5"),
        ({"lr": 3.0}, "proximal-mu below 1 / lr, .*'lr': 3.0"),
    ],
)
def test_what_the_forms_do_not_cover_is_an_error(federation: Federations, options: Any, reason: str) -> None:
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match=reason):
        last_model(fed, FedNova(proximal_mu=0.5), 1, grid=grid(fed, (2, 2), **options))


def test_momentum_of_an_earlier_round_is_an_error(federation: Federations) -> None:
    fed = federation((8, 12), lr=0.1, steps=2, momentum=0.9, keep_momentum=True)
    with pytest.raises(RunFailed, match=r"begins at zero in each round .* kept from an earlier round"):
        last_model(fed, FedNova(), 2)
    with pytest.raises(SettingsError, match="FedNova divides the change of each client"):
        GlobalMomentum(FedNova())


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ("{optimizer: adam}", "'adam'"),
        ("{momentum: 0.9, keep_momentum: true}", "keep_momentum"),
        ("{momentum: 0.9, optimizer: {name: sgd, nesterov: true}}", "{'name': 'sgd', 'nesterov': True}"),
    ],
)
def test_an_experiment_names_the_setting(train: str, found: str, tmp_path: Any) -> None:
    file = tmp_path / "nova.yaml"
    file.write_text(f"strategy: {{name: FedNova}}\nmodel: {{name: cnn}}\ntrain: {train}\n")
    with pytest.raises(SettingsError, match=f"{found}.*, but strategy FedNova divides"):
        prepare(load_experiment(str(file), []))
    file.write_text(file.read_text().replace(train, "{momentum: 0.9}"))
    with pytest.raises(
        SettingsError, match=r"momentum is 0\.9, but .* FedNova knows .* either momentum or proximal_mu"
    ):
        prepare(load_experiment(str(file), ["strategy.proximal_mu=0.1"]))


def test_frozen_statistics_stay_and_secure_aggregation_is_an_error(federation: Federations) -> None:
    fed = federation((8, 12), lr=0.1)
    before = unpack(fed.arrays())
    after = last_model(fed, FixBN(FedNova(), freeze_round=0), 2, grid=grid(fed))
    assert after["1.running_var"].tobytes() == before["1.running_var"].tobytes()
    assert after["1.weight"].tobytes() != before["1.weight"].tobytes()
    with pytest.raises(SettingsError, match="FedNova divides the change of each client by its own number of steps"):
        Secure(FedNova())
    with pytest.raises(SettingsError, match="which bounds don't limit"):
        FedNova(bounds={"max_share": 0.5})


@pytest.mark.parametrize("a", [0.0, 1e-9, -1.0, None, 2001.0, 2e9])
def test_a_reply_with_a_false_number_of_steps_is_left_out(federation: Federations, a: float | None) -> None:
    """A number near zero would multiply the client's change by as much as it likes, a large one all changes."""
    fed = federation((8, 12, 8), lr=0.1, steps=2)

    def lie(message: RecordDict, reply: RecordDict, partition: int) -> None:
        if partition == 2:
            metrics = reply.metric_records["metrics"]
            del metrics["effective-steps"]
            metrics.update({} if a is None else {"effective-steps": a})

    found = last_model(fed, FedNova(fraction_evaluate=0.0), 1, fed.grid(between(fed.app(), lie)))
    fed.data = fed.data[:2]
    without = last_model(fed, FedNova(fraction_evaluate=0.0), 1)
    near(without, found)
