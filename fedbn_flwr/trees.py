"""Mappings of anything by name, as files have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]  # settings by key, whose sections are trees too, or an object of a JSON file
Draft = dict[str, Any]  # a tree while it is made


def flat_settings(settings: Tree, prefix: str = "") -> Draft:
    """`{"train": {"lr": 0.1}}` as `{"train.lr": 0.1}`."""
    values: Draft = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        values |= flat_settings(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values
