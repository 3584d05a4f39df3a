"""Finding an experiment: a shipped one by name, a file, YAML text, or what a Flower run's config says."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import SettingsError, did_you_mean

from . import settings
from .settings import Experiment


def experiments_folder() -> Path:
    """Where the shipped experiments lie: in the package of a wheel, else in `apps/` of a checkout or bundle."""
    here = Path(__file__).parent.parent
    inside = here / "apps"
    return (inside if inside.is_dir() else here.parent / "apps") / "experiments"


def shipped_experiments() -> dict[str, Path]:
    return {file.stem: file for file in sorted(experiments_folder().glob("*.yaml"))}


def read_source(source: str) -> tuple[str, Any]:
    """Name and content of an experiment: a shipped one, a file, or YAML text."""
    if "\n" in source or source.lstrip().startswith("{"):
        return "experiment", settings.parse_yaml(source)
    path = Path(source).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        shipped = shipped_experiments()
        if source not in shipped:
            raise SettingsError(
                f"there is no experiment {source!r}: neither a file ending in .yaml nor one that is shipped; "
                f"{did_you_mean(source, shipped)}"
            )
        path = shipped[source]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read the experiment {str(path)!r}: {error.strerror}") from None
    return path.stem, settings.parse_yaml(text)


def load_experiment(source: str, overrides: Sequence[str] = ()) -> Experiment:
    name, content = read_source(source)
    return settings.read_experiment(content, overrides, name=name)


@functools.lru_cache(maxsize=8)
def _from_run_config(source: str, changes: str) -> Experiment:
    return load_experiment(source, shlex.split(changes))


def from_run_config(run_config: Mapping[str, Any]) -> Experiment:
    """The experiment that a Flower run is to carry out: `experiment` and `set` of its run config."""
    return _from_run_config(str(run_config.get("experiment", "demo")), str(run_config.get("set", "")))


def run_names(experiment: Experiment) -> list[str]:
    """A folder's name for each run: its label, and its seed where labels repeat."""
    labels = [re.sub(r"[^\w+.=-]+", "-", run.label).strip("-") or "run" for run in experiment.runs]
    repeated = len(set(labels)) < len(labels)
    names = [
        f"{label}-seed{run.seed}" if repeated else label for label, run in zip(labels, experiment.runs, strict=True)
    ]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingsError(f"two runs are both called {twice!r}; give each a label of its own and each seed once")
    return names
