"""What the tests of data share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Own = Callable[[Any], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """Makes a function importable as `own_parts:part`."""

    def make(part: Any) -> str:
        module = ModuleType("own_parts")
        module.part = part  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_parts", module)
        return "own_parts:part"

    return make
