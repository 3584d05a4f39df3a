"""Batch norm of padded series is nn.BatchNorm1d of the packed real positions, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import Role, convert_norm, roles
from fedbn_flwr.norms.statistics import frozen_norm, reestimate
from fedbn_flwr.norms.variants import MaskedBatchNorm1d

CPU = torch.device("cpu")


def series(*lengths: int, channels: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Series of these lengths, whose padding has values of its own, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), channels, max(lengths) + 1, generator=generator, dtype=torch.float64) * 3 + 2
    return x, torch.arange(x.shape[2]) < torch.tensor(lengths)[:, None]


def packed(x: Tensor, mask: Tensor) -> Tensor:
    """[1, C, V]: the real positions one after another."""
    return torch.cat([each[:, real] for each, real in zip(x, mask, strict=True)], 1)[None]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_output_gradients_and_running_statistics_are_those_of_the_packed_positions(options: dict[str, object]) -> None:
    ours = MaskedBatchNorm1d(3, dtype=torch.float64, **options)  # type: ignore[arg-type]
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    twin = nn.BatchNorm1d(3, dtype=torch.float64, **options)  # type: ignore[arg-type]
    twin.load_state_dict(ours.state_dict())
    for step in range(4):
        x, mask = series(5, 2, 7, 1, seed=step)
        if step == 3:
            ours.eval(), twin.eval()
        theirs = packed(x, mask).requires_grad_()
        found, expected = ours(x.requires_grad_(), mask), twin(theirs)
        torch.testing.assert_close(packed(found, mask), expected, rtol=1e-12, atol=1e-12)
        assert not found.transpose(1, 2)[~mask].any(), "zero at the other positions"
        weights = torch.randn(expected.shape, dtype=torch.float64)
        (packed(found, mask) * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(packed(x.grad, mask), theirs.grad, rtol=1e-10, atol=1e-12)
        assert not x.grad.transpose(1, 2)[~mask].any()
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-12, atol=1e-12)
        for mine, other in zip(ours.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_without_a_mask_it_is_batch_norm_bit_for_bit() -> None:
    x, _ = series(5, 6)
    twin = nn.BatchNorm1d(3, dtype=torch.float64)
    assert MaskedBatchNorm1d(3, dtype=torch.float64)(x).equal(twin(x))


@pytest.mark.parametrize(
    ("x", "mask", "says"),
    [
        (
            torch.zeros(2, 3, 4),
            torch.ones(2, 4),
            r"the mask is torch.float32 \[2, 4\] for an input \[2, 3, 4\]; expected",
        ),
        (torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), r"torch.bool \[2, 3\] for an input \[2, 3, 4\]"),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), r"for an input \[2, 3\]; expected"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.bool), "has no real position"),
    ],
)
def test_a_mask_that_does_not_fit_is_described(x: Tensor, mask: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MaskedBatchNorm1d(3)(x, mask)


class Net(nn.Module):
    """Padded series in a dict, with two layers, of which the second has half the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv1d(3, 4, 3, padding=1, dtype=torch.float64), MaskedBatchNorm1d(4)
        self.second, self.norm2 = nn.Conv1d(4, 5, 2, stride=2, dtype=torch.float64), MaskedBatchNorm1d(5)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        x = self.norm1(self.first(batch["x"] * mask[:, None]), mask=mask)
        half = mask[:, : mask.shape[1] // 2 * 2 : 2]
        y: Tensor = self.norm2(self.second(x.relu()), half).sum(2)
        return y / half.sum(1, keepdim=True)


def batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    made = [series(5, 3, 9, seed=1), series(2, 4, seed=2)]
    return [({"x": x, "mask": mask}, torch.zeros(len(x), dtype=torch.int64)) for x, mask in made]


def test_reestimation_measures_real_positions() -> None:
    net = Net()
    found, _ = reestimate(net, batches(), CPU, pooled=True)
    inputs = [net.first(x["x"] * x["mask"][:, None]).transpose(1, 2)[x["mask"]] for x, _ in batches()]
    torch.testing.assert_close(found["norm1.running_mean"], torch.cat(inputs).mean(0).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["norm1.running_var"], torch.cat(inputs).var(0).detach(), rtol=1e-12, atol=1e-12)
    assert set(found) == {f"norm{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")}


def test_its_arrays_have_the_roles_of_batch_norm_and_freeze_like_it() -> None:
    net = Net()
    role_of = roles(net)
    assert {role_of[f"norm1.{key}"] for key in ("weight", "bias")} == {Role.AFFINE}
    assert role_of["norm2.running_var"] is Role.STATISTICS
    before = copy.deepcopy(net.state_dict())
    with frozen_norm(net, frozenset({Role.STATISTICS})):
        found = net(batches()[0][0])
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())
    torch.testing.assert_close(found, net.eval()(batches()[0][0]))


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "none", "sbn", "brn"])
def test_other_norms_take_its_place_where_series_have_no_mask(kind: str) -> None:
    x = torch.randn(4, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = [
        convert_norm(nn.Sequential(norm(6, dtype=torch.float64)), kind)[0]
        for norm in (MaskedBatchNorm1d, nn.BatchNorm1d)
    ]
    assert layers[0](x).equal(layers[1](x))
    assert layers[0](x, None).equal(layers[1](x))
    with pytest.raises(ValueError, match="cannot leave out the padded positions of a mask; use norm 'bn'"):
        convert_norm(Net(), kind, groups=1)(batches()[0][0])
    net = Net()
    assert convert_norm(net, "bn") is net
