"""Why AlexNet with batch norm does not train with batches of two: its batch norms of vectors, or the learning rate?

    python benchmarks/two_images.py     # appends to docs/results/fedwon/batch2/two_images.jsonl

Centralised SGD on all images of Office-Caltech-10 in $FEDBN_DATA, at 128 pixels, from the same weights with the same
batches. "without those of vectors" has no batch norm behind fully connected layers, "only those of vectors" no other.
"""

import time

import torch
from frame import note
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import build_model
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source

STEPS, PART = 400, 100
WITHOUT = {
    "all batch norms": (),
    "without those of vectors": (nn.BatchNorm1d,),
    "only those of vectors": (nn.BatchNorm2d,),
}

torch.set_num_threads(1)
data = load(Source(name="office_caltech10", size=128))
images, labels = data.train.images, data.train.labels
mean, std = (torch.tensor(values)[:, None, None] for values in data.moments)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
for name, kinds in WITHOUT.items():
    for lr in (0.01, 0.001):
        torch.manual_seed(0)
        model = build_model("alexnet_bn", num_classes=10)
        for module in list(model.modules()):
            for key, child in list(module.named_children()):
                if kinds and isinstance(child, kinds):
                    setattr(module, key, nn.Identity())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses, began = [], time.monotonic()
        for step in range(STEPS):
            rows = order[2 * step : 2 * step + 2]
            loss = F.cross_entropy(model((images[rows].float() / 255 - mean) / std), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        loss = {"steps 1-100": sum(losses[:PART]) / PART, "steps 301-400": sum(losses[-PART:]) / PART}
        note("fedwon/batch2/two_images.jsonl", model=name, lr=lr, **loss, seconds=round(time.monotonic() - began))
