"""A network of the user, by the name `module:callable`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError

from .tensors import check_tensors


def custom(name: str, num_classes: int, **options: Any) -> nn.Module:
    """What the callable that `name` refers to returns, called with `num_classes` and these options."""
    model = named.call("model.name", name, num_classes=num_classes, **options)
    if not isinstance(model, nn.Module):
        raise SettingsError(f"model.name={name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    try:
        check_tensors(model)
    except SettingsError as error:
        raise SettingsError(f"model.name={name!r}: {error}") from None
    return model
