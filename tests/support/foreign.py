"""A client that does not use fedbn_flwr."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.client import NumPyClient


class Foreign(NumPyClient):
    """Adds one to every array."""

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return [array + 1 for array in parameters], 7, {"flag": True, "score": np.float32(0.5), "name": "left out"}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        return 0.25, 3, {"accuracy": np.float64(0.5), "count": np.int64(4)}
