"""Times training steps of ResNet-20 in float32 and bfloat16, in turns, on one core."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from fedbn_flwr.models.build import build_model


def step_of(size: int, norm: str, *, fast: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = build_model("resnet20", 10, norm, input_shape=(3, size, size)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(20, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (20,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


torch.set_num_threads(1)
print(f"torch {torch.__version__}, one core: median of 41 steps in turns, ms")
for size, norm in itertools.product((32, 16), ("bn", "gn+ws")):
    steps = {"float32": step_of(size, norm, fast=False), "bfloat16": step_of(size, norm, fast=True)}
    turns = [{name: seconds(step) for name, step in steps.items()} for _ in range(46)][5:]
    medians = (f"{name} {1000 * statistics.median(turn[name] for turn in turns):.1f}" for name in steps)
    print(f"{size} pixels, {norm}: {', '.join(medians)}", flush=True)
