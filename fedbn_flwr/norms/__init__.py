"""Normalisation layers: roles of their arrays, conversion, freezing, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .masked import MaskedBatchNorm1d

__all__ = ["MaskedBatchNorm1d"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a server that only reads names of arrays does not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .masked import MaskedBatchNorm1d

    return MaskedBatchNorm1d
