"""The types of settings that a file can write in several forms, such as a part by its name, or with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, PlainSerializer, PlainValidator, Tag

from fedbn_flwr.data.partitions import KINDS, Options, OwnOptions
from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.experiment.registry import check_strategy
from fedbn_flwr.named import is_name
from fedbn_flwr.schema import Several, expects
from fedbn_flwr.trees import Tree

AUGMENTATIONS = ("flip", "crop", "resized_crop", "rotate")
OWN = "module:callable"


def _kind_of(partition: object) -> object:
    """The tag that selects the options of a partition."""
    kind = partition.get("kind") if isinstance(partition, Mapping) else getattr(partition, "kind", None)
    return OWN if isinstance(kind, str) and is_name(kind) else kind


if TYPE_CHECKING:
    Partition = Options
else:  # one of the registered kinds, chosen by `kind`, or one of the user
    Partition = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in {**KINDS, OWN: OwnOptions}.items())],  # noqa: UP007  # of a tuple
        Discriminator(_kind_of),
    ]


def _named(value: Any) -> str | Tree:
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str):
        return name if value == {"name": name} else value
    raise ValueError(f"found {value!r}; expected a name, or a mapping with a name and options")


# A part by its name, or by a mapping of its name and options.
Named = Annotated[str | Tree, PlainValidator(_named), PlainSerializer(lambda value: value)]


def name_in(part: str | Tree) -> str:
    return part if isinstance(part, str) else str(part["name"])


def options_in(part: str | Tree | None) -> Tree:
    return {key: value for key, value in part.items() if key != "name"} if isinstance(part, Mapping) else {}


def tracker_of(part: str | Tree) -> str:
    """The `module:callable` of a tracker."""
    name = name_in(part)
    return "fedbn_flwr.experiment.tensorboard:TensorBoard" if name == "tensorboard" else name


def _augmentation(part: str | Tree) -> str | Tree:
    """One of these names without options, or a part of the user."""
    if not is_name(name_in(part)) and part not in AUGMENTATIONS:
        hint = did_you_mean(name_in(part), AUGMENTATIONS)
        raise ValueError(f"{name_in(part)!r} is not an augmentation; {hint}, or module:callable for your own")
    return part


Augment = Several[Annotated[Named, AfterValidator(_augmentation)]]

Weights = Annotated[
    Literal["balanced"] | Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)],
    expects("balanced, or a list with a weight for each class, zero or more"),
]
# Arguments without a name belong to the default strategy, as in `strategy.fraction_train=0.5`.
Strategy = Annotated[Tree, AfterValidator(lambda spec: check_strategy({"name": "FedAvg", **spec}))]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # without control characters, which terminals obey
