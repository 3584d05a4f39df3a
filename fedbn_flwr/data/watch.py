"""Smartwatches of ten persons during seven shoulder exercises (Burns et al. 2018, https://arxiv.org/abs/1802.01489).

The recordings are a file of the package seglearn (BSD): acceleration and rotation on three axes each, at 50 Hz.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from fedbn_flwr.errors import MissingPackage
from fedbn_flwr.named import path_of
from fedbn_flwr.trees import Tree

PACKAGE = "seglearn"
_SHARE = 0.25  # of a recording: its end, for testing


def recordings() -> Tree:
    """Long tables with the columns recording, person, exercise, and those of the sensors."""
    found = importlib.util.find_spec(PACKAGE)  # not imported, which takes seconds
    if found is None or found.origin is None:
        raise MissingPackage(f"data.name='watch' is in the package {PACKAGE!r}: pip install {PACKAGE}==1.2.5")
    # Its pickle is trusted as the code of the package is.
    given = np.load(path_of(found.origin).parent / "data" / "watch_dataset.npy", allow_pickle=True).item()
    lengths = np.array([len(values) for values in given["X"]])
    rows = np.concatenate([np.arange(length) for length in lengths])
    is_test = rows >= np.repeat(np.round(lengths * (1 - _SHARE)), lengths)
    exercises = np.array(given["y_labels"])[given["y"]]
    of_recordings = {"recording": np.arange(len(lengths)), "person": given["subject"], "exercise": exercises}
    columns = {name: np.repeat(values, lengths) for name, values in of_recordings.items()}
    columns |= dict(zip(given["X_labels"], np.concatenate(given["X"]).T, strict=True))
    return {
        part: {name: values[chosen] for name, values in columns.items()}
        for part, chosen in (("train", ~is_test), ("test", is_test))
    }
