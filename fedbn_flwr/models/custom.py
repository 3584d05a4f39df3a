"""A network of the user, by the name `module:callable`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError

from .tensors import check_tensors


def custom(name: str) -> Callable[..., nn.Module]:
    """The callable that `name` refers to, as a function of num_classes and options.

    It is called with `num_classes`, and with `in_channels` and `image_size` (height, width) if its signature names
    them.
    """
    make = named.load("model.name", name)

    def build(num_classes: int, **options: Any) -> nn.Module:
        model = named.call("model.name", name, num_classes=num_classes, **options)
        if not isinstance(model, nn.Module):
            raise SettingsError(f"model.name={name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
        try:
            check_tensors(model)
        except SettingsError as error:
            raise SettingsError(f"model.name={name!r}: {error}") from None
        return model

    # `build_model` passes the options that this signature names, not all that **kwargs would accept.
    own = inspect.Parameter("num_classes", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = named.accepted(make, dict.fromkeys(("in_channels", "image_size")))
    taken = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY) for option in options]
    build.__signature__ = inspect.Signature([own, *taken])  # type: ignore[attr-defined]
    return build
