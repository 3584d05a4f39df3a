"""Volumes: balls, cubes and crosses in scans of three scanners, generated.

`python volume.py`: a small three-dimensional CNN with BatchNorm3d; FedAvg, FixBN and FedBN, each scanner is a client.
"""

import numpy as np
from torch import nn

from fedbn_flwr import run_all


def scans(each=60, side=8):
    random = np.random.default_rng(0)
    x, y, z = np.abs(np.indices((side,) * 3) - (side - 1) / 2)
    ball, cube = x**2 + y**2 + z**2 < 9, np.maximum(np.maximum(x, y), z) < 2.6
    cross = ((x < 1) & (y < 1)) | ((y < 1) & (z < 1)) | ((x < 1) & (z < 1))
    forms = np.stack([ball, cube, cross]).astype(np.float32)

    def split(count):
        inputs, labels, groups = [], [], []
        for scanner, (contrast, level, noise) in {"A": (1, 0, 0.8), "B": (3, 2, 2.4), "C": (2, -2, 1.6)}.items():
            kinds = random.integers(0, 3, count)
            inputs.append(level + contrast * forms[kinds] + random.normal(0, noise, (count, side, side, side)))
            labels.append(kinds)
            groups += [scanner] * count
        return {"inputs": np.concatenate(inputs)[:, None], "labels": np.concatenate(labels), "groups": groups}

    return {"train": split(each), "test": split(each), "classes": ["ball", "cube", "cross"]}


class Volumes(nn.Sequential):
    def __init__(self, num_classes, in_channels):
        first = [nn.Conv3d(in_channels, 8, 3), nn.BatchNorm3d(8), nn.ReLU()]
        second = [nn.Conv3d(8, 16, 3), nn.BatchNorm3d(16), nn.ReLU(), nn.AdaptiveAvgPool3d(2)]
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(128, num_classes))


EXPERIMENT = {
    "name": "volume",
    "rounds": 8,
    "clients": 3,
    "data": {"name": "volume:scans", "partition": {"kind": "natural"}},
    "model": {"name": "volume:Volumes"},
    "train": {"lr": 0.05, "batch_size": 10, "epochs": 2, "schedule": {"switch": 0.1}},
    "evaluate": {"every": 4},
    "runs": {
        "FedAvg": {},
        "FixBN": {"strategy": {"name": "FixBN", "freeze_round": 0.5}},
        "FedBN": {"strategy": "FedBN"},
    },
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, progress=False).table())
