"""The indices of each client's training images, and of its share of the test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import named, seeding
from fedbn_flwr.data.dataset import Groups
from fedbn_flwr.errors import DataError

from .custom import own_partition
from .kinds import KINDS, Rows


def partition(
    labels: Tensor, classes: int, clients: int, seed: int, kind: str, *, groups: Groups | None = None, **options: Any
) -> list[Tensor]:
    """Indices of each client's images, ascending, for a kind of partition in kinds.py with its `options`.

    `kind` may also be `module:callable`, a partition of the user, which may leave images out, as does the option
    `images`. Raises DataError unless each image belongs to exactly one client and each client has images.
    """
    if clients > len(labels):
        raise DataError(f"clients is {clients}, but the data has {len(labels)} training images")
    rows = Rows(labels.numpy(), classes, groups)
    if named.is_name(kind):
        return [torch.from_numpy(np.sort(part)) for part in own_partition(kind, rows, clients, seed, **options)]
    if kind not in KINDS:
        raise DataError(f"data.partition.kind={kind!r} is not one of {', '.join(KINDS)}")
    parts = KINDS[kind].assign(rows, clients, seed, **options)
    empty = [i for i, part in enumerate(parts) if len(part) == 0]
    if empty:
        shown = ", ".join(str(i) for i in empty[:8]) + (", ..." if len(empty) > 8 else "")
        raise DataError(
            f"data.partition ({kind}) leaves {len(empty)} of {clients} clients without images (clients {shown}); "
            "use fewer clients, more classes per client, a larger alpha, or another seed"
        )
    counts = np.bincount(np.concatenate(parts), minlength=len(labels))
    if (lost := int((counts == 0).sum())) and not options.get("images"):
        gone = sorted(set(labels[torch.from_numpy(counts == 0)].tolist()))
        raise DataError(
            f"data.partition ({kind}) gives {lost} of {len(labels)} images to no client (classes {gone[:10]}); "
            "use more clients, more classes per client, or assignment: consecutive"
        )
    if np.max(counts) > 1:
        raise DataError(f"data.partition ({kind}) gives image {int(np.argmax(counts))} to two clients; expected one")
    return [torch.from_numpy(np.sort(part)) for part in parts]


def hold_out(rows: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """A client's images for training, and a random share for validation, rounded; at least one is for training."""
    if not share:
        return rows, rows[:0]
    count = min(int(share * len(rows) + 0.5), len(rows) - 1)
    order = torch.randperm(len(rows), generator=seeding.generator(seed, "validation", client)).to(rows.device)
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def share_test(parts: Sequence[Tensor], labels: Tensor, test_labels: Tensor, seed: int) -> list[Tensor]:
    """Indices of each client's own test images, ascending; `parts` are its training images, indices of `labels`.

    The test images of each class are divided in proportion to the clients' training images of that class, by largest
    remainders. Test images of a class without training images belong to no client. If a class has few test images, a
    client may get none.
    """
    classes = 1 + int(max(labels.max(), test_labels.max()))
    held = np.stack([np.bincount(labels[part].numpy(), minlength=classes) for part in parts])  # [clients, classes]
    order = np.random.default_rng(seeding.seed_for(seed, "own test images")).permutation(len(test_labels))
    shuffled = test_labels.numpy()[order]
    pieces: list[list[np.ndarray]] = [[] for _ in parts]
    for label in np.flatnonzero(held.sum(0)):
        rows = order[shuffled == label]
        # In integers, so that rounding errors cannot change a share.
        counts, remainders = np.divmod(held[:, label] * len(rows), held[:, label].sum())
        counts[np.argsort(-remainders, kind="stable")[: len(rows) - counts.sum()]] += 1
        for piece, some in zip(pieces, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            piece.append(some)
    return [torch.from_numpy(np.sort(np.concatenate(piece))) for piece in pieces]
