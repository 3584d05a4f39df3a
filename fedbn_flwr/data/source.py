"""What to load: the settings of a data set that say where its examples are, and in which form they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import Size

PARTS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """`digits`, an entry of the catalogue, a file, a folder, a name on the Hugging Face hub, or `module:callable`.

    `root` (by default $FEDBN_DATA) is a folder of local copies: `root/name` is read if it exists. `revision` is the
    commit, tag or branch of a data set on the hub. `options` are arguments of the callable.
    `inputs`, `label`, `domain` and `group` name columns, the first two one or several; docs/data.md says which are
    found without a name. A `label` column of images contains segmentation masks. `domains` selects domains. `train` and
    `test` are names of splits; a number as `test` is the share of the training split that is held out as test split.

    `shape` is that of the inputs of one example; None as its last number stands for any length. `tokens` is the number
    of tokens, `categories` gives the values of columns of texts, `missing` is `mean` if a missing value is replaced.
    `classes` is the number of classes. `class_names` are the classes in the order of their numbers; examples of a part
    of them are enough.

    All images are resized to `size`, a side or height and width (by default the catalogue's). `fit` is `stretch`, or
    `crop`, which keeps the centre. With `stream`, `readers` threads decode images on request; `auto` does so if all
    images together would take more than `memory` GiB.
    """

    name: str
    root: str | None = None
    revision: str | None = None
    inputs: str | Sequence[str] | None = None
    label: str | Sequence[str] | None = None
    domain: str | None = None
    domains: Sequence[str] = ()
    group: str | None = None
    train: str | None = None
    test: str | float | None = None
    task: str | None = None
    shape: Sequence[int | None] = ()
    tokens: int | None = None
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    missing: Literal["mean"] | None = None
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

    @property
    def held_out(self) -> float | None:
        """The share of the examples that are the test split; None if the data have one."""
        return None if self.test is None or isinstance(self.test, str) else self.test


def names_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name or several."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
