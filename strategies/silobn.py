"""SiloBN (Andreux et al. 2020, https://arxiv.org/abs/2008.07424): batch norm's statistics stay on the client.

Gamma and beta are averaged like the weights; running mean and variance, which describe one client's data, never mix.
For data of none of the clients the paper takes statistics of that data, as AdaBN does: `evaluate.statistics:
reestimated` judges the global model so.
"""

from __future__ import annotations

from fedbn_flwr.norms.roles import Role

from .fedbn import LocalNorm


class SiloBN(LocalNorm):
    """FedAvg of all but the statistics of batch norm; the arguments are LocalNorm's and FedAvg's."""

    kept = frozenset({Role.STATISTICS, Role.COUNTER})
