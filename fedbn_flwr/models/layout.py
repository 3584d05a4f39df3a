"""The memory format of convolutions' filters; the outputs have the same format.

With channels last, a CPU trains most networks faster (docs/results/performance.md); the last bits of results differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr import seeding
from fedbn_flwr.batch import Outputs, Targets, Value, count, map_tensors

from .identity import plain_attributes

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of the filters' axes


def lay_out(model: nn.Module) -> None:
    """Put the channels of the filters of 2-d and 3-d convolutions last; keys, values and parameters stay the same."""
    for layer in model.modules():
        for parameter in layer.parameters() if isinstance(layer, _ConvNd) else ():
            if kind := _FORMATS.get(parameter.ndim):
                # `contiguous` would leave filters of one channel as they are, since they have both formats.
                parameter.data = parameter.data.to(memory_format=kind)


def suits_channels_last(model: nn.Module) -> bool:
    """Whether a CPU trains the network faster with channels last, as measured.

    Steps become slower in float64, with some norms, and with a convolution of a few channels whose number isn't a
    multiple of 8, such as LeNet's 6. 3-d convolutions gain nothing. A layer of another project may be such a norm.
    """
    layers = [*model.modules()]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    filters = [parameter for layer in convolutions for parameter in layer.parameters()]
    return (
        bool(convolutions)
        and all(each.dtype is torch.float32 and each.device.type == "cpu" for each in filters)
        # The first one has the channels of the images.
        and not any(layer.in_channels < 16 and layer.in_channels % 8 for layer in convolutions[1:])
        and not any(map(_may_be_slow, layers))
    )


def _may_be_slow(layer: nn.Module) -> bool:
    if isinstance(layer, nn.GroupNorm):  # with one channel a group, this is instance norm
        return layer.num_channels < 8 * layer.num_groups
    known = type(layer).__module__.startswith(("torch.nn.", "fedbn_flwr."))
    if not known and any((layer._parameters, layer._buffers)):
        return True
    return isinstance(layer, _InstanceNorm) or (isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1)


# --- the choice ---

Loss = Callable[[Outputs, Targets], Tensor]

_decided: WeakSet[nn.Module] = WeakSet()
# The results of trials, by what decides them: a project may make a new model for each message.
_fits: dict[Hashable, bool] = {}
_MOST = 100


def choose_layout(model: nn.Module, inputs: Value, targets: Value, *losses: Loss) -> None:
    """Put channels last if a CPU then trains the network faster and computes the same; this is decided once.

    The network and the `losses`, of training and of evaluation, may use `view` or `as_strided`. So a trial computes
    with a batch in both formats; it leaves the model as it is.
    """
    if model in _decided:
        return
    if suits_channels_last(model):
        key = plain_attributes(model), *(getattr(loss, "__code__", type(loss)) for loss in losses)
        if key not in _fits:
            if len(_fits) == _MOST:  # the attributes of a module may change in each round
                _fits.clear()
            _fits[key] = _computes_the_same(model, inputs, targets, *losses)
        if _fits[key]:
            lay_out(model)
    _decided.add(model)


def _computes_the_same(model: nn.Module, inputs: Value, targets: Value, loss: Loss, eval_loss: Loss) -> bool:
    if count(inputs) == 1:  # batch norm may need two examples
        inputs, targets = (map_tensors(lambda tensor: torch.cat([tensor, tensor]), part) for part in (inputs, targets))

    def evaluated(model: nn.Module) -> Tensor:
        model.eval()
        with torch.no_grad():
            return eval_loss(model(inputs), targets)

    with seeding.streams(0), torch.enable_grad():
        before = seeding.drawn()
        try:
            expected = evaluated(copy.deepcopy(model))
            last = copy.deepcopy(model)
            lay_out(last)
            same = evaluated(last).allclose(expected, rtol=1e-3, equal_nan=True)
            if not same or seeding.drawn() != before:  # a mask that dropout draws depends on the format
                return False
            last.train()
            loss(last(inputs), targets).backward()
        except Exception:  # it cannot be copied, needs the other format, or will fail in the round as well
            return False
    return True
