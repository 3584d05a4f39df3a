"""FedWon (Zhuang, Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", arXiv 2306.05879).

The network has no normalisation layers: batch norms are removed, convolutions are reparametrised by scaled weight
standardisation (`model.norm=won`, see `fedbn_flwr.norms.wsconv`), and clients clip their gradients adaptively. The
server averages as FedAvg does.

The paper uses lambda = 0.1 for larger batches and no clipping for small ones (1 to 4 images). The last linear layer is
not clipped, as in Brock et al. 2021, who introduced adaptive clipping.
"""

from __future__ import annotations

from typing import Any, Unpack

from flwr.app import ArrayRecord

from fedbn_flwr.client.rules.fedwon import CLIP
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import Role, roles

from ._rule import Round
from .fedavg import FedAvg, FedAvgOptions


class FedWon(FedAvg):
    """FedAvg for a network without normalisation.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    clip : float or None (default: 0.1)
        lambda, the largest ratio of a unit's gradient norm to its weight norm; None or 0 turns clipping off.
    """

    def __init__(self, *, clip: float | None = 0.1, **options: Unpack[FedAvgOptions]) -> None:
        super().__init__(**options)
        if clip is not None and not clip >= 0:
            raise SettingsError(f"clip is {clip!r}; expected zero or more")
        self.clip = clip

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        for key, role in roles(arrays).items():
            if role is Role.STATISTICS:
                raise SettingsError(
                    f"FedWon is for networks without normalisation, and the model has batch norm ({key!r}); use a "
                    "model with model.norm=won, or convert_norm(model, 'won')"
                )

    def instructions(self, round: Round) -> dict[str, Any]:
        return {CLIP: float(self.clip)} if self.clip else {}
