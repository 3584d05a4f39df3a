"""gpu_lanes.py [STEPS]: client-steps per second of ResNet-20 on a GPU, by the number of clients that train at once."""

import copy
import functools
import json
import sys
import time

import torch
from torch.nn import functional as F

from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.training import Training, backpropagate, train
from fedbn_flwr.extensions.compiled.passes import compiled_gradient, uncompiled
from fedbn_flwr.extensions.together.lanes import lane_of, train_lanes
from fedbn_flwr.models.build import build_model

BATCH, STEPS = 20, int(sys.argv[1]) if len(sys.argv) > 1 else 100
GPU = torch.device("cuda")
torch.set_num_threads(1)
torch.manual_seed(0)
model = build_model("resnet20", 10, "bn").to(GPU)
first = copy.deepcopy(model.state_dict())
images = torch.randn(10, STEPS, BATCH, 3, 32, 32, device=GPU)
labels = torch.randint(0, 10, (10, STEPS, BATCH), device=GPU)


def rounds(clients: int) -> list[Training]:
    """A round of each client; all share the model, as in an experiment."""
    found = []
    for client in range(clients):
        optimizer = make_optimizer("sgd", dict(model.named_parameters()), 0.02, momentum=0.9, weight_decay=1e-4)
        gradient = compiled_gradient(functools.partial(backpropagate), BATCH)
        batches = list(zip(images[client], labels[client], strict=True))
        found.append(Training(model, batches, optimizer, F.cross_entropy, GPU, gradient=gradient))
    return found


def run(clients: int, at_once: bool) -> tuple[list[dict[str, torch.Tensor]], float]:
    """The trained models, and the seconds that training took."""
    found, begun, taken = [], [], 0.0
    for training in rounds(clients):
        model.load_state_dict(first)
        model.train()
        if at_once:
            begun.append(lane_of(training))
        else:
            torch.cuda.synchronize()
            start = time.perf_counter()
            train(training)
            torch.cuda.synchronize()
            taken += time.perf_counter() - start
            found.append(copy.deepcopy(model.state_dict()))
    if at_once:
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_lanes(begun)
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        for lane in begun:
            assert lane.trained is not None
            lane.finished()
            found.append(copy.deepcopy(model.state_dict()))
    return found, taken


for clients in (1, 2, 3, 5, 10):
    for at_once in (False, True):
        run(clients, at_once)  # records
    torch.cuda.reset_peak_memory_stats()
    apart, one = min((run(clients, False) for _ in range(2)), key=lambda each: each[1])
    alone = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found, all_ = min((run(clients, True) for _ in range(3)), key=lambda each: each[1])
    same = sum(all(a[key].equal(b[key]) for key in a) for a, b in zip(found, apart, strict=True))
    steps = clients * STEPS
    print(
        json.dumps(
            {
                "clients": clients,
                "steps/s one by one": round(steps / one),
                "steps/s at once": round(steps / all_),
                "times": round(one / all_, 2),
                "equal bits": f"{same} of {clients}",
                "MiB": [round(alone / 2**20), round(torch.cuda.max_memory_allocated() / 2**20)],
                "unrecorded": [error for _, error in uncompiled],
            }
        ),
        flush=True,
    )
