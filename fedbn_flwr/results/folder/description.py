"""What a model needs besides its weights: the content of model.json, which is checked whole when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from fedbn_flwr.data import Moments
from fedbn_flwr.data.schema import Positive, Problem, Section

if TYPE_CHECKING:
    from fedbn_flwr.server.traits import Traits

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Names = tuple[str, ...]


class Scale(Section):
    """The mean and the deviation of each column or channel."""

    mean: tuple[_Finite, ...]
    std: tuple[Annotated[_Finite, Field(gt=0)], ...]

    def problems(self) -> Iterator[Problem]:
        yield len(self.mean) != len(self.std), f"it has {len(self.mean)} means and {len(self.std)} deviations"

    @property
    def moments(self) -> Moments:
        return self.mean, self.std


class Build(Section):
    """The arguments of `build_model`; it checks the options of the norm."""

    model_config = ConfigDict(extra="allow")

    name: str
    num_classes: Positive
    norm: str
    arguments: Mapping[str, Any] = {}
    input_shape: Annotated[tuple[Positive, ...], Field(min_length=1)]
    num_tokens: Positive | None = None


class Description(Section):
    build: Build
    normalise: Scale
    targets: Scale | None = None  # the units of regression targets, if they are scaled
    inputs: _Names = ()  # columns, and their types
    types: _Names = ()
    label: _Names = ()
    classes: _Names = ()  # or the names of labels or of numbers
    categories: Mapping[str, _Names] = {}
    local: _Names = ()  # what stays on the clients, as in `Traits`
    sent_back: bool = True

    def problems(self) -> Iterator[Problem]:
        """Values that do not fit each other: a mean for several columns would be used for all of them."""
        outputs, features = self.build.num_classes, self.build.input_shape[0]
        means, names, units = (
            len(each)
            for each in (self.normalise.mean, self.classes, self.targets.mean if self.targets else range(outputs))
        )
        columns = sum(len(self.categories.get(name, "1")) for name in self.inputs)
        of_table = {"array", "list", "Image"}.isdisjoint(self.types)
        yield from (
            (self.build.num_tokens is None and means != features, f"normalise has {means} means for {features} inputs"),
            (len(self.inputs) != len(self.types), f"{len(self.inputs)} inputs have {len(self.types)} types"),
            (
                columns and of_table and columns != features,
                f"build.input_shape has {features} inputs, inputs {columns}",
            ),
            (
                any(len({*each}) < len(each) for each in (self.inputs, self.label, self.classes)),
                "a name is there twice",
            ),
            (
                names and names != outputs and (names, outputs) != (2, 1),
                f"classes has {names} names for {outputs} outputs",
            ),
            (units != outputs, f"targets has {units} means for {outputs} outputs"),
        )

    @property
    def traits(self) -> Traits:
        """What the run's strategy shares of a model."""
        from fedbn_flwr.server.traits import Traits  # Flower, which those who read only texts do not need

        return Traits(local=frozenset(self.local), sent_back=self.sent_back)

    @property
    def units(self) -> Moments | None:
        return self.targets.moments if self.targets else None

    @property
    def agreed(self) -> Moments:
        """The moments of inputs and targets together, as sites agree on them."""
        (means, deviations), units = self.normalise.moments, self.units or ((), ())
        return means + units[0], deviations + units[1]
