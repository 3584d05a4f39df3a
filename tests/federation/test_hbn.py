"""HBN against a twin in float64 of the paper's explicit sums, and its layer against batch norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, Role, client_app, convert_norm, roles
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.variants import HybridBatchNorm
from fedbn_flwr.strategies import HBN, FedAvg, GlobalMomentum, Secure
from tests.support.federations import Arrays, Federations, differing, models_of, near
from tests.support.fixtures import small_net

OFF: dict[str, Any] = {"fraction_evaluate": 0.0}
LR = 0.3
SHAPE = (1, -1, 1, 1)


def hybrid_net() -> nn.Module:
    return convert_norm(small_net(), "hbn")


def mixed(values: Tensor, w: dict[str, Tensor], alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch mean and biased variance, and the hybrid ones."""
    flat = values.transpose(0, 1).flatten(1)
    mu = flat.mean(1)
    var = ((flat - mu[:, None]) ** 2).mean(1)
    a = 1 / (1 + torch.exp(-alpha))
    return mu, var, a * mu + (1 - a) * w["1.running_mean"], a * var + (1 - a) * w["1.running_var"]


def client(batches: Any, w: dict[str, Tensor], alpha: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A client's parameters after a round of SGD from its own alpha, and what it measured on its first batch."""
    own = {key: value.clone() for key, value in w.items() if "running" not in key} | {"1.alpha": alpha.clone()}
    measured: list[tuple[Tensor, Tensor]] = []
    for images, labels in batches:
        p = {key: value.requires_grad_() for key, value in own.items()}
        x = F.conv2d(images, p["0.weight"])
        mu, var, m, s = mixed(x, w, p["1.alpha"])
        measured.append((m.detach(), s.detach()) if kind == "hybrid" else (mu.detach(), var.detach()))
        x = (x - m.view(SHAPE)) / (s.view(SHAPE) + 1e-5).sqrt() * p["1.weight"].view(SHAPE) + p["1.bias"].view(SHAPE)
        loss = F.cross_entropy(F.linear(x.relu().flatten(1), p["4.weight"], p["4.bias"]), labels)
        steps = torch.autograd.grad(loss, [*p.values()])
        own = {key: (value - LR * step).detach() for (key, value), step in zip(p.items(), steps, strict=True)}
    return own, *measured[0]


def twin(fed: Any, rounds: int, rate: float, kind: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The server's arrays after `rounds` rounds, and each client's alpha."""
    w = {key: value.clone() for key, value in fed.model.state_dict().items() if "num_batches" not in key}
    sizes = [sum(len(images) for images, _ in data.batches) for data in fed.data]
    counts = [len(data.batches[0][0]) for data in fed.data]  # N_k
    n, total = sum(sizes), sum(counts)
    alphas = [w["1.alpha"].clone() for _ in sizes]
    for _ in range(rounds):
        found = [client(data.batches, w, alpha, kind) for data, alpha in zip(fed.data, alphas, strict=True)]
        alphas = [own["1.alpha"] for own, _, _ in found]
        mu = sum((c * m for c, (_, m, _) in zip(counts, found, strict=True)), torch.zeros(())) / total
        var = sum((c * s + c * (m - mu) ** 2 for c, (_, m, s) in zip(counts, found, strict=True)), torch.zeros(()))
        new = {key: sum((size * own[key] for size, (own, _, _) in zip(sizes, found, strict=True)), torch.zeros(())) / n
               for key in found[0][0]}  # fmt: skip
        w = {**new, "1.running_mean": rate * mu + (1 - rate) * w["1.running_mean"],
             "1.running_var": rate * var / (total - 1) + (1 - rate) * w["1.running_var"]}  # fmt: skip
    return w, alphas


def check(found: Arrays, expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    near(expected, found, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["hybrid", "batch"])
@pytest.mark.parametrize("rate", [0.002, 0.5])
def test_rounds_are_the_explicit_sums(federation: Federations, kind: Any, rate: float) -> None:
    fed = federation((6, 9, 14), batches=2, model=hybrid_net, dtype=torch.float64, lr=LR)
    rule = HBN(refresh=rate, measure=kind, statistics="model", **OFF)
    expected, alphas = twin(fed, 3, rate, kind)
    check(models_of(fed, rule, 3)[-1], expected)
    assert (alphas[0] - alphas[1]).abs().max() > 1e-4, "each client has an alpha of its own"


def test_a_client_continues_from_its_own_alpha_and_a_new_one_from_the_mean(federation: Federations) -> None:
    fed = federation((6, 9), batches=1, model=hybrid_net, dtype=torch.float64, lr=LR)
    begun: dict[int, list[Tensor]] = {0: [], 1: []}

    class Watched(BNClient):
        def train_round(self, arrays: Any, config: Any, *rest: Any) -> Any:
            if config["server-round"] == 1 and self.identity["partition-id"] == 1:
                raise OSError("not there yet")
            self.model.register_forward_pre_hook(
                lambda model, _: begun[self.identity["partition-id"]].append(model[1].alpha.detach().clone())
            )
            return super().train_round(arrays, config, *rest)

    def make(context: Any) -> BNClient:
        plain = fed.make_client(context)
        return Watched(plain.model, plain.train_data, lr=LR, context=context)

    rule = HBN(statistics="model", min_train_nodes=1, min_available_nodes=1, **OFF)
    models = models_of(fed, rule, 3, client_app(make))
    np.testing.assert_array_equal(begun[1][0], models[1]["1.alpha"])
    mean = (6 * begun[0][2] + 9 * begun[1][1]) / 15  # of what they have after round 2
    np.testing.assert_allclose(models[2]["1.alpha"], mean, rtol=1e-12)
    assert (begun[0][2] - mean).abs().max() > 1e-5


def test_the_global_model_is_evaluated_with_the_moments_of_all_clients_data(federation: Federations) -> None:
    """One batch each: the mean of the means; the mean of the unbiased variances and the variance of the means."""
    fed = federation((6, 9), batches=1, model=hybrid_net, dtype=torch.float64, lr=LR)
    models = models_of(fed, HBN(**OFF), 1)
    weight = torch.from_numpy(models[1]["0.weight"].copy())
    flat = [F.conv2d(data.batches[0][0], weight).transpose(0, 1).flatten(1) for data in fed.data]
    means = torch.stack([each.mean(1) for each in flat])
    expected = torch.stack([each.var(1) for each in flat]).mean(0) + means.var(0, correction=0)
    np.testing.assert_allclose(models[1]["1.running_mean"], means.mean(0), rtol=1e-12)
    np.testing.assert_allclose(models[1]["1.running_var"], expected, rtol=1e-12)


# --- the layer ---


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 4, 4)])
def test_a_large_alpha_is_batch_norm_and_a_small_one_frozen_batch_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    layer = HybridBatchNorm(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3))
        layer.bias.copy_(torch.randn(3))
        layer.running_mean.copy_(torch.randn(3))
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    for alpha, training in ((60.0, True), (-60.0, False)):
        layer.load_state_dict(state)
        nn.init.constant_(layer.alpha, alpha)
        expected = F.batch_norm(
            x, state["running_mean"].clone(), state["running_var"].clone(), layer.weight, layer.bias, training
        )
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_its_gradients_are_those_of_finite_differences_and_its_statistics_those_of_batch_norm() -> None:
    layer, plain = HybridBatchNorm(2).double(), nn.BatchNorm1d(2).double()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    layer(x), plain(x)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(layer, name), getattr(plain, name))
    layer.momentum = 0.0

    def of(inputs: Tensor, alpha: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"alpha": alpha}, (inputs,))

    alpha = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(of, (x, alpha))


def test_alpha_is_a_part_of_batch_norm_to_client_and_server() -> None:
    net = hybrid_net()
    assert roles(net)["1.alpha"] is roles(net.state_dict())["1.alpha"] is Role.AFFINE


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HBN(refresh=0.0), "refresh is 0.0"),
        (lambda: HBN(measure="both"), "measure is 'both'"),  # type: ignore[arg-type]
        (lambda: HBN(bounds={"max_share": 0.5}), "the sizes of the clients' batches, which bounds don't limit"),
        (lambda: Secure(HBN()), "HBN weights statistics by the sizes of the batches"),
    ],
)
def test_what_it_cannot_do_is_an_error(make: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        make()


def test_other_strategies_train_the_layer_as_a_batch_norm(federation: Federations) -> None:
    """With GlobalMomentum around HBN too; and after FedAvg its statistics have followed the batches."""
    fed = federation((6, 9), model=hybrid_net, dtype=torch.float64, lr=0.05, momentum=0.9)
    before = unpack(fed.arrays())
    assert differing(before, models_of(fed, FedAvg(**OFF), 1)[-1]) == before.keys()
    assert np.isfinite(models_of(fed, GlobalMomentum(HBN(**OFF)), 2)[-1]["1.alpha"]).all()


def test_gamma_beta_and_alpha_may_stay_on_the_client(federation: Federations) -> None:
    fed = federation((8, 12), model=hybrid_net, dtype=torch.float64, lr=LR)
    clients = [fed.make_client(Context(0, node, {"partition-id": node}, RecordDict(), {})) for node in range(2)]
    app = client_app(lambda context: clients[context.node_config["partition-id"]])
    HBN(kept=["affine"], global_kept="initial", **OFF).start(fed.grid(app), fed.arrays(), num_rounds=2)
    assert differing(*(client.model.state_dict() for client in clients)) >= {"1.alpha", "1.weight", "1.bias"}
