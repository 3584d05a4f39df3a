"""Size `small` of the papers' experiments: no run needs more work than two cores do in half an hour.

The unit of work is a training image of ResNet-20 on 32x32 pixels. Nothing is timed here: on two quiet cores, the 160
rounds of `fixbn/table4` took half an hour, which are 1.6 million images and 16 evaluations.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from described import describe
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.experiment.data import Shape
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.parts import make_model
from fedbn_flwr.experiment.settings import Data, Model, Settings
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION

HALF_AN_HOUR = 1.7e6
CORES = 2
FORWARD = 1 / 3  # of the work of a training image: testing has no backward pass
# Each step reads and writes all parameters. Of AlexNet's 57 million, this took as long as 30 to 60 images.
OF_A_MILLION_PARAMETERS = 1.0
TEST_IMAGES = {"office_caltech10": 483, "tiny_imagenet_25": 1_250, "digits_five": 5_860}
MOST_TEST_IMAGES = 10_000  # of the other data sets at this size


@functools.cache
def counted(data: Data, model: Model) -> tuple[int, int, int]:
    """The operations and the values of the convolutions for an image, and the parameters."""
    run = Settings(data=data, model=model)
    entry, size = CATALOGUE[data.name], run.data.crop or run.data.size
    sides = (size, size) if isinstance(size, int) else size
    with torch.device("meta"):
        task = CLASSIFICATION if entry.ids is None else SEGMENTATION
        network = make_model(run, Shape(entry.classes, (entry.channels, *sides), task)).eval()
        values: list[int] = []
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda module, given, found: values.append(found.numel()))
        with FlopCounterMode(display=False) as counter:
            network(torch.empty(2, entry.channels, *sides))  # some normalisers need two images
    return counter.get_total_flops() // 2, sum(values) // 2, sum(each.numel() for each in network.parameters())


def examples_of(run: Settings) -> float:
    """The examples that all clients of a run train on, one example counted each time."""
    strategy = run.strategy
    while "base" in strategy:  # the innermost one chooses
        strategy = strategy["base"]
    clients = max(int(run.clients * strategy.get("fraction_train", 1)), strategy.get("min_train_nodes", 2))
    clients = min(run.clients, clients)
    if run.train.steps is not None:
        return run.rounds * clients * run.train.steps * run.train.batch_size
    of_each = run.data.partition.model_dump().get("examples")
    held = of_each * run.clients if of_each else run.data.examples or CATALOGUE[run.data.name].examples
    return run.rounds * (run.train.epochs or 1) * held * (1 - run.evaluate.validation) * clients / run.clients


def work(run: Settings) -> float:
    """The work of a run: its training and its tests, in examples of ResNet-20."""
    images = examples_of(run)
    data = Data(name=run.data.name, size=run.data.size, crop=run.data.crop)
    operations, values, parameters = counted(data, run.model)
    usual = counted(Data(name="cifar10"), Model(name="resnet20"))
    # Depthwise convolutions have few operations for each value that they read and write.
    of_an_image = max(operations / usual[0], values / usual[1])
    steps = images / run.train.batch_size
    training = images * of_an_image + steps * OF_A_MILLION_PARAMETERS * parameters / 1e6
    tested = run.data.test_examples or TEST_IMAGES.get(run.data.name, MOST_TEST_IMAGES)
    by_server = 2 if CATALOGUE[run.data.name].domains else 1  # all images, and those of each domain
    traits = describe(run.strategy["name"]).traits
    asked = traits.personalises if run.evaluate.clients is None else run.evaluate.clients
    # Each tests on its own images, and perhaps on all, and again by domain.
    by_clients = (run.clients * (1 + run.evaluate.domains) if asked is True else 0) + bool(asked)
    evaluations = math.ceil(run.rounds / run.evaluate.every)
    testing = evaluations * tested * (by_server + by_clients) * FORWARD * of_an_image
    return training * CORES / min(CORES, run.clients) + testing


def marked(name: str) -> Any:
    slow = name == "fixbn/table3"  # its networks are of a package that takes seconds to import
    return pytest.param(name, marks=pytest.mark.nightly if slow else ())


TABLES = ("ours/heart", "ours/heart-bn")  # 740 rows, in seconds at any size


@pytest.mark.parametrize("name", [marked(name) for name in shipped_experiments() if "/" in name and name not in TABLES])
def test_a_run_of_size_small_is_half_an_hour_of_work_at_most(name: str) -> None:
    for run in load_experiment(name, ["size=small", "seed=0"]).runs:
        assert work(run) <= HALF_AN_HOUR, f"{run.label}: {work(run):,.0f}"
