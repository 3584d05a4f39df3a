"""Files of your own format at sites that differ: WAV files of three microphones, generated.

`python reader.py`: a function reads a site's folder, and the sites train with other batches and numbers of steps,
which FedNova takes into account; FedBN keeps each microphone's batch norm at its site.
"""

import tempfile
import wave
from pathlib import Path

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from fedbn_flwr import run_all

RATE, LENGTH, KINDS = 4_000, 512, ("low", "middle", "high")


def record(folder, count, site):
    """Tones of three heights in KIND-NUMBER.wav; a microphone has its own volume and noise."""
    random = np.random.default_rng(site)
    folder.mkdir(parents=True)
    for number in range(count):
        kind = number % 3
        tone = np.sin(2 * np.pi * (200 + 150 * kind + random.uniform(-40, 40)) * np.arange(LENGTH) / RATE)
        heard = (tone + random.normal(0, 0.4 + 0.3 * site, LENGTH)) * 3_000 / (1 + 4 * site)
        with wave.open(str(folder / f"{KINDS[kind]}-{number:03}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, LENGTH, "NONE", ""))
            file.writeframes(heard.astype("<i2").tobytes())


class Recordings(Dataset):
    """Reads a file when its item is asked for. With `targets`, labels are known before."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("*.wav"))
        self.targets = [KINDS.index(file.name.partition("-")[0]) for file in self.files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        with wave.open(str(self.files[number])) as file:
            samples = np.frombuffer(file.readframes(LENGTH), "<i2").astype(np.float32)
        return samples[None], self.targets[number]


def recordings(root):
    """What `data.name` names: at a site, `root` is the folder in its node config, data-path."""
    folder = Path(root)
    return {"train": Recordings(folder / "train"), "test": Recordings(folder / "test"), "classes": KINDS}


class Convolutions(nn.Sequential):
    def __init__(self, num_classes, in_channels):
        first = [nn.Conv1d(in_channels, 8, 32, stride=4), nn.BatchNorm1d(8), nn.ReLU()]
        second = [nn.Conv1d(8, 16, 8, stride=2), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveMaxPool1d(1)]
        super().__init__(nn.BatchNorm1d(in_channels), *first, *second, nn.Flatten(), nn.Linear(16, num_classes))


EXPERIMENT = {
    "name": "reader",
    "rounds": 12,
    "clients": 3,
    # Smaller than the recordings, which then stay in their files until a batch needs them.
    "data": {"name": "reader:recordings", "classes": 3, "shape": [1, LENGTH], "memory": 1e-5},
    "model": {"name": "reader:Convolutions"},
    "train": {"lr": 0.05, "batch_size": 10, "steps": 6},
    "evaluate": {"every": 4, "server": False},
    "runs": {"FedAvg": {}, "FedNova": {"strategy": "FedNova"}, "FedBN": {"strategy": "FedBN"}},
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as sites:
        for site in range(3):
            record(Path(sites, f"site-{site}", "train"), 90, site)
            record(Path(sites, f"site-{site}", "test"), 45, site)
        nodes = [{"data-path": f"{sites}/site-{site}", "min-batch": 1} for site in range(3)]
        nodes[0] |= {"steps": 30}  # a site with a fast machine
        nodes[2] |= {"batch-size": 5, "lr-factor": 0.5}
        print(run_all(EXPERIMENT, progress=False, node_config=nodes).table())
