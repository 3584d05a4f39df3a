"""A table: scikit-learn's breast cancer data at four hospitals, each of which has patients of one class only.

`pip install scikit-learn`, then `python table.py`: a perceptron with BatchNorm1d, FixBN and FedTAN against FedAvg.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from torch import nn

from fedbn_flwr import run_all


def patients():
    """30 numbers about a tumour, and whether it is malignant."""
    inputs, labels = load_breast_cancer(return_X_y=True)
    test = np.random.default_rng(0).random(len(labels)) < 0.25
    split = {"train": ~test, "test": test}
    parts = {name: {"inputs": inputs[rows], "labels": labels[rows]} for name, rows in split.items()}
    return {**parts, "classes": ["malignant", "benign"]}


class Perceptron(nn.Sequential):
    def __init__(self, num_classes, input_shape):
        layers = [nn.Linear(*input_shape, 32), nn.BatchNorm1d(32), nn.ReLU()]
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, num_classes)]
        super().__init__(*layers)


EXPERIMENT = {
    "name": "table",
    "rounds": 20,
    "clients": 4,
    "data": {"name": "table:patients", "partition": {"kind": "classes", "classes_per_client": 1}},
    "model": {"name": "table:Perceptron"},
    "train": {"lr": 0.1, "batch_size": 32, "steps": 5},
    "evaluate": {"every": 5},
    "runs": {
        "FedAvg": {},
        "FixBN": {"strategy": {"name": "FixBN", "freeze_round": 0.25}},
        "FedTAN": {"strategy": "FedTAN"},
    },
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, progress=False).table())
