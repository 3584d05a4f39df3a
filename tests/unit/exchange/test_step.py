"""FedTAN's step against its trusted twin: ordinary batch norm on the union of the clients' batches, in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedbn_flwr import build_model
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep, replaced_forward
from fedbn_flwr.messages.aggregate import Array
from tests.support.cohort import alone, cohort_gradients, gradients, trained_on
from tests.support.marks import slow_except


class Perceptron(nn.Module):
    """1d batch norms, one of them without gamma and beta, one straight on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(12), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.ReLU(),
            nn.Linear(9, 7), nn.BatchNorm1d(7, affine=False), nn.Tanh(), nn.Linear(7, 5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.flatten(1))
        return y


class Twice(nn.Module):
    """One batch norm that is used twice in a forward pass, across a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Conv2d(4, 4, 1)
        self.classify = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm(self.conv(x)))
        b = self.norm(self.mix(a))
        y: Tensor = self.classify((a + b).mean((2, 3)))
        return y


class Unused(nn.Module):
    """The loss does not depend on its second batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.aside = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](x.flatten(1))
        self.aside(hidden)
        y: Tensor = self.layers[2](hidden)
        return y


def small_mobilenet() -> nn.Module:
    return torchvision.models.mobilenet_v2(num_classes=5, width_mult=0.25, dropout=0.0)


def plain_net(conv: type[nn.Module], norm: type[nn.Module], features: int) -> nn.Module:
    layers = conv(3, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 6, 2, stride=2), norm(6), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(features, 5))


def volume_net() -> nn.Module:
    return plain_net(nn.Conv3d, nn.BatchNorm3d, 72)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet20": (lambda: build_model("resnet20", 5), (3, 16, 16)),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), (3, 32, 32)),
    "mobilenet_v2": (small_mobilenet, (3, 32, 32)),
    "densenet": (lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=5), (3, 32, 32)),
    "timm": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=5), (3, 32, 32)),  # BatchNormAct2d
    "perceptron": (Perceptron, (3, 2, 2)),
    "used twice": (Twice, (3, 6, 6)),
    "outside the loss": (Unused, (3, 2, 2)),
    "series": (lambda: plain_net(nn.Conv1d, nn.BatchNorm1d, 30), (3, 10)),
    "volume": (volume_net, (3, 4, 5, 6)),
    "synchronised": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(volume_net()), (3, 4, 5, 6)),
}


def clients_of(name: str, sizes: list[int]) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    make, shape = MODELS[name]
    torch.manual_seed(3)
    model = make().double().train()
    # Label skew, and inputs that differ from client to client, so that local and global statistics differ much.
    batches = [
        (torch.randn(n, *shape, dtype=torch.float64) * (1 + i) + i, torch.full((n,), i % 5))
        for i, n in enumerate(sizes)
    ]
    return model, batches


def calls_of(model: nn.Module, inputs: Tensor) -> int:
    """How many times a forward pass calls batch norms."""
    calls = 0

    def counted(name: str, layer: object, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y.clone()  # an activation after it may work in place

    with replaced_forward(model, counted):
        model(inputs)
    return calls


def union_twin(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    return trained_on(model, *map(torch.cat, zip(*batches, strict=True)))


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    scale = max(float(value.abs().max()) for value in b.values())
    return max(float((a[key] - b[key]).abs().max()) for key in b) / scale


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "paper"])
@pytest.mark.parametrize("name", slow_except(MODELS.keys() - {"resnet18", "mobilenet_v2", "timm"}, MODELS))
@pytest.mark.parametrize("sizes", [[4, 4, 4], [2, 5, 3], [6]], ids=["equal", "unequal", "one client"])
def test_weighted_gradient_equals_that_of_batch_norm_on_the_union(name: str, sizes: list[int], fused: bool) -> None:
    model, batches = clients_of(name, sizes)
    copies, mean, exchanges = cohort_gradients(model, batches, [float(n) for n in sizes], fused=fused)
    assert exchanges == calls_of(model, batches[0][0]) * (2 if fused else 3)
    twin = union_twin(model, batches)
    expected = gradients(twin)
    assert worst({key: mean[key] for key in expected}, expected) < 1e-10
    for ours in copies:
        assert list(ours.state_dict()) == list(model.state_dict())
        assert not any("forward" in vars(layer) for layer in ours.modules()), "the model is as it was"
        for key, buffer in twin.named_buffers():
            torch.testing.assert_close(dict(ours.named_buffers())[key], buffer, rtol=1e-10, atol=1e-12)


def test_channels_last_changes_only_the_last_bits() -> None:
    model, batches = clients_of("resnet20", [4, 4])
    _, plain, _ = cohort_gradients(model, batches, [1.0, 1.0])
    model.to(memory_format=torch.channels_last)
    last = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
    _, found, _ = cohort_gradients(model, last, [1.0, 1.0])
    assert worst(found, plain) < 1e-10


def test_the_forward_exchange_is_not_enough() -> None:
    model, batches = clients_of("resnet20", [4, 4, 4])
    _, mean, exchanges = cohort_gradients(model, batches, [1.0] * 3, backward=False)
    assert exchanges == 19 + 1, "the last one ends them"
    assert worst(mean, gradients(union_twin(model, batches))) > 0.01


def test_weights_by_data_set_need_not_follow_the_batches() -> None:
    """With weights p_i the step is batch norm over a union in which each image of client i has the weight p_i / n_i."""
    model, batches = clients_of("perceptron", [3, 6])
    # A client of weight 2/3 whose batch is half as large: as if the union had each of its images four times.
    _, mean, _ = cohort_gradients(model, batches, [2.0, 1.0])
    repeated = [(batches[0][0].repeat(4, 1, 1, 1), batches[0][1].repeat(4)), batches[1]]
    assert worst(mean, gradients(union_twin(model, repeated))) < 1e-10


def test_the_backward_pass_waits_in_the_thread_that_called_it() -> None:
    """Which autograd's thread of a GPU, one for all clients, could not: so autograd must use no thread of its own."""
    model, batches = clients_of("used twice", [3])
    seen = set()

    def noted(contribution: Contribution) -> Agreement:
        if contribution.kind == "gradients":
            seen.add((threading.get_ident(), torch._C._is_multithreading_enabled()))
        return alone(contribution)

    LayerwiseStep(noted)(model, *batches[0], F.cross_entropy)
    assert seen == {(threading.get_ident(), False)}


class GraphNet(nn.Module):
    """Each node adds the features of its neighbours; `edges` [2, E] are pairs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.classify = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        x = F.relu(self.norm(self.first(graph["x"])))
        start, end = graph["edges"]
        y: Tensor = self.classify(x.index_add(0, end, x[start]))
        return y


def test_the_nodes_of_a_graph_are_the_examples_of_its_batch() -> None:
    """Its edges have another number of rows, so no part of the nodes is a graph."""
    model, nodes = GraphNet().double(), 6
    graphs = [
        {"x": torch.randn(nodes, 3, dtype=torch.float64) + i, "edges": torch.randint(0, nodes, (2, 9 + i))}
        for i in range(2)
    ]
    labels = [torch.randint(0, 5, (nodes,)) for _ in graphs]
    _, mean, exchanges = cohort_gradients(model, list(zip(graphs, labels, strict=True)), [1.0, 1.0])
    assert exchanges == 2
    union = {
        "x": torch.cat([graph["x"] for graph in graphs]),
        "edges": torch.cat([graph["edges"] + nodes * i for i, graph in enumerate(graphs)], 1),
    }
    assert worst(mean, gradients(trained_on(model, union, torch.cat(labels)))) < 1e-12


def test_a_loss_that_calls_batch_norm_is_an_error() -> None:
    model, (batch,) = clients_of("used twice", [4])

    def consistency(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + (model(batch[0].flip(3)) - outputs).square().mean()

    with pytest.raises(MessageError, match=r"'norm' \(BatchNorm2d\(4, .* was called after it: by the loss"):
        LayerwiseStep(alone)(model, *batch, consistency)
    assert "forward" not in vars(model.norm)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "paper"])
def test_statistics_in_float32_are_accurate_if_the_mean_is_much_larger_than_the_deviation(fused: bool) -> None:
    """The variance is a mean of squared deviations: the difference of two means of squares would lose all digits."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).train()
    inputs = torch.randn(16, 3, 8, 8) + 5000
    sent: dict[str, Array] = {}

    def noted(contribution: Contribution) -> Agreement:
        sent.update({} if contribution.kind == "gradients" else contribution.tensors)
        return alone(contribution)

    LayerwiseStep(noted, fused=fused)(model, inputs, torch.zeros(16, dtype=torch.int64), F.cross_entropy)
    np.testing.assert_allclose(sent["mean"], inputs.double().mean((0, 2, 3)).numpy(), rtol=1e-6)
    np.testing.assert_allclose(sent["var"], inputs.double().var((0, 2, 3), correction=0).numpy(), rtol=1e-4)


def test_frozen_batch_norms_exchange_nothing() -> None:
    model, batches = clients_of("resnet20", [4])
    model.bn.eval()
    _, _, exchanges = cohort_gradients(model, batches, [1.0])
    assert exchanges == 2 * 18


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_batch_norm_that_the_backward_pass_computes_again_is_refused(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return y

    model = nn.Sequential(nn.Linear(3, 4), Checkpointed(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(MessageError, match="activation checkpointing"):
        LayerwiseStep(alone)(model, torch.randn(8, 3), torch.zeros(8, dtype=torch.int64), F.cross_entropy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_in_float32_between_layers_of_half_precision(dtype: torch.dtype) -> None:
    """The step of one client is that of ordinary batch norm."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).to(dtype)
    model[1].float()
    ordinary = copy.deepcopy(model)
    x, y = torch.randn(16, 3, dtype=dtype), torch.randint(0, 5, (16,))
    LayerwiseStep(alone)(model, x, y, F.cross_entropy)
    F.cross_entropy(ordinary(x), y).backward()
    for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.005)
    torch.testing.assert_close(model[1].running_var, ordinary[1].running_var, rtol=0.01, atol=0.001)
