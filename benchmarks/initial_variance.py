"""Shows how activations grow in residual networks without normalisation, and what that costs in training.

    python benchmarks/initial_variance.py DATA

DATA is the CIFAR-10 folder or hub name. For each normaliser: standard deviations after the stages and of the logits at
initialisation, on 500 images, and the largest activation; then the mean training loss of the last 20 of 150 steps of
centralised SGD with batch size 32 and momentum 0.9, without and with FedWon's clipping. "won, branches x 0.2" has
`branch_scale=0.2`, as NF-ResNets scale their branches (Brock et al. 2021, alpha).
"""

import sys

import torch
from fedbn_flwr.strategies.fedwon import clip_adaptively  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import build_model, convert_norm
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source

STAGES = {"resnet20": ("stages.2", "stages.5", "stages.8"), "resnet18": ("layer1", "layer2", "layer3", "layer4")}
NORMS = ("bn", "gn", "fixup", "none", "won", "won, branches x 0.2")

data = load(Source(name=sys.argv[1])).train
images = data.inputs[:20_000].float() / 255
inputs = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
targets = data.labels[:20_000]


def begin(name: str, norm: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, scaled = norm.partition(", branches x ")
    model = convert_norm(build_model(name, 10), kind, **({"branch_scale": float(scaled)} if scaled else {}))
    return model.train()


@torch.no_grad()
def spreads(name: str, norm: str) -> list[float]:
    model, found = begin(name, norm), []
    for stage in (model.get_submodule(key) for key in STAGES[name]):
        stage.register_forward_hook(lambda module, args, output: found.append((output.std(), output.max())))
    logits = model(inputs[:500])
    return [float(each) for each in (*(std for std, _ in found), logits.std(), max(most for _, most in found))]


def loss_after(name: str, norm: str, lr: float, clip: float) -> float:
    model, losses = begin(name, norm), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    clipped = {key: p for key, p in model.named_parameters() if not key.startswith("classify")}
    for _ in range(150):
        rows = torch.randint(0, len(targets), (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        if clip:
            clip_adaptively(clipped, {key: p.grad for key, p in clipped.items()}, clip)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


torch.set_num_threads(1)
for name in STAGES:
    for norm in NORMS:
        print(
            f"{name}, {norm}: after the stages, of the logits, largest",
            *(f"{each:.3g}" for each in spreads(name, norm)),
            flush=True,
        )
for norm in NORMS:
    for clip in (0.0, 0.1) if norm.startswith(("won", "none")) else (0.0,):
        results = [f"lr {lr}: {loss_after('resnet20', norm, lr, clip):.3f}" for lr in (0.003, 0.01, 0.03, 0.1)]
        print(f"resnet20, {norm}, clip {clip}:", *results, flush=True)
