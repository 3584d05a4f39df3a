"""Batches of other forms than a pair of tensors: dicts as Hugging Face data sets yield them, tuples of three, ..."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbn_flwr import BNClient
from fedbn_flwr.batch import split_batch
from tests.support.federations import Federations

IMAGES, LABELS = torch.zeros(4, 1, 2, 2), torch.arange(4)


@pytest.mark.parametrize(
    ("form", "batch"),
    [
        (lambda x, y: {"img": x, "label": y}, None),
        (lambda x, y: {"pixel_values": x, "labels": y, "id": ["a"] * len(y)}, None),
        (lambda x, y: {"photo": x, "species": y}, ("photo", "species")),
        (lambda x, y: {"image": x, "fine": y, "label": y * 0}, ("image", "fine")),
        (lambda x, y: (torch.arange(len(y)), x, y), (1, 2)),
        (lambda x, y: {"img": x.numpy(), "y": y.tolist()}, lambda b: (torch.tensor(b["img"]), torch.tensor(b["y"]))),
    ],
    ids=["img", "pixel_values", "keys", "keys win", "positions", "function"],
)
def test_a_client_trains_and_evaluates_the_same_on_batches_of_any_form(
    federation: Federations, form: Callable[[Tensor, Tensor], Any], batch: Any
) -> None:
    fed = federation()
    pairs = fed.data[0].batches
    data = [form(x, y) for x, y in pairs]
    plain = BNClient(copy.deepcopy(fed.model), pairs, pairs)
    client = BNClient(copy.deepcopy(fed.model), data, data, batch=batch)
    expected, result = (each.fit(each.get_parameters({}), {}) for each in (plain, client))
    assert (result[1], result[2]) == (8, expected[2])
    for value, twin in zip(result[0], expected[0], strict=True):
        np.testing.assert_array_equal(value, twin)
    assert client.evaluate(result[0], {}) == plain.evaluate(result[0], {})
    arrays = {key: value.numpy() for key, value in fed.model.state_dict().items()}
    found, twin = (each.statistics_round(arrays, {}).arrays for each in (client, plain))
    np.testing.assert_array_equal(found["1.running_var"], twin["1.running_var"])


@pytest.mark.parametrize(
    ("found", "how", "words"),
    [
        (
            {"photo": IMAGES, "label": LABELS},
            None,
            "a batch is a dict with the keys 'photo', 'label'; expected one key",
        ),
        ({"img": IMAGES, "x": IMAGES, "y": LABELS}, None, "a dict with the keys 'img', 'x', 'y'; expected one key"),
        ((IMAGES, LABELS, LABELS), None, "a batch is a tuple of Tensor, Tensor, Tensor; expected a pair"),
        (IMAGES, None, "a batch is a Tensor; expected a pair"),
        ((IMAGES.numpy(), LABELS.numpy()), None, "a batch is a tuple of ndarray, ndarray; expected a pair"),
        ({"img": [IMAGES], "label": LABELS}, None, "a batch is a tuple of list, Tensor; expected a pair"),
        ({"img": IMAGES}, ("img", "label"), r"batch=\('img', 'label'\) does not fit the data: a batch is a dict with"),
        ({"img": IMAGES}, len, "batch='len' returned a int; expected a pair"),
    ],
)
def test_a_batch_that_is_not_understood_is_described(found: Any, how: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        split_batch(found, how)


class Encoding(Mapping[str, Tensor]):
    """A mapping that is no dict, as the tokenisers of transformers return."""

    def __init__(self) -> None:
        self.content = {"image": IMAGES, "label": LABELS}

    def __getitem__(self, key: str) -> Tensor:
        return self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def test_any_mapping_is_read_by_its_keys() -> None:
    assert split_batch(Encoding(), None) == (IMAGES, LABELS)


def test_inputs_and_targets_may_be_dicts_of_tensors() -> None:
    inputs, targets = {"tokens": LABELS, "mask": LABELS > 1}, {"class": LABELS, "age": LABELS.float()}
    assert split_batch([inputs, targets], None) == (inputs, targets)
    assert split_batch({"inputs": inputs, "label": LABELS}, None) == (inputs, LABELS)
    with pytest.raises(TypeError, match=r"expected a pair \(inputs, targets\) of tensors or dicts of tensors"):
        split_batch(({"tokens": [1, 2]}, LABELS), None)
    with pytest.raises(TypeError, match="expected a pair"):
        split_batch(({}, LABELS), None)
