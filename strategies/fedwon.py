"""FedWon (Zhuang, Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", arXiv 2306.05879).

No normalisation at all: batch norms are taken out, convolutions are reparametrised by scaled weight standardisation
(`model.norm=won`, see `fedbn_flwr.norms.wsconv`), and clients clip their gradients adaptively. What remains for
the server is FedAvg.

The paper's lambda is 0.1; it is meant for larger batches, and small ones (1 to 4 images) do without clipping. The last
linear layer is not clipped, as in Brock et al. 2021, where the method comes from.
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
    """FedAvg of a network without normalisation.

    Takes FedAvg's arguments too.

    Parameters
    ----------
    clip : float or None (default: 0.1)
        lambda: a unit's gradient is at most so many times as long as its weights. None or 0 clips nothing.
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
