"""The recordings of smartwatches, from the file of another package; a stand-in of the same form has known values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import MissingPackage
from fedbn_flwr.experiment.data import shares_of
from fedbn_flwr.experiment.settings import Data

SENSORS = ["ax", "ay", "az", "wx", "wy", "wz"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Twenty recordings, two of each of ten persons, whose values say recording and time."""
    given = [1000.0 * number + np.arange(16)[:, None] + np.arange(6) / 10 for number in range(20)]
    content = {
        "X": given, "y": np.arange(20) % 2, "subject": 1 + np.arange(20) // 2, "X_labels": SENSORS,
        "y_labels": ["PEN", "ABD"],
    }  # fmt: skip
    folder = tmp_path / "seglearn" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('it takes seconds')\n")
    np.save(folder / "watch_dataset.npy", np.array(content, object), allow_pickle=True)
    monkeypatch.syspath_prepend(tmp_path)
    return given


def keys(**changes: object) -> dict[str, object]:
    return {
        "name": "watch",
        "label": "exercise",
        "series": "recording",
        "window": {"length": 4, "overlap": 0.5},
    } | changes


def test_the_end_of_each_recording_is_for_testing(package: list[np.ndarray]) -> None:
    data = load(Source(**keys(group="person")))
    assert (data.shape, data.class_names) == ((6, 4), ("ABD", "PEN"))
    assert (len(data.train), len(data.test)) == (20 * 5, 20)
    assert data.train.inputs[5].equal(torch.from_numpy(package[1][:4].T).float())
    assert data.test.inputs[1].equal(torch.from_numpy(package[1][12:].T).float())


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_each_seed_has_other_persons_as_its_last_clients(package: list[np.ndarray], seed: int) -> None:
    data = Data(**keys(group="person", partition={"kind": "natural", "rotate": 2}))
    for part, rows in zip(("train", "test"), shares_of(data, 10, seed, "cpu"), strict=True):
        recordings = [getattr(load(data), part).inputs[own, 0, 0] // 2000 for own in rows]
        assert [int(own.unique()) for own in recordings] == [(client + 2 * seed) % 10 for client in range(10)]


def test_without_the_package_its_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(
        MissingPackage, match=r"data\.name='watch' is in the package 'seglearn': pip install seglearn=="
    ):
        load(Source(**keys()))
