"""What all sections of settings share: their base, and types that several of them use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from .errors import SettingsError


def refuse(faults: Mapping[str, bool], error: type[Exception] = SettingsError) -> None:
    """Raise the first fault that is found."""
    for fault, is_found in faults.items():
        if is_found:
            raise error(fault)


def expects(words: str) -> WrapValidator:
    """One error message for a type of several forms; a union would report one for each form."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"found {value!r}; expected {words}") from None

    return WrapValidator(check)


class Section(BaseModel):
    # Strict: the text "3" is not the number 3. Frozen: settings are keys of caches.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def faults(self) -> dict[str, bool]:
        """What may be wrong with the values together, and whether it is."""
        return {}

    @model_validator(mode="after")
    def _has_no_fault(self) -> Self:
        refuse(self.faults(), ValueError)
        return self


Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
