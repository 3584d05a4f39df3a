"""Identification: which of many candidate images were in a batch, from its statistics.

The statistic is the likelihood ratio of Homer et al. (2008) for means of Gaussian vectors, with the covariance of
public images (Dwork et al., "Robust Traceability from Trace Amounts", 2015): the score of a candidate does not need to
know any other image of the batch. `solve` is the attack of a server that has a list with all images of the batch: the
non-negative least squares solution of "the mean of which rows is this vector?".
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

SHRINK = 1e-3  # of the mean eigenvalue, added to all: rounding in float32 and few public images


def scores(observed: Tensor, images: float, candidates: Tensor, public: Tensor) -> Tensor:
    """The log likelihood ratio of each candidate, up to scale, for the mean of a batch of so many images.

    log N(o; mu + (x - mu) / B, S (B - 1) / B^2) - log N(o; mu, S / B), constants left out.
    """
    centre, scale = public.mean(0), public.std(0)
    used = scale > 1e-6 * scale.max()  # a unit that is always off has no information
    rows = [((each - centre) / scale)[..., used].double() for each in (public, candidates, observed)]
    values, vectors = torch.linalg.eigh(rows[0].T @ rows[0] / len(public))
    whiten = vectors * torch.rsqrt(values.clamp(min=0) + SHRINK * values.mean())
    x, o = rows[1] @ whiten, rows[2] @ whiten
    return x @ o - x.square().sum(1) / (2 * images)


def auc(members: Tensor, others: Tensor) -> float:
    """The probability that a member's score is above another image's."""
    order = torch.sort(others).values
    below = torch.searchsorted(order, members, right=False) + torch.searchsorted(order, members, right=True)
    return float(below.double().mean() / (2 * len(others)))


def top_one(members: Tensor, others: Tensor) -> float:
    """The share of members that would be ranked first among the others."""
    return float((members > others.max()).double().mean())


def solve(observed: Tensor, rows: Tensor, images: int) -> set[int]:
    """The rows with the largest weights in the non-negative combination that is closest to `observed`."""
    scale = rows.std(0)
    used = scale > 1e-6 * scale.max()
    matrix = (rows / scale)[:, used].double().numpy().T  # a column per image
    goal = (observed / scale)[used].double().numpy()
    one = np.full((1, matrix.shape[1]), 10.0)  # the weights sum to one
    weights, _ = nnls(np.vstack([matrix, one]), np.append(goal, 10.0), maxiter=20 * matrix.shape[1])
    return {int(row) for row in np.argsort(-weights)[:images] if weights[row] > 0}
