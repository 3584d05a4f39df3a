"""Text: sentences of different lengths as tokens, generated.

`python text.py`: an embedding and a convolution, whose batch norm leaves out padding; FixBN and FedTAN against FedAvg.
"""

import numpy as np
import torch
from torch import nn

from fedbn_flwr import run_all
from fedbn_flwr.norms.variants import MaskedBatchNorm1d

WORDS, LONGEST = 60, 24


def sentences(count=480):
    """Each subject has pairs of words that follow one another; all words occur in all subjects."""
    random = np.random.default_rng(0)

    def split(size):
        labels = random.integers(0, 4, size)
        tokens = random.integers(1, WORDS, (size, LONGEST))
        lengths = random.integers(6, LONGEST + 1, size)
        for row, (label, length) in enumerate(zip(labels, lengths, strict=True)):
            for place in random.choice(length - 1, 2, replace=False):
                first = random.integers(1, 6)
                tokens[row, place : place + 2] = first, first + 10 * label + 5
        mask = np.arange(LONGEST) < lengths[:, None]
        return {"inputs": tokens * mask, "mask": mask, "labels": labels}

    return {"train": split(count), "test": split(count // 2), "classes": ["sport", "money", "art", "travel"]}


class Sentences(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.convolve = nn.Conv1d(16, 64, 2, padding=1)
        self.norm = MaskedBatchNorm1d(64)
        self.classify = nn.Linear(64, num_classes)

    def forward(self, batch):
        tokens, mask = batch["inputs"], batch["mask"]
        words = self.embed(tokens).transpose(1, 2) * mask[:, None]
        found = torch.relu(self.norm(self.convolve(words)[:, :, 1:], mask))
        return self.classify(found.masked_fill(~mask[:, None], 0).amax(2))


EXPERIMENT = {
    "name": "text",
    "rounds": 40,
    "clients": 4,
    "data": {
        "name": "text:sentences",
        "inputs": ["inputs", "mask"],
        "partition": {"kind": "classes", "classes_per_client": 1},
    },
    "model": {"name": "text:Sentences"},
    "train": {"lr": 0.3, "batch_size": 32, "steps": 5},
    "evaluate": {"every": 5},
    "runs": {
        "FedAvg": {},
        "FixBN": {"strategy": {"name": "FixBN", "freeze_round": 0.5}},
        "FedTAN": {"strategy": "FedTAN"},
    },
}

if __name__ == "__main__":
    print(run_all(EXPERIMENT, progress=False).table())
