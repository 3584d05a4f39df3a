"""SiloBN (Andreux et al. 2020, https://arxiv.org/abs/2008.07424): batch norm's statistics stay on the client.

Gamma and beta are averaged like the weights; the running mean and variance, which describe one client's data, are not.
For data from outside the federation the paper uses the statistics of those data, as AdaBN does; `evaluate.statistics:
reestimated` evaluates the global model in this way.
"""

from __future__ import annotations

from fedbn_flwr.norms.roles import NORM_STATE
from fedbn_flwr.server.traits import Traits

from .fedbn import LocalNorm


class SiloBN(LocalNorm):
    """Each client has its own statistics of batch norm; weights, gamma and beta are averaged.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    global_norm : "average" | "initial" (default: "average")
        The statistics of the global model, which no client uses: "average" is the mean over the round's clients, which
        send their statistics for this purpose; "initial" keeps the initial values, and clients send no statistics. The
        server never sends statistics: a new client begins with the statistics of a newly built model.
    """

    traits = Traits(client_memory=("their own statistics of batch norm",), local=NORM_STATE)
