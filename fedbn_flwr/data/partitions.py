"""Partitions: which client has which training examples, and which share of the test examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import named, seeding
from fedbn_flwr.errors import DataError, error_if, few
from fedbn_flwr.trees import Tree

from .dataset import DataSet, Groups
from .kinds import KINDS, ClientRows, Rows

KEY = "data.partition.kind"


def partition(
    labels: Tensor, classes: int, clients: int, seed: int, kind: str, groups: Groups | None = None, /, **options: object
) -> list[Tensor]:
    """Indices of each client's examples, ascending, for a kind of partition with its `options`.

    `kind` may also be `module:callable`, a partition of the user, which may leave examples out, as does the option
    `examples`. Raises DataError unless each example belongs to exactly one client and each client has examples.
    """
    error_if(
        clients > len(labels),
        f"clients is {clients}, but the data has {len(labels)} training examples",
    )
    rows = Rows(labels.numpy(), classes, *((groups.names, groups.train.numpy()) if groups else ()))
    own = named.is_name(kind)
    parts = _own(kind, rows, clients, seed, options) if own else KINDS[kind].assign(rows, clients, seed, **options)
    empty = [str(i) for i, part in enumerate(parts) if len(part) == 0]
    error_if(
        empty,
        f"data.partition ({kind}) leaves {len(empty)} of {clients} clients without examples (clients "
        f"{few(empty, 8)}); use fewer clients, more classes per client, a larger alpha, or another seed",
    )
    lost = np.setdiff1d(np.arange(len(labels)), np.concatenate(parts))
    gone = sorted(set(labels[torch.from_numpy(lost)].tolist()))
    error_if(
        len(lost) and not own and not options.get("examples"),
        f"data.partition ({kind}) gives {len(lost)} of {len(labels)} examples to no client (classes {gone[:10]}); "
        "use more clients, or more classes per client",
    )
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _own(name: str, rows: Rows, clients: int, seed: int, options: Tree) -> ClientRows:
    """The row numbers of each client that the callable `name` returns for the labels and the number of clients.

    Its random draws are functions of `seed`: it is offered a generator and the seed, and Python's, NumPy's and torch's
    global generators are seeded. Rows may be left out, but no row may belong to two clients.
    """
    drawn, owners = seeding.seed_for(seed, "own partition"), np.full(len(rows.labels), -1)
    first, second = (_called(name, rows, clients, drawn, options) for _ in range(2))
    error_if(
        not all(map(np.array_equal, first, second)),
        f"{KEY}={name!r} returned two different partitions for the same arguments, so processes would not agree on "
        "it; draw from the argument `generator`, which it gets if its signature names it",
    )
    for client, part in enumerate(first):
        where = f"{KEY}={name!r}: client {client} has"
        error_if(
            part.ndim != 1 or (part.size and part.dtype.kind not in "iu"),
            f"{where} {part.dtype} values of shape {list(part.shape)}; expected a list of row numbers",
        )
        if (outside := part[(part < 0) | (part >= len(owners))]).size:
            raise DataError(f"{where} the row {outside[0]}; expected 0 to {len(owners) - 1}, the training examples")
        for row in part.astype(np.int64):
            if owners[row] >= 0:
                raise DataError(f"{where} the row {row}, which client {owners[row]} has too; expected each row once")
            owners[row] = client
    return [np.flatnonzero(owners == client) for client in range(clients)]


def _called(name: str, rows: Rows, clients: int, seed: int, options: Tree) -> ClientRows:
    offered = {
        "generator": np.random.default_rng(seed),
        "seed": seed % 2**32,
        "classes": rows.classes,
        "domains": None if rows.groups is None else np.array(rows.names)[rows.groups],
    }
    offered = {key: value for key, value in offered.items() if key not in options}
    with seeding.streams(seed):
        taken = named.accepted(named.load(KEY, name), offered)
        found = named.call(KEY, name, rows.labels.copy(), clients, **taken, **options)
    if not isinstance(found, list | tuple | np.ndarray) or len(found) != clients:
        size = f" of {len(found)}" if hasattr(found, "__len__") else ""
        raise DataError(
            f"{KEY}={name!r} returned a {type(found).__name__}{size}; expected a list of {clients} arrays of row "
            "numbers, one for each client"
        )
    return list(map(np.asarray, found))


def hold_out(
    dataset: DataSet, parts: Mapping[int, Tensor], share: float, seed: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Each client's examples for training, and a random share for validation, rounded; at least one is for training.

    Examples that the test split keeps together, such as the windows of a series, are together here, too: if several
    clients have some, the first one draws for all, so that none trains on what another one validates with.
    """
    unit = torch.arange(len(dataset.train)) if dataset.apart is None else dataset.apart.train
    owner = torch.full((1 + int(unit.max()),), -1)
    held = owner >= 0
    for place, rows in reversed([*enumerate(parts.values())]):
        owner[unit[rows]] = place
    for place, client in enumerate(parts if share else ()):
        own = (owner == place).nonzero()[:, 0]
        order = torch.randperm(len(own), generator=seeding.generator(seed, "validation", client))
        held[own[order[: min(int(share * len(own) + 0.5), max(0, len(own) - 1))]]] = True
    found = {client: (rows[~held[unit[rows]]], rows[held[unit[rows]]]) for client, rows in parts.items()}
    empty = [str(client) for client, (left, _) in found.items() if not len(left)]
    error_if(
        empty,
        f"evaluate.validation is {share:g}, which leaves nothing to train on at clients {few(empty, 8)}: all their "
        "series, or values of data.test.by, are held out; use a smaller share, fewer clients or another partition",
    )
    return found


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
