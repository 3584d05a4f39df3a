"""Experiments from YAML text, as a command line reads them."""

from __future__ import annotations

import pytest

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import parse_overrides, parse_yaml, read_experiment
from fedbn_flwr.experiment.settings import Settings


def read(text: str, *overrides: str) -> Settings:
    """The settings of an experiment's only run."""
    (run,) = read_experiment(parse_yaml(text), parse_overrides(overrides)).runs
    return run


def fault(text: str, *overrides: str) -> str:
    """The error with which an experiment is refused."""
    with pytest.raises(SettingsError) as caught:
        read_experiment(parse_yaml(text), parse_overrides(overrides))
    return str(caught.value)
