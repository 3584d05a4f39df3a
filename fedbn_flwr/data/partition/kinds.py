"""One function for each way to split: labels or groups in, the rows of each client out.

Flower's own partitioners decide wherever they can; they see the labels alone, so a split of ImageNet costs no
more than one of digits. What is checked of every split is in partitions.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import types
import warnings
from typing import Any

import numpy as np
from torch import Tensor

from fedbn_flwr.data.load import Groups
from fedbn_flwr.errors import DataError

Parts = list[np.ndarray]  # the rows of each client


def _flowers() -> Any:
    """flwr_datasets.partitioner, without the plots that its package imports: SciPy's statistics and seaborn, 2 s."""
    package, name = "flwr_datasets", "flwr_datasets.partitioner"
    if name in sys.modules:
        return sys.modules[name]
    if package in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    stand_in = types.ModuleType(package)
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = stand_in
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[package]  # whoever imports the package gets all of it


def by_flower(partitioner: Any, labels: Tensor | np.ndarray, clients: int) -> Parts:
    """Flower's partitioners hand out pieces of a data set: give them one of labels and row numbers."""
    import datasets

    rows = {"label": np.asarray(labels), "row": np.arange(len(labels))}
    partitioner.dataset = datasets.Dataset.from_dict(rows).with_format("numpy")
    # What they warn of (classes that nobody holds) is checked afterwards; some draw progress bars.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        # All rows, then the column: a column of a data set is read row by row, 0.2 ms each.
        return [np.asarray(partitioner.load_partition(i)[:]["row"], dtype=np.int64) for i in range(clients)]


def iid(labels: Tensor, clients: int, seed: int) -> Parts:
    # Flower cuts contiguous pieces; many data sets are sorted, so the order is drawn first.
    order = np.random.default_rng(seed).permutation(len(labels))
    return [order[part] for part in by_flower(_flowers().IidPartitioner(clients), labels, clients)]


def dirichlet(labels: Tensor, clients: int, seed: int, alpha: float, min_size: int = 1, by: str = "class") -> Parts:
    """`by` class: the clients' shares of each class are drawn, so clients differ in size (Yurochkin et al. 2019).

    `by` client: each client's mix of classes is drawn, and all are of equal size (Hsu et al. 2019).
    """
    if by == "client":
        return _dirichlet_by_client(labels, clients, seed, alpha)
    partitioner = _flowers().DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=alpha,
        min_partition_size=min_size,
        self_balancing=False,
        seed=seed,
    )
    try:
        return by_flower(partitioner, labels, clients)
    except ValueError as error:  # it gives up after some draws
        raise DataError(
            f"data.partition (dirichlet, alpha={alpha}): no draw gives each of {clients} clients at least "
            f"min_size={min_size} images; use a larger alpha, fewer clients or another seed ({error})"
        ) from None


def _dirichlet_by_client(labels: Tensor, clients: int, seed: int, alpha: float) -> Parts:
    # Flower's InnerDirichletPartitioner draws image by image and divides zero by zero once a client's classes
    # are all used up, which a small alpha makes likely. Then the rest comes from what is left.
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    rows = [rng.permutation(np.flatnonzero(labels.numpy() == label)) for label in classes]
    mixes = rng.dirichlet(alpha * counts / len(labels), size=clients)  # q ~ Dir(alpha p), p the mix of all
    sizes = [len(part) for part in np.array_split(labels.numpy(), clients)]
    left = counts.copy()
    parts = []
    for mix, size in zip(mixes, sizes, strict=True):
        held = np.zeros_like(left)
        while (need := size - held.sum()) > 0:
            room = left - held
            share = np.where(room > 0, mix, 0.0)
            share = share / share.sum() if share.sum() > 1e-12 else room / room.sum()
            held += np.minimum(rng.multinomial(need, share), room)
        parts.append(np.concatenate([some[n - k : n] for some, n, k in zip(rows, left, held, strict=True)]))
        left -= held
    return parts


def classes(
    labels: Tensor, count: int, clients: int, seed: int, classes_per_client: int, assignment: str = "consecutive"
) -> Parts:
    if classes_per_client > count:
        raise DataError(f"data.partition.classes_per_client={classes_per_client}, but the data has {count} classes")
    if assignment != "consecutive":
        partitioner = _flowers().PathologicalPartitioner(
            num_partitions=clients,
            partition_by="label",
            num_classes_per_partition=classes_per_client,
            class_assignment_mode=assignment,
            seed=seed,
        )
        try:
            return by_flower(partitioner, labels, clients)
        except ValueError as error:
            raise DataError(f"data.partition (classes, {assignment}): {error}") from None
    # Flower has no such mode: client i begins at class i * classes / clients and wraps around, so that two
    # classes for each of five clients cover all ten (its "deterministic" mode would use six of them).
    holders: list[list[int]] = [[] for _ in range(count)]
    for client in range(clients):
        first = client * count // clients
        for k in range(classes_per_client):
            holders[(first + k) % count].append(client)
    order = np.random.default_rng(seed).permutation(len(labels))
    shuffled = labels.numpy()[order]
    pieces: list[Parts] = [[] for _ in range(clients)]
    for label, clients_of_label in enumerate(holders):
        rows = order[shuffled == label]
        if clients_of_label:
            for client, piece in zip(clients_of_label, np.array_split(rows, len(clients_of_label)), strict=True):
                pieces[client].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def shards(labels: Tensor, clients: int, seed: int, shards_per_client: int) -> Parts:
    """Images sorted by label and cut into clients * shards_per_client shards of one size, dealt at random."""
    wanted = clients * shards_per_client
    size = -(-len(labels) // wanted)
    if -(-len(labels) // size) != wanted:
        raise DataError(
            f"data.partition (shards): {len(labels)} images do not make {wanted} shards ({clients} clients with "
            f"shards_per_client={shards_per_client}) of one size, not even with a smaller last one; use fewer shards"
        )
    # Not num_shards_per_partition: with it Flower leaves the remainder out.
    partitioner = _flowers().ShardPartitioner(
        num_partitions=clients, partition_by="label", shard_size=size, keep_incomplete_shard=True, seed=seed
    )
    return by_flower(partitioner, labels, clients)


def unbalanced_shards(
    labels: Tensor, clients: int, seed: int, shard_size: int, min_shards: int = 1, max_shards: int = 30
) -> Parts:
    """Images sorted by label and cut into shards; each client holds between the least and the most of them.

    Their numbers are drawn uniformly and scaled to what there is. Flower deals every client as many.
    """
    order = np.argsort(labels.numpy(), kind="stable")
    pieces = np.split(order, range(shard_size, len(order), shard_size))
    if not clients * min_shards <= len(pieces) <= clients * max_shards:
        raise DataError(
            f"data.partition (unbalanced_shards): shard_size={shard_size} makes {len(pieces)} shards of {len(labels)} "
            f"images, but {clients} clients with min_shards={min_shards} to max_shards={max_shards} hold "
            f"{clients * min_shards} to {clients * max_shards}"
        )
    rng = np.random.default_rng(seed)
    drawn = rng.integers(min_shards, max_shards + 1, clients)
    exact = drawn * (len(pieces) / drawn.sum())
    counts = np.clip(np.rint(exact).astype(int), min_shards, max_shards)
    while missing := len(pieces) - counts.sum():
        step = int(np.sign(missing))
        free = counts < max_shards if step > 0 else counts > min_shards
        counts[np.argmax(np.where(free, step * (exact - counts), -np.inf))] += step
    dealt = np.split(rng.permutation(len(pieces)), np.cumsum(counts)[:-1])
    return [np.concatenate([pieces[shard] for shard in some]) for some in dealt]


def domain(groups: Groups | None, clients: int, seed: int, clients_per_domain: int | None = None) -> Parts:
    """Each domain over as many clients, IID among them: the first domain's clients come first."""
    if groups is None:
        raise DataError("data.partition (domain): the data has no domains; name their column by data.domain")
    present = groups.train.unique().tolist()
    names = ", ".join(groups.names[i] for i in present)
    each = clients_per_domain or max(1, clients // len(present))
    if each * len(present) != clients:
        raise DataError(
            f"data.partition (domain): {len(present)} domains ({names}) do not go over clients={clients}; for "
            f"{each} per domain set clients={each * len(present)}"
        )
    parts: Parts = []
    for number, rows in enumerate(by_flower(_flowers().NaturalIdPartitioner("label"), groups.train, len(present))):
        if len(rows) < each:
            raise DataError(
                f"data.partition (domain): {groups.names[present[number]]!r} has {len(rows)} images for {each} clients"
            )
        parts += [rows[part] for part in iid(groups.train[rows], each, seed + number)]
    return parts


def natural(groups: Groups | None, clients: int) -> Parts:
    """Each value of a column is a client, in their order by name."""
    if groups is None:
        raise DataError("data.partition (natural): the data has no such column; it is data.partition.column")
    present = groups.train.unique().tolist()
    if len(present) != clients:
        few = ", ".join(groups.names[i] for i in present[:5]) + (", ..." if len(present) > 5 else "")
        raise DataError(
            f"data.partition (natural): the column {groups.column!r} has {len(present)} values ({few}), but clients "
            f"is {clients}; set clients={len(present)}"
        )
    return by_flower(_flowers().NaturalIdPartitioner("label"), groups.train, clients)
