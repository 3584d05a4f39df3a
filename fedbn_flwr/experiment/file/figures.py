"""The figures of a paper in an experiment file, for its runs or for the conditions of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.results.folder import flat_settings
from fedbn_flwr.results.report.curves import Measure
from fedbn_flwr.results.text import shorten
from fedbn_flwr.schema import expects

from .expansion import Cell, values_in_words

AVERAGE = "average"  # of the domains of a figure that is given by domain

# Settings that a paper's figure does not depend on, or that it has no word on.
FREE = ("name", "label", "cell", "size", "seed", "seeds", "track", "published", "engine", "evaluate", "mods")
FREE_KEYS = ("data.root", "data.revision", "data.memory", "train.compile")


class Published(BaseModel):
    """Figures of a paper, by their keys in summary.json, for the report; a figure may have a standard deviation."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[
        str, Annotated[float | tuple[float, float], expects("a number, or a mean and a standard deviation")]
    ]

    source: Annotated[str, Field(min_length=1)]
    # Why the figures are not those of this run's set-up: its size, or overrides; a file may give a reason of its own.
    differs: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_domain(cls, figures: Any) -> Any:
        """`accuracy: {sea: 0.5, average: 0.6}` as accuracy_sea and accuracy."""
        if not isinstance(figures, Mapping):
            return figures
        flat: dict[Any, Any] = {}
        for key, value in figures.items():
            if isinstance(value, Mapping):
                flat |= {key if domain == AVERAGE else f"{key}_{domain}": each for domain, each in value.items()}
            else:
                flat[key] = value
        return flat

    @model_validator(mode="after")
    def _fractions(self) -> Published:
        figures = self.__pydantic_extra__
        if not figures:
            raise ValueError("there is no figure; give one by its key in summary.json, for instance accuracy: 0.7689")
        for key, value in figures.items():
            if Measure.of(key).is_fraction and (value[0] if isinstance(value, tuple) else value) > 1:
                raise ValueError(f"{key} is {value}; expected a fraction, for instance 0.7689, not percent")
        return self


def condition(cell: Cell) -> str:
    """The label of a cell without the values that it tries."""
    return ", ".join([cell.row, *values_in_words(cell)[: len(cell.sweep)]])


def figures_by_label(figures: Any, rows: Sequence[str], conditions: Iterable[str], name: str) -> Mapping[str, Any]:
    """The figures by the label of a row or of one of its conditions, of those that the file has."""
    if figures is None or rows == [""]:
        return {"": figures}
    if not isinstance(figures, Mapping):
        raise SettingsError(f"{name}: published is {figures!r}; expected the figures by the labels of their runs")
    known = dict.fromkeys([*rows, *conditions])
    if unknown := next((str(label) for label in figures if str(label) not in known), None):
        raise SettingsError(f"{name}: published has {unknown!r}, which is no run; {did_you_mean(unknown, known)}")
    return {str(label): content for label, content in figures.items()}


def with_set_up(figures: Any, size: str, in_file: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The figures of a run, with a note if a size or the command line changes its settings in the file."""
    before = flat_settings(in_file)
    changed = [key for key, value in flat_settings(changes).items() if before.get(key) != value]
    keys = [key for key in changed if key.partition(".")[0] not in FREE and key not in FREE_KEYS]
    if not keys or not isinstance(figures, Mapping) or "differs" in figures:
        return figures
    return {**figures, "differs": shorten(f"size {size}, other {', '.join(keys)}", 200)}
