"""Why batch norm breaks federated averaging, with the numbers of examples/bias.py: exact, or against a twin in float64.

The papers' statements: equal data give equal statistics and gradients (FedTAN, Property 1), other data a gradient that
is wrong by a bias (Observation 1) and rounds that stop at a distance which more of them do not shorten (Theorem 1);
agreed statistics without agreed gradients do not repair it (Property 3).
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Iterator
from functools import partial
from math import sqrt
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.strategies import FedAvg, FedTAN, FixBN
from tests.support.command import ROOT
from tests.support.marks import slow_except
from tests.support.twins import sgd

FedAvgOnly = partial(FedAvg, fraction_evaluate=0.0)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        module = importlib.import_module("bias")
        patch.setattr(module, "biases", functools.cache(module.biases))
        yield module


# --- a single batch norm: x = y m ± s, y = ±1 ------------------------------------------------------

CASES = [(a, m, s) for a in (0.0, 0.25, 0.5, 0.75, 1.0) for m, s in ((1.0, 0.7), (0.2, 3.0), (5.0, 0.1))]


@pytest.mark.parametrize(("a", "m", "s"), CASES)
def test_the_bias_of_the_gradient_has_a_closed_form(example: Any, a: float, m: float, s: float) -> None:
    """A client's batch has the mean ± a m and the variance s² + m² (1 - a²); y has the variance 1 - a² in it."""
    clients = example.two_signs(a, m, s)
    for inputs, targets in clients:
        assert abs(float(targets.mean())) == a
        assert float(inputs.var(correction=0)) == pytest.approx(s**2 + m**2 * (1 - a**2), rel=1e-12)
    formula = m / sqrt(s**2 + m**2) - m * (1 - a**2) / sqrt(s**2 + m**2 * (1 - a**2))
    assert example.bias(a, m, s) == pytest.approx(formula, abs=1e-15)
    for gamma, beta in ((0.3, 0.1), (-2.0, 1.5)):
        model = example.single_norm(gamma, beta)
        found = example.mean_gradient(FedAvgOnly(), model, clients, example.squared)
        right = example.full_gradient(model, clients, example.squared)
        assert float(found["0.weight"] - right["0.weight"]) == pytest.approx(formula, abs=1e-12)
        assert float(found["0.bias"] - right["0.bias"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("a", "m", "s"), slow_except(CASES[::6], CASES[::2]))  # each a, and each pair of m and s
def test_fedtan_and_frozen_statistics_of_all_data_reach_the_gamma_of_all_data(
    example: Any, a: float, m: float, s: float
) -> None:
    found = example.biases(a, m, s)
    assert found["bias"] == pytest.approx(example.bias(a, m, s), abs=1e-12)
    assert found["FedAvg"] == pytest.approx(example.fixed_point(a, m, s), abs=1e-12)
    for name in ("FedTAN", "FixBN"):
        assert found[name] == pytest.approx(m / sqrt(s**2 + m**2), abs=1e-12)


@pytest.mark.parametrize("a", [0.25, 1.0])
def test_more_rounds_do_not_lower_the_floor(example: Any, a: float) -> None:
    """After 20, 40 and 100 rounds the gradient of all data is as large as the bias."""
    clients, model = example.two_signs(a), example.single_norm()
    states = example.after_rounds(FedAvgOnly(), model, clients, 100, example.squared, lr=0.9)
    for rounds in (20, 40, 100):
        model.load_state_dict(states[rounds])
        gradient = example.full_gradient(model, clients, example.squared)
        assert float(gradient["0.weight"]) == pytest.approx(-example.bias(a), abs=1e-12)
        assert float(gradient["0.bias"]) == pytest.approx(0, abs=1e-12)


def slope(state: dict[str, Tensor]) -> float:
    """By how much the output of a model in use rises with its input."""
    return float(state["0.weight"] / state["0.running_var"].sqrt())


@pytest.mark.parametrize("a", [0.5, 1.0])
def test_fixbn_learns_the_function_of_all_data_with_the_clients_statistics(example: Any, a: float) -> None:
    """Frozen after ten rounds, the variance is that within clients: another gamma, and the same slope and shift.

    All data have the slope cov(x, y) / var(x) = m / (s² + m²), with mean 0 on both sides.
    """
    clients, run = example.two_signs(a), partial(example.after_rounds, rounds=45, loss=example.squared, lr=0.6)
    fixed = run(FixBN(FedAvgOnly(), freeze_round=10), example.single_norm(), clients)[-1]
    assert slope(fixed) == pytest.approx(1 / 1.49, abs=1e-12)
    assert float(fixed["0.bias"]) == pytest.approx(0, abs=1e-12)
    assert slope(run(FedAvgOnly(), example.single_norm(), clients)[-1]) < 0.92 / 1.49, "without the freeze"


def test_one_class_on_each_client_leaves_no_trace_of_the_labels(example: Any) -> None:
    """Each client's batch norm gives y = 1 and y = -1 the same outputs."""
    clients, model = example.two_signs(1.0), example.single_norm()
    outputs = [model.train()(inputs) for inputs, _ in clients]
    torch.testing.assert_close(outputs[0].sort(0)[0], outputs[1].sort(0)[0], rtol=0, atol=1e-12)
    assert example.biases(1.0, 1.0, 0.7)["FedAvg"] == pytest.approx(0, abs=1e-12)


# --- a network with two batch norms ----------------------------------------------------------------

SKEWS = (0, 0.2, 0.4, 0.6, 0.8, 1)


@pytest.fixture(scope="module")
def errors(example: Any) -> dict[float, dict[str, float]]:
    return {skew: example.errors(skew) for skew in SKEWS}


def twin(model: nn.Module, clients: list[tuple[Tensor, Tensor]], *, agree: bool) -> dict[str, Tensor]:
    """The gradient of the clients' mean loss, whose batch norms use each client's own statistics, or all clients'.

    With `agree` (Algorithm 2) their values are those of all clients, and their gradients those of the client's own.
    """
    model = copy.deepcopy(model).train()
    hidden = [inputs for inputs, _ in clients]
    for layer in model:
        if not isinstance(layer, nn.BatchNorm1d):
            hidden = [layer(each) for each in hidden]
            continue
        means = [each.mean(0) for each in hidden]
        if agree:
            means = [own + (sum(means) / len(means) - own).detach() for own in means]
        variances = [
            (each - (mean.detach() if agree else mean)).square().mean(0)
            for each, mean in zip(hidden, means, strict=True)
        ]
        if agree:
            variances = [own + (sum(variances) / len(variances) - own).detach() for own in variances]
        hidden = [
            (each - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias
            for each, mean, variance in zip(hidden, means, variances, strict=True)
        ]
    losses = [F.cross_entropy(each, targets) for each, (_, targets) in zip(hidden, clients, strict=True)]
    (sum(losses) / len(losses)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "agree"), slow_except({"Algorithm 2"}, [("FedAvg+BN", False), ("Algorithm 2", True)]))
def test_the_error_by_skew_is_that_of_independent_code(example: Any, errors: Any, name: str, agree: bool) -> None:
    for skew in SKEWS:
        clients, model = example.two_classes(skew), example.two_norms()
        right = example.full_gradient(model, clients)
        expected = example.error(twin(model, clients, agree=agree), right)
        assert errors[skew][name] == pytest.approx(expected, rel=1e-9, abs=1e-14)


def test_the_error_of_batch_norm_rises_with_the_skew(errors: Any) -> None:
    found = [errors[skew]["FedAvg+BN"] for skew in SKEWS]
    assert found[0] < 1e-14, "the clients have equal data"
    assert found == sorted(found)
    assert [round(each, 2) for each in found[1:]] == [0.11, 0.21, 0.3, 0.49, 0.95]


def test_agreed_statistics_alone_are_worse_than_none_if_clients_differ_much(errors: Any) -> None:
    found = [errors[skew]["Algorithm 2"] for skew in SKEWS]
    assert found[0] < 1e-14
    assert [round(each, 2) for each in found[1:]] == [0.05, 0.19, 0.45, 0.74, 1.26]
    better = [errors[skew]["Algorithm 2"] < errors[skew]["FedAvg+BN"] for skew in SKEWS[1:]]
    assert better == [True, True, False, False, False]


@pytest.mark.parametrize("name", ["FedTAN", "FixBN", "FedAvg+GN"])
def test_agreed_gradients_frozen_statistics_and_group_norm_have_no_error(errors: Any, name: str) -> None:
    """FedTAN's is compared with batch norm on all data, the others with all data under their own normalisation."""
    assert max(errors[skew][name] for skew in SKEWS) < 1e-14


def test_all_data_are_the_same_whatever_the_skew(example: Any) -> None:
    """So the errors differ by who has which examples only."""
    pools = [
        {(*map(float, x), int(y)) for x, y in zip(*example.union(example.two_classes(a)), strict=True)} for a in SKEWS
    ]
    assert all(pool == pools[0] for pool in pools)
    assert len(pools[0]) == 80


def test_on_equal_data_federated_averaging_is_centralised_training(example: Any) -> None:
    """Property 1 and footnote 2, for ten rounds of one step."""
    clients, model = example.two_classes(0), example.two_norms()
    states = example.after_rounds(FedAvgOnly(), model, clients, 10, lr=0.5)
    agreed = example.after_rounds(FedTAN(fraction_evaluate=0.0), model, clients, 10, lr=0.5)
    central = sgd(copy.deepcopy(model).train(), [example.union(clients)] * 10, lr=0.5)
    for name, value in central.items():
        if not name.endswith("running_var"):  # unbiased, and so another one for 80 values than for 160
            torch.testing.assert_close(states[-1][name], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(agreed[-1][name], value, rtol=1e-10, atol=1e-12)


# --- the pictures of docs/batch-norm.md --------------------------------------------------------------

IMAGES = ROOT / "docs" / "images"


def assert_drawn(picture: str, curves: dict[str, list[float]]) -> None:
    """The curves are at these heights, to half a pixel: one scale fits them all."""
    root = ElementTree.parse(IMAGES / picture)
    heights: list[float] = []
    values: list[float] = []
    for name, expected in curves.items():
        (path, *_) = root.findall(f".//*[@id='{name}']/{{http://www.w3.org/2000/svg}}path")
        points = re.findall(r"[ML] \S+ (\S+)", path.attrib["d"])
        assert len(points) == len(expected), name
        heights += map(float, points)
        values += expected
    slope, shift = np.polyfit(values, heights, 1)
    assert slope < -50, "upwards"
    np.testing.assert_allclose(slope * np.array(values) + shift, heights, atol=0.5)


def test_the_picture_has_the_errors_by_skew(errors: Any) -> None:
    names = {"FedAvg+BN": "FedAvg+BN", "Algorithm-2": "Algorithm 2", "FedTAN": "FedTAN"}
    assert_drawn("bias.svg", {gid: [errors[skew][name] for skew in SKEWS] for gid, name in names.items()})


def test_the_picture_has_the_gamma_by_round(example: Any) -> None:
    """A step with the learning rate 0.2 leaves 0.8 of the distance to the fixed point."""
    ends = {skew: example.fixed_point(skew) for skew in (0, 0.5, 0.75, 1)}
    curves = {skew: [end + (1 - end) * 0.8**number for number in range(31)] for skew, end in ends.items()}
    assert example.gammas(0.75) == pytest.approx(curves[0.75], abs=1e-12)
    assert_drawn("rounds.svg", {f"gamma-{skew:g}": curve for skew, curve in curves.items()})
