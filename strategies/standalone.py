"""Standalone: each client trains on its own, the lower bound that a federation has to beat.

A round has its messages, but no array travels. Clients begin with the model they were built with, the same for all
where they build it from one seed, and keep everything from round to round. There is no global model, so a run's
accuracy is the mean over the clients. (The upper bound, training on all data in one place, is FedAvg with one client.)
"""

from __future__ import annotations

from fedbn_flwr.norms.roles import Role

from ._rule import Traits
from .fedavg import FedAvg


class Standalone(FedAvg):
    """FedAvg that shares nothing; the arguments are FedAvg's."""

    traits = Traits(personal=True, has_global_model=False, client_memory="their models", kept=frozenset(Role))
