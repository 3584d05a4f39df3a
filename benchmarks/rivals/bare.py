"""Federated averaging in plain PyTorch: one client after the other, and the mean of their models."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .networks import batches, build, load
from .task import CLIENTS, RATE, Task

task = Task()
torch.set_num_threads(1)
model, clients = build(task.network), batches(task)
load(model, task)
server = {name: value.clone() for name, value in model.state_dict().items()}


def one_round() -> None:
    total = {name: torch.zeros_like(value) for name, value in server.items() if value.is_floating_point()}
    for client in clients:
        model.load_state_dict(server)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for inputs, targets in client:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        state = model.state_dict()
        for name, value in total.items():
            value.add_(state[name])
    server.update({name: value / CLIENTS for name, value in total.items()})


task.serve(one_round, lambda: {name: server[name].numpy() for name in task.initial}, "torch")
