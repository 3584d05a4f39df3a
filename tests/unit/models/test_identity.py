"""Keys of functions by which clients share recordings and groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fedbn_flwr.models.identity import identity


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
