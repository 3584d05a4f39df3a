"""Image files: how they are decoded and resized, streamed to training, or cached as arrays in a folder.

Cached arrays are memory-mapped: a second run starts at once, and processes on one machine share the pages.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedbn_flwr.cores import cores
from fedbn_flwr.errors import DataError, StorageError

from . import IGNORED, Size
from .augment import Window, crop_and_resize
from .examples import BatchRequest, InMemory, Labelled, Tag

_MARGIN = 224 / 256  # share of the side that a centre crop keeps, as is usual for ImageNet
_TRIED = 16  # images of a streamed split that are checked before training
_MEASURED = 512  # images of a streamed split from which its mean and standard deviation are estimated

Example = tuple[np.ndarray, np.ndarray | None]  # image uint8 [C, H, W], and mask uint8 [H, W] for segmentation


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

    def example(self, row: int) -> Example:
        """The image of a row at the model's size, and its mask."""
        return self._decoded(row, *self._files[row].values())

    def window(self, row: int, window: Window, number: int, size: Sequence[int]) -> np.ndarray:
        """Crop `number` of `window`, cut from the stored image of a row and resized."""
        picture = self._picture(self._files[row][self.column], row)
        height, width = size
        top, left, tall, wide = window.box(number, picture.height, picture.width)
        if tall <= height and wide <= width:  # enlarge exactly as for images in memory
            whole = torch.from_numpy(np.array(_array(picture)))[None]
            return crop_and_resize(whole, torch.tensor([[top, left, tall, wide]]), size)[0].numpy()
        box = picture.crop((left, top, left + wide, top + tall))
        return _array(box.resize((width, height), Image.Resampling.BILINEAR))  # smooths when it shrinks

    def decode(self) -> list[Tensor]:
        """All images, uint8 [N, C, H, W], and all masks, uint8 [N, H, W], if there are any."""
        facts = (self.split._fingerprint, self.column, self.masks, self.size, self.fit, self.ids, self.classes)
        key = hashlib.sha256(f"4|{facts}|{self._stamps()}".encode()).hexdigest()[:24]
        files = [_cache_folder() / f"{key}.{column}.npy" for column in range(len(self._files.column_names))]
        with suppress(OSError, ValueError, EOFError):  # absent or damaged
            return list(map(_mapped, files))
        columns = [self._files[column][:] for column in self._files.column_names]  # single rows take 0.2 ms each
        with ThreadPoolExecutor(cores()) as pool:  # PIL decodes outside the interpreter lock
            examples = pool.map(self._decoded, range(len(self)), *columns)
            for file, arrays in zip(files, zip(*examples, strict=True), strict=False):
                _write(file, self.stacked(arrays))
        return list(map(_mapped, files))

    def select(self, rows: Tensor) -> Files:
        return replace(self, split=self.split.select(torch.arange(len(self))[rows].numpy()))

    @cached_property
    def _files(self) -> Any:
        """The columns of images and masks as bytes or paths, not decoded."""
        columns = [self.column] if self.masks is None else [self.column, self.masks]
        split = self.split.select_columns(columns)
        for column in columns:
            split = split.cast_column(column, datasets.Image(decode=False))
        return split

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

    # --- one row ---

    def _decoded(self, row: int, item: Any, mask: Any = None) -> Example:
        picture = self._picture(item, row)
        if self.masks is None:
            return _array(self._fitted(picture)), None
        labels = self._mask(mask, row)
        if picture.size != labels.size:
            raise DataError(
                f"{self.name!r}: row {row} has an image of {picture.height}x{picture.width} pixels, but a mask of "
                f"{labels.height}x{labels.width} in {self.masks!r}"
            )
        return _array(self._fitted(picture)), np.asarray(self._fitted(labels, smooth=False))

    def _picture(self, item: Any, row: int) -> Any:
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
        opened = self._read(item, row, "mask")
        if opened.mode not in ("1", "L", "P", "I", "I;16"):
            raise DataError(
                f"{self.name!r}: the mask in row {row} has several values per pixel (mode {opened.mode}); expected "
                "one, the pixel's class"
            )
        values = np.asarray(opened).astype(np.int64)
        table = np.full(257, -1 if self.ids is None else IGNORED)  # the last entry is for values outside 0 to 255
        table[IGNORED] = IGNORED
        ids = list(range(self.classes) if self.ids is None else self.ids)
        table[ids] = np.arange(len(ids))
        labels = table[np.where((values < 0) | (values > 255), 256, values)]
        if (labels < 0).any():
            raise DataError(
                f"{self.name!r}: the mask in row {row} has the value {values[labels < 0][0]}; expected 0 to "
                f"{self.classes - 1}, or {IGNORED} for an ignored pixel (data.classes is {self.classes})"
            )
        return Image.fromarray(labels.astype(np.uint8))

    def _read(self, item: Any, row: int, what: str) -> Any:
        try:
            source = io.BytesIO(item["bytes"]) if item.get("bytes") is not None else item["path"]
            with Image.open(source) as opened:
                opened.load()
                return opened
        except Exception as error:  # Pillow's formats raise many kinds, and one of its own for images above its limit
            raise DataError(f"{self.name!r}: the {what} in row {row}{_where(item)} cannot be read: {error}") from None

    def _fitted(self, picture: Any, *, smooth: bool = True) -> Any:
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

    def stacked(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Images with the channels of those that have most; or masks."""
        if arrays[0].ndim == 3:
            most = max(map(len, arrays))
            arrays = [coloured(array, most) for array in arrays]
        if len(shapes := {array.shape[-2:] for array in arrays}) > 1:
            few = ", ".join(f"{h}x{w}" for h, w in sorted(shapes)[:4])
            raise DataError(
                f"{self.name!r} has images of {len(shapes)} sizes ({few}, ...); set data.size to resize them"
            )
        return np.stack(arrays)


def coloured(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Repeat the channel of a greyscale image if the data set has colour."""
    return np.repeat(pixels, channels, 0) if len(pixels) == 1 < channels else pixels


def _where(item: Any) -> str:
    return f" ({item['path']})" if item and item.get("path") else ""


def _array(picture: Any) -> np.ndarray:
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


# --- the cache ---------------------------------------------------------------


def _cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Path(os.environ.get("FEDBN_CACHE") or cache / "fedbn-flwr")


def _mapped(file: Path) -> Tensor:
    # Copy-on-write, because torch warns about read-only arrays; no code writes to it.
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def _write(file: Path, array: np.ndarray) -> None:
    """Write so that other processes see the whole file or none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
                np.save(made, array)
            os.replace(made.name, file)
    except OSError as error:
        raise StorageError(
            f"the cache of decoded images, {str(file.parent)!r}, cannot be written: {error.strerror or error}; set "
            f"FEDBN_CACHE to a folder with {array.nbytes // 2**20 + 1} MiB of free space"
        ) from None


# --- streams -----------------------------------------------------------------


@dataclass(frozen=True)
class Stream(Labelled):
    """Images on disk, decoded by a few threads ahead of training.

    Decoding releases the interpreter lock. The threads end after each pass over a plan, so that no forked process
    inherits them. At most two batches (or two images per thread) are decoded ahead.
    """

    files: Files
    targets: Tensor  # int64 [N]: the class of each image, or zeros for segmentation; or floats, as in memory
    shape: tuple[int, ...] = ()  # channels, height and width, once images were tried
    readers: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Tensor, Tensor, Tag]]:
        waiting: deque[tuple[BatchRequest[Tag], list[Future[Example]]]] = deque()
        todo = iter(plan)
        # One PyTorch thread in each: a forked process has no thread pool and would wait for it.
        pool = ThreadPoolExecutor(self.readers, "reader", initializer=torch.set_num_threads, initargs=(1,))
        try:
            while True:
                while sum(len(futures) for _, futures in waiting) < 2 * self.readers or len(waiting) < 2:
                    request = next(todo, None)
                    if request is None:
                        break
                    rows = enumerate(request.rows.tolist())
                    waiting.append((request, [pool.submit(self._read, row, i, request.window) for i, row in rows]))
                if not waiting:
                    return
                request, futures = waiting.popleft()
                images, masks = zip(*(future.result() for future in futures), strict=True)
                targets = self.targets[request.rows]
                if self.files.masks is not None:
                    targets = torch.from_numpy(np.stack(masks)).long()
                yield self._sent(torch.from_numpy(np.stack(images))), self._sent(targets), request.tag
        finally:  # also if a round ends before the plan
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, row: int, number: int, window: Window | None) -> Example:
        mask = None
        if window is not None and window.cut is None:
            pixels = self.files.window(row, window, number, self.shape[1:])
        else:
            pixels, mask = self.files.example(row)
        channels, height, width = self.shape
        if pixels.shape[1:] != (height, width):
            raise DataError(
                f"{self.files.name!r}: the image in row {row} has {pixels.shape[1]}x{pixels.shape[2]} pixels, others "
                f"{height}x{width}; set data.size to resize them"
            )
        if len(pixels) > channels:
            raise DataError(
                f"{self.files.name!r}: the image in row {row} has colour, but those checked before training "
                "are greyscale; set data.stream to false to check all images"
            )
        if window is not None and window.cut is not None:
            top, left, tall, wide = window.box(number, height, width)
            pixels = pixels[:, top : top + tall, left : left + wide]
            mask = None if mask is None else mask[top : top + tall, left : left + wide]
        return coloured(pixels, channels), mask

    def _sent(self, values: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def sample(self) -> Tensor:
        """Images that are evenly spaced, from which mean and standard deviation are measured."""
        ((images, _, _),) = self.batches([BatchRequest(spread(len(self), _MEASURED), None)])
        return images

    def tried(self) -> Stream:
        """With the shape of some images, which are decoded now to count channels and to find broken files."""
        rows = spread(len(self), _TRIED).tolist()
        with ThreadPoolExecutor(self.readers) as pool:
            images = [pixels for pixels, _ in pool.map(self.files.example, rows)]
        return replace(self, shape=self.files.stacked(images).shape[1:])

    def decoded(self) -> InMemory:
        images, *masks = self.files.decode()
        return InMemory(images, *masks or [self.targets])

    def blank(self, number: int) -> Tensor:
        """Inputs of this form that are zero, to try a model."""
        return torch.zeros(number, *self.shape)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded images and masks, if each has the size of the first."""
        return len(self.files) * sum(part.size for part in self.files.example(0) if part is not None)

    def coloured(self, channels: int) -> Stream:
        return replace(self, shape=(channels, *self.shape[1:]))

    def select(self, rows: Tensor) -> Stream:
        return replace(self, files=self.files.select(rows), targets=self.targets[rows])

    def to(self, device: torch.device) -> Stream:
        return replace(self, device=device)


def spread(count: int, most: int) -> Tensor:
    """Up to `most` evenly spaced row numbers of `count` rows, including the first and the last."""
    return torch.from_numpy(np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)))
