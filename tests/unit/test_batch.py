"""One helper for both forms of inputs and targets: a tensor, or a dict of tensors."""

from __future__ import annotations

import torch

from fedbn_flwr.batch import count, first, map_tensors

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
