"""`convert_norm` replaces the batch norms of a model with another normalisation layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.named import accepted, call, check_name, is_name, load
from fedbn_flwr.trees import Draft, Tree

from . import NORMS
from .compound import DECLARE, computes_batch_norm, modules_after
from .fixup import convolutions, fixup, residual_blocks
from .roles import AFFINE, batch_norms, check_own
from .variants import BatchRenorm, HybridBatchNorm, MaskedBatchNorm1d, StaticBatchNorm, WithoutMask
from .wsconv import RELU_GAMMA, standardise

Convert = Callable[..., nn.Module]  # takes a batch norm, its name, and the options that the signature names


def _group_norm(layer: _BatchNorm, where: str, groups: int = 2) -> nn.Module:
    if layer.num_features % groups:
        raise SettingsError(
            f"norm 'gn': {where} has {layer.num_features} channels, which cannot be split into {groups} equal groups"
        )
    return nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)


class InstanceNorm(nn.GroupNorm):
    """nn.InstanceNorm for inputs of any number of dimensions; `where` is its name in the model."""

    def __init__(self, layer: _BatchNorm, where: str) -> None:
        super().__init__(layer.num_features, layer.num_features, eps=layer.eps, affine=layer.affine)
        self.where = where

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input[0, 0].numel() == 1:  # it would be zero, whatever the input
            raise SettingsError(
                f"norm 'in': {self.where} has an input of shape {[*input.shape]}, with one value per channel and "
                "example; instance norm needs several"
            )
        return super().forward(input)


class NormOptions(TypedDict, total=False):
    """The options of all normalisers, as `model` of an experiment has them."""

    groups: int
    branch_scale: float
    r_max: float
    d_max: float
    warmup: int
    r_steps: int
    d_steps: int


class Normaliser(NamedTuple):
    """What replaces a batch norm, and what else changes in the model."""

    norm: Convert = nn.Identity
    options: tuple[str, ...] = ()  # it ignores all others
    standard: tuple[float, float | None] | None = None  # eps and gamma of the weights, if they are standardised
    whole: Callable[[nn.Module], nn.Module] | None = None  # converts the model, instead of its norms one by one
    # Whether it has a use for a model with these layers to standardise, and these batch norms.
    is_useful: Callable[[object, object], object] = lambda weights, norms: norms


NORMALISERS = {
    "bn": Normaliser(whole=lambda model: model),
    "gn": Normaliser(_group_norm, ("groups",)),
    # Group norm with one group, so gamma and beta are per channel; unlike nn.LayerNorm, examples may be of any size.
    "ln": Normaliser(partial(_group_norm, groups=1)),
    "in": Normaliser(InstanceNorm),
    "none": Normaliser(is_useful=lambda *_: True),
    "gn+ws": Normaliser(
        _group_norm, ("groups",), standard=(1e-5, None), is_useful=lambda weights, norms: weights and norms
    ),
    # It needs the residual branches, so it converts the whole model.
    "fixup": Normaliser(whole=fixup),
    "won": Normaliser(
        options=("branch_scale",),
        standard=(1e-6, RELU_GAMMA),
        # It also removes batch norm, so a model without convolutions has a use for it.
        is_useful=lambda weights, norms: weights or norms,
    ),
    "sbn": Normaliser(lambda layer, where: StaticBatchNorm(layer.num_features, eps=layer.eps, affine=layer.affine)),
    "brn": Normaliser(
        lambda layer, where, **bounds: BatchRenorm(
            layer.num_features, layer.eps, layer.momentum, layer.affine, **bounds
        ),
        ("r_max", "d_max", "warmup", "r_steps", "d_steps"),
    ),
    "hbn": Normaliser(
        lambda layer, where: HybridBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine)
    ),
}


def own_module(key: str, name: str, /, *positional: object, **arguments: object) -> nn.Module:
    """Call the user's function `name`, which must return a module; `key` is the setting that names it."""
    module = call(key, name, *positional, **arguments)
    if not isinstance(module, nn.Module):
        raise SettingsError(f"{key}={name!r} returned a {type(module).__name__}; expected a torch.nn.Module")
    return module


def _own(layer: _BatchNorm, where: str, name: str) -> nn.Module:
    """The user's own norm: a function of the number of channels, and of `layer` if its signature has it."""
    options = accepted(load("model.norm", name), {"layer": layer})
    return own_module("model.norm", name, layer.num_features, **options)


def convert_norm(model: nn.Module, kind: str, **options: Unpack[NormOptions]) -> nn.Module:
    """Replaces every batch norm of `model`, found by its type, with the normalisation layer `kind`.

    `kind` is one of NORMS, or `module:callable`, a function that takes the number of channels and returns a module.

    Gamma, beta, device, dtype and training mode stay the same, and so does the rest of the model, such as the
    activation in timm's BatchNormAct2d (`declare_batch_norm`). Two exceptions: some kinds also replace convolutions,
    and `fixup` initialises weights. The model is changed in place and returned. If the model itself is a batch norm,
    its replacement is returned.
    """
    check_name("model.norm", kind, NORMS, "a kind of normalisation")
    normaliser = Normaliser(partial(_own, name=kind)) if is_name(kind) else NORMALISERS[kind]
    own = _options_of(normaliser, options)
    if normaliser.whole:
        return normaliser.whole(model)
    scale = own.pop("branch_scale", 1.0)
    blocks = residual_blocks(model, kind) if scale != 1 else {}
    norms = batch_norms(model, f"norm {kind!r}")
    weights = _standardise(model, kind, *normaliser.standard) if normaliser.standard else []
    replaced: dict[nn.Module, nn.Module] = {}  # a layer that is used twice stays one layer
    for name, norm in norms.items():
        if norm not in replaced:
            replaced[norm] = _replace(norm, name or "the model itself", kind, partial(normaliser.norm, **own))
        if name:
            model.set_submodule(name, replaced[norm])
    for block in blocks.values():
        convolutions(block)[-1].gamma *= scale
    if not normaliser.is_useful(weights, replaced):
        lacks_weights = normaliser.standard and not weights
        what = "convolution or linear layer to standardise" if lacks_weights else "batch norm to replace"
        raise SettingsError(f"norm {kind!r}: the model has no {what}; use 'bn', which leaves the model as it is")
    return replaced.get(model, model)


def _options_of(normaliser: Normaliser, options: Tree) -> Draft:
    """The options that it has; SettingsError for one that no normaliser has."""
    known = NormOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise SettingsError(f"convert_norm has no option {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    return {key: value for key, value in options.items() if key in normaliser.options}


def _standardise(model: nn.Module, kind: str, eps: float, gamma: float | None) -> Sequence[nn.Module]:
    """Make the convolutions or, in a network for tables, which has none, the linear layers standardise their weights.

    Returns these layers.
    """
    layers = {
        layer: name for name, layer in model.named_modules() if isinstance(layer, _ConvNd | nn.Linear | _BatchNorm)
    }
    convolved = [layer for layer in layers if isinstance(layer, _ConvNd)]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    chosen = convolved or linear
    # A last layer with no norm after it keeps its weights, for instance the classifier of a segmentation model.
    if chosen[-1:] == [*layers][-1:] and (gamma is None or not convolved):
        chosen = chosen[:-1]
    for layer in chosen:
        standardise(layer, layers[layer] or "the model itself", kind, eps, gamma)
    return chosen


def _replace(layer: _BatchNorm, where: str, kind: str, convert: Convert) -> nn.Module:
    if isinstance(layer, LazyModuleMixin):
        raise SettingsError(
            f"norm {kind!r}: {where} is a {type(layer).__name__} of unknown size; pass a batch through the model first"
        )
    if not computes_batch_norm(layer) and not isinstance(layer, BatchRenorm):
        raise SettingsError(
            f"norm {kind!r}: {where} is a {type(layer).__name__}, which computes more than batch norm, so replacing it "
            f"would change the model; use plain batch norm there; {DECLARE}"
        )
    new = convert(layer, where)
    like = layer.running_mean if layer.weight is None else layer.weight
    if like is not None:
        new.to(device=like.device, dtype=like.dtype)
    state, own = layer.state_dict(), new.state_dict()
    # The user's own norm may have other parameters than batch norm, or parameters of other shapes.
    shared = {name for name in own if name in state and state[name].shape == own[name].shape}
    for name in AFFINE:
        if name in own or (hasattr(new, name) and not is_name(kind)):
            check_own(layer, where, kind, name)
        if name in shared or (hasattr(new, name) and not is_name(kind)):
            # The same object, which another layer may share; None without beta.
            setattr(new, name, getattr(layer, name))
    new.load_state_dict({name: state[name] for name in shared}, strict=False)
    new.train(layer.training)
    after, masked = modules_after(layer), isinstance(layer, MaskedBatchNorm1d) and not is_name(kind)
    if not after and not masked:
        return new
    whole = (WithoutMask if masked else nn.Sequential)(OrderedDict(norm=new, **after))
    whole.training = layer.training
    return whole
