"""Roles of a state dict's entries: weights, affine, statistics and counter.

A strategy for batch norm is mostly a choice of roles: FedAvg shares weights, affine and statistics, SiloBN keeps the
statistics on the client, FedBN the affine parameters as well.

A role follows from the module that owns the entry, never from the entry's name: a ResNet's `downsample.1.weight` is a
batch norm's gamma, which its name does not show.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from fedbn_flwr.errors import SettingsError

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

V = TypeVar("V")


class Role(StrEnum):
    WEIGHTS = "weights"  # everything else
    AFFINE = "affine"  # gamma and beta of batch norm
    STATISTICS = "statistics"  # running mean and variance
    COUNTER = "counter"  # num_batches_tracked, never sent


MEAN, VARIANCE = "running_mean", "running_var"
AFFINE = ("weight", "bias")
_ROLES = {
    **dict.fromkeys(AFFINE, Role.AFFINE),
    **dict.fromkeys((MEAN, VARIANCE), Role.STATISTICS),
    "num_batches_tracked": Role.COUNTER,
}
_COMPUTED = re.compile(r"((?:.*?\.)?)parametrizations\.(\w+)\..+")  # as torch.nn.utils.parametrize calls its entries


def roles(arrays_or_module: Mapping[str, Any] | nn.Module) -> dict[str, Role]:
    """The role of each key of a state dict, in its order.

    A module's batch norms are found by type. Among arrays (the server has no model), a prefix with a `running_mean`
    is a batch norm.
    """
    if isinstance(arrays_or_module, Mapping):
        keys = tuple(arrays_or_module)
        find = _of_keys if sum(map(len, keys)) <= _CACHED else _of_keys.__wrapped__
        return dict(find(keys))  # a copy: the caller may change it
    norms = {f"{name}." if name else "" for name in norm_layers(arrays_or_module)}
    return _of_layers(arrays_or_module.state_dict(), norms)


_CACHED = 1 << 20  # characters; the keys of a reply may be of any length


@functools.lru_cache(maxsize=64)
def _of_keys(keys: tuple[str, ...]) -> dict[str, Role]:
    """A round asks for the roles of the same keys several times."""
    return _of_layers(keys, set(layers(keys)))


def _of_layers(keys: Iterable[str], norms: set[str]) -> dict[str, Role]:
    return {key: next((_ROLES[name] for layer, name in _places(key) if layer in norms), Role.WEIGHTS) for key in keys}


def _places(key: str) -> Iterator[tuple[str, str]]:
    """The prefixes of the layers that the entry of this key may belong to, and the name in _ROLES that it then has.

    What computes gamma or beta has its role: `bn.parametrizations.weight.original`, and `bn.weight_orig` or
    `bn.weight_g` of pruning and weight norm.
    """
    layer, dot, name = key.rpartition(".")
    found = [(layer + dot, name), (layer + dot, name.partition("_")[0])]
    if computed := _COMPUTED.fullmatch(key):
        found.append((computed[1], computed[2]))
    return (each for each in found if each[1] in _ROLES)


def layers(keys: Iterable[str]) -> list[str]:
    """The prefixes of the layers among these keys of a state dict that track statistics, `bn1.` for `bn1.weight`."""
    return [key.removesuffix(MEAN) for key in keys if key.rpartition(".")[2] == MEAN]


def is_variance(key: str) -> bool:
    """Whether a key, whose role is STATISTICS, is that of a running variance."""
    return key.rpartition(".")[2] == VARIANCE


def norm_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers whose arrays have the roles of batch norm, by name: batch norms, and all layers that track statistics.

    The latter are for instance instance norms with `track_running_stats=True`.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return {
        name: layer
        # A layer that is used twice has two prefixes in the state dict: include both.
        for name, layer in module.named_modules(remove_duplicate=False)
        if layer._buffers.get(MEAN) is not None or isinstance(layer, _BatchNorm)
    }


def batch_norms(model: nn.Module, what: str) -> dict[str, _BatchNorm]:
    """The layers whose statistics are those of a batch, by name; `what` is done with them.

    SettingsError names a layer of another library that tracks statistics, since of which values is unknown. Instance
    norms, and batch norms that are always frozen (gamma is a buffer), have no statistics of a batch.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    layers = norm_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer, _BatchNorm | _InstanceNorm) and AFFINE[0] not in layer._buffers:
            raise SettingsError(
                f"{what} needs layers of torch.nn.modules.batchnorm, but {name!r} is a {type(layer).__name__}, which "
                "tracks statistics of unknown values; use nn.BatchNorm1d, 2d or 3d, or a subclass"
            )
    return {name: layer for name, layer in layers.items() if isinstance(layer, _BatchNorm)}


def computes_as_batch_norm(layer: nn.Module) -> bool:
    """Whether this layer computes batch norm and nothing else, perhaps of the real positions of padded series.

    Subclasses may compute something else in `forward`: timm's BatchNormAct2d includes ReLU, and batch renormalisation
    differs in training. Code that replaces `forward` would lose that.
    """
    from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

    from .variants import MaskedBatchNorm1d

    # SyncBatchNorm differs only if torch.distributed has several processes.
    return type(layer).forward in (_BatchNorm.forward, SyncBatchNorm.forward, MaskedBatchNorm1d.forward)


def check_own(layer: nn.Module, where: str, kind: str, name: str) -> None:
    """Raise SettingsError unless the layer to replace has weight or bias (`name`) as a parameter, or None."""
    if name not in layer._parameters:
        raise SettingsError(
            f"norm {kind!r}: {where} computes its {name} from other tensors (a parametrisation, weight norm, pruning), "
            "which the new layer would not; remove that first, for instance by "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )


def split_by_role(
    state: Mapping[str, V], of: Mapping[str, Role], wanted: Collection[Role]
) -> tuple[dict[str, V], dict[str, V]]:
    """The entries of `state` whose role is wanted, and the others."""
    inside = {key: value for key, value in state.items() if of[key] in wanted}
    return inside, {key: value for key, value in state.items() if key not in inside}
