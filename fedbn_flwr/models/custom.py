"""A network of the user, by the name `module:callable`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import SettingsError


def custom(name: str) -> Callable[..., nn.Module]:
    """The callable that `name` refers to, as a function of num_classes and options.

    It is called with `num_classes`, and with `in_channels` and `image_size` (height, width) if its signature names
    them.
    """
    make = _find(name)

    def build(num_classes: int, **options: Any) -> nn.Module:
        model = _call(name, make, num_classes=num_classes, **options)
        if not isinstance(model, nn.Module):
            raise SettingsError(f"model.name={name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
        for where, module in model.named_modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
                raise SettingsError(
                    f"model.name={name!r}: {where or 'the model'} is a {type(module).__name__} of unknown size; "
                    "pass a batch through the model before returning it"
                )
        return model

    # `build_model` passes the options that this signature names, not all that **kwargs would accept.
    named = {} if (signature := _signature(make)) is None else signature.parameters
    own = inspect.Parameter("num_classes", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY)
        for option in ("in_channels", "image_size")
        if option in named
    ]
    build.__signature__ = inspect.Signature([own, *options])  # type: ignore[attr-defined]
    return build


def _find(name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise SettingsError(f"model.name={name!r}: expected module:callable for a network of your own")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        hint = "; its folder must be on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise SettingsError(
            f"model.name={name!r}: cannot import {module_name!r} ({type(error).__name__}: {error}){hint}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"model.name={name!r}: {module_name!r} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise SettingsError(f"model.name={name!r} is a {type(found).__name__}; expected a function that builds a model")
    return found  # type: ignore[no-any-return]


def _signature(make: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(make)
    except ValueError:  # some built-in callables have none
        return None


def _call(name: str, make: Callable[..., Any], **arguments: Any) -> Any:
    if (signature := _signature(make)) is not None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            names = ", ".join(arguments)
            raise SettingsError(f"model.name={name!r} cannot be called with {names}: {error}") from None
    try:
        return make(**arguments)
    except Exception as error:
        raise SettingsError(f"model.name={name!r} failed: {type(error).__name__}: {error}") from error
