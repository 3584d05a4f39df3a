"""What layers compute: batch norm and nothing else, or batch norm and then some of their own modules.

A subclass of batch norm may compute anything in `forward`, so code that replaces `forward` or the layer needs a
declaration. It belongs to the class that defines `forward`, and holds for the subclasses that inherit it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

# By class, whose library need not be installed: the names of the modules that follow the norm.
_THEN: dict[str, tuple[str, ...]] = {
    "torch.nn.modules.batchnorm:_BatchNorm": (),
    "torch.nn.modules.batchnorm:SyncBatchNorm": (),  # differs only if torch.distributed has several processes
    "fedbn_flwr.norms.variants:MaskedBatchNorm1d": (),  # at the real positions
    "timm.layers.norm_act:BatchNormAct2d": ("drop", "act"),
    "timm.layers.norm_act:SyncBatchNormAct": ("drop", "act"),
}

# For errors about a layer without a declaration.
DECLARE = "if it computes batch norm and then some of its modules, declare it (declare_batch_norm)"


def declare_batch_norm(layer: type[nn.Module], *then: str) -> None:
    """Declares what a subclass of batch norm computes: batch norm, then the modules with these names, in this order.

    `declare_batch_norm(NormAct, "act")` lets FedTAN train networks with `NormAct`, and lets `model.norm` replace its
    norm and keep its module `act`. A subclass that normalises parts of a batch is declared without names; FedTAN then
    normalises whole batches.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    if not issubclass(layer, _BatchNorm):
        raise SettingsError(f"{layer.__name__} is no subclass of torch's batch norms; expected one to declare")
    _THEN[_name(layer)] = then


def computes_batch_norm(layer: nn.Module) -> bool:
    """Whether this layer computes batch norm, perhaps at the real positions of padded series, and then its modules."""
    return _declared(layer) is not None


def modules_after(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules of a layer that follow its norm, by name and in their order."""
    own = dict(layer.named_children())
    if missing := [name for name in _declared(layer) or () if name not in own]:
        raise SettingsError(
            f"{type(layer).__name__} is declared with {missing[0]!r} after its norm, but has no module of this name; "
            f"it has {', '.join(own) or 'none'}"
        )
    return {name: own[name] for name in _declared(layer) or ()}


def followed(layer: nn.Module, norm: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
    """The result of `norm`, and then what follows it in the layer."""
    values = norm(*args, **kwargs)
    for module in modules_after(layer).values():
        values = module(values)
    return values


def _declared(layer: nn.Module) -> tuple[str, ...] | None:
    return _THEN.get(_name(next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))))


def _name(layer: type[nn.Module]) -> str:
    return f"{layer.__module__}:{layer.__qualname__}"
