"""The public names of this package."""

from typing import Any as _Any

from fedbn_flwr import extensions as _extensions
from fedbn_flwr.messages.reply import Reply as Reply
from fedbn_flwr.server.flower import as_rule as as_rule
from fedbn_flwr.server.hooks import evaluation_round as evaluation_round
from fedbn_flwr.server.hooks import restore as restore
from fedbn_flwr.server.hooks import state_of as state_of
from fedbn_flwr.server.round import Rule as Rule
from fedbn_flwr.server.traits import Round as Round
from fedbn_flwr.server.traits import Traits as Traits
from fedbn_flwr.server.traits import mean_is_enough as mean_is_enough
from fedbn_flwr.server.wrapper import Wrapper as Wrapper
from fedbn_flwr.server.wrapper import broken_guarantees as broken_guarantees

# One line for each strategy; `fedbn_flwr/experiment/registry.py` lists those that an experiment can choose from.
from .fedavg import FedAvg as FedAvg
from .fedbn import FedBN as FedBN
from .fedbs import FedBS as FedBS
from .fednova import FedNova as FedNova
from .fedprox import FedProx as FedProx
from .fedrep import FedRep as FedRep
from .fedtan import FedAvgGlobalStats as FedAvgGlobalStats
from .fedtan import FedTAN as FedTAN
from .fedtan import FedTANII as FedTANII
from .fedwon import FedWon as FedWon
from .fixbn import FixBN as FixBN
from .fixbn import frozen_roles as frozen_roles
from .globalmomentum import GlobalMomentum as GlobalMomentum
from .hbn import HBN as HBN
from .heterobn import HeteroBN as HeteroBN
from .meanstatistics import MeanStatistics as MeanStatistics
from .scaffold import Scaffold as Scaffold
from .silobn import SiloBN as SiloBN
from .standalone import Standalone as Standalone


def __getattr__(name: str) -> _Any:
    """A strategy of an extension, which is imported when it is used."""
    if name in _extensions.declared("strategies"):
        return _extensions.part("strategies", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
