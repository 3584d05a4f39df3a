"""The kinds of partition: one function each, which assigns rows to clients by labels or groups.

To add a kind, write its function. Its keyword-only arguments, with types and defaults, are the settings of the kind;
the first line of its docstring describes the examples of one client. A kind that Flower has too makes the same draws as
Flower's partitioner, so both give the same partition for a seed. indices.py checks every partition.
"""
# Without `from __future__ import annotations`: pydantic needs the types in the signatures, not their names.

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

from fedbn_flwr.errors import DataError

if TYPE_CHECKING:
    from fedbn_flwr.data.dataset import Groups

Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Labels = np.ndarray  # int64 [N], the class of each example
Parts = list[np.ndarray]  # the row numbers of each client


@dataclass(frozen=True)
class Rows:
    """The training examples to assign to clients."""

    labels: Labels
    classes: int  # their number
    groups: "Groups | None"  # domains, or the groups of a natural partition

    def by_group(self) -> dict[str, np.ndarray]:
        """The row numbers of each group that has any, in the order of the groups."""
        if self.groups is None:
            return {}
        found = {name: np.flatnonzero(self.groups.train.numpy() == i) for i, name in enumerate(self.groups.names)}
        return {name: group for name, group in found.items() if len(group)}


class Options(BaseModel):
    """`data.partition` of an experiment; each kind is a subclass with its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    assign: ClassVar[Callable[..., Parts]]  # (rows, clients, seed, **options)
    by_class: ClassVar[bool] = False  # whether each example must have one class

    kind: str = ""
    bins: Positive | None = None  # of a number to predict, which are then the classes; by default 10

    def model_post_init(self, _: Any) -> None:
        self.model_fields_set.add("kind")  # for a dump of what is set


class OwnOptions(Options):
    """The options of a partition of the user, which are passed on as they are."""

    model_config = ConfigDict(extra="allow")


KINDS: dict[str, type[Options]] = {}


def kind(*, by_class: bool = False) -> Callable[[Callable[..., Parts]], type[Options]]:
    """Make a kind of a function of (rows, clients, seed, *, options), by the function's name in the settings."""

    def register(assign: Callable[..., Parts]) -> type[Options]:
        name = assign.__name__
        fields: dict[str, Any] = {"kind": (Literal[name], name)}
        for option in inspect.signature(assign).parameters.values():
            if option.kind is inspect.Parameter.KEYWORD_ONLY:
                fields[option.name] = (option.annotation, ... if option.default is option.empty else option.default)
        made = create_model(name, __base__=Options, __doc__=assign.__doc__, __module__=__name__, **fields)
        made.assign, made.by_class = staticmethod(assign), by_class
        KINDS[name] = made
        return made  # pickle finds the class by this name

    return register


def describe_partitions() -> dict[str, str]:
    """The first line of each kind's docstring."""
    lines = {name: (inspect.getdoc(kind) or "").split("\n")[0] for name, kind in KINDS.items()}
    return lines | {
        "MODULE:CALLABLE": "a partition of your own: a function of labels and clients, see docs/own-parts.md"
    }


# --- the kinds ---------------------------------------------------------------

_DRAWS = 11  # Flower's limit, for the same partition or none


@kind()
def iid(rows: Rows, clients: int, seed: int) -> Parts:
    """An equal-sized random share; the default."""
    return np.array_split(np.random.default_rng(seed).permutation(len(rows.labels)), clients)


@kind(by_class=True)
def dirichlet(
    rows: Rows,
    clients: int,
    seed: int,
    *,
    alpha: Annotated[float, Field(gt=0)],
    min_size: Annotated[int, Field(ge=0)] = 1,  # smallest number of examples of a client
    by: Literal["class", "client"] = "class",
) -> Parts:
    """Images of all classes in random proportions, more alike with a larger `alpha`.

    `by: class`, as in Flower's `DirichletPartitioner`: for each class, the clients' shares are drawn (Yurochkin et al.
    2019), so sizes differ too. `by: client`, as in Hsu et al. 2019: each client's class proportions are drawn, with
    concentration alpha times the overall proportions, and all clients have the same size; `min_size` is ignored.
    """
    labels = rows.labels
    if by == "client":
        return _dirichlet_by_client(labels, clients, seed, alpha)
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_DRAWS):
        ends = [np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(images) for images in of_class]
        pieces = [np.split(images, end.astype(int)) for images, end in zip(of_class, ends, strict=True)]
        parts = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= min_size:
            return parts
    raise DataError(
        f"data.partition (dirichlet, alpha={alpha}): none of {_DRAWS} draws gives each of {clients} clients at least "
        f"min_size={min_size} examples; use a larger alpha, fewer clients or another seed"
    )


def _dirichlet_by_client(labels: Labels, clients: int, seed: int, alpha: float) -> Parts:
    # Flower's InnerDirichletPartitioner draws example by example and divides zero by zero when no examples of a
    # client's classes are left, which is likely with a small alpha. Here such a client draws from the remaining ones.
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    rows = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
    mixes = rng.dirichlet(alpha * counts / len(labels), size=clients)  # q ~ Dir(alpha p), p the mix of all
    sizes = [len(part) for part in np.array_split(labels, clients)]
    left = counts.copy()
    parts = []
    for mix, size in zip(mixes, sizes, strict=True):
        held = np.zeros_like(left)
        while (need := size - int(held.sum())) > 0:
            room = left - held
            share = np.where(room > 0, mix, 0.0)
            share = share / share.sum() if share.sum() > 1e-12 else room / room.sum()
            held += np.minimum(rng.multinomial(need, share), room)
        parts.append(np.concatenate([some[n - k : n] for some, n, k in zip(rows, left, held, strict=True)]))
        left -= held
    return parts


@kind(by_class=True)
def classes(
    rows: Rows,
    clients: int,
    seed: int,
    *,
    classes_per_client: Positive,
    assignment: Literal["consecutive", "random", "first-deterministic"] = "consecutive",
) -> Parts:
    """`classes_per_client` classes; the clients that have a class share it equally.

    `consecutive`: client i starts at class i * classes / clients and wraps around (FedTAN's setting);
    `first-deterministic` and `random` as in Flower's `PathologicalPartitioner`.
    """
    labels, drawn = rows.labels, assignment != "consecutive"
    known = np.unique(labels) if drawn else np.arange(rows.classes)
    if classes_per_client > len(known):
        raise DataError(
            f"data.partition.classes_per_client={classes_per_client}, but the data has {len(known)} classes"
        )
    rng = np.random.default_rng(seed)
    if assignment == "random":
        held = [rng.choice(known, size=classes_per_client, replace=False) for _ in range(clients)]
    elif drawn:
        held = [_first_and_drawn(known, client, classes_per_client, rng) for client in range(clients)]
    else:  # not Flower's "deterministic", which has only six of ten classes for five clients of two each
        firsts = [client * len(known) // clients for client in range(clients)]
        held = [(first + np.arange(classes_per_client)) % len(known) for first in firsts]
    order = np.arange(len(labels)) if drawn else rng.permutation(len(labels))
    shuffled = labels[order]
    pieces: list[Parts] = [[] for _ in range(clients)]
    for label in known:
        of_label = order[shuffled == label]
        holders = [client for client, own in enumerate(held) if label in own]
        if drawn and len(of_label) < len(holders):
            raise DataError(
                f"data.partition (classes, {assignment}): {len(holders)} clients have drawn class {label}, which has "
                f"{len(of_label)} examples; use fewer clients or classes per client, or another seed"
            )
        for client, piece in zip(holders, np.array_split(of_label, max(1, len(holders))), strict=False):
            pieces[client].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def _first_and_drawn(known: Labels, client: int, count: int, rng: np.random.Generator) -> Labels:
    own = known[[client % len(known)]]
    while len(own) < count:
        one = rng.choice(known, size=1)
        own = own if one in own else np.append(own, one)
    return own


@kind(by_class=True)
def shards(rows: Rows, clients: int, seed: int, *, shards_per_client: Positive) -> Parts:
    """`shards_per_client` equal-sized shards of the examples sorted by class (McMahan et al. 2017).

    With ten classes, five clients with two shards each have 20 % of the classes (FixBN); with MNIST, 100 clients have
    two shards of 300 examples (FedBS).
    """
    labels = rows.labels
    wanted = clients * shards_per_client
    size = -(-len(labels) // wanted)
    if -(-len(labels) // size) != wanted:
        raise DataError(
            f"data.partition (shards): {len(labels)} examples cannot be cut into {wanted} shards ({clients} clients "
            f"with shards_per_client={shards_per_client}) of one size, even if the last is smaller; use fewer shards"
        )
    pieces = _shards_of(labels, size)
    dealt = np.random.default_rng(seed).permutation(wanted).reshape(clients, shards_per_client)
    return [np.concatenate([pieces[shard] for shard in some]) for some in dealt]


def _shards_of(labels: Labels, size: int) -> Parts:
    return np.split(np.argsort(labels, kind="stable"), range(size, len(labels), size))


@kind(by_class=True)
def unbalanced_shards(
    rows: Rows,
    clients: int,
    seed: int,
    *,
    shard_size: Positive,  # examples
    min_shards: Positive = 1,  # of a client
    max_shards: Positive = 30,
) -> Parts:
    """A random number of shards of the examples sorted by class; `shard_size: 50` gives 1,200 shards of MNIST (FedBS).

    The numbers are drawn uniformly between the bounds and scaled to the number of shards.
    """
    labels = rows.labels
    pieces = _shards_of(labels, shard_size)
    if not clients * min_shards <= len(pieces) <= clients * max_shards:
        raise DataError(
            f"data.partition (unbalanced_shards): shard_size={shard_size} makes {len(pieces)} shards of {len(labels)} "
            f"examples, but {clients} clients with min_shards={min_shards} to max_shards={max_shards} hold "
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


@kind()
def domain(
    rows: Rows,
    clients: int,
    seed: int,
    *,
    clients_per_domain: Positive | None = None,
    examples: Positive | None = None,  # of each client; the others are not used
) -> Parts:
    """Examples of one domain; the clients of the first domain have the lowest numbers.

    The clients of a domain have equal-sized random shares of it, or `examples` of these. Default: clients / domains.
    """
    if not (found := rows.by_group()):
        raise DataError("data.partition (domain): the data has no domains; name their column by data.domain")
    each = clients_per_domain or max(1, clients // len(found))
    if each * len(found) != clients:
        raise DataError(
            f"data.partition (domain): {len(found)} domains ({', '.join(found)}) cannot be assigned equally to "
            f"clients={clients}; for {each} per domain set clients={each * len(found)}"
        )
    parts: Parts = []
    for number, (name, group) in enumerate(found.items()):
        if len(group) < each * (examples or 1):
            of_each = f" with examples={examples}" if examples else ""
            raise DataError(f"data.partition (domain): {name!r} has {len(group)} examples for {each} clients{of_each}")
        shares = np.array_split(np.random.default_rng(seed + number).permutation(group), each)
        parts += [share[:examples] for share in shares]
    return parts


@kind()
def natural(rows: Rows, clients: int, seed: int) -> Parts:
    """All examples with one value in the column `data.group`, for instance a site; one client for each value."""
    found = rows.by_group()
    if len(found) != clients:
        few = ", ".join(list(found)[:5]) + (", ..." if len(found) > 5 else "")
        raise DataError(
            f"data.partition (natural): the column of data.group has {len(found)} values ({few}), but clients is "
            f"{clients}; set clients={len(found)}"
        )
    return list(found.values())
