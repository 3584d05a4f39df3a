"""Builds a run's model and checks that it accepts the examples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import Value, each
from fedbn_flwr.client.training import Loss
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import main
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.models.build import build_model
from fedbn_flwr.tasks import SEVERAL

from .data import Shape
from .objective import targets_like
from .settings import Settings, name_in


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device is 'cuda', but PyTorch finds no GPU here; use auto or cpu")
    return torch.device(name)


def make_model(run: Settings, dataset: DataSet | Shape) -> nn.Module:
    """The run's model, with initial weights drawn from its seed."""
    outputs = run.model.classes or dataset.outputs
    if outputs != dataset.outputs:
        raise SettingsError(
            f"model.classes is {outputs}, but {run.data.name!r} has {dataset.classes} classes, for which the model "
            f"needs {dataset.outputs} outputs"
        )
    with seeding.streams(seeding.seed_for(run.seed, "initial model"), torch.device("cpu")):
        return build_model(**model_arguments(run, dataset), weights=run.model.weights)


def model_arguments(run: Settings, dataset: DataSet | Shape) -> dict[str, Any]:
    """The arguments with which `build_model` builds the run's model."""
    return {
        "name": run.model.name,
        "num_classes": dataset.outputs,
        "norm": run.model.norm,
        "in_channels": dataset.channels,
        "image_size": run.model.image_size or (dataset.size if dataset.is_image else None),
        "input_shape": None if run.model.image_size else dataset.shape,
        "num_tokens": dataset.tokens,
        "stem": run.model.stem,
        "groups": run.model.groups,  # each norm uses the options that it has
        "branch_scale": run.model.branch_scale,
        **run.model.brn.model_dump(),
    }


def try_model(
    run: Settings, model: nn.Module, dataset: DataSet | Shape, device: torch.device, loss: Loss | None
) -> None:
    """Run two examples through the model, so that a wrong size is reported before training.

    It is tried in eval mode, and a copy of it in training mode, in which some networks return something else, which
    needs a `loss` of the user.
    """
    named.check_unchanged(run.model_dump())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError(f"model.name={run.model.name!r} has no parameter with requires_grad; expected one to train")
    model.eval()
    # Two, because static batch norm cannot compute the variance of one value.
    tried = [each(lambda part: part.to(device), dataset.blank(2))]
    if run.data.crop is not None:
        tried.insert(0, tried[0].new_zeros(2, dataset.channels, run.data.crop, run.data.crop))
    for inputs in tried:
        _try_examples(run, model, dataset, inputs)
    try:
        copied = copy.deepcopy(model).train()
    except Exception:  # a module of the user; clients try it
        return
    with seeding.all_streams(0, device):  # dropout draws
        _try_examples(run, copied, dataset, tried[0], loss)


def _try_examples(
    run: Settings,
    model: nn.Module,
    dataset: DataSet | Shape,
    inputs: Value,
    loss: Loss | None = None,
) -> None:
    size = main(inputs).shape[2:]
    mode = " in training mode" if model.training else ""
    try:
        with torch.no_grad():
            logits = model(inputs)
    except Exception as error:  # the network may be the user's
        reason = " ".join(str(error).split())[:200]
        if not isinstance(error, RuntimeError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise SettingsError(
            f"model.name={run.model.name!r} does not take the {_described(inputs)} examples of "
            f"{run.data.name!r}{mode}: {reason}"
        ) from None
    expected = [2, dataset.outputs, *(size if dataset.dense else ())]
    of_pixels = isinstance(logits, Tensor) and logits.ndim > 2
    # A model with one output may leave out its dimension.
    forms = (expected, [2]) if dataset.outputs == 1 and not dataset.dense else (expected,)
    is_right = isinstance(logits, Tensor) and list(logits.shape[: len(expected)]) in forms
    if dataset.task is SEVERAL or (is_right and of_pixels == dataset.dense):
        return
    found = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if loss is not None:
        targets = targets_like(dataset.task, dataset.classes, 2, expected[2:]).to(main(inputs).device)
        try:
            value: Any = loss(logits, targets)
            problem = None if isinstance(value, Tensor) and value.ndim == 0 else "it did not return a scalar tensor"
        except Exception as error:  # the user's
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise SettingsError(
                f"model.name={run.model.name!r} returns {found}{mode} for a batch of 2 examples, which "
                f"train.loss={name_in(run.train.loss or '')!r} does not take: {problem}"
            )
        return
    if of_pixels and not dataset.dense:
        raise SettingsError(
            f"model.name={run.model.name!r} is a segmentation network (one output per pixel), but "
            f"{run.data.name!r} has one label per example; use a classifier, such as resnet18, or segmentation data"
        )
    if isinstance(logits, Tensor) and logits.ndim == 2 and dataset.dense:
        raise SettingsError(
            f"model.name={run.model.name!r} is a classifier (one output per example), but {run.data.name!r} has one "
            "label per pixel; use a segmentation network, such as deeplabv3plus_mobilenet_v2"
        )
    other = ", or a train.loss of your own that takes what the model returns" if model.training else ""
    raise SettingsError(
        f"model.name={run.model.name!r} returns {found}{mode} for a batch of 2 examples; expected shape {expected}, as "
        f"{run.data.name!r} has {dataset.classes} {_COUNTED[dataset.task.form]}{other}"
    )


_COUNTED = {"classes": "classes", "labels": "labels", "numbers": "numbers to predict", "": "targets"}


def _described(inputs: Value) -> str:
    if isinstance(inputs, Mapping):
        return ", ".join(f"{key}: {_described(part)}" for key, part in inputs.items())
    return "x".join(map(str, inputs.shape[1:]))
