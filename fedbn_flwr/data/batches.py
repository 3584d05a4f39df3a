"""Batches of normalised inputs, augmented a whole batch at a time on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import Inputs, Targets, Value, map_tensors
from fedbn_flwr.errors import DataError

from . import Moments
from .augment import random_crop, random_cut, random_flip, random_resized_crop, random_rotate
from .examples import MASK, Examples, main_input, main_key

Normalise = (
    Moments | Callable[[Value], Value]
)  # mean and deviation per feature or channel, or a function that raises an error
Augmentation = Callable[[Inputs, Targets, torch.Generator], tuple[Inputs, Targets]]


@functools.lru_cache(maxsize=16)
class Standardiser(nn.Module):
    """Turns examples into inputs of the model: zero mean and unit standard deviation per feature or channel.

    Tokens stay as they are. Missing values become the mean, zero, and so do padded ones.
    """

    def __init__(self, moments: Moments, device: torch.device) -> None:
        super().__init__()
        mean, deviation = (torch.tensor(list(values), device=device) for values in moments)
        # For pixels one multiplication and one addition: (x / 255 - mean) / deviation.
        scale, shift = (values.view(1, -1, 1, 1) for values in (1 / (255 * deviation), -mean / deviation))
        self.mean, self.deviation = nn.Buffer(mean), nn.Buffer(deviation)
        self.scale, self.shift = nn.Buffer(scale, persistent=False), nn.Buffer(shift, persistent=False)

    def forward(self, inputs: Value) -> Value:
        if isinstance(inputs, Tensor):
            return self._standardise(inputs)
        key, mask = main_key(inputs), inputs.get(MASK)
        values = self._standardise(inputs[key])
        if mask is not None and values.is_floating_point():
            values = values * mask.view(len(mask), *[1] * (values.ndim - 2), -1)
        return {**inputs, key: values}

    def _standardise(self, inputs: Tensor) -> Tensor:
        if inputs.dtype is torch.uint8 and inputs.ndim == 4:
            return inputs.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if inputs.dtype is torch.uint8:
            inputs = inputs.float() / 255
        if not inputs.is_floating_point():
            return inputs
        mean, deviation = (values.view(-1, *[1] * (inputs.ndim - 2)) for values in (self.mean, self.deviation))
        return ((inputs - mean) / deviation).nan_to_num_(0.0)


def _standardiser(normalise: Normalise, device: torch.device) -> Callable[[Value], Value]:
    return normalise if callable(normalise) else Standardiser(normalise, device)


# --- parts of the user, by the name `module:callable` ---


def own_augmentation(name: str, /, **options: object) -> Augmentation:
    """The augmentation `name` of a batch; a class is first called with `options`.

    If the callable has a parameter `generator`, it receives a batch `[N, C, H, W]` and a torch generator, and returns
    the batch changed. Otherwise it is called for one image at a time, as torchvision's transforms are, with Python's,
    NumPy's and torch's global generators seeded from that generator.
    """
    key = "data.augment"
    function = named.with_options(key, name, options)
    takes_batches = named.accepted(function, {"generator": None})

    def augment(images: Tensor, targets: Value, generator: torch.Generator) -> tuple[Tensor, Value]:
        try:
            if takes_batches:
                new = function(images, generator=generator)
            else:
                seed = int(torch.randint(2**62, (), generator=generator))
                with seeding.streams(seed, images.device):
                    new = torch.stack([function(image) for image in images])
        except Exception as error:
            raise DataError(f"{key}: {name!r} failed", f": {named.in_a_line(error)}") from error
        _check(f"{key}: {name!r}", new, images)
        return new, targets

    return augment


def _check(what: str, new: Inputs, old: Inputs) -> None:
    """Refuse inputs of another type or form; height and width of images may change."""
    new, old = (main_input(value) if isinstance(value, dict) else value for value in (new, old))
    kept = 2 if old.ndim == 4 else old.ndim
    if (
        not isinstance(new, Tensor)
        or (new.ndim, new.dtype, new.device) != (old.ndim, old.dtype, old.device)
        or new.shape[:kept] != old.shape[:kept]
    ):
        found = _described(new, new.shape) if isinstance(new, Tensor) else f"a {type(new).__name__}"
        expected = _described(old, [*old.shape[:kept], *["height", "width"][: old.ndim - kept]])
        raise DataError(f"{what} returned {found} for inputs {list(old.shape)}; expected {expected}")


def _described(tensor: Tensor, sides: Sequence[object]) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor [{', '.join(map(str, sides))}] on {tensor.device.type}"


# --- batches ---

_AT_ONCE = 1 << 17  # bytes of examples that are standardised at a time, unless a batch has more


class TestBatches:
    """All examples of a split, or those at `indices`, in order."""

    __test__ = False  # for pytest: not a test case

    def __init__(self, data: Examples, normalise: Normalise, batch_size: int, indices: Tensor | None = None) -> None:
        self.data = data
        self.batch_size = batch_size
        self.indices = torch.arange(len(data)) if indices is None else indices.cpu()
        self.num_examples = len(self.indices)
        self._normalise = _standardiser(normalise, data.device)

    def __iter__(self) -> Iterator[tuple[Value, Value]]:
        parts = list(self.indices.split(self.batch_size))
        if len(parts) > 1 and len(parts[-1]) == 1 < self.batch_size:  # one example may have no batch statistics
            parts[-2:] = [torch.cat(parts[-2:])]
        for rows in parts:
            images, targets = self.data.batch(rows)
            yield self._normalise(images), targets


class ClientBatches:
    """The training batches of one client: a data set that all clients share, and the indices of its partition.

    Order and augmentation are functions of (seed, round, client, epoch, batch). `cut` is the side in pixels of random
    square crops, which are not resized. `own` are augmentations of the user, applied last. `targets` are the moments
    of regression targets, which are scaled to mean zero and deviation one.
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
        targets: Moments | None = None,
    ) -> None:
        self.data = data
        self.indices = indices
        self.batch_size = batch_size
        self.num_examples = len(indices)
        self.client = client
        self.seed = seed
        known: dict[str, Augmentation] = {
            "resized_crop": random_resized_crop,
            "crop": functools.partial(random_crop, pad=pad),
            "flip": random_flip,
            "rotate": random_rotate,
        }
        self._augmentations = [*(function for name, function in known.items() if name in augment), *own]
        if cut is not None:
            self._augmentations.insert(0, functools.partial(random_cut, side=cut))
        self._normalise = _standardiser(normalise, data.device)
        self._scale = _standardiser(targets, data.device) if targets else lambda targets: targets
        # Small batches are standardised many at a time; a batch is augmented by itself.
        size = max(1, data.nbytes * batch_size // max(1, len(data)))
        self._at_once = 1 if self._augmentations else max(1, _AT_ONCE // size)

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Value, Value]]:
        """Each example of the client once, in an order drawn for this round and epoch."""
        order = torch.randperm(
            self.num_examples, generator=seeding.generator(self.seed, "order", server_round, self.client, epoch)
        )
        if self.num_examples % self.batch_size == 1 < self.num_examples:
            # Batch norm cannot compute a variance from one example. Other epochs have this one in a larger batch.
            order = order[:-1]
        for number, rows in enumerate(self.indices.cpu()[order].split(self._at_once * self.batch_size)):
            inputs, targets = self.data.batch(rows)
            if self._augmentations:
                generator = seeding.generator(self.seed, "augment", server_round, self.client, epoch, number)
                for augment in self._augmentations:
                    inputs, targets = augment(inputs, targets, generator)
            inputs, targets = self._normalise(inputs), self._scale(targets)
            for start in range(0, len(rows), self.batch_size):
                yield _cut(inputs, start, self.batch_size), _cut(targets, start, self.batch_size)


def _cut(values: Value, start: int, size: int) -> Value:
    """A batch of these values, in memory of its own: where it begins may change the last bits of a matrix product."""
    return map_tensors(lambda part: part if len(part) <= size else part[start : start + size].clone(), values)
