"""One Flower Strategy per aggregation rule; import them from `fedbn_flwr.strategies`."""

from ._memory import CannotSave, restore, state
from ._registry import STRATEGIES, build_strategy, describe_strategies
from ._wrapper import (
    Wrapper,
    check,
    global_model,
    has_global_model,
    kept_by_clients,
    notes,
    personal,
    prepare,
    replaces_norm,
)
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedbs import FedBS
from .fedprox import FedProx
from .fedtan import FedAvgGlobalStats, FedTAN, FedTANII
from .fedwon import FedWon
from .fixbn import FixBN
from .globalmomentum import GlobalMomentum
from .heterobn import HeteroBN
from .meanstatistics import MeanStatistics
from .scaffold import Scaffold
from .silobn import SiloBN
from .standalone import Standalone

__all__ = [
    "FedAvg", "FedAvgGlobalStats", "FedBN", "FedBS", "FedProx", "FedTAN", "FedTANII", "FedWon", "FixBN",
    "GlobalMomentum", "HeteroBN",
    "MeanStatistics", "Scaffold", "SiloBN", "Standalone",
    "STRATEGIES", "CannotSave", "Wrapper", "build_strategy", "check", "describe_strategies", "global_model",
    "has_global_model", "kept_by_clients", "notes", "personal", "prepare", "replaces_norm", "restore",
    "state",
]  # fmt: skip
