"""Reconstruction: images whose statistics, or whose gradient, are those that a client sent.

Gradient inversion (Geiping et al. 2020) and its variants with the statistics of batch norm (Yin et al. 2021,
Hatamizadeh et al. 2023), with labels known: Adam on the images, and the best matching of reconstructed and true images.
The prior is a Gaussian with mean and covariance of public images, which is stronger than total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

RATE = 0.1  # of Adam
UNLIKELY, OUTSIDE = 1e-2, 1.0  # weights of the prior and of values outside of 0 to 1


@dataclass(frozen=True)
class Prior:
    """Examples as mean plus principal components, each in units of its deviation over public images."""

    mean: Tensor  # [1, C, H, W]
    components: Tensor  # [D, C * H * W]

    @classmethod
    def of(cls, images: Tensor) -> Prior:
        mean = images.mean(0, keepdim=True)
        _, values, vectors = torch.linalg.svd((images - mean).flatten(1), full_matrices=False)
        return cls(mean, vectors * (values / math.sqrt(len(images)))[:, None])

    def images(self, z: Tensor) -> Tensor:
        return self.mean + (z @ self.components).view(-1, *self.mean.shape[1:])


def invert(distance: Callable[[Tensor], Tensor], prior: Prior, count: int, *, steps: int, seed: int) -> Tensor:
    """`count` images in 0 to 1 that minimise `distance` and are likely under the prior."""
    generator = torch.Generator().manual_seed(seed)
    z = (0.3 * torch.randn(count, len(prior.components), generator=generator)).to(prior.mean.dtype).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 0.01 * RATE)
    for _ in range(steps):
        images = prior.images(z)
        inside = images.clamp(0, 1)
        loss = distance(inside + images - images.detach()) + UNLIKELY * z.square().mean()
        loss = loss + OUTSIDE * (images - inside).square().mean()
        (z.grad,) = torch.autograd.grad(loss, z)
        optimizer.step()
        schedule.step()
    return prior.images(z.detach()).clamp(0, 1)


def cosine(found: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(found, target, dim=0)


def matched(found: Tensor, true: Tensor) -> Tensor:
    """`found` in the order in which the mean square distance to `true` is least; `found` may have more images."""
    rows, columns = linear_sum_assignment(distances(true, found).numpy())
    assert list(rows) == list(range(len(true)))
    return found[torch.as_tensor(columns)]


def nearest(true: Tensor, others: Tensor) -> Tensor:
    """For each true image the most similar one of `others`: what a person could know without an attack."""
    return others[distances(true, others).argmin(1)]


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Mean square distances between images."""
    return torch.cdist(a.flatten(1).double(), b.flatten(1).double()).square() / a[0].numel()


def psnr(found: Tensor, true: Tensor) -> Tensor:
    """Decibels for each image, at most 60."""
    return -10 * (found - true).square().flatten(1).mean(1).clamp(min=1e-6).log10()


def ssim(found: Tensor, true: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of each image, with windows of 7 by 7 pixels."""
    size, (c1, c2) = 7, (0.01**2, 0.03**2)

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, size, stride=1)

    a, b = mean(found), mean(true)
    correction = size**2 / (size**2 - 1)
    va, vb = (mean(x.square()) - m.square() for x, m in ((found, a), (true, b)))
    both = mean(found * true) - a * b
    top = (2 * a * b + c1) * (2 * correction * both + c2)
    return (top / ((a.square() + b.square() + c1) * (correction * (va + vb) + c2))).flatten(1).mean(1)
