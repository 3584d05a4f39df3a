"""The kinds of partitions: which client has which training examples.

A kind is a function, which assigns rows to clients by labels or groups. To add one, write its function.
Its keyword-only arguments, with types and defaults, are the settings of the kind; the first line of its docstring
describes the examples of one client. A kind that Flower has too makes the same draws as Flower's partitioner, so both
give the same partition for a seed. `partitions.partition` checks every one.
"""
# Without `from __future__ import annotations`: pydantic needs the types in the signatures, not their names.

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, create_model

from fedbn_flwr.errors import DataError, error_if, few
from fedbn_flwr.trees import Draft

from .schema import Positive, Section

Labels = np.ndarray  # int64 [N], the class of each example
ClientRows = list[np.ndarray]  # the row numbers of each client


@dataclass(frozen=True)
class Rows:
    """The training examples to assign to clients."""

    labels: Labels
    classes: int  # their number
    names: Sequence[str] = ()  # of domains, or of the groups of a natural partition
    groups: np.ndarray | None = None  # the group of each example, as an index of `names`

    def by_group(self) -> dict[str, np.ndarray]:
        """The row numbers of each group that has any, in the order of the groups."""
        found = {name: np.flatnonzero(self.groups == i) for i, name in enumerate(self.names)}
        return {name: group for name, group in found.items() if len(group)}


class Options(Section):
    """`data.partition` of an experiment; each kind is a subclass with its settings."""

    assign: ClassVar[Callable[..., ClientRows]]  # (rows, clients, seed, **options)
    by_class: ClassVar[bool] = False  # whether each example must have one class

    kind: str = ""

    def model_post_init(self, _: Any) -> None:
        self.model_fields_set.add("kind")  # for a dump of what is set


class OwnOptions(Options):
    """The options of a partition of the user, which are passed on as they are."""

    model_config = ConfigDict(extra="allow")


KINDS: dict[str, type[Options]] = {}


def kind(*, by_class: bool = False) -> Callable[[Callable[..., ClientRows]], type[Options]]:
    """Make a kind of a function of (rows, clients, seed, *, options), by the function's name in the settings."""

    def register(assign: Callable[..., ClientRows]) -> type[Options]:
        name = assign.__name__
        fields: Draft = {"kind": (Literal[name], name)}
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
    return {
        **{name: (inspect.getdoc(kind) or "").split("\n")[0] for name, kind in KINDS.items()},
        "MODULE:CALLABLE": "a partition of your own: a function of labels and clients, see docs/own-parts.md",
    }


# --- the kinds ---------------------------------------------------------------

_DRAWS = 11  # Flower's limit, for the same partition or none


@kind()
def iid(rows: Rows, clients: int, seed: int) -> ClientRows:
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
) -> ClientRows:
    """Images of all classes in random proportions, more alike with a larger `alpha`.

    As in Flower's `DirichletPartitioner`, the clients' shares of each class are drawn (Yurochkin et al. 2019), so sizes
    differ too.
    """
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(rows.labels == label) for label in np.unique(rows.labels)]
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


@kind(by_class=True)
def classes(rows: Rows, clients: int, seed: int, *, classes_per_client: Positive) -> ClientRows:
    """`classes_per_client` classes; the clients that have a class share it equally.

    Client i starts at class i * classes / clients and wraps around (FedTAN's setting).
    """
    known = rows.classes
    error_if(
        classes_per_client > known,
        f"data.partition.classes_per_client={classes_per_client}, but the data has {known} classes",
    )
    # Not Flower's "deterministic", which has only six of ten classes for five clients of two each.
    firsts = [client * known // clients for client in range(clients)]
    order = np.random.default_rng(seed).permutation(len(rows.labels))
    shuffled = rows.labels[order]
    pieces: list[ClientRows] = [[] for _ in range(clients)]
    for label in range(known):
        holders = [client for client, first in enumerate(firsts) if (label - first) % known < classes_per_client]
        shares = np.array_split(order[shuffled == label], max(1, len(holders)))
        for client, share in zip(holders, shares, strict=False):
            pieces[client].append(share)
    return [np.concatenate(piece) for piece in pieces]


@kind(by_class=True)
def shards(rows: Rows, clients: int, seed: int, *, shards_per_client: Positive) -> ClientRows:
    """`shards_per_client` equal-sized shards of the examples sorted by class (McMahan et al. 2017).

    With ten classes and five clients, two shards each give a client 20 % of the classes (FixBN). On MNIST, 100 clients
    get two shards of 300 examples each (FedBS).
    """
    labels = rows.labels
    wanted = clients * shards_per_client
    size = -(-len(labels) // wanted)
    error_if(
        -(-len(labels) // size) != wanted,
        f"data.partition (shards): {len(labels)} examples cannot be cut into {wanted} shards ({clients} clients "
        f"with shards_per_client={shards_per_client}) of one size, even if the last is smaller; use fewer shards",
    )
    pieces = _shards_of(labels, size)
    dealt = np.random.default_rng(seed).permutation(wanted).reshape(clients, shards_per_client)
    return [np.concatenate([pieces[shard] for shard in some]) for some in dealt]


def _shards_of(labels: Labels, size: int) -> ClientRows:
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
) -> ClientRows:
    """A random number of shards of the examples sorted by class; `shard_size: 50` gives 1,200 shards of MNIST (FedBS).

    The numbers are drawn uniformly between the bounds and scaled to the number of shards.
    """
    labels = rows.labels
    pieces = _shards_of(labels, shard_size)
    error_if(
        not clients * min_shards <= len(pieces) <= clients * max_shards,
        f"data.partition (unbalanced_shards): shard_size={shard_size} makes {len(pieces)} shards of {len(labels)} "
        f"examples, but {clients} clients with min_shards={min_shards} to max_shards={max_shards} hold "
        f"{clients * min_shards} to {clients * max_shards}",
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
) -> ClientRows:
    """Examples of one domain; the clients of the first domain have the lowest numbers.

    The clients of a domain have equal-sized random shares of it, or `examples` of these. Default: clients / domains.
    """
    found = rows.by_group()
    error_if(not found, "data.partition (domain): the data has no domains; name their column by data.domain")
    per_domain = clients_per_domain or max(1, clients // len(found))
    error_if(
        per_domain * len(found) != clients,
        f"data.partition (domain): {len(found)} domains ({', '.join(found)}) cannot be assigned equally to "
        f"clients={clients}; for {per_domain} per domain set clients={per_domain * len(found)}",
    )
    parts: ClientRows = []
    for number, (name, group) in enumerate(found.items()):
        if len(group) < per_domain * (examples or 1):
            of_each = f" with examples={examples}" if examples else ""
            raise DataError(
                f"data.partition (domain): {name!r} has {len(group)} examples for {per_domain} clients{of_each}"
            )
        shares = np.array_split(np.random.default_rng(seed + number).permutation(group), per_domain)
        parts += [share[:examples] for share in shares]
    return parts


@kind()
def natural(
    rows: Rows,
    clients: int,
    seed: int,
    *,
    rotate: Annotated[int, Field(ge=0)] = 0,  # values by which each seed moves on
) -> ClientRows:
    """All examples with one value in the column `data.group`, for instance a site; one client for each value.

    With `rotate`, client 0 has the value number `seed * rotate`, and so on in a circle: each seed has other newcomers.
    """
    found = rows.by_group()
    error_if(
        len(found) != clients,
        f"data.partition (natural): the column of data.group has {len(found)} values ({few(found, 5)}), but "
        f"clients is {clients}; set clients={len(found)}",
    )
    return list(map(list(found.values()).__getitem__, np.roll(range(clients), -seed * rotate)))
