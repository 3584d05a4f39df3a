"""Augmentations and normalisations of the user, by the name `module:callable`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import Value
from fedbn_flwr.errors import DataError

from .batches import Augmentation
from .examples import is_dense


def own_augmentation(name: str, **options: Any) -> Augmentation:
    """The augmentation `name` of a batch; a class is first called with `options`.

    If the callable has a parameter `generator`, it receives a batch and a torch generator: `images [N, C, H, W]`, and
    for segmentation `masks [N, H, W]`, and returns them changed. Otherwise it is called for one image at a time, as
    torchvision's transforms are, with Python's, NumPy's and torch's global generators seeded from that generator.
    """
    key = "data.augment"
    function = named.load(key, name)
    if isinstance(function, type):
        function = named.call(key, name, **options)
        if not callable(function):
            raise DataError(
                f"{key}: {name!r} makes a {type(function).__name__}; expected a callable, for instance a transform"
            )
    elif options:
        function = functools.partial(function, **options)
    taken = named.accepted(function, dict.fromkeys(("generator", "masks")))

    def augment(images: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        dense = is_dense(targets)
        if dense and len(taken) < 2:
            raise DataError(
                f"{key}: {name!r} would not change the masks of segmentation data; expected a function of images, "
                "masks and generator that returns images and masks"
            )
        masks = {"masks": targets} if dense else {}
        try:
            if "generator" in taken:
                changed = function(images, **masks, generator=generator)
            else:
                seed = int(torch.randint(2**62, (), generator=generator))
                with seeding.streams(seed, images.device):
                    changed = torch.stack([function(image) for image in images])
        except Exception as error:
            raise DataError(f"{key}: {name!r} failed: {named.in_a_line(error)}") from error
        new, targets = changed if dense and isinstance(changed, tuple) else (changed, targets)
        _check(f"{key}: {name!r}", new, images, same_type=True)
        return new, targets

    return augment


def own_normalisation(name: str) -> Callable[[Value], Value]:
    """The function `name`, from a batch of examples as they are stored to inputs of the model."""
    key = "data.normalise"
    named.load(key, name)

    def normalise(stored: Value) -> Value:
        inputs: Value = named.call(key, name, stored)
        _check(f"{key}={name!r}", inputs, stored, same_type=False)
        return inputs

    return normalise


def _check(what: str, new: Any, old: Any, *, same_type: bool) -> None:
    """Refuse inputs of another type or form; height and width of images may change."""
    if isinstance(new, dict) and isinstance(old, dict):
        return
    if isinstance(old, dict):
        raise DataError(f"{what} returned a {type(new).__name__}; expected a dict")
    kept = 2 if old.ndim == 4 else old.ndim
    sides = ", ".join([*map(str, old.shape[:kept]), *["height", "width"][: old.ndim - kept]])
    expected = f"a {old.dtype if same_type else 'float'} tensor [{sides}]".replace("torch.", "")
    if not isinstance(new, Tensor):
        raise DataError(f"{what} returned a {type(new).__name__}; expected {expected}")
    is_right = new.dtype == old.dtype if same_type else new.is_floating_point()
    if new.ndim != old.ndim or new.shape[:kept] != old.shape[:kept] or not is_right or new.device != old.device:
        found = f"{str(new.dtype).removeprefix('torch.')} {list(new.shape)} on {new.device.type}"
        raise DataError(
            f"{what} returned {found} for inputs {list(old.shape)}; expected {expected} on {old.device.type}"
        )
