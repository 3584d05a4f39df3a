"""A model's tensors are loaded and read in one copy where they are contiguous."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.client.model_tensors import ModelTensors, copied, flatten_storage, initial_arrays, joined
from fedbn_flwr.messages.arrays import FlatArrays


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


def pieces(model: nn.Module, *prefixes: str) -> list[int]:
    state = model.state_dict()
    keys = [key for key in initial_arrays(model) if key.startswith(prefixes)]
    return [len(piece) for piece in joined([state[key].view(-1) for key in keys])]


def test_a_model_in_one_piece_of_memory_trains_as_before() -> None:
    model = net()
    moved = flatten_storage(copy.deepcopy(model))
    for key, value in model.state_dict().items():
        assert moved.state_dict()[key].equal(value), key
    expected, found = two_steps(model), two_steps(moved)
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)


def test_it_is_one_piece_and_a_part_of_it_as_few_as_can_be() -> None:
    conv, norm, linear = 3 * 4 * 9 + 4, 4 * 4, 4 * 36 * 5 + 5
    apart = net()
    assert len(pieces(apart, "")) == len(initial_arrays(apart))
    model = flatten_storage(net())
    assert pieces(model, "") == [conv + norm + linear]
    assert pieces(model, "0", "4") == [conv, linear]  # FedBN: batch norm stays local
    assert pieces(model, "4", "1") == [norm + linear]
    backwards = [value.view(-1) for value in reversed(list(model[0].state_dict().values()))]
    assert len(joined(backwards)) == 2


def test_pieces_joined_are_the_tensors_themselves() -> None:
    model = flatten_storage(net())
    (whole,) = joined([value.view(-1) for value in model[4].state_dict().values()])
    whole.fill_(7)
    assert (model[4].weight == 7).all()
    assert (model[4].bias == 7).all()
    assert not (model[1].running_var == 7).any()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("keys", [("",), ("0", "4"), ("1",)], ids=["all", "without norm", "norm"])
def test_what_is_loaded_is_there_and_comes_back(moved: bool, keys: tuple[str, ...]) -> None:
    model = flatten_storage(net()) if moved else net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parts = ModelTensors(model)
    sent = {key: value + 1 for key, value in initial_arrays(model).items() if key.startswith(keys)}
    block = copied({key: torch.from_numpy(value) for key, value in sent.items()})
    assert isinstance(block, FlatArrays)
    parts.load(block)
    for key, value in model.state_dict().items():
        expected = before[key] + 1 if key in sent else before[key]
        assert value.equal(expected), key
    taken = parts.taken(sent)
    assert list(taken) == list(sent)
    for key, value in sent.items():
        np.testing.assert_array_equal(taken[key], value)
    two_steps(model)
    for key, value in sent.items():
        np.testing.assert_array_equal(taken[key], value)  # a copy


def test_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    flatten_storage(model)
    assert model[1].weight is model[0].weight
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == 3


def test_what_is_of_another_kind_or_has_gaps_is_left_where_it_is() -> None:
    model = net()
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    counter, weight = model[1].num_batches_tracked.data_ptr(), model[0].weight.data_ptr()
    flatten_storage(model)
    assert model[1].num_batches_tracked.data_ptr() == counter
    assert model[0].weight.data_ptr() == weight
    assert not model[0].weight.is_contiguous()
    flatten_storage(nn.ReLU())  # nothing to move


def test_moved_tensors_are_no_longer_current() -> None:
    model = net()
    parts = ModelTensors(model)
    assert parts.are_current()
    flatten_storage(model)
    assert not parts.are_current()


def test_blocks_fit_that_are_the_model_together() -> None:
    model = net()
    parts = ModelTensors(model)
    arrays = initial_arrays(model)
    counter = copied({"1.num_batches_tracked": model[1].num_batches_tracked})
    norm = copied(
        {key: value for key, value in model.state_dict().items() if key.startswith("1.") and "num" not in key}
    )
    rest = copied({key: value for key, value in model.state_dict().items() if not key.startswith("1.")})
    assert parts.fits(arrays)
    assert parts.fits(arrays, counter)
    assert parts.fits(rest, norm)
    assert parts.fits(rest), "norm state may be missing: it stays on the client"
    assert not parts.fits(norm), "weights are missing"
    assert not parts.fits(arrays, norm), "norm state twice"
    assert not parts.fits(dict(arrays)), "the dict is unknown: all its arrays are checked"
    assert not ModelTensors(nn.Sequential(nn.Linear(4, 5))).fits(arrays)
    wider = nn.Sequential(nn.Conv2d(3, 4, 5), *net()[1:])
    assert not ModelTensors(wider).fits(arrays), "another shape"
