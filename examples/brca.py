"""Survival times of breast cancer patients in six regions (TCGA-BRCA): a loss and a metric of one's own.

`python brca.py FOLDER`, with brca.csv and train_test_split.csv of FLamby's fed_tcga_brca in FOLDER (open access at the
Genomic Data Commons; do not try to identify anyone). A linear model, as in FLamby's benchmark.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from torch import nn

from fedbn_flwr import run_all


def patients(folder):
    """39 numbers about a patient; days until death, or as a negative number days until the last visit."""
    with (Path(folder) / "train_test_split.csv").open() as file:
        places = {row["pid"]: (row["fold"], row["fold2"][-1]) for row in csv.DictReader(file)}
    with (Path(folder) / "brca.csv").open() as file:
        rows = [list(row.values()) for row in csv.DictReader(file) if row["pid"] in places]
    folds, regions = np.array([places[pid] for pid, *_ in rows]).T
    values = np.array([row[1:] for row in rows], dtype=np.float32)
    died, days = values[:, -2] > 0, values[:, -1]
    every = {"inputs": values[:, :-2], "labels": np.where(died, days, -days), "groups": regions}
    return {part: {key: column[folds == part] for key, column in every.items()} for part in ("train", "test")}


def linear(num_outputs, input_shape):
    return nn.Linear(*input_shape, num_outputs)


def cox(risks, days):
    """The negative partial log-likelihood (Cox 1972), over the patients of the batch as those at risk."""
    order = days.abs().argsort(descending=True)
    risks, died = risks.flatten()[order], days[order] > 0
    return ((risks.logcumsumexp(0) - risks) * died).mean()


def concordance(risks, days):
    """The share of pairs whose order in time the risks predict (Harrell 1982); equal risks count half."""
    risks, died, days = risks.flatten(), days > 0, days.abs()
    earlier = died[:, None] & ((days[:, None] < days) | ((days[:, None] == days) & ~died))
    right = (risks[:, None] > risks).double() + (risks[:, None] == risks).double() / 2
    return right[earlier].mean()


EXPERIMENT = {
    "name": "brca",
    "rounds": 5,
    "clients": 6,
    "seeds": [0, 1, 2, 3, 4],
    "data": {"name": "brca:patients", "normalise": "unit", "partition": {"kind": "natural"}},
    "model": {"name": "brca:linear"},
    "train": {"lr": 0.1, "batch_size": 8, "steps": 100, "loss": "brca:cox"},
    "evaluate": {"metrics": ["brca:concordance"]},
    "runs": {
        "FedAvg": {},
        "FedAdam": {
            "strategy": {"name": "FedAdam", "eta": 0.1, "beta_2": 0.999, "tau": 1e-8},
            "train": {"lr": 0.01},
        },
    },
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, data={"options": {"folder": sys.argv[1]}}, progress=False).table())
