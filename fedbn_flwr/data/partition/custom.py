"""A partition of the user, by the name `module:callable` in `data.partition.kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbn_flwr import named, seeding
from fedbn_flwr.errors import DataError

from .kinds import Parts, Rows

KEY = "data.partition.kind"


def own_partition(name: str, rows: Rows, clients: int, seed: int, **options: Any) -> Parts:
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
    groups = rows.groups
    offered = {
        "generator": np.random.default_rng(seed),
        "seed": seed % 2**32,
        "classes": rows.classes,
        "domains": None if groups is None else np.array(groups.names)[groups.train.numpy()],
    }
    offered = {key: value for key, value in offered.items() if key not in options}
    with seeding.all_streams(seed):
        taken = named.accepted(named.load(KEY, name), offered)
        found = named.call(KEY, name, rows.labels.copy(), clients, **taken, **options)
    return checked(name, found, clients, len(rows.labels))


def checked(name: str, found: Any, clients: int, images: int) -> Parts:
    """The partition as arrays of row numbers; DataError names the client whose rows are wrong."""
    if isinstance(found, Mapping):
        found = [found[client] for client in sorted(found)]
    if not isinstance(found, list | tuple | np.ndarray) or len(found) != clients:
        size = f" of {len(found)}" if hasattr(found, "__len__") else ""
        raise DataError(
            f"{KEY}={name!r} returned a {type(found).__name__}{size}; expected a list of {clients} arrays of row "
            "numbers, one for each client"
        )
    owner = np.full(images, -1)
    parts = []
    for client, given in enumerate(found):
        part = np.asarray(sorted(given) if isinstance(given, set | frozenset) else given)
        where = f"{KEY}={name!r}: client {client}"
        if part.size == 0:
            raise DataError(f"{where} has no images; expected at least one row number")
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
            raise DataError(
                f"{where} has {part.dtype} values of shape {list(part.shape)}; expected a list of row numbers"
            )
        if part.min() < 0 or part.max() >= images:
            wrong = part.min() if part.min() < 0 else part.max()
            raise DataError(f"{where} has the row {wrong}; expected 0 to {images - 1}, the training images")
        if len(np.unique(part)) < len(part):
            values, counts = np.unique(part, return_counts=True)
            raise DataError(f"{where} has the row {values[counts > 1][0]} twice; expected each row once")
        if (owner[part] >= 0).any():
            row = part[owner[part] >= 0][0]
            raise DataError(f"{where} has the row {row}, which client {owner[row]} has too; expected disjoint clients")
        owner[part] = client
        parts.append(part.astype(np.int64))
    return parts
