"""What all sections of settings share: their base, and types that several of them use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from fedbn_flwr.errors import SettingsError


def expects(words: str) -> WrapValidator:
    """One error message for a type of several forms; a union would report one for each form."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"found {value!r}; expected {words}") from None

    return WrapValidator(check)


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """A key of a section: its default, its meaning for the tables of the documentation, and limits of its values."""
    return Field(default=default, description=meaning, **limits)


Problem = tuple[object, str]  # whether it is so, and what is wrong then


def refuse(problems: Iterable[Problem], error: type[ValueError] = SettingsError) -> None:
    """Raise an error for the first problem that is so."""
    for is_so, problem in problems:
        if is_so:
            raise error(problem)


class Section(BaseModel):
    # Strict: the text "3" is not the number 3. Frozen: settings are keys of caches.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def problems(self) -> Iterator[Problem]:
        """What may be wrong with the values together; the first one that is so is reported."""
        return iter(())

    @model_validator(mode="after")
    def _has_no_problem(self) -> Self:
        refuse(self.problems(), ValueError)
        return self


Positive = Annotated[int, Field(ge=1, le=1_000_000)]

T = TypeVar("T")


def _listed(value: object) -> object:
    return () if value is None else value if isinstance(value, list | tuple) else (value,)


# Several values, or one without a list around it; null for none.
Several = Annotated[tuple[T, ...], Field(strict=False), BeforeValidator(_listed)]
