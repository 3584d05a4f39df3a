"""Measures what the statistics of batch norm reveal about images; docs/privacy.md.

    python -m benchmarks.attacks identify mnist/mlp mnist/lenet cifar10/resnet20
    python -m benchmarks.attacks reconstruct mnist/mlp mnist/lenet cifar10/resnet20
    python -m benchmarks.attacks picture

The first two append a line for each setting to docs/results/privacy/*.jsonl and skip those that are there. The data
sets are read from $FEDBN_DATA. One thread; an hour for everything.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.attacks import identify, reconstruct
from benchmarks.attacks.features import (
    Batch,
    Layer,
    contributions,
    features,
    frozen_layers,
    layers_of,
    vector,
    weight_gradient,
)
from benchmarks.frame import RESULTS, note, pending
from fedbn_flwr import build_model, seeding
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source

BATCHES = (1, 8, 32, 128)
COHORT = 5
EPOCH_STEPS = 8  # of a local epoch of FedAvg
MOMENTUM = 0.1  # of the running statistics
RATE = 0.05

# What the server sees: a client's contributions to the forward exchange, or to all of FedTAN's; their mean over the
# cohort; the change of the running statistics in a round of FedAvg of one step, or of an epoch.
SEEN = ("exchange", "moments", "agreement", "one step", "epoch")


@dataclass(frozen=True)
class Setting:
    """A data set and a network; private images are those of the clients, public ones those of the attacker."""

    data: str
    network: str
    others: int = 999  # candidates that are in no batch
    public: int = 1000
    trials: int = 20
    states: tuple[str, ...] = ("untrained", "trained")

    @functools.cached_property
    def pixels(self) -> tuple[Tensor, Tensor]:
        source = load(Source(name=self.data)).train
        order = torch.randperm(len(source.labels), generator=seeding.generator(0, self.data))[:20_000]
        return source.inputs[order].float() / 255, source.labels[order]  # type: ignore[union-attr]

    def normalise(self, images: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(each).view(1, -1, 1, 1) for each in CATALOGUE[self.data].moments or ())
        return (images - mean) / deviation

    def batch(self, rows: Tensor | slice) -> Batch:
        images, labels = self.pixels
        return self.normalise(images[rows]), labels[rows]

    @property
    def private(self) -> range:
        return range(10_000)

    def not_in_batches(self, count: int, *, attacker: bool) -> slice:
        """Examples that no client has: for the attacker's covariance, or as false candidates."""
        start = 10_000 if attacker else 15_000
        return slice(start, start + count)

    @functools.cached_property
    def prior(self) -> reconstruct.Prior:
        return reconstruct.Prior.of(self.pixels[0][self.not_in_batches(self.public, attacker=True)])

    @functools.lru_cache(maxsize=2)  # noqa: B019 (two settings that live as long as the process)
    def model(self, state: str) -> nn.Module:
        torch.manual_seed(0)
        images, _ = self.pixels
        model = build_model(self.network, 10, input_shape=images.shape[1:])
        if state == "trained":  # on the private images, as a federation does
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            for step in range(400 if self.network != "resnet20" else 150):
                rows = torch.randint(10_000, (64,), generator=seeding.generator(0, "train", step))
                inputs, targets = self.batch(rows)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        return model.train().requires_grad_()


SETTINGS = {
    "mnist/mlp": Setting("mnist", "mlp", public=2000),
    "mnist/lenet": Setting("mnist", "lenet", trials=5),
    "cifar10/resnet20": Setting("cifar10", "resnet20", others=499, public=500, trials=1, states=("trained",)),
}


# --- identification ---


def keys_to_identify(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for name, seen, batch in itertools.product(names, SEEN, BATCHES):
        if name.endswith("mlp") and batch == 1 and seen in ("one step", "epoch"):
            continue  # batch norm needs two values
        for state in SETTINGS[name].states:
            yield {"setting": name, "model": state, "batch": batch, "seen": seen}


def run_identify(names: list[str]) -> None:
    for key in pending("privacy/identify.jsonl", keys_to_identify(names)):
        setting = SETTINGS[key["setting"]]
        model, began = setting.model(key["model"]), time.perf_counter()
        found = [identified(setting, model, key["batch"], key["seen"], trial) for trial in range(setting.trials)]
        result = {name: round(statistics.mean(each[name] for each in found), 4) for name in found[0]}
        seconds = round(time.perf_counter() - began, 1)
        note("privacy/identify.jsonl", **key, **result, trials=len(found), seconds=seconds)


def identified(setting: Setting, model: nn.Module, size: int, seen: str, trial: int) -> dict[str, float]:
    """AUC and top-1 of one batch, and the share of it that `solve` finds in a list of all candidates."""
    drawn = torch.randperm(len(setting.private), generator=seeding.generator(0, "batch", size, trial))
    count = {"agreement": COHORT, "epoch": EPOCH_STEPS}.get(seen, 1) * size
    gradients = seen in ("exchange", "agreement")
    rows = drawn[:count]
    if seen in ("one step", "epoch"):
        model, layers = after_local_training(setting, model, rows.split(size))
        observed = vector(layers, gradients=False)
    else:
        agreed = contributions(model, setting.batch(drawn[: COHORT * size]))
        layers = layers_of(agreed)
        own = layers if seen == "agreement" else layers_of(contributions(model, setting.batch(rows), agreed))
        observed = vector(own, gradients=gradients)

    def rows_of(which: Tensor | slice) -> Tensor:
        inputs, targets = setting.batch(which)
        parts = zip(inputs.split(128), targets.split(128), strict=True)
        return torch.cat([features(model, layers, i, t if gradients else None).detach() for i, t in parts])

    members = rows_of(rows)
    others = rows_of(setting.not_in_batches(setting.others, attacker=False))
    public = rows_of(setting.not_in_batches(setting.public, attacker=True))
    scores = identify.scores(observed.detach(), count, torch.cat([members, others]), public)
    within, outside = scores[:count], scores[count:]
    chosen = identify.solve(observed.detach(), torch.cat([members, others]), count)
    return {
        "auc": identify.auc(within, outside),
        "top1": identify.top_one(within, outside),
        "solved": sum(row < count for row in chosen) / count,
        "chance": count / (count + setting.others),  # of `solved`
        "numbers": len(observed),
    }


def after_local_training(
    setting: Setting, model: nn.Module, batches: tuple[Tensor, ...]
) -> tuple[nn.Module, list[Layer]]:
    """FedAvg: the batch statistics that follow from the running ones of a reply, and the model at half of the way."""
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    values: dict[str, int] = {}  # per channel and batch, for the correction of the variance

    def count(name: str, module: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        values[name] = inputs[0].numel() // inputs[0].shape[1]

    norms = {name: each for name, each in trained.named_modules() if isinstance(each, _BatchNorm)}
    for name, norm in norms.items():
        norm.register_forward_hook(functools.partial(count, name))
    for rows in batches:
        inputs, targets = setting.batch(rows)
        optimizer.zero_grad()
        F.cross_entropy(trained(inputs), targets).backward()
        optimizer.step()
    kept = (1 - MOMENTUM) ** len(batches)
    layers = []
    for name, norm in norms.items():
        before = model.get_submodule(name)
        mean, var = (
            (getattr(norm, key) - kept * getattr(before, key)) / (1 - kept) for key in ("running_mean", "running_var")
        )
        none = torch.zeros_like(mean)
        layers.append(Layer(mean, var * (values[name] - 1) / values[name], none, none))
    if len(batches) == 1:  # the statistics of the model that the server sent
        return model, layers
    between = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(between.parameters(), trained.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    return between, layers


# --- reconstruction ---

# The gradient of one step under FixBN's frozen statistics, in which no statistics leave a client, is the comparison.
MATCHED = ("moments", "exchange", "agreement", "frozen gradient")
STEPS = {"mlp": 300, "lenet": 200, "resnet20": 150}
LARGEST = {  # batches above it would take hours on a CPU
    ("resnet20", "exchange"): 8,
    ("resnet20", "frozen gradient"): 8,
    ("resnet20", "agreement"): 1,
    ("resnet20", "moments"): 32,
    ("mlp", "agreement"): 32,
    ("lenet", "agreement"): 32,
}


def keys_to_reconstruct(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for name, batch, seen in itertools.product(names, BATCHES, MATCHED):
        if batch > LARGEST.get((SETTINGS[name].network, seen), 128):
            continue
        for state in SETTINGS[name].states:
            yield {"setting": name, "model": state, "batch": batch, "seen": seen}


def run_reconstruct(names: list[str]) -> None:
    for key in pending("privacy/reconstruct.jsonl", keys_to_reconstruct(names)):
        setting, began = SETTINGS[key["setting"]], time.perf_counter()
        trials = max(1, setting.trials // (2 * key["batch"]))
        found = []
        for trial in range(trials):
            true, images = inverted(setting, setting.model(key["model"]), key["batch"], key["seen"], trial)
            found.append(measures(setting, true, images))
        result = {name: round(statistics.mean(each[name] for each in found), 3) for name in found[0]}
        seconds = round(time.perf_counter() - began, 1)
        note("privacy/reconstruct.jsonl", **key, **result, trials=trials, seconds=seconds)


def inverted(setting: Setting, model: nn.Module, size: int, seen: str, trial: int) -> tuple[Tensor, Tensor]:
    """The true images of a client's batch, and the reconstructed ones that match them best."""
    drawn = torch.randperm(len(setting.private), generator=seeding.generator(0, "batch", size, trial))
    rows = drawn[: size * (COHORT if seen == "agreement" else 1)]
    inputs, targets = setting.batch(rows)
    public = setting.batch(setting.not_in_batches(500, attacker=True))
    if seen == "frozen gradient":
        layers = frozen_layers(model)
        goal = weight_gradient(model, layers, inputs, targets).detach()

        def distance(images: Tensor) -> Tensor:
            found = weight_gradient(model, layers, setting.normalise(images), targets, graph=True)
            return reconstruct.cosine(found, goal)
    else:
        agreed = contributions(model, setting.batch(drawn[: COHORT * size]))
        layers = layers_of(agreed)
        gradients = seen != "moments"
        own = layers if seen == "agreement" else layers_of(contributions(model, (inputs, targets), agreed))
        goal = vector(own, gradients=gradients)
        scale = features(model, layers, public[0], public[1] if gradients else None).detach().std(0)
        used = scale > 1e-6 * scale.max()
        labels = targets if gradients else None

        def distance(images: Tensor) -> Tensor:
            found = features(model, layers, setting.normalise(images), labels, graph=True).mean(0)
            return ((found - goal) / scale)[used].square().mean() * len(images)

    true = setting.pixels[0][rows]
    images = reconstruct.invert(distance, setting.prior, len(true), steps=STEPS[setting.network], seed=trial)
    true = true[:size]  # of an agreement, the images of one client
    return true, reconstruct.matched(images, true)


def measures(setting: Setting, true: Tensor, images: Tensor) -> dict[str, float]:
    """Mean over the images of PSNR and SSIM, of the best image, and of guesses that use no exchange."""
    public = setting.pixels[0][setting.not_in_batches(2000, attacker=True)]
    mean = public.mean(0, keepdim=True).expand_as(true)
    similar = reconstruct.nearest(true, public)
    several = reconstruct.matched(public[: max(len(true), 1)], true)
    values: dict[str, float] = {"best_psnr": float(reconstruct.psnr(images, true).max())}
    for name, guess in (("", images), ("mean_", mean), ("nearest_", similar), ("others_", several)):
        values[f"{name}psnr"] = float(reconstruct.psnr(guess, true).mean())
        values[f"{name}ssim"] = float(reconstruct.ssim(guess, true).mean())
    return values


def picture() -> None:
    """Examples of MNIST batches of 1, 8 and 32, and those reconstructed from what each kind of server sees."""
    setting, rows, columns = SETTINGS["mnist/mlp"], dict[str, Tensor](), 12
    for size in (1, 8, 32):
        for seen in MATCHED:
            true, images = inverted(setting, setting.model("trained"), size, seen, 0)
            rows.setdefault(f"batch of {size}: true", true[:columns])
            rows[f"batch of {size}: from {seen}"] = images[:columns]
    figure = Figure((0.62 * columns + 1.9, 0.68 * len(rows)))
    places = figure.subplots(len(rows), columns, squeeze=False)
    for (title, images), line in zip(rows.items(), places, strict=True):
        line[0].text(-0.15, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
        for place in line:
            place.axis("off")
        for image, place in zip(images, line, strict=False):
            place.imshow(image.squeeze(0).clamp(0, 1), cmap="gray", vmin=0, vmax=1)
    figure.subplots_adjust(left=0.2, right=1, top=1, bottom=0, wspace=0.05, hspace=0.05)
    figure.savefig(RESULTS / "privacy" / "reconstruction.png", dpi=82)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("identify", "reconstruct", "picture"))
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)}; by default all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.settings or list(SETTINGS)
    {"identify": run_identify, "reconstruct": run_reconstruct, "picture": lambda _: picture()}[arguments.what](names)
