"""Where each setting of a run was given, for `fedbn explain`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.results.folder import flat_settings

from .content import written_out
from .data import resolve
from .expansion import nested
from .find import parse_overrides
from .settings import DERIVED, Experiment, Settings

_NO_SETTINGS = (*DERIVED, "published")


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    # "command line", "sweep", "tune", "size NAME", "run LABEL", "file", "data set" (of the catalogue) or "default"
    origin: str


def settings_of(experiment: Experiment, run: Settings) -> list[Setting]:
    """All settings of a run that have a value."""
    content: Mapping[str, Any] = json.loads(experiment.run_config["experiment"])
    changes = parse_overrides(shlex.split(experiment.run_config["set"]))
    variants = {str(label): variant for label, variant in (content.get("runs") or {}).items()}
    layers = {
        "sweep": _within(run.cell.sweep),
        "tune": _within(run.cell.tune),
        "command line": _keys(changes),
        f"size {run.size.name}": set(run.size.changed),
        f"run {run.cell.row}": _keys(variants.get(run.cell.row) or {}),
        "file": _keys({key: value for key, value in content.items() if key not in ("runs", "description")}),
    }
    given = flat_settings(run.model_dump(mode="json"))
    found = []
    for key, value in flat_settings(resolve(run).model_dump(mode="json")).items():
        if key == "name" or key.partition(".")[0] in _NO_SETTINGS or value is None:
            continue
        origin = next((name for name, keys in layers.items() if key in keys), "default")
        if origin == "default" and value != given.get(key):
            origin = "data set"
        found.append(Setting(key, value, origin))
    return found


def _keys(settings: Mapping[str, Any]) -> set[str]:
    keys = set(flat_settings(settings))
    return keys | {"seed"} if "seeds" in keys else keys


def _within(cell: Mapping[str, Any]) -> set[str]:
    """The keys that a cell gives: the value of one may be a section."""
    return set(flat_settings(written_out(nested(cell))))
