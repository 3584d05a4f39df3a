"""What decides what a pass computes, besides the values of tensors, and what it draws: to repeat passes."""

from __future__ import annotations

import functools
import pickle
import random
import weakref
from collections.abc import Hashable
from contextlib import suppress
from types import NoneType

import numpy as np
import torch
from torch import Tensor, nn


def plain_attributes(model: nn.Module) -> Hashable:
    """The types of all modules, with their attributes that are numbers, texts or None, such as modes and options."""
    plain = (bool, int, float, str, NoneType)
    return tuple(
        (type(module), *((name, value) for name, value in vars(module).items() if isinstance(value, plain)))
        for module in model.modules()
    )


def hooks_of(parameter: Tensor) -> list[object]:
    """The hooks of a parameter."""
    places = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [hook for place in places for hook in (place or {}).values()]


def identity(function: object) -> Hashable:
    """A key for a function, equal for partial objects of different clients with equal options."""
    if isinstance(function, functools.partial):
        key: Hashable = (function.func, function.args, *function.keywords.items())
        with suppress(TypeError):  # an option may be a list
            hash(key)
            return key
    with suppress(TypeError):  # it may have no weak reference or no hash
        key = weakref.ref(function)  # since it may hold the model
        hash(key)
        return key
    return function.__call__  # type: ignore[operator, no-any-return]  # bound methods are compared by identity


def drawn(device: torch.device | None = None) -> Hashable:
    """The states of the global generators, which draws change: those on the CPU, and that of a GPU if it is given."""
    on_gpu = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else torch.empty(0)
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), on_gpu)]
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), *states
