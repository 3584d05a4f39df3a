"""Marks for some of a test's cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The values of a parameter, or tuples of those of several; only the slower tests try cases that aren't quick.

    `quick` has cases, or the first values of tuples.
    """
    return [pytest.param(*each, marks=() if each in quick or each[0] in quick else pytest.mark.slow)
            for each in (case if isinstance(case, tuple) else (case,) for case in cases)]  # fmt: skip
