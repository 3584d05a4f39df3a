"""The indices of each client's training examples, and of its share of the test examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import named, seeding
from fedbn_flwr.data.dataset import Groups
from fedbn_flwr.errors import DataError

from .kinds import KINDS, Parts, Rows

KEY = "data.partition.kind"


def partition(
    labels: Tensor, classes: int, clients: int, seed: int, kind: str, *, groups: Groups | None = None, **options: Any
) -> list[Tensor]:
    """Indices of each client's examples, ascending, for a kind of partition in kinds.py with its `options`.

    `kind` may also be `module:callable`, a partition of the user, which may leave examples out, as does the option
    `examples`. Raises DataError unless each example belongs to exactly one client and each client has examples.
    """
    if clients > len(labels):
        raise DataError(f"clients is {clients}, but the data has {len(labels)} training examples")
    rows = Rows(labels.numpy(), classes, groups)
    own = named.is_name(kind)
    parts = _own(kind, rows, clients, seed, options) if own else KINDS[kind].assign(rows, clients, seed, **options)
    empty = [str(i) for i, part in enumerate(parts) if len(part) == 0]
    if empty:
        shown = ", ".join(empty[:8]) + (", ..." if len(empty) > 8 else "")
        raise DataError(
            f"data.partition ({kind}) leaves {len(empty)} of {clients} clients without examples (clients {shown}); "
            "use fewer clients, more classes per client, a larger alpha, or another seed"
        )
    lost = np.setdiff1d(np.arange(len(labels)), np.concatenate(parts))
    if len(lost) and not own and not options.get("examples"):
        gone = sorted(set(labels[torch.from_numpy(lost)].tolist()))
        raise DataError(
            f"data.partition ({kind}) gives {len(lost)} of {len(labels)} examples to no client (classes {gone[:10]}); "
            "use more clients, more classes per client, or assignment: consecutive"
        )
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _own(name: str, rows: Rows, clients: int, seed: int, options: Mapping[str, Any]) -> Parts:
    """The row numbers of each client that the callable `name` returns for the labels and the number of clients.

    Its random draws are functions of `seed`: it is offered a generator and the seed, and Python's, NumPy's and torch's
    global generators are seeded. Rows may be left out, but no row may belong to two clients.
    """
    drawn = seeding.seed_for(seed, "own partition")
    first, second = (_called(name, rows, clients, drawn, options) for _ in range(2))
    if any(not np.array_equal(one, two) for one, two in zip(first, second, strict=True)):
        raise DataError(
            f"{KEY}={name!r} returned two different partitions for the same arguments, so processes would not agree on "
            "it; draw from the argument `generator`, which it gets if its signature names it"
        )
    return first


def _called(name: str, rows: Rows, clients: int, seed: int, options: Mapping[str, Any]) -> Parts:
    """The partition as arrays of row numbers; DataError names the client whose rows are wrong."""
    offered = {
        "generator": np.random.default_rng(seed),
        "seed": seed % 2**32,
        "classes": rows.classes,
        "domains": None if rows.groups is None else np.array(rows.groups.names)[rows.groups.train.numpy()],
    }
    offered = {key: value for key, value in offered.items() if key not in options}
    with seeding.streams(seed):
        taken = named.accepted(named.load(KEY, name), offered)
        found = named.call(KEY, name, rows.labels.copy(), clients, **taken, **options)
    if isinstance(found, Mapping):
        found = [found[client] for client in sorted(found)]
    if not isinstance(found, list | tuple | np.ndarray) or len(found) != clients:
        size = f" of {len(found)}" if hasattr(found, "__len__") else ""
        raise DataError(
            f"{KEY}={name!r} returned a {type(found).__name__}{size}; expected a list of {clients} arrays of row "
            "numbers, one for each client"
        )
    owners: dict[int, int] = {}
    parts = []
    for client, given in enumerate(found):
        part = np.asarray(sorted(given) if isinstance(given, set | frozenset) else given)
        where = f"{KEY}={name!r}: client {client}"
        if part.ndim != 1 or (part.size and not np.issubdtype(part.dtype, np.integer)):
            raise DataError(
                f"{where} has {part.dtype} values of shape {list(part.shape)}; expected a list of row numbers"
            )
        for row in part.tolist():
            if not 0 <= row < len(rows.labels):
                raise DataError(
                    f"{where} has the row {row}; expected 0 to {len(rows.labels) - 1}, the training examples"
                )
            if row in owners:
                raise DataError(
                    f"{where} has the row {row}, which client {owners[row]} has too; expected each row once"
                )
            owners[row] = client
        parts.append(part.astype(np.int64))
    return parts


def hold_out(rows: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """A client's examples for training, and a random share for validation, rounded; at least one is for training."""
    if not share:
        return rows, rows[:0]
    count = min(int(share * len(rows) + 0.5), len(rows) - 1)
    order = torch.randperm(len(rows), generator=seeding.generator(seed, "validation", client)).to(rows.device)
    return rows[order[count:].sort().values], rows[order[:count].sort().values]


def share_test(parts: Sequence[Tensor], labels: Tensor, test_labels: Tensor, seed: int) -> list[Tensor]:
    """Indices of each client's own test examples, ascending; `parts` are its training examples, indices of `labels`.

    The test examples of each class are divided in proportion to the clients' training examples of that class, by
    largest remainders. Test examples of a class without training examples belong to no client. If a class has few test
    examples, a client may get none.
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
