"""Clients that train otherwise than the others, by the experiment."""

from __future__ import annotations

from pathlib import Path

import torch

from fedbn_flwr import run_all

OWN = {"batch_size": 8, "steps": 3, "lr_factor": 0.5}
EXPERIMENT = {
    "rounds": 2,
    "clients": 2,
    "model": {"name": "mlp"},
    "engine": {"device": "cpu"},
    "runs": {
        "all": {"train": {"lr": 0.05, "batch_size": 8, "steps": 3}},
        "each": {"train": {"lr": 0.1, "epochs": 2, "of_clients": [{"client": 0, **OWN}, {"client": 1, **OWN}]}},
        "one": {"train": {"lr": 0.1, "epochs": 2, "of_clients": [{"client": 1, **OWN}]}},
    },
}


def test_settings_of_every_client_are_those_of_all_and_the_report_says_who_has_them(tmp_path: Path) -> None:
    results = run_all(EXPERIMENT, out=tmp_path, progress=False)
    of_all, each, one = (result.model().state_dict() for result in results)
    assert all(torch.equal(values, each[key]) for key, values in of_all.items())
    assert not all(torch.equal(values, one[key]) for key, values in of_all.items())
    titles, _, *rows = results.table().partition("clients that took part\n")[2].splitlines()
    assert titles.split()[-5:] == ["batch", "size", "steps", "lr", "factor"]
    differ = [line.split()[:2] for line in rows if line.split()[-3:] == ["8", "3", "0.5"]]
    assert differ == [["each", "0"], ["each", "1"], ["one", "1"]]
