"""What takes the place of normalisation in a part of a network: squeeze-excitation, and features of one length."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import SettingsError


class SqueezeExcitation(nn.Module):
    """x * sigmoid(W_2 relu(W_1 z)), where z is the mean of each channel (Hu et al. 2018, arXiv 1709.01507).

    ANFR (2025) puts it after scaled weight standardisation, in place of the last batch norm of a residual branch, where
    SE-ResNets have it. Both linear layers have biases, as theirs do.
    """

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.squeeze, self.excite = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(self.squeeze(x.flatten(2).mean(2)).relu()).sigmoid()
        return x * gate.view(*gate.shape, *[1] * (x.ndim - 2))


def excitation(convolution: _ConvNd, reduction: int) -> SqueezeExcitation:
    """Squeeze-excitation of what this convolution returns."""
    made = SqueezeExcitation(convolution.out_channels, reduction)
    return made.to(convolution.weight).train(convolution.training)


class FeatureLinear(nn.Linear):
    """A linear layer whose inputs h [.., d] are scaled to the length sqrt(d): FN (2023, arXiv 2308.09565).

    The gradient with respect to h is then orthogonal to h. As in the code of the paper, a length below 1e-12 counts as
    1e-12.
    """

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(math.sqrt(self.in_features) * F.normalize(h, dim=-1, eps=1e-12))


def normalise_features(model: nn.Module) -> None:
    """Scale the inputs of the last layer, which must be linear; its parameters and their names stay as they are."""
    last = [layer for layer in model.modules() if [*layer.parameters(recurse=False)]][-1:]
    if not last or type(last[0]) not in (nn.Linear, FeatureLinear):
        found = (
            f"the last layer with parameters is a {type(last[0]).__name__}" if last else "the model has no parameters"
        )
        raise SettingsError(f"norm 'fn': {found}; expected nn.Linear, whose inputs are the features")
    last[0].__class__ = FeatureLinear
