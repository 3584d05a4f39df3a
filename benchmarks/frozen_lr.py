"""Tests whether plain SGD trains a network with frozen batch norm at this learning rate, without federated code.

    fedbn run fedtan/mnist rounds=50 'seeds=[0]' --out RUNS      # FedAvg+BN and FedTAN are used
    python benchmarks/frozen_lr.py RUNS/FedAvg+BN/model.safetensors DATA

DATA is the MNIST folder or hub name. Appends the loss of every 20th step of 200 with batches of 640 to
docs/results/mnist/frozen_lr.jsonl, for batch norm with batch statistics, frozen at the model's running statistics, and
frozen at those of the whole training set.
"""

import sys

import torch
from frame import note
from safetensors.torch import load_file

from fedbn_flwr import build_model
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source

data = load(Source(name=sys.argv[2])).train
inputs, targets = data.inputs.float() / 255, data.labels


def begin():
    model = build_model("mlp", 10)
    model.load_state_dict(load_file(sys.argv[1]), strict=False)
    return model.train()


with torch.no_grad():
    exact_var, exact_mean = torch.var_mean(begin().hidden(inputs.flatten(1)), 0)
for statistics in ("batch", "running", "exact"):
    for lr in (0.5, 0.1):
        model = begin()
        if statistics != "batch":
            model.bn.eval()
        if statistics == "exact":
            model.bn.running_mean.copy_(exact_mean)
            model.bn.running_var.copy_(exact_var)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        torch.manual_seed(0)
        losses = []
        for _ in range(200):
            rows = torch.randint(0, len(targets), (640,))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        note("mnist/frozen_lr.jsonl", statistics=statistics, lr=lr, losses=[round(loss, 3) for loss in losses[::20]])
