"""Image files are decoded once, at the model's size, into arrays in a folder.

The arrays are memory-mapped: a second run starts at once, processes on one machine share the pages, and a set may be
larger than the memory. Those used least recently are removed when the folder is full.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from fedbn_flwr.cores import cores
from fedbn_flwr.errors import DataError, StorageError, error_if
from fedbn_flwr.trees import Tree

from . import IGNORED, Size
from .examples import Examples, main_input
from .table import Table

_MARGIN = 224 / 256  # share of the side that a centre crop keeps, as is usual for ImageNet
_MADE = "decoding-"  # the beginning of the name of a folder in which files are made
_AHEAD = 64  # images that are decoded before they are written
_GB = 100  # the size of the cache, unless FEDBN_CACHE_GB is set

_OLD = 86_400  # seconds after which the folder of a process that is decoding is one that was killed

_used: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()  # files that this process maps into memory


@dataclass(frozen=True)
class Files:
    """The image files of a split, and how they are decoded.

    Parameters
    ----------
    table, column
        A table, and its column of images.
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
    channels
        The least number of channels: with 3, greyscale images become images of three equal channels.
    """

    table: Table = field(repr=False)
    column: str
    name: str = field(repr=False)
    size: Size | None = None
    fit: str = "stretch"
    masks: str | None = None
    ids: tuple[int, ...] | None = None
    classes: int = 0
    channels: int = 1

    def decoded(self, chosen: Examples) -> Examples:
        """Examples whose inputs are rows of the table, with images, uint8 [N, C, H, W], and masks, uint8 [N, H, W]."""
        rows = main_input(chosen.inputs).numpy()
        key = hashlib.sha256(f"8|{self.table.fingerprint}|{self}|{self._stamps()}|".encode() + rows.tobytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fedbn-flwr"
        folder = Path(os.environ.get("FEDBN_CACHE") or cache)
        names = [f"{key.hexdigest()[:24]}.{column}.npy" for column in range(len(self._files))]
        with suppress(OSError, ValueError, EOFError):  # absent or damaged
            return _mapped(folder, names, chosen)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # So that other processes see whole files or none.
            with TemporaryDirectory(prefix=_MADE, dir=folder) as made:
                new = [Path(made) / name for name in names]
                if not self._write(rows, new, self.channels):
                    self._write(rows, new, channels=3)
                for file in new:
                    os.replace(file, folder / file.name)
            found = _mapped(folder, names, chosen)
            _trim(folder)
        except OSError as error:
            raise StorageError(
                f"the cache of decoded images, {str(folder)!r}, cannot be written: {error.strerror or error}; set "
                "FEDBN_CACHE to a folder with more free space"
            ) from None
        return found

    def _write(self, rows: np.ndarray, files: Sequence[Path], channels: int) -> bool:
        """Write the images, and the masks, to a file each; False if an image has more channels."""
        sizes: set[tuple[int, ...]] = set()
        with ExitStack() as stack:
            opened = [stack.enter_context(file.open("wb")) for file in files]
            pool = stack.enter_context(ThreadPoolExecutor(cores()))  # PIL decodes outside the interpreter lock
            for some in np.split(rows, range(_AHEAD, len(rows), _AHEAD)):
                images, *masks = zip(*pool.map(self._decoded, some), strict=True)
                if max(map(len, images)) > channels:
                    return False
                sizes |= {image.shape[1:] for image in images}
                few = ", ".join(f"{h}x{w}" for h, w in sorted(sizes)[:4])
                problem = f"{self.name!r} has images of several sizes ({few}, ...); set data.size to resize them"
                error_if(len(sizes) > 1, problem)
                coloured = [np.broadcast_to(image, (channels, *image.shape[1:])) for image in images]
                for file, arrays in zip(opened, (coloured, *masks), strict=True):
                    if not file.tell():
                        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), *arrays[0].shape)}
                        np.lib.format.write_array_header_1_0(file, header)
                    file.write(np.stack(arrays).tobytes())
        return True

    @property
    def _files(self) -> list[pa.ChunkedArray]:
        """The bytes or paths of images, and of masks."""
        return [self.table.columns[column] for column in (self.column, self.masks) if column is not None]

    def _stamps(self) -> str:
        """A hash of the rows' images in memory, and of the times and sizes of those in files.

        A table with a fingerprint, which may be larger than the memory, is known by it and by the paths of its files.
        """
        facts = hashlib.sha256()
        for content, paths in (column.flatten() for column in self._files):
            for part in content.chunks if not self.table.fingerprint else ():
                for buffer in filter(None, part.buffers()):
                    facts.update(buffer)
            for path in paths.filter(content.is_null()).to_pylist():
                with suppress(OSError, TypeError, ValueError):  # decoding it will raise an error that has the row
                    stat = os.stat(path)
                    facts.update(f"{os.path.abspath(path)}|{stat.st_mtime_ns}|{stat.st_size}\n".encode())
        return facts.hexdigest()

    # --- one row ---

    def _decoded(self, row: int) -> list[np.ndarray]:
        """The image of a row at the model's size, uint8 [C, H, W], and its mask, uint8 [H, W], for segmentation."""
        item, *mask = (column[row].as_py() or {} for column in self._files)
        picture = self._picture(item, row)
        found = [np.atleast_3d(np.asarray(self._fitted(picture))).transpose(2, 0, 1)]
        if self.masks is not None:
            labels = self._mask(mask[0], row)
            error_if(
                picture.size != labels.size,
                f"{self.name!r}: row {row} has an image of {picture.height}x{picture.width} pixels, but a mask of "
                f"{labels.height}x{labels.width} in {self.masks!r}",
            )
            found.append(np.asarray(self._fitted(labels, smooth=False)))
        return found

    def _picture(self, item: Tree, row: int) -> Image.Image:
        opened = self._read(item, row, "image")
        # Pillow would set values above 255 to 255. PNG and PGM have at most 16 bits, even in mode I.
        if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
            return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
        if opened.mode in ("I", "F"):
            raise DataError(
                f"{self.name!r}: the image in row {row} has {'whole' if opened.mode == 'I' else 'floating-point'} "
                f"numbers of 32 bits (mode {opened.mode}), whose range is unknown; expected 8 or 16 bits",
                _where(item),
            )
        return opened.convert("L" if opened.mode in ("1", "L") else "RGB")

    def _mask(self, item: Tree, row: int) -> Image.Image:
        """A mask of class numbers, with 255 for ignored pixels."""
        opened = self._read(item, row, "mask")
        error_if(
            opened.mode not in ("1", "L", "P", "I", "I;16"),
            f"{self.name!r}: the mask in row {row} has several values per pixel (mode {opened.mode}); expected "
            "one, the pixel's class",
        )
        values = np.asarray(opened).astype(np.int64)
        table = np.full(257, -1 if self.ids is None else IGNORED)  # the last entry is for values outside 0 to 255
        ids = range(self.classes) if self.ids is None else self.ids
        table[[*ids, IGNORED]] = [*range(len(ids)), IGNORED]
        labels = table[np.where((values < 0) | (values > 255), 256, values)]
        if (labels < 0).any():
            raise DataError(
                f"{self.name!r}: the mask in row {row} has other values than 0 to {self.classes - 1}, and {IGNORED} "
                f"for an ignored pixel (data.classes is {self.classes})",
                f": {values[labels < 0][0]}",
            )
        return Image.fromarray(labels.astype(np.uint8))

    def _read(self, item: Tree, row: int, what: str) -> Image.Image:
        try:
            source = io.BytesIO(item["bytes"]) if item.get("bytes") is not None else item["path"]
            with Image.open(source) as opened:
                opened.load()
                return opened
        except Exception as error:  # Pillow's formats raise many kinds, and one of its own for images above its limit
            problem = f"{self.name!r}: the {what} in row {row} cannot be read"
            raise DataError(problem, f"{_where(item)}: {error}") from None

    def _fitted(self, picture: Image.Image, *, smooth: bool = True) -> Image.Image:
        if self.size is None or picture.size == self.size[::-1]:
            return picture
        how = Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST
        height, width = self.size
        if self.fit == "stretch":
            return picture.resize((width, height), how)
        tall, wide = round(height / _MARGIN), round(width / _MARGIN)
        # One side is resized to the margin, and the other, which is longer, is cut.
        wide, tall = (
            max(wide, picture.width * tall // picture.height),
            max(tall, picture.height * wide // picture.width),
        )
        left, top = round((wide - width) / 2), round((tall - height) / 2)
        return picture.resize((wide, tall), how).crop((left, top, left + width, top + height))


def _where(item: Tree) -> str:
    return f" ({item['path']})" if item and item.get("path") else ""


def _trim(folder: Path) -> None:
    """Remove the files that were used least recently, until the others fit; those that this process uses stay.

    Folders of processes that were killed are removed too.
    """
    try:
        left = float(given := os.environ.get("FEDBN_CACHE_GB", _GB)) * 1e9
    except ValueError:
        raise DataError(f"FEDBN_CACHE_GB is {given!r}; expected a number of gigabytes") from None
    with suppress(FileNotFoundError):  # another process trims too
        for path in folder.glob(f"{_MADE}*/"):
            if path.stat().st_mtime < time.time() - _OLD:
                shutil.rmtree(path, ignore_errors=True)
        files = [
            (path.name in _used, (at := path.stat()).st_atime_ns, at.st_size, path) for path in folder.glob("*.npy")
        ]
        for is_used, _, size, path in sorted(files, reverse=True):
            left -= size
            if left < 0 and not is_used:
                path.unlink()


def _mapped(folder: Path, names: Sequence[str], chosen: Examples) -> Examples:
    # Copy-on-write, because torch warns about read-only arrays; no code writes to it.
    arrays = [np.load(folder / name, mmap_mode="c") for name in names]
    images, *masks = map(torch.from_numpy, arrays)
    _used.update(zip(names, arrays, strict=True))
    for name in names:
        with suppress(OSError):  # a file of another user
            os.utime(folder / name, ns=(time.time_ns(), (folder / name).stat().st_mtime_ns))  # used now
    return replace(chosen, inputs=images, targets=masks[0] if masks else chosen.targets)
