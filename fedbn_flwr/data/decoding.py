"""Decodes image files and resizes them for the model; splits that fit in memory are cached as arrays in a folder.

Cached arrays are memory-mapped: a second run starts at once, and processes on one machine share the pages.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.cores import cores
from fedbn_flwr.errors import DataError, StorageError

from . import IGNORED, Size
from .augment import Window, crop_and_resize

_MARGIN = 224 / 256  # share of the side that a centre crop keeps, as is usual for ImageNet


@dataclass(frozen=True)
class Files:
    """The image files of a split, and how they are decoded.

    Parameters
    ----------
    split, column
        A split of `datasets`, and its column of images.
    name
        The data set's name in error messages.
    size
        Images are resized to it; None leaves them unchanged.
    fit
        How an image with another aspect ratio is resized: `stretch`, or `crop`, which leaves a margin around `size`
        and cuts it off.
    masks
        The column of segmentation masks; None for classification.
    ids
        The value of class 0, 1, and so on in a mask; other values are ignored. None: the value is the class.
    classes
        Number of classes, for segmentation.
    """

    split: Any
    column: str
    name: str
    size: Size | None = None
    fit: str = "stretch"
    masks: str | None = None
    ids: tuple[int, ...] | None = None
    classes: int = 0

    def __len__(self) -> int:
        return len(self.split)

    # --- one row ---

    def pixels(self, row: int) -> np.ndarray:
        """The image of a row at the model's size, uint8 [C, H, W]."""
        return _array(self._fitted(self._open(row)))

    def pair(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Image and mask of a row, uint8 [C, H, W] and [H, W]."""
        return self._pair(self._open(row), self._open_mask(row), row)

    def look(self, row: int) -> np.ndarray:
        """The image of a row; raises DataError if the image or its mask cannot be read."""
        return self.pixels(row) if self.masks is None else self.pair(row)[0]

    def window(self, row: int, window: Window, number: int, size: Size) -> np.ndarray:
        """Crop `number` of `window`, cut from the stored image of a row and resized."""
        picture = self._open(row)
        height, width = size
        top, left, tall, wide = window.box(number, picture.height, picture.width)
        if tall <= height and wide <= width:  # enlarge exactly as for images in memory
            whole = torch.from_numpy(np.array(_array(picture)))[None]
            return crop_and_resize(whole, torch.tensor([[top, left, tall, wide]]), size)[0].numpy()
        from PIL import Image

        box = picture.crop((left, top, left + wide, top + tall))
        return _array(box.resize((width, height), Image.Resampling.BILINEAR))  # smooths when it shrinks

    @cached_property
    def _files(self) -> Any:
        """The columns of images and masks as bytes or paths, not decoded."""
        import datasets

        columns = [self.column] if self.masks is None else [self.column, self.masks]
        split = self.split.select_columns(columns)
        for column in columns:
            split = split.cast_column(column, datasets.Image(decode=False))
        return split

    def _open(self, row: int) -> Any:
        return self._picture(self._files[row][self.column], row)

    def _open_mask(self, row: int) -> Any:
        return self._mask(self._files[row][self.masks], row)

    # --- all rows ---

    def decode(self) -> Tensor:
        """All images, uint8 [N, C, H, W]."""
        return self._cached("images", lambda: _stacked(self._all(self.column, self._whole), self.name))

    def decode_masks(self) -> Tensor:
        """All masks, uint8 [N, H, W]."""
        assert self.masks is not None
        return self._cached("masks", lambda: _stacked(self._all(self.masks, self._whole_mask), self.name))

    def _all(self, column: str | None, read: Any) -> list[np.ndarray]:
        raw = self._files[column][:]  # all at once: single rows take 0.2 ms each
        with ThreadPoolExecutor(cores()) as pool:  # PIL decodes outside the interpreter lock
            return list(pool.map(read, raw, range(len(raw))))

    def _whole(self, item: Any, row: int) -> np.ndarray:
        return _array(self._fitted(self._picture(item, row)))

    def _whole_mask(self, item: Any, row: int) -> np.ndarray:
        return np.asarray(self._fitted(self._mask(item, row), smooth=False))

    def _cached(self, what: str, make: Any) -> Tensor:
        facts = (self.split._fingerprint, self.column, self.masks, self.size, self.fit, self.ids, self.classes)
        key = hashlib.sha256(f"3|{what}|{facts}|{self._stamps}".encode()).hexdigest()[:24]
        file = _cache_folder() / f"{key}.npy"
        with suppress(OSError, ValueError, EOFError):  # absent or damaged
            return _mapped(file)
        _write(file, make())
        return _mapped(file)

    @cached_property
    def _stamps(self) -> str:
        """A hash of the times and sizes of the rows' files; the split's fingerprint has their paths only."""
        facts = hashlib.sha256()
        for column in self._files.column_names:
            for chunk in self._files.data.column(column).chunks:
                for path in chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist():
                    with suppress(OSError, TypeError, ValueError):  # decoding it will raise an error that has the row
                        stat = os.stat(path)
                        facts.update(f"{os.path.abspath(path)}|{stat.st_mtime_ns}|{stat.st_size}\n".encode())
        return facts.hexdigest()

    # --- one file ---

    def _pair(self, picture: Any, mask: Any, row: int) -> tuple[np.ndarray, np.ndarray]:
        if picture.size != mask.size:
            raise DataError(
                f"{self.name!r}: row {row} has an image of {picture.height}x{picture.width} pixels, but a mask of "
                f"{mask.height}x{mask.width} in {self.masks!r}"
            )
        return _array(self._fitted(picture)), np.asarray(self._fitted(mask, smooth=False))

    def _picture(self, item: Any, row: int) -> Any:
        from PIL import Image

        opened = self._read(item, row, "image")
        # Pillow would set values above 255 to 255. PNG and PGM have no more than 16 bits, also in mode I.
        if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
            return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
        if opened.mode in ("I", "F"):
            kind = "whole" if opened.mode == "I" else "floating-point"
            raise DataError(
                f"{self.name!r}: the image in row {row}{_where(item)} has {kind} numbers of 32 bits (mode "
                f"{opened.mode}), whose range is unknown; expected 8 or 16 bits"
            )
        return opened.convert("L" if opened.mode in ("1", "L") else "RGB")

    def _mask(self, item: Any, row: int) -> Any:
        """A mask of class numbers, with 255 for ignored pixels."""
        from PIL import Image

        opened = self._read(item, row, "mask")
        if opened.mode not in ("1", "L", "P", "I", "I;16"):
            raise DataError(
                f"{self.name!r}: the mask in row {row} has several values per pixel (mode {opened.mode}); expected "
                "one, the pixel's class"
            )
        values = np.asarray(opened).astype(np.int64)
        table = np.full(257, -1)  # the last entry is for values outside 0 to 255
        table[IGNORED] = IGNORED
        if self.ids is None:
            table[: self.classes] = np.arange(self.classes)
        else:
            table[:] = IGNORED
            table[list(self.ids)] = np.arange(len(self.ids))
        labels = table[np.where((values < 0) | (values > 255), 256, values)]
        if (labels < 0).any():
            raise DataError(
                f"{self.name!r}: the mask in row {row} has the value {values[labels < 0][0]}; expected 0 to "
                f"{self.classes - 1}, or {IGNORED} for an ignored pixel (data.classes is {self.classes})"
            )
        return Image.fromarray(labels.astype(np.uint8))

    def _read(self, item: Any, row: int, what: str) -> Any:
        from PIL import Image

        try:
            source = io.BytesIO(item["bytes"]) if item.get("bytes") is not None else item["path"]
            with Image.open(source) as opened:
                opened.load()
                return opened
        except Exception as error:  # Pillow's formats raise many kinds, and one of its own for images above its limit
            raise DataError(f"{self.name!r}: the {what} in row {row}{_where(item)} cannot be read: {error}") from None

    def _fitted(self, picture: Any, *, smooth: bool = True) -> Any:
        from PIL import Image

        if self.size is None or picture.size == self.size[::-1]:
            return picture
        how = Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST
        height, width = self.size
        if self.fit == "stretch":
            return picture.resize((width, height), how)
        tall, wide = round(height / _MARGIN), round(width / _MARGIN)
        if picture.width * tall >= picture.height * wide:  # the height is resized to the margin, the width is cut
            wide = picture.width * tall // picture.height
        else:
            tall = picture.height * wide // picture.width
        picture = picture.resize((wide, tall), how)
        left, top = round((wide - width) / 2), round((tall - height) / 2)
        return picture.crop((left, top, left + width, top + height))


def coloured(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Repeat the channel of a greyscale image if the data set has colour."""
    return np.repeat(pixels, channels, 0) if len(pixels) == 1 < channels else pixels


def _where(item: Any) -> str:
    return f" ({item['path']})" if isinstance(item, dict) and item.get("path") else ""


def _array(picture: Any) -> np.ndarray:
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _stacked(pixels: Sequence[np.ndarray], name: str) -> np.ndarray:
    if pixels[0].ndim == 3:
        most = max(len(array) for array in pixels)
        pixels = [coloured(array, most) for array in pixels]
    if len(shapes := {array.shape[-2:] for array in pixels}) > 1:
        few = ", ".join(f"{h}x{w}" for h, w in sorted(shapes)[:4])
        raise DataError(f"{name!r} has images of {len(shapes)} sizes ({few}, ...); set data.size to resize them")
    return np.stack(pixels)


def _cache_folder() -> Path:
    if given := os.environ.get("FEDBN_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fedbn-flwr"


def _mapped(file: Path) -> Tensor:
    # Copy-on-write, because torch warns about read-only arrays; no code writes to it.
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def _write(file: Path, array: np.ndarray) -> None:
    """Write so that other processes see the whole file or none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as temporary:
            try:
                np.save(temporary, array)
                temporary.close()
                os.replace(temporary.name, file)
            finally:
                Path(temporary.name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"the cache of decoded images, {str(file.parent)!r}, cannot be written: {error.strerror or error}; set "
            f"FEDBN_CACHE to a folder with {array.nbytes // 2**20 + 1} MiB of free space"
        ) from None
