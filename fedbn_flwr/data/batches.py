"""Batches of normalised images, augmented a whole batch at a time on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedbn_flwr import seeding

from . import Moments
from .augment import Window, random_crop, random_flip, random_rotate
from .dataset import Examples
from .images import BatchRequest

Normalise = Moments | Callable[[Tensor], Tensor]  # mean and standard deviation per channel, or a function of images
Augmentation = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]  # of images and targets


@functools.lru_cache(maxsize=16)
class _Normaliser:
    """Turns images into inputs of the model: zero mean and unit standard deviation per channel."""

    def __init__(self, moments: Moments, device: torch.device) -> None:
        mean, deviation = (torch.tensor(list(values), device=device).view(1, -1, 1, 1) for values in moments)
        # One multiplication and one addition: (x / 255 - mean) / deviation.
        self.scale = 1 / (255 * deviation)
        self.shift = -mean / deviation

    def __call__(self, images: Tensor) -> Tensor:
        if images.is_floating_point():  # pixels from 0 to 255 are those of uint8 images only
            return (images * (self.scale * 255)).add_(self.shift)
        return images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)


def _normaliser(normalise: Normalise, device: torch.device) -> Callable[[Tensor], Tensor]:
    return normalise if callable(normalise) else _Normaliser(normalise, device)


class TestBatches:
    """All images of a split, or those at `indices`, in order."""

    __test__ = False  # for pytest: not a test case

    def __init__(self, data: Examples, normalise: Normalise, batch_size: int, indices: Tensor | None = None) -> None:
        self.data = data
        self.batch_size = batch_size
        self.indices = torch.arange(len(data.labels)) if indices is None else indices.cpu()
        self.num_examples = len(self.indices)
        self._normalise = _normaliser(normalise, data.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        parts = list(self.indices.split(self.batch_size))
        if len(parts) > 1 and len(parts[-1]) == 1 < self.batch_size:  # one image may have no batch statistics
            parts[-2:] = [torch.cat(parts[-2:])]
        plan = (BatchRequest(rows, None) for rows in parts)
        for images, targets, _ in self.data.batches(plan):
            yield self._normalise(images), targets


class ClientBatches:
    """The training batches of one client: a data set that all clients share, and the indices of its partition.

    Order and augmentation are functions of (seed, round, client, epoch, batch). `cut` is the side in pixels of random
    square crops, which are not resized. `own` are augmentations of the user, applied last.
    """

    def __init__(
        self,
        data: Examples,
        indices: Tensor,
        normalise: Normalise,
        *,
        batch_size: int,
        client: int,
        seed: int,
        augment: Sequence[str] = (),
        pad: int = 2,
        cut: int | None = None,
        own: Sequence[Augmentation] = (),
    ) -> None:
        self.data = data
        self.indices = indices
        self.batch_size = batch_size
        self.num_examples = len(indices)
        self.client = client
        self.seed = seed
        self.augment = tuple(augment)
        self.pad = pad
        self.cut = cut
        self.own = tuple(own)
        self._normalise = _normaliser(normalise, data.device)

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each image of the client once, in an order drawn for this round and epoch."""
        order = torch.randperm(
            self.num_examples, generator=seeding.generator(self.seed, "order", server_round, self.client, epoch)
        )
        plan = self._plan(self.indices.cpu()[order], server_round, epoch)
        for images, targets, generator in self.data.batches(plan):
            images, targets = self._augment(images, targets, generator)
            yield self._normalise(images), targets

    def _plan(self, chosen: Tensor, server_round: int, epoch: int) -> Iterator[BatchRequest[torch.Generator]]:
        for number, rows in enumerate(chosen.split(self.batch_size)):
            if len(rows) == 1 < self.batch_size and number:
                # Batch norm cannot compute a variance from one image. Other epochs have this image in a larger batch.
                return
            # One generator per batch: it draws the window here, and the other augmentations after reading the images.
            generator = seeding.generator(self.seed, "augment", server_round, self.client, epoch, number)
            window = None
            if "resized_crop" in self.augment:
                window = Window.resized(len(rows), generator)
            elif self.cut is not None:
                window = Window.square(len(rows), self.cut, generator)
            yield BatchRequest(rows, generator, window)

    def _augment(self, images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if "crop" in self.augment:
            images = random_crop(images, self.pad, generator)
        if "flip" in self.augment:
            if self.data.dense:
                images, targets = random_flip(generator, images, targets)
            else:
                (images,) = random_flip(generator, images)
        if "rotate" in self.augment:
            images = random_rotate(images, generator)
        for augment in self.own:
            images, targets = augment(images, targets, generator)
        return images, targets
