"""Resized crops and turns of a whole batch against torchvision, an image at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as tv

from fedbn_flwr.data.augment import RATIO, SCALE, crop_and_resize, random_cut, random_rotate, resized_crop_boxes
from fedbn_flwr.data.batches import ClientBatches
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source


def draws(count: int, seed: int) -> torch.Tensor:
    return torch.rand((4, count, 10), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 28, 28), (3, 20, 31)])
def test_resized_crop_equals_torchvision_image_by_image(shape: tuple[int, int, int]) -> None:
    images = torch.randint(0, 256, (40, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = resized_crop_boxes(draws(40, 5), *shape[1:])
    found = crop_and_resize(images, boxes)
    assert found.dtype == torch.uint8
    assert len({tuple(box) for box in boxes.tolist()}) > 30, "each image has a box of its own"
    for image, mine, box in zip(images, found, boxes.int().tolist(), strict=True):
        expected = tv.resized_crop(image, *box, list(shape[1:]), InterpolationMode.BILINEAR, antialias=False)
        # Both round, but sum in another order: for a value halfway between two integers they may differ by one.
        assert (mine.int() - expected.int()).abs().max() <= 1
        assert (mine != expected).double().mean() < 0.1
        # No crop is shrunk, so smoothing changes nothing.
        smooth = tv.resized_crop(image, *box, list(shape[1:]), InterpolationMode.BILINEAR, antialias=True)
        assert (mine.int() - smooth.int()).abs().max() <= 1


@pytest.mark.parametrize("size", [(64, 64), (20, 90)])
def test_boxes_have_the_law_of_torchvision_s(size: tuple[int, int]) -> None:
    """Means and deviations over 3,000 boxes; in the long image most tries fail and the middle is taken."""
    mine = resized_crop_boxes(draws(3_000, 0), *size).float()
    image = torch.zeros(1, *size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = torch.tensor(
            [RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(3_000)], dtype=torch.float32
        )
    top, left, tall, wide = mine.unbind(1)
    assert min(top.min(), left.min()) >= 0
    assert min(tall.min(), wide.min()) >= 1
    assert (top + tall).max() <= size[0]
    assert (left + wide).max() <= size[1]
    torch.testing.assert_close(mine.mean(0), theirs.mean(0), rtol=0.06, atol=0.5)
    torch.testing.assert_close(mine.std(0), theirs.std(0), rtol=0.08, atol=0.5)


def test_an_image_in_which_no_try_fits_is_cut_in_the_middle() -> None:
    draw = torch.rand(4, 5, 10, generator=torch.Generator().manual_seed(0))
    assert resized_crop_boxes(draw, 10, 100, (1.0, 1.0)).tolist() == [[0, 43, 10, 13]] * 5


def test_square_crops_lie_within_and_reach_every_place() -> None:
    places = torch.arange(7 * 12).view(1, 1, 7, 12).expand(2_000, -1, -1, -1)
    images, masks = random_cut(places, places[:, 0], torch.Generator().manual_seed(0), side=5)
    assert images.shape == (2_000, 1, 5, 5)
    assert masks.equal(images[:, 0])
    top, left = masks[:, 0, 0] // 12, masks[:, 0, 0] % 12
    assert masks[:, 4, 4].equal(masks[:, 0, 0] + 4 * 12 + 4)
    assert top.unique().tolist() == list(range(3))
    assert left.unique().tolist() == list(range(8))
    assert torch.bincount(left).min() > 2_000 / 8 * 0.8, "each as likely"


def test_turned_images_equal_torchvision_s() -> None:
    images = torch.randint(1, 256, (20, 3, 24, 31), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, _ = random_rotate(images, torch.arange(len(images)), torch.Generator().manual_seed(3))
    draws = torch.rand(20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    angles = (60 * draws - 30).tolist()
    assert min(angles) < -20
    assert max(angles) > 20
    for image, mine, angle in zip(images, found, angles, strict=True):
        assert mine.equal(tv.rotate(image, angle))


@pytest.mark.parametrize("kinds", [("flip", "crop"), ("resized_crop",), ("rotate",)], ids="+".join)
def test_what_a_client_sees_is_a_function_of_its_place(kinds: tuple[str, ...]) -> None:
    data = load(Source(name="digits"))

    def first(augment: tuple[str, ...]) -> torch.Tensor:
        batches = ClientBatches(
            data.train, torch.arange(32), data.moments, batch_size=32, client=0, seed=0, augment=augment
        )
        return next(batches.epoch(1, 0))[0]

    assert first(kinds).equal(first(kinds))
    assert not first(kinds).equal(first(()))
    assert first(kinds).shape == first(()).shape


@pytest.mark.parametrize("masked", [True, False])
def test_small_batches_equal_those_that_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """Bit for bit, in memory of their own, and without the last one, which has a single example."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(21, 3, 5, generator=draw).where(torch.rand(21, 3, 5, generator=draw) < 0.9, torch.nan)
    inputs = {"inputs": values, "mask": torch.rand(21, 5, generator=draw) < 0.5} if masked else values
    data, moments = Examples(inputs, torch.randn(21, generator=draw)), ((0.1, 0.2, 0.3), (1.5, 2.0, 0.7))
    found = []
    for at_once in (1 << 17, 1):
        monkeypatch.setattr("fedbn_flwr.data.batches._AT_ONCE", at_once)
        own = ClientBatches(
            data, torch.arange(21), moments, batch_size=4, client=0, seed=0, targets=((0.5,), (3.0,))
        ).epoch(1, 0)
        found.append([*own])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    sizes = [(targets.untyped_storage().nbytes(), targets.nbytes) for _, targets in found[0]]
    assert sizes == [(16, 16)] * 5


class Transfers(TorchDispatchMode):
    """Copies from the CPU to another device: how many, and which of them the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.waited_for: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            self.made += 1
            if not kwargs.get("non_blocking"):
                self.waited_for.append(args[0].shape)
        return func(*args, **kwargs)


@pytest.mark.parametrize("augment", [(), ("crop", "flip", "rotate"), ("resized_crop", "flip")], ids="+".join)
def test_no_batch_makes_the_host_wait_for_the_device(augment: tuple[str, ...]) -> None:
    """On PyTorch's meta device, which does everything except the arithmetic."""
    device = torch.device("meta")
    data = Examples(torch.zeros(20, 3, 16, 16, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)).to(device)
    moments = ((0.5,) * 3, (0.25,) * 3)
    batches = ClientBatches(data, torch.arange(20), moments, batch_size=5, client=0, seed=0, augment=augment)
    with Transfers() as transfers:
        shapes = [
            (tuple(inputs.shape), inputs.device.type, targets.device.type) for inputs, targets in batches.epoch(1, 0)
        ]
    assert shapes == [((5, 3, 16, 16), "meta", "meta")] * 4
    assert transfers.made, "rows are copied"
    assert transfers.waited_for == []
