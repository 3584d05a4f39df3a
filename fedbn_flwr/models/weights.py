"""Pretrained weights of a safetensors file."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from safetensors import SafetensorError
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, log_once


def read_weights(weights: str) -> dict[str, Tensor]:
    """The state dict of the file."""
    from safetensors.torch import load_file

    try:
        return load_file(named.path_of(weights).absolute())
    except (RuntimeError, OSError, SafetensorError) as error:  # also no such user, or a folder that cannot be read
        raise SettingsError(f"model.weights={weights!r} cannot be read: {error}; expected a safetensors file") from None


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
        log_once(
            logging.WARNING,
            f"model.weights={weights!r} has {len(state[key])} outputs and the data {len(drawn[key])} classes: {last!r} "
            "keeps its initial values",
        )
