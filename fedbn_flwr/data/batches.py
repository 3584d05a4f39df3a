"""Batches of normalised inputs, augmented a whole batch at a time on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value

from . import Moments
from .augment import Window, random_crop, random_flip, random_rotate
from .dataset import Examples
from .examples import MASK, BatchRequest, is_dense, main_key

Normalise = Moments | Callable[[Value], Value]  # mean and deviation per feature or channel, or a function of inputs
Augmentation = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]  # of images and targets


@functools.lru_cache(maxsize=16)
class Normaliser:
    """Turns examples into inputs of the model: zero mean and unit standard deviation per feature or channel.

    Tokens stay as they are. Missing values become the mean, zero, and so do padded ones.
    """

    def __init__(self, moments: Moments, device: torch.device) -> None:
        self.mean, self.deviation = (torch.tensor(list(values), device=device) for values in moments)
        # For pixels one multiplication and one addition: (x / 255 - mean) / deviation.
        self.scale = (1 / (255 * self.deviation)).view(1, -1, 1, 1)
        self.shift = (-self.mean / self.deviation).view(1, -1, 1, 1)

    def __call__(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            key, mask = main_key(inputs), inputs.get(MASK)
            values = self(inputs[key])
            if mask is not None and values.is_floating_point():
                values = values * mask.view(len(mask), *[1] * (values.ndim - 2), -1)
            return {**inputs, key: values}
        if inputs.dtype is torch.uint8 and inputs.ndim == 4:
            return inputs.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if inputs.dtype is torch.uint8:
            inputs = inputs.float() / 255
        if not inputs.is_floating_point():
            return inputs
        mean, deviation = (values.view(-1, *[1] * (inputs.ndim - 2)) for values in (self.mean, self.deviation))
        return ((inputs - mean) / deviation).nan_to_num_(0.0)


def _normaliser(normalise: Normalise, device: torch.device) -> Callable[[Value], Value]:
    return normalise if callable(normalise) else Normaliser(normalise, device)


class TestBatches:
    """All examples of a split, or those at `indices`, in order."""

    __test__ = False  # for pytest: not a test case

    def __init__(self, data: Examples, normalise: Normalise, batch_size: int, indices: Tensor | None = None) -> None:
        self.data = data
        self.batch_size = batch_size
        self.indices = torch.arange(len(data)) if indices is None else indices.cpu()
        self.num_examples = len(self.indices)
        self._normalise = _normaliser(normalise, data.device)

    def __iter__(self) -> Iterator[tuple[Value, Value]]:
        parts = list(self.indices.split(self.batch_size))
        if len(parts) > 1 and len(parts[-1]) == 1 < self.batch_size:  # one example may have no batch statistics
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

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Value, Value]]:
        """Each example of the client once, in an order drawn for this round and epoch."""
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
                # Batch norm cannot compute a variance from one example. Other epochs have this one in a larger batch.
                return
            # One generator per batch: it draws the window here, and the other augmentations after reading the images.
            generator = seeding.generator(self.seed, "augment", server_round, self.client, epoch, number)
            is_cut = self.cut is not None or "resized_crop" in self.augment
            yield BatchRequest(rows, generator, Window.drawn(len(rows), self.cut, generator) if is_cut else None)

    def _augment(self, images: Any, targets: Any, generator: torch.Generator) -> tuple[Value, Value]:
        if "crop" in self.augment:
            images = random_crop(images, self.pad, generator)
        if "flip" in self.augment:
            moved = [images, targets] if is_dense(targets) else [images]
            images, targets = (*random_flip(generator, *moved), targets)[:2]
        if "rotate" in self.augment:
            images = random_rotate(images, generator)
        for augment in self.own:
            images, targets = augment(images, targets, generator)
        return images, targets
