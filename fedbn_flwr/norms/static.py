"""Static batch norm (Diao et al. 2021, HeteroFL, https://arxiv.org/abs/2010.01264)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


class AnyBatchNorm(_BatchNorm):
    """Batch norm of values with any number of axes."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least two dimensions [N, C, ...], found {list(input.shape)}")


class StaticBatchNorm(AnyBatchNorm):
    """HeteroFL's static batch norm: it normalises with batch statistics and tracks none.

    NOTE: a state dict with `running_mean` and `running_var` gives the layer statistics, which it then uses in eval mode
    as any batch norm does. Its own state dict does not contain them, and loading a state dict without them removes
    them: statistics fit only the weights with which they were loaded.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_features, eps=eps, affine=affine, track_running_stats=False)
        self.register_buffer("running_mean", None, persistent=False)
        self.register_buffer("running_var", None, persistent=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("running_mean", "running_var"):
            value = state_dict.pop(prefix + name, None)
            like = self.weight if self.weight is not None else value
            setattr(self, name, None if value is None else value.detach().clone().to(like))
        super()._load_from_state_dict(state_dict, prefix, *args)
