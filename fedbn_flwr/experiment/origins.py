"""Where each setting of a run was given, for `fedbn explain`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.results.folder import flat_settings

from .data import resolve
from .find import parse_overrides
from .settings import Experiment, Settings


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    origin: str  # "command line", "run LABEL", "file", "data set" (of the catalogue) or "default"


def settings_of(experiment: Experiment, run: Settings) -> list[Setting]:
    """All settings of a run that have a value."""
    content: Mapping[str, Any] = json.loads(experiment.run_config["experiment"])
    changes = parse_overrides(shlex.split(experiment.run_config["set"]))
    label = _label(content.get("runs") or {}, run.label)
    variant = (content.get("runs") or {}).get(label) or {}
    layers = {
        "command line": _keys(changes),
        f"run {label}": _keys(variant),
        "file": _keys({key: value for key, value in content.items() if key not in ("runs", "description")}),
    }
    given = flat_settings(run.model_dump(mode="json"))
    found = []
    for key, value in flat_settings(resolve(run).model_dump(mode="json")).items():
        if key in ("name", "label") or value is None:
            continue
        origin = next((name for name, keys in layers.items() if key in keys), "default")
        if origin == "default" and value != given.get(key):
            origin = "data set"
        found.append(Setting(key, value, origin))
    return found


def _keys(settings: Mapping[str, Any]) -> set[str]:
    keys = set(flat_settings(settings))
    return keys | {"seed"} if "seeds" in keys else keys


def _label(runs: Mapping[str, Any], label: str) -> str | None:
    """The label in the file: overrides may have added to it."""
    known = [str(each) for each in runs if label == str(each) or label.startswith(f"{each}, ")]
    longest = max(known, key=len, default=None)
    return next((each for each in runs if str(each) == longest), None)
