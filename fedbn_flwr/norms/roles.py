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
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from fedbn_flwr.errors import SettingsError

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

V = TypeVar("V")


class Role(StrEnum):
    """What an array of a model is: weights, affine (gamma and beta), statistics or counter."""

    WEIGHTS = "weights"  # everything else
    AFFINE = "affine"  # gamma and beta of batch norm
    STATISTICS = "statistics"  # running mean and variance
    COUNTER = "counter"  # num_batches_tracked; sent and averaged only if the server's first model has it


NORM_STATE = frozenset({Role.STATISTICS, Role.COUNTER})  # what batch norm measures, and does not learn

MEAN, VARIANCE = "running_mean", "running_var"
AFFINE = ("weight", "bias")
ALPHA = "alpha"  # of a hybrid batch norm
_ROLES = {
    **dict.fromkeys((*AFFINE, ALPHA), Role.AFFINE),
    **dict.fromkeys((MEAN, VARIANCE), Role.STATISTICS),
    "num_batches_tracked": Role.COUNTER,
}
_COMPUTED = re.compile(r"((?:.*?\.)?)parametrizations\.(\w+)\..+")  # as torch.nn.utils.parametrize calls its entries


def roles(arrays_or_module: Mapping[str, object] | nn.Module) -> dict[str, Role]:
    """The role of each key of a state dict, in its order.

    In a module, batch norms are found by their type. The server has only arrays: there, a prefix with a `running_mean`
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
    """`roles` with a cache, since a round asks for the roles of the same keys several times."""
    return _of_layers(keys, set(layers(keys)))


def _of_layers(keys: Iterable[str], norms: set[str]) -> dict[str, Role]:
    return {key: next((_ROLES[name] for layer, name in _places(key) if layer in norms), Role.WEIGHTS) for key in keys}


def _places(key: str) -> Iterator[tuple[str, str]]:
    """The layers that an entry may belong to, as prefixes, and the name in _ROLES that it would have there.

    A tensor from which gamma or beta is computed has its role: `bn.parametrizations.weight.original`, or
    `bn.weight_orig` and `bn.weight_g` after pruning and weight norm.
    """
    layer, dot, name = key.rpartition(".")
    places = [(layer + dot, name), (layer + dot, name.partition("_")[0])]
    if computed := _COMPUTED.fullmatch(key):
        places.append((computed[1], computed[2]))
    return (place for place in places if place[1] in _ROLES)


def key_of(layer: str, name: str) -> str:
    """The key of a layer's tensor; the model itself is the layer ""."""
    return f"{layer}.{name}" if layer else name


def layers(keys: Iterable[str]) -> list[str]:
    """The prefixes, such as `bn1.` for `bn1.weight`, of the layers that track statistics."""
    return [key.removesuffix(MEAN) for key in keys if key.rpartition(".")[2] == MEAN]


def is_variance(key: str) -> bool:
    """Whether a key with the role STATISTICS is a running variance."""
    return key.rpartition(".")[2] == VARIANCE


def mean_of(key: str) -> str:
    """The key of the running mean that belongs to a running variance."""
    return key.removesuffix(VARIANCE) + MEAN


def norm_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers whose arrays have batch norm's roles, by name.

    These are batch norms and all other layers that track statistics, such as instance norms with
    `track_running_stats=True`.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    return {
        name: layer
        # A layer that is used twice has two prefixes in the state dict. Include both.
        for name, layer in module.named_modules(remove_duplicate=False)
        if layer._buffers.get(MEAN) is not None or isinstance(layer, _BatchNorm)
    }


def batch_norms(model: nn.Module, what: str) -> dict[str, _BatchNorm]:
    """The layers that normalise with the statistics of a batch, by name; `what` names their use, for errors.

    SettingsError names a layer of another library that tracks statistics, because nothing says which values they cover.
    Instance norms, and batch norms that are always frozen (gamma is a buffer), use no statistics of a batch.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    layers = norm_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer, _BatchNorm | _InstanceNorm) and AFFINE[0] not in layer._buffers:
            raise SettingsError(
                f"{what} needs layers of torch.nn.modules.batchnorm, but {name!r} is a {type(layer).__name__}, and it "
                "is unknown which values its statistics cover; use nn.BatchNorm1d, 2d or 3d, or a subclass"
            )
    return {name: layer for name, layer in layers.items() if isinstance(layer, _BatchNorm)}


def check_own(layer: nn.Module, where: str, kind: str, name: str) -> None:
    """Raise SettingsError if the layer to replace computes its weight or bias (`name`) from other tensors."""
    if name not in layer._parameters:
        raise SettingsError(
            f"norm {kind!r}: {where} computes its {name} from other tensors (a parametrisation, weight norm, pruning), "
            "but the new layer would not; remove that first, for instance with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )


LAST = "last"


def selected(role_of: Mapping[str, Role], names: Collection[str]) -> set[str]:
    """The keys that these names select; `role_of` has all keys, in the model's order.

    A name is a role, "last" for the model's last layer, or a pattern of keys or layers (`fc`, `layer4*`) as for file
    names. A pattern does not select counters, which are never sent: only their role does.
    """
    patterns = [name for name in names if name not in {*Role, LAST}]
    layer = f"{_layer_of(next(reversed([*role_of]), ''))}." if LAST in names else None

    def is_selected(key: str) -> bool:
        is_last = layer is not None and f"{key}.".startswith(layer)
        return is_last or any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns)

    return {key for key, role in role_of.items() if role in names or (role is not Role.COUNTER and is_selected(key))}


def _layer_of(key: str) -> str:
    computed = _COMPUTED.fullmatch(key)
    return computed[1].removesuffix(".") if computed else key.rpartition(".")[0]


def split(state: Mapping[str, V], wanted: Collection[str]) -> tuple[dict[str, V], dict[str, V]]:
    """The entries of `state` with these keys, and the others."""
    inside = {key: value for key, value in state.items() if key in wanted}
    return inside, {key: value for key, value in state.items() if key not in inside}


def of_roles(state: Mapping[str, V], wanted: Collection[Role]) -> dict[str, V]:
    """The entries of a state dict that have one of these roles."""
    return {key: state[key] for key, role in roles(state).items() if role in wanted}
