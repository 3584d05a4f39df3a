"""`build_model`: a network by name, with a chosen kind of normalisation and perhaps pretrained weights."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Unpack

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedbn_flwr.errors import SettingsError, log_once
from fedbn_flwr.named import accepted, check_name, in_a_line, is_name, load, path_of, signature_of
from fedbn_flwr.norms.convert import NormOptions, convert_norm, own_module
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.trees import Tree

from . import MODELS, check_options
from .tensors import check_tensors
from .vision import Stem


def build_model(
    name: str,
    num_classes: int,
    norm: str = "bn",
    *,
    input_shape: Sequence[int] | None = None,
    num_tokens: int | None = None,
    weights: str | None = None,
    arguments: Tree = MappingProxyType({}),
    stem: Stem = "auto",
    **options: Unpack[NormOptions],
) -> nn.Module:
    """The network `name`, its batch norms replaced by `norm` (see `convert_norm`).

    Weights are drawn from torch's global generator: seed it first.

    Parameters
    ----------
    name
        One of `MODELS`, or `module:callable`, a network of your own.
    input_shape
        The shape of one example's inputs, for instance (3, 32, 32) for images: [channels, height, width]. By default
        the shape that the network was made for.
    num_tokens
        The number of different tokens, if the inputs are tokens.
    weights
        A file of pretrained weights, by safetensors or `torch.save` (see `load_weights`).
    arguments
        Further arguments of the network's function or class, such as a width.
    stem
        The first layers of a torchvision network: `small`, `large`, or `auto`, which depends on the image size (see
        `vision`).
    options
        Options of the norm.
    """
    check_name("model.name", name, MODELS, "a model")
    if weights is not None and norm == "fixup":
        raise SettingsError(f"model.weights is {weights!r}, but norm 'fixup' draws its own weights; use another norm")
    model = _network(name, num_classes, _input_arguments(input_shape, num_tokens), stem, arguments)
    state = {} if weights is None else read_weights(weights)
    has_batch_norm = Role.STATISTICS in roles(state).values()
    if has_batch_norm:  # so that other norms keep the trained gamma and beta
        load_weights(model, state, str(weights))
    model = convert_norm(model, norm, **options)
    if weights is not None and not has_batch_norm:
        load_weights(model, state, str(weights))
    return model


def _input_arguments(shape: Sequence[int] | None, num_tokens: int | None) -> Tree:
    """What the inputs say about the network, by the names of its arguments."""
    of_shape = {} if shape is None else {"input_shape": tuple(shape), "in_channels": shape[0] if shape else 0}
    of_image = {} if shape is None or len(shape) != 3 else {"image_size": tuple(shape[1:])}
    return {**of_shape, **of_image, **({} if num_tokens is None else {"num_tokens": num_tokens})}


def _network(name: str, num_classes: int, of_inputs: Tree, stem: str, arguments: Tree) -> nn.Module:
    """The network before its norms are replaced: each gets the arguments that its signature names."""
    own = is_name(name)
    make: Callable[..., nn.Module] = load("model.name", name) if own else _shipped(name)
    given = accepted(make, {**of_inputs, **({"num_outputs": num_classes} if own else {"stem": stem})})
    if not own:
        _check_inputs(name, of_inputs, given)
    signature = signature_of(make)
    if signature is not None and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        check_options(name, arguments, signature.parameters)
    if stem != "auto" and "stem" not in given:
        choice = ", ".join(key for key in MODELS if accepted(_shipped(key), {"stem": stem}))
        raise SettingsError(f"model.stem is {stem!r}, but {name!r} has only one stem; models with a choice: {choice}")
    given |= arguments
    if not own:
        return make(num_classes, **given)
    classes = {} if "num_outputs" in given else {"num_classes": num_classes}
    model = own_module("model.name", name, **classes, **given)
    check_tensors(model)  # a trial pass would set the size of lazy layers
    return model


def _shipped(name: str) -> Callable[..., nn.Module]:
    return pkgutil.resolve_name(f"{__package__}.{MODELS[name]}")  # type: ignore[no-any-return]


def _check_inputs(name: str, of_inputs: Tree, given: Tree) -> None:
    """Raise SettingsError if a network of `MODELS` does not take such inputs."""
    if "num_tokens" in of_inputs:
        raise SettingsError(
            f"model.name={name!r} takes numbers, but these inputs are tokens; use module:callable, a network of your "
            "own with an embedding, which receives num_tokens"
        )
    if "input_shape" in of_inputs and "image_size" not in of_inputs and "input_shape" not in given:
        raise SettingsError(
            f"model.name={name!r} takes images, [channels, height, width], but these inputs have the shape "
            f"{[*of_inputs['input_shape']]}; use mlp, for series [channels, time] cnn1d, or module:callable"
        )


# --- pretrained weights ---


def read_weights(weights: str) -> dict[str, Tensor]:
    """The state dict in the file, written by safetensors or `torch.save`."""
    from safetensors.torch import load_file

    expected = "a state dict, in a safetensors file or written by torch.save(model.state_dict(), 'weights.pt')"
    try:
        path = path_of(weights).absolute()
        if path.suffix not in (".pt", ".pth", ".bin"):
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    # The path may name an unknown user, or a closed folder.
    except (RuntimeError, OSError, EOFError, SafetensorError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"model.weights={weights!r} cannot be read: {reason}; expected {expected}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        found = f"a dict with the keys {[*state][:3]}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SettingsError(f"model.weights={weights!r} is {found}; expected {expected}")
    return dict(state)


def _with_one_channel(state: Mapping[str, Tensor], own: Mapping[str, Tensor], weights: str) -> Mapping[str, Tensor]:
    """Weights for images of several channels as weights for one: the sum over the channels, as in timm."""
    key = next((key for key, value in own.items() if value.ndim > 2), "")  # the first convolution
    if key not in state or own[key].shape[1] > 1 or state[key].ndim != own[key].ndim or state[key].shape[1] == 1:
        return state
    log_once(
        f"model.weights={weights!r} is for {state[key].shape[1]} channels, which {key!r} adds up for images of one"
    )
    return {**state, key: state[key].sum(1, keepdim=True)}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], weights: str) -> None:
    """Copy `state` into the model, batch norm's statistics included. Counters may be missing.

    Weights for images of several channels fit images of one: the first convolution gets their sum. If the last layer
    has another number of outputs, it keeps its initial values, and the log says so. Any other difference raises a
    SettingsError that names the keys.
    """
    own = model.state_dict()
    state = _with_one_channel(state, own, weights)
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
            f"model.weights={weights!r} does not fit the network: {in_a_line(error)} If the weights are for another "
            "image size, set model.stem. Weights for color images fit images of one channel too, but no other number"
        ) from None
    for key in [*drawn][:1]:
        log_once(
            f"model.weights={weights!r} has {len(state[key])} outputs, but the data have {len(drawn[key])} classes: "
            f"{last!r} keeps its initial values",
        )
