"""FedBS (Idrissi, Berrada, Noubir, "FedBS: Learning on Non-IID Data in Federated Learning using Batch Normalization").

Clients that are behind weigh more: each counts by its training loss, until the losses lie close together; then
FedProx, all alike. Close together means that the standard deviation over a round's clients has been at most epsilon
for r rounds in a row.

Where the paper leaves a choice:

- The loss is the mean over the images of a client's round, as training saw them, which every reply carries.
- One weight for all that travels, statistics of batch norm included.
- The paper gives no mu for FedProx: the default is that of our FedProx.

This is the rule that the paper describes. The authors' public code averages weights alike and pools the statistics that
all clients sent in all rounds so far; it has neither the loss nor the switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import metrics_of

from ._memory import numbers
from .fedavg import FedAvg


class FedBS(FedAvg):
    """FedAvg weighted by loss, then FedProx with equal weights.

    Parameters
    ----------
    epsilon : float (default: 0.1)
        The standard deviation of the clients' losses (of the population) at which they count as alike.
    patience : int (default: 5)
        r, the rounds in a row in which they must.
    proximal_mu : float (default: 0.01)
        mu of FedProx, from the next round on.

    The other arguments are FedAvg's; `weighted_by_key` has no effect but on the mean of metrics.
    """

    def __init__(
        self, *args: Any, epsilon: float = 0.1, patience: int = 5, proximal_mu: float = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if not epsilon >= 0:
            raise SettingsError(f"epsilon is {epsilon!r}; expected zero or more")
        if not patience >= 1:
            raise SettingsError(f"patience is {patience!r}; expected one round or more")
        if not proximal_mu >= 0:
            raise SettingsError(f"proximal_mu is {proximal_mu!r}; expected zero or more")
        self.epsilon = epsilon
        self.patience = patience
        self.proximal_mu = proximal_mu
        self._alike = 0  # rounds in a row
        self._switch_round: int | None = None  # the first of FedProx

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        self._alike, self._switch_round = 0, None

    def state(self) -> RecordDict:
        switch = {} if self._switch_round is None else {"switch-round": self._switch_round}
        return RecordDict({**super().state(), "fedbs": ConfigRecord({"alike": self._alike, **switch})})

    def restore(self, records: RecordDict) -> None:
        super().restore(records)
        told = numbers(records, "fedbs")
        self._alike, self._switch_round = told["alike"], told.get("switch-round")

    def notes(self) -> dict[str, Any]:
        """`switch_round` is the first round of FedProx, or None."""
        return {"switch_round": self._switch_round}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._switch_round is None:
            config.pop(protocol.PROXIMAL_MU, None)
        else:
            config[protocol.PROXIMAL_MU] = float(self.proximal_mu)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.shares and self._switch_round is None:
            spread = float(np.std(list(self.shares.values())))  # the weights are the losses
            self._alike = self._alike + 1 if spread <= self.epsilon else 0
            if self._alike >= self.patience:
                self._switch_round = server_round + 1
        return arrays, metrics

    def weights(self, server_round: int, contents: Sequence[RecordDict]) -> list[float]:
        losses = [_loss(content) for content in contents]
        # Equal losses, zero ones as well, are equal weights to the last bit.
        return [1.0] * len(losses) if self._switch_round is not None or len(set(losses)) == 1 else losses

    def _problem(self, content: RecordDict, with_arrays: bool) -> str | None:
        problem = super()._problem(content, with_arrays)
        if problem is None and with_arrays and self._switch_round is None and not 0 <= _loss(content) < np.inf:
            loss = metrics_of(content).get(protocol.TRAIN_LOSS)
            return (
                f"the reply's metrics have {protocol.TRAIN_LOSS!r} = {loss!r}, which cannot be a weight; expected a "
                "number, zero or more"
            )
        return problem


def _loss(content: RecordDict) -> float:
    """The round's mean training loss; NaN where the reply tells none."""
    loss = metrics_of(content).get(protocol.TRAIN_LOSS)
    return float(loss) if isinstance(loss, int | float) else float("nan")
