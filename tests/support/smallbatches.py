"""FedTAN and its relatives with permission for the batches of a few examples that most tests have."""

from functools import partial

from fedbn_flwr import strategies

FedTAN = partial(strategies.FedTAN, min_batch=1)
FedTANII = partial(strategies.FedTANII, min_batch=1)
FedAvgGlobalStats = partial(strategies.FedAvgGlobalStats, min_batch=1)
