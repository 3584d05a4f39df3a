"""Norm state has roles: who owns which entry of a model's state dict.

A federated rule for batch norm is mostly a choice of roles: FedAvg shares weights, affine and statistics,
SiloBN keeps the statistics on the client, FedBN the affine parameters as well.

Roles come from what an entry belongs to, never from its name: a ResNet's `downsample.1.weight` is a batch
norm's gamma, which its name does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

V = TypeVar("V")


class Role(StrEnum):
    WEIGHTS = "weights"  # everything else
    AFFINE = "affine"  # gamma and beta of batch norm
    STATISTICS = "statistics"  # running mean and variance
    COUNTER = "counter"  # num_batches_tracked, never sent by us


_STATISTICS = ("running_mean", "running_var")
_AFFINE = ("weight", "bias")


def roles(arrays_or_module: Mapping[str, Any] | nn.Module) -> dict[str, Role]:
    """The role of each key of a state dict, in its order.

    From a module: its batch norms are found by type. From arrays (the server has no model): a prefix that
    owns `running_mean` is a batch norm.
    """
    if isinstance(arrays_or_module, Mapping):
        keys = list(arrays_or_module)
        ends = ("running_mean", ".running_mean")
        norms = {key.removesuffix("running_mean") for key in keys if key.endswith(ends)}
    else:
        keys = list(arrays_or_module.state_dict())
        norms = _batch_norm_prefixes(arrays_or_module)
    return {key: _role(key, norms) for key in keys}


def _batch_norm_prefixes(module: nn.Module) -> set[str]:
    from torch.nn.modules.batchnorm import _NormBase  # batch norm, and instance norm that tracks statistics

    found = set()
    # A layer used under two names has two keys in the state dict: ask for both.
    for name, child in module.named_modules(remove_duplicate=False):
        tracks = "running_mean" in child._buffers and child._buffers["running_mean"] is not None
        if tracks or (isinstance(child, _NormBase) and "InstanceNorm" not in type(child).__name__):
            found.add(f"{name}." if name else "")
    return found


def computes_as_batch_norm(layer: nn.Module) -> bool:
    """Whether this batch norm's arithmetic is batch norm's and nothing else.

    Subclasses may do more or otherwise in `forward`, for instance timm's BatchNormAct2d, which is batch norm and ReLU
    in one, or batch renormalisation: what replaces their arithmetic with batch norm's would lose that.
    """
    from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

    # Across processes where torch runs some, else as the others.
    return type(layer).forward in (_BatchNorm.forward, SyncBatchNorm.forward)


def _role(key: str, norms: set[str]) -> Role:
    prefix, _, name = key.rpartition(".")
    if (f"{prefix}." if prefix else "") not in norms:
        return Role.WEIGHTS
    if name in _STATISTICS:
        return Role.STATISTICS
    if name == "num_batches_tracked":
        return Role.COUNTER
    return Role.AFFINE if name in _AFFINE else Role.WEIGHTS


def split(
    state: Mapping[str, V], of: Mapping[str, Role], wanted: set[Role] | frozenset[Role]
) -> tuple[dict[str, V], dict[str, V]]:
    """`state` cut in two: entries whose role is wanted, and the rest."""
    inside = {key: value for key, value in state.items() if of[key] in wanted}
    return inside, {key: value for key, value in state.items() if key not in inside}
