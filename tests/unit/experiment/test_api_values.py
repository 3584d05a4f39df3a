"""Values that `run` refuses before anything is trained, each with its key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedbn_flwr import run
from fedbn_flwr.errors import SettingsError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": (number for number in range(2))}, r"seed is \[0, 1\]: expected a whole number"),
        ({"seed": {1, 2}}, r"seed is \[1, 2\]: expected a whole number"),
        ({"strategy": lambda: None}, "'.*<lambda>@.*' returned a NoneType; expected a .*Strategy"),
        ({"train": {"lr": float("inf")}}, "train.lr is inf; expected a finite number"),
        ({"train": {"lr": np.float32("nan")}}, "train.lr is nan; expected a finite number"),
        (
            {"train": {"schedule": {"milestones": np.array([1, -np.inf])}}},
            "train.schedule.milestones.1 is -inf; expected a finite number",
        ),
    ],
)
def test_what_is_no_value_is_named(changes: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        run("quick", **changes, progress=False)
