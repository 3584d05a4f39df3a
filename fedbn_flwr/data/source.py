"""What to load: the settings of a data set that say where its examples are, and in which form they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedbn_flwr.errors import DataError

from . import Size

PARTS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """`digits`, an entry of the catalogue, a folder, a name on the Hugging Face hub, or `module:callable`.

    `root` (by default $FEDBN_DATA) is a folder of local copies: `root/name` is read if it exists. `revision` is the
    commit, tag or branch of a data set on the hub. `options` are arguments of the callable.
    `image`, `label` and `domain` name columns; by default they are found by type (`domain` by name). A `label` column
    of images contains segmentation masks. `domains` selects domains; `column` is that of a natural partition; `train`
    and `test` are names of splits.

    All images are resized to `size`, a side or height and width (by default the catalogue's). `fit` is `stretch`, or
    `crop`, which keeps the centre. `classes` is the number of classes of a segmentation data set. `class_names` are
    the classes in the order of their numbers; images of a part of them are enough.

    With `stream`, `readers` threads decode images on request; `auto` does so if all images together would take more
    than `memory` GiB.
    """

    name: str
    root: str | None = None
    revision: str | None = None
    image: str | None = None
    label: str | None = None
    domain: str | None = None
    domains: Sequence[str] = ()
    column: str | None = None
    train: str | None = None
    test: str | None = None
    size: int | Size | None = None
    fit: Literal["stretch", "crop"] | None = None
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    stream: bool | Literal["auto"] = "auto"
    memory: float = 8.0
    readers: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pixels(self) -> Size | None:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def check_in_memory(self) -> None:
        """Refuse the settings of columns of image files."""
        for key in ("image", "label", "domain", "column", "train", "test", "fit", "stream"):
            if (value := getattr(self, key)) not in (None, False, "auto", "stretch"):
                key = "partition.column" if key == "column" else key
                raise DataError(
                    f"data.{key} is {str(value).lower() if value is True else repr(value)}, which is for data sets "
                    f"with columns of image files, but the images of {self.name!r} are arrays in memory; leave it out"
                )
