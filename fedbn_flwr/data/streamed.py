"""Inputs that are read when a batch needs them, of a torch `Dataset` that is larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 64  # items


@dataclass(frozen=True)
class Streamed:
    """Stands for a tensor [N, ...], whose rows it reads when they are asked for."""

    items: Any  # of each, the first value is the inputs
    rows: Tensor  # int64 [N], the numbers of the items
    made: Callable[[np.ndarray], Tensor] = torch.from_numpy  # a tensor of some items

    @cached_property
    def like(self) -> Tensor:
        return self[:1]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.like.shape[1:]

    @property
    def nbytes(self) -> int:
        return len(self) * self.like.nbytes

    @property
    def chunks(self) -> Iterator[slice]:
        """The rows, some at a time."""
        return (slice(start, start + _AT_ONCE) for start in range(0, len(self), _AT_ONCE))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Tensor | slice) -> Tensor:
        return self.made(np.stack([np.asarray(self.items[row][0]) for row in self.rows[chosen].tolist()]))

    def __getattr__(self, name: str) -> Any:
        """Type, device and so on, as a tensor with the first row has them."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.like, name)

    def select(self, rows: Tensor) -> Streamed:
        return replace(self, rows=self.rows[rows])

    def to(self, *_: object, **__: object) -> Streamed:
        return self  # the batches are sent
