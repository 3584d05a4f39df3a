"""Federated averaging with pfl-research; torchrun starts several processes, which divide the clients among them."""

from __future__ import annotations

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from .networks import build, load
from .task import BATCH, CLIENTS, RATE, Task


class WithLoss(nn.Module):
    """pfl asks the network for its loss, and for metrics before its first round."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        return {}


task = Task()
torch.set_num_threads(1)
network = build(task.network)
load(network, task)
module = WithLoss(network)
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
users = [
    Dataset((torch.from_numpy(inputs), torch.from_numpy(targets)), user_id=str(client))
    for client, (inputs, targets) in enumerate(zip(task.inputs, task.targets, strict=True))
]
federated = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(range(CLIENTS))))
backend = SimulatedBackend(federated, federated, [WeightByDatapoints()])
algorithm = FederatedAveraging()
training = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
rounds = 0


def one_round() -> None:
    """In each of the processes."""
    global rounds
    rounds += 1
    # Evaluates in the first round alone, which is not counted.
    wanted = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=CLIENTS, val_cohort_size=None
    )
    algorithm.run(wanted, backend, model, training, training, send_metrics_to_platform=False)


def told(go_on: bool = False) -> bool:
    """What the first process says, in all of them."""
    said = torch.tensor(go_on)
    if distributed.world_size > 1:
        torch.distributed.broadcast(said, 0)
    return bool(said)


def told_round() -> None:
    told(True)
    one_round()


if distributed.global_rank == 0:
    task.serve(
        told_round,
        lambda: {name: value.detach().numpy() for name, value in network.named_parameters()},
        "pfl",
        "torch",
    )
    told(False)
else:
    while told():
        one_round()
