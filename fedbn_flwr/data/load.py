"""Loads a data set: the embedded digits, an entry of the catalogue, a folder, or a name on the Hugging Face hub.

Small data sets are decoded into memory, one uint8 tensor per split; large ones stay on disk (see decoding.py).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.errors import DataError, needs
from fedbn_flwr.named import is_name

from .dataset import DataSet
from .returned import in_memory, returned
from .source import PARTS, Source


def load(source: Source) -> DataSet:
    """The data set that `source` describes."""
    given: Mapping[str, Any] | None = None
    if source.revision is not None and (source.name == "digits" or is_name(source.name)):
        raise DataError(
            f"data.revision is {source.revision!r}, which is for data sets of the hub, not for {source.name!r}"
        )
    if source.name == "digits":
        given = digits()
    elif is_name(source.name):
        given = returned(source)
    if given is not None and isinstance(given["train"], Mapping):
        return in_memory(source, given)
    with needs("data", f"data.name={source.name!r}"):
        from .columns import read_columns
    return read_columns(source, given)


def digits() -> Mapping[str, Any]:
    """1,797 handwritten digits of 8 by 8 pixels, in digits.json with their source; every fifth is a test image."""
    file = json.loads(Path(__file__).with_name("digits.json").read_text(encoding="utf-8"))
    rows = np.frombuffer(zlib.decompress(base64.b64decode(file["data"])), np.uint8).reshape(-1, 65)
    pixels = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    is_test = np.arange(len(rows)) % 5 == 4
    parts = {
        part: {"images": pixels[of], "labels": rows[of, -1]}
        for part, of in zip(PARTS, (~is_test, is_test), strict=True)
    }
    return {**parts, "classes": range(10)}
