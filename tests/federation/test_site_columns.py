"""Sites with tables of their own: no site trains on columns or classes in another order than the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr import run
from fedbn_flwr.errors import RunFailed

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "clients": 2,
    "data": {"name": "/nowhere", "label": "ill", "classes": 2, "shape": [2], "test": 0.25},
    "model": {"name": "mlp"},
    "train": {"lr": 0.1, "batch_size": 16},
    "strategy": {"name": "FedAvg"},
    "evaluate": {"server": False},
    "engine": {"device": "cpu", "workers": 0},
}


def write(folder: Path, columns: dict[str, str], classes: tuple[str, str] = ("no", "yes"), **more: Any) -> None:
    """North has age and bp; south has `columns`, by their names in north. Only the age says who is ill."""
    for seed, name in enumerate(("north", "south")):
        rng = np.random.default_rng(seed)
        age = rng.integers(20, 90, 80)
        frame = pd.DataFrame({"age": age, "bp": rng.normal(120, 9, 80).round(1)})
        frame["ill"] = np.where(age > 55, "yes", "no")
        if name == "south":
            frame = frame[[*columns, "ill"]].rename(columns=columns).assign(**more)
            frame["ill"] = frame["ill"].map(dict(zip(("no", "yes"), classes, strict=True)))
        frame.to_csv(folder / f"{name}.csv", index=False)


def trained(folder: Path, changes: dict[str, Any]) -> Any:
    own = {"min-batch": 16}
    nodes = [
        {"data-path": str(folder / f"{name}.csv"), "partition-id": i, **own}
        for i, name in enumerate(("north", "south"))
    ]
    settings = {**SETTINGS, "data": {**SETTINGS["data"], **changes}}
    return run(settings, out=folder / "out", node_config=nodes, progress=False)


@pytest.mark.parametrize("normalise", ["moments", "unit"])
@pytest.mark.parametrize(
    ("columns", "classes", "says"),
    [
        (
            {"bp": "bp", "age": "age"},
            ("no", "yes"),
            r"inputs bp, age, but client 0 has age, bp; name them in data\.inputs",
        ),
        (
            {"age": "age", "bp": "pressure"},
            ("no", "yes"),
            r"inputs age, pressure, but client 0 has age, bp; name them in data\.inputs",
        ),
        ({"age": "age", "bp": "bp"}, ("healthy", "ill"), "classes healthy, ill, but client 0 has no, yes"),
    ],
)
def test_other_columns_or_classes_at_a_site_are_an_error_before_training(
    columns: dict[str, str], classes: tuple[str, str], says: str, normalise: str, tmp_path: Path
) -> None:
    write(tmp_path, columns, classes)
    with pytest.raises(RunFailed, match=f"client 1: its data have the {says}"):
        trained(tmp_path, {"normalise": normalise})


def test_columns_that_the_experiment_names_may_be_in_any_order(tmp_path: Path) -> None:
    ends = []
    for columns in ({"bp": "bp", "age": "age"}, {"age": "age", "bp": "bp"}):
        folder = tmp_path / next(iter(columns))
        folder.mkdir()
        write(folder, columns, weight=1.0)
        result = trained(folder, {"inputs": ["age", "bp"]})
        ends.append((result.folder / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    described = json.loads((Path(result.folder) / "model.json").read_text())
    assert (described["inputs"], described["label"], described["classes"]) == (["age", "bp"], ["ill"], ["no", "yes"])
