"""The bare loop of the measurement of memory, a program of its own that imports PyTorch and torchvision only."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

from fedbn_flwr.models.vision import resnet18


def main(examples: int, test_examples: int, steps: int, batch_size: int) -> None:
    """Train a ResNet-18 on random images and evaluate it in batches of 100."""
    torch.set_num_threads(1)
    (train, labels), (test, test_labels) = (
        (torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (count,)))
        for count in (examples, test_examples)
    )
    model = resnet18(10, image_size=(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for rows in torch.randperm(examples)[: steps * batch_size].split(batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(train[rows].float() / 255), labels[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for rows in torch.arange(test_examples).split(100):
            F.cross_entropy(model(test[rows].float() / 255), test_labels[rows])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
