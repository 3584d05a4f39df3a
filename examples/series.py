"""A time series: movements of six persons, each with a sensor of their own, generated.

`python series.py`: a one-dimensional CNN, FedBN against FixBN; each person is a client.
"""

import numpy as np
from torch import nn

from fedbn_flwr import run_all


def movements(persons=6, each=60, length=48):
    """Three channels of acceleration while a person rests, walks, runs or jumps."""
    random = np.random.default_rng(0)
    time = np.arange(length) / length

    def split(count):
        inputs, labels, groups = [], [], []
        for person in range(persons):
            # A sensor has its own gain, offset and noise: this is what the persons' batch norms differ in.
            sensor = np.random.default_rng(person)
            gain, offset = sensor.lognormal(0, 0.5, 3), sensor.normal(0, 1, 3)
            kinds = random.integers(0, 4, count)
            phase, speed = random.uniform(0, 1, (2, count))
            turns = np.array([0, 2, 5, 3])[kinds] + 0.5 * speed
            wave = np.sin(2 * np.pi * (turns[:, None] * time + phase[:, None]))
            wave = np.where(kinds[:, None] == 3, np.abs(wave) ** 3, wave)
            shape = np.stack([wave, np.roll(wave, 3, 1), wave**2], 1) + random.normal(0, 0.6, (count, 3, length))
            inputs.append(shape * gain[:, None] + offset[:, None])
            labels.append(kinds)
            groups += [f"person {person}"] * count
        return {"inputs": np.concatenate(inputs), "labels": np.concatenate(labels), "groups": groups}

    return {"train": split(each), "test": split(each // 2), "classes": ["rest", "walk", "run", "jump"]}


class Convolutions(nn.Sequential):
    def __init__(self, num_classes, in_channels):
        first = [nn.Conv1d(in_channels, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2)]
        second = [nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1)]
        super().__init__(nn.BatchNorm1d(in_channels), *first, *second, nn.Flatten(), nn.Linear(32, num_classes))


EXPERIMENT = {
    "name": "series",
    "rounds": 12,
    "clients": 6,
    "data": {"name": "series:movements", "partition": {"kind": "natural"}},
    "model": {"name": "series:Convolutions"},
    "train": {"lr": 0.1, "batch_size": 20, "epochs": 2, "schedule": {"switch": 0.1}},
    "evaluate": {"every": 4},
    "runs": {
        "FedAvg": {},
        "FixBN": {"strategy": {"name": "FixBN", "freeze_round": 0.5}},
        "FedBN": {"strategy": "FedBN"},
    },
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, progress=False).table())
