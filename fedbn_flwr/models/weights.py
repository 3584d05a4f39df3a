"""Pretrained weights: a safetensors file, or the name of torchvision's weights of a network."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean, log_once

SUFFIX = ".safetensors"

# The published files of DenseNet have older names: `norm.1` for `norm1`.
_OLDER = re.compile(r"^(.*denselayer\d+\.(?:norm|conv))\.([12]\.\w+)$")


def read_weights(name: str, weights: str) -> dict[str, Tensor]:
    """The state dict that `weights` refers to: a file, or weights that torchvision has for the network `name`."""
    if not weights.endswith(SUFFIX):
        return _torchvision(name.removeprefix("torchvision.models:"), weights)
    from safetensors.torch import load_file

    try:
        return load_file(named.path_of(weights).absolute())
    except (RuntimeError, OSError, SafetensorError) as error:  # also no such user, or a folder that cannot be read
        raise SettingsError(f"model.weights={weights!r} cannot be read: {error}") from None


@functools.lru_cache(maxsize=2)
def _torchvision(name: str, weights: str) -> dict[str, Tensor]:
    from torchvision.models import get_model_weights

    try:
        known: Any = get_model_weights(name)
    except ValueError:
        raise SettingsError(
            f"model.weights={weights!r}: torchvision has no weights for {name!r}; expected a file that ends in "
            f"{SUFFIX}, or a network of torchvision such as resnet18"
        ) from None
    if weights not in known.__members__:
        raise SettingsError(
            f"model.weights={weights!r} are not weights of {name!r}; {did_you_mean(weights, known.__members__)}, or a "
            f"file that ends in {SUFFIX}"
        )
    entry = known[weights]
    try:
        state = entry.get_state_dict(progress=False, check_hash=True)
    except (URLError, OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise SettingsError(
            f"model.weights={weights!r}: {entry.url} cannot be loaded ({named.in_a_line(error)}); where there is no "
            f"network, put the file into {str(folder)!r}"
        ) from None
    return {_OLDER.sub(r"\1\2", key): value for key, value in state.items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], weights: str) -> None:
    """Copy `state` into the model, statistics of batch norm included. Counters may be absent.

    The last layer keeps its initial values if it has another number of outputs; the log reports it. Other differences
    are errors that name the keys.
    """
    own = model.state_dict()
    last = next(reversed(own), "").rpartition(".")[0]
    drawn = {
        key: value
        for key, value in own.items()
        if key in state and key.rpartition(".")[0] == last
        if state[key].shape != value.shape and state[key].shape[1:] == value.shape[1:]
    }
    try:
        model.load_state_dict({**state, **drawn})
    except RuntimeError as error:
        raise SettingsError(
            f"model.weights={weights!r} does not fit the network: {named.in_a_line(error)} For another image size or "
            "number of channels, set model.stem or data.channels"
        ) from None
    for key in [*drawn][:1]:
        outputs = f"has {len(state[key])} outputs and the data {len(drawn[key])} classes"
        log_once(logging.WARNING, f"model.weights={weights!r} {outputs}: {last!r} keeps its initial values")
