"""What is loaded into a model's tensors and taken from them, and keys of functions."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fedbn_flwr.extensions.identity import identity
from fedbn_flwr.messages.arrays import size_of
from fedbn_flwr.models.tensors import ModelTensors, copied, initial_arrays
from tests.support.federations import near


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()


def two_steps(model: nn.Module) -> dict[str, Tensor]:
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.arange(6) % 5).backward()
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("keys", [("",), ("0", "4"), ("1",)], ids=["all", "without norm", "norm"])
def test_what_is_loaded_is_there_and_comes_back(keys: tuple[str, ...]) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parts = ModelTensors(model)
    sent = {key: value + 1 for key, value in initial_arrays(model).items() if key.startswith(keys)}
    parts.load(copied({key: torch.from_numpy(value) for key, value in sent.items()}))
    for key, value in model.state_dict().items():
        expected = before[key] + 1 if key in sent else before[key]
        assert value.equal(expected), key
    taken = parts.values_of(sent)
    assert list(taken) == list(sent)
    near(sent, taken)
    two_steps(model)
    near(sent, taken)


def test_the_values_of_a_single_tensor_are_a_copy() -> None:
    model = nn.Linear(2, 1, bias=False)
    taken = ModelTensors(model).values_of(["weight"])
    before = taken["weight"].copy()
    nn.init.constant_(model.weight, 9)
    np.testing.assert_array_equal(taken["weight"], before)


def test_tensors_without_elements_are_loaded_among_others() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("mask", torch.zeros(0, dtype=torch.bool))  # the only one of its dtype
    sent = dict(initial_arrays(model)) | {"0.bias": np.array([5, 7], np.float32)}
    ModelTensors(model).load(sent)
    assert model[0].bias.tolist() == [5, 7]


def test_initial_values_keep_no_autograd_graph() -> None:
    """PyTorch would use nodes of that graph again, on the stream of their creation, and recording on a GPU failed."""
    parts = ModelTensors(net())
    for parameter in parts.model.parameters():
        get_gradient_edge(parameter).node.metadata["used before"] = True
        assert len(get_gradient_edge(parameter).node.metadata) == 0


def test_what_is_not_given_has_the_values_that_the_model_had_at_first() -> None:
    model, first = net(), net().state_dict()
    sent = {key: value + 1 for key, value in initial_arrays(model).items() if not key.startswith("1.")}
    own = {"1.bias": np.full(4, 7.0)}
    before = [*vars(model)]
    ModelTensors(model).load_all(initial_arrays(model), {})
    two_steps(model)
    ModelTensors(model).load_all(sent, own)
    assert [*vars(model)] == before
    for key, value in model.state_dict().items():
        expected = {**{name: each.numpy() for name, each in first.items()}, **own, **sent}[key]
        np.testing.assert_array_equal(value.numpy(), expected, err_msg=key)


def test_a_tensor_with_two_keys_is_kept_or_sent_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tensors = ModelTensors(model)
    assert tensors.kept_problem({"0.weight", "1.weight"}) is None
    assert "'0.weight' stays on the client and '1.weight' does not" in str(tensors.kept_problem({"0.weight"}))
    assert "the server sent '0.bias', which stays" in str(tensors.kept_problem({"0.bias"}, ["0.bias"]))


def test_loading_does_not_copy_the_received_arrays_in_between() -> None:
    model = nn.Sequential(nn.Linear(300, 100), nn.BatchNorm1d(100))
    parts, sent = ModelTensors(model), initial_arrays(model)
    tracemalloc.start()
    try:
        parts.load(sent)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < size_of(sent)[1] / 2, "NumPy reports its arrays to tracemalloc"


# --- keys of functions, by which clients share recordings and groups ---


@dataclass
class Unhashable:
    weight: float

    def __call__(self) -> None: ...


class Slotted:
    __slots__ = ()

    def __call__(self) -> None: ...


@pytest.mark.parametrize("make", [lambda: Unhashable(0.5), Slotted])
def test_a_function_without_a_hash_or_a_weak_reference_has_an_identity(make: Callable[[], Any]) -> None:
    one, other = make(), make()
    assert {identity(one), identity(one)} == {identity(one)}
    assert identity(one) != identity(other)


@pytest.mark.slow
def test_the_first_read_only_array_still_makes_pytorch_warn() -> None:
    """It does so once per process, and the user's code may be what deserves it."""
    code = (
        "import numpy as np, torch, warnings\n"
        "from fedbn_flwr.models.tensors import ModelTensors, initial_arrays\n"
        "model = torch.nn.BatchNorm1d(2).bfloat16()\n"
        "warnings.simplefilter('error')\n"
        "ModelTensors(model).load(initial_arrays(model))\n"
        "ModelTensors(model.float()).load(initial_arrays(model))\n"
        "try: torch.from_numpy(np.frombuffer(b'12345678', np.float32))\n"
        "except UserWarning: print('warned')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "warned\n"
