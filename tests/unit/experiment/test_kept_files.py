"""The experiment files beside the results can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.experiment.file.layers import load_experiment
from tests.support.command import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/**/*.yaml")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_a_kept_experiment_is_accepted(file: Path) -> None:
    assert load_experiment(str(file)).runs
