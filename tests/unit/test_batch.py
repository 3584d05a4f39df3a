"""Batches of any form, their tensors, and passes over them in several threads."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient
from fedbn_flwr.batch import count, first, map_batches, map_tensors, split_batch
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.norms.statistics import reestimate
from tests.support.federations import Federations
from tests.support.nets import net, some_batches

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
            "a batch is a dict with the keys 'photo', 'label'; expected a pair .* one key for the inputs .img, image,",
        ),
        ({"img": IMAGES, "x": IMAGES, "y": LABELS}, None, "a dict with the keys 'img', 'x', 'y'; expected a pair"),
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


# --- tensors, and dicts of tensors ---

TOKENS, MASK = torch.arange(12).reshape(4, 3), torch.ones(4, 3, dtype=torch.bool)


def test_a_function_is_applied_to_every_tensor() -> None:
    assert map_tensors(torch.Tensor.size, TOKENS) == (4, 3)
    found = map_tensors(lambda tensor: tensor[:2], {"tokens": TOKENS, "mask": MASK})
    assert [*found] == ["tokens", "mask"]
    assert found["tokens"].equal(TOKENS[:2])
    assert found["mask"].equal(MASK[:2])


def test_examples_are_counted_by_the_first_tensor() -> None:
    assert (count(TOKENS), count({"tokens": TOKENS, "mask": MASK})) == (4, 4)
    assert first({"tokens": TOKENS, "mask": MASK}) is first(TOKENS) is TOKENS


# --- passes in several threads ---

CPU = torch.device("cpu")


class Remembering(nn.Module):
    """Sets an attribute in `forward` and reads it when another thread has had the time to set it too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        time.sleep(0.002)
        return self.kept * self.scale


class Locked(Remembering):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def call(model: nn.Module, batch: Tensor) -> float:
    return float(model(batch).detach())


@pytest.mark.parametrize("make", [Remembering, Locked])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_batch_meets_its_own_attributes(make: type[Remembering], threads: int) -> None:
    found = list(map_batches(call, make(), map(torch.tensor, range(12)), threads))
    assert found == [2.0 * i for i in range(12)]
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")], "threads end with the pass"


def test_results_keep_the_order_of_the_batches_though_later_ones_are_ready_first() -> None:
    later = threading.Event()

    def wait(model: nn.Module, batch: int) -> int:
        if batch == 0:
            assert later.wait(300), "batch 1 must run while batch 0 waits"
        else:
            later.set()
        return batch

    assert list(map_batches(wait, net(), range(4), 2)) == [0, 1, 2, 3]


def test_the_threads_have_the_tensors_and_one_pytorch_thread_each() -> None:
    model = net()

    def inspect(found: nn.Module, batch: int) -> tuple[int, int]:
        return torch.get_num_threads(), next(found.parameters()).data_ptr()

    assert set(map_batches(inspect, model, range(4), 2)) == {(1, next(model.parameters()).data_ptr())}


def test_only_a_few_batches_are_gathered_ahead() -> None:
    gathered, done = 0, 0

    def batches() -> Iterator[int]:
        nonlocal gathered
        for number in range(20):
            gathered += 1
            assert gathered <= done + 4, "two that are computed, and two that wait"
            yield number

    for _ in map_batches(lambda model, batch: batch, net(), batches(), 2):
        done += 1
    assert done == 20


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(model: nn.Module, batch: int) -> int:
        raise ValueError(f"batch {batch}")

    with pytest.raises(ValueError, match="batch 0"):
        list(map_batches(fail, net(), range(3), 2))


@pytest.mark.parametrize("threads", [2, 3])
def test_evaluation_is_that_of_one_thread(threads: int) -> None:
    model, batches = net(), some_batches()
    metrics = ("auc", "macro_f1")
    one = evaluate(model, batches, F.cross_entropy, CPU, metrics)
    assert evaluate(model, batches, F.cross_entropy, CPU, metrics, threads=threads) == one
    assert one.keys() >= {"auc", "macro-f1"}


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("threads", [2, 3])
def test_reestimated_statistics_are_those_of_one_thread(threads: int, pooled: bool) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (one, count), (several, again) = (
        reestimate(model, some_batches(), CPU, pooled=pooled, threads=n) for n in (1, threads)
    )
    assert count == again == len(some_batches())
    assert one.keys() == several.keys()
    assert all(torch.equal(one[key], several[key]) for key in one)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
