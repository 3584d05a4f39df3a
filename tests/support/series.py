"""Tokens of different lengths with padding masks: a model, clients' batches, and their union."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.norms.variants import MaskedBatchNorm1d

Batch = tuple[dict[str, Tensor], Tensor]


class Text(nn.Module):
    """Tokens and a mask; a layer over all positions, one over every second, and one over examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm0 = MaskedBatchNorm1d(6)
        self.first, self.norm1 = nn.Conv1d(6, 5, 3, padding=1, bias=False), MaskedBatchNorm1d(5)
        self.second, self.norm2 = (
            nn.Conv1d(5, 4, 3, padding=1, stride=2, bias=False),
            MaskedBatchNorm1d(4, affine=False),
        )
        self.norm3, self.classify = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask, half = batch["mask"], batch["mask"][:, ::2]
        x = self.norm0(self.embed(batch["tokens"]).transpose(1, 2), mask)
        x = self.norm1(self.first(x), mask=mask).tanh() * mask[:, None]
        x = self.norm2(self.second(x), half).tanh()
        y: Tensor = self.classify(self.norm3(x.sum(2) / half.sum(1, keepdim=True)))
        return y


def text(client: int, *lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(client)
    size = len(lengths), max(lengths) + client
    tokens = torch.randint(client, 8 + client, size, generator=generator)
    mask = torch.arange(size[1]) < torch.tensor(lengths)[:, None]
    return {"tokens": tokens, "mask": mask}, torch.full(size[:1], client % 3)


CLIENTS = [text(0, 3, 9, 1), text(1, 15, 12, 20, 2, 14), text(2, 1, 2)]


def union_of(batches: list[Batch]) -> Batch:
    longest = max(x["mask"].shape[1] for x, _ in batches)
    padded = [{key: F.pad(value, (0, longest - value.shape[1])) for key, value in x.items()} for x, _ in batches]
    return {key: torch.cat([x[key] for x in padded]) for key in padded[0]}, torch.cat([y for _, y in batches])
