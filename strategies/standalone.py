"""Standalone: each client trains separately, the baseline that federated training has to improve on.

The messages of a round contain no arrays. Each client begins with its newly built model, which is the same for all
clients if they use the same seed, and keeps all arrays from round to round. There is no global model, so the accuracy
of a run is the mean over the clients. (The opposite baseline, training on all data in one place, is FedAvg with one
client.)
"""

from __future__ import annotations

from fedbn_flwr.norms.roles import Role
from fedbn_flwr.server.traits import Traits

from .fedavg import FedAvg


class Standalone(FedAvg):
    """Each client trains by itself, and no arrays are sent.

    The arguments are FedAvg's, except `bounds` and `kept`.
    """

    traits = Traits(client_memory=("their models",), local=frozenset(Role), sent_back=False)
