"""Makes the settings of a run from the mapping in a file, and explains what is wrong with its keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedbn_flwr.data.partitions import KINDS, OwnOptions
from fedbn_flwr.data.source import HeldOut
from fedbn_flwr.errors import SettingsError, did_you_mean, few
from fedbn_flwr.text import shorten
from fedbn_flwr.trees import Tree

from ..settings import DERIVED, OWN, Settings
from .content import KEYS_OF_A_FILE

_EXPLAINED = 10  # problems; each may list the known keys


def check_settings(settings: Tree) -> Settings:
    try:
        return Settings.model_validate(dict(settings))
    except ValidationError as error:
        raise SettingsError(few(map(_explain, error.errors()), _EXPLAINED, "; ")) from None


def completed(settings: Tree) -> Tree:
    """The settings of a run, perhaps of an earlier version, with the defaults of keys that this version has added."""
    return check_settings(settings).model_dump(mode="json")


# Words of an experiment file, where pydantic uses Python's.
_EXPECTED = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "string_pattern_mismatch": "one line without control characters",
    "float_type": "a number",
    "int_type": "a whole number",
    "greater_than": "a number above {gt:.10g}",
    "greater_than_equal": "at least {ge:.10g}",
    "less_than": "a number below {lt:.10g}",
    "less_than_equal": "at most {le:.10g}",
}


def _explain(details: ErrorDetails) -> str:
    # Pydantic adds the kind of a partition, and the form of a value (`<share>`), to the path; they aren't in the file.
    parts = [str(part) for part in details["loc"]]
    key = ".".join(
        part
        for i, part in enumerate(parts)
        if part not in ("<share>", "<value>") and "partition" not in parts[i - 1 : i]
    )
    found, kind, value = details["input"], details["type"], shorten(repr(details["input"]), 200)
    if kind == "extra_forbidden":
        elsewhere = [f"{name}.{parts[-1]}" for name in Settings.model_fields if parts[-1] in _section([name])]
        hint = f"did you mean {' or '.join(elsewhere)}? " if elsewhere and len(parts) == 1 else ""
        return f"unknown key {key!r} (= {value}); {hint or did_you_mean(parts[-1], _section(parts[:-1]))}".rstrip()
    if kind == "missing":
        return f"{key!r} is missing"
    if kind.startswith("union_tag"):  # of a partition
        given = found if isinstance(found, Mapping) else {"kind": found}
        name, options = given.get("kind"), given.keys() - {"kind"}
        wrong = (
            f".kind={name!r} is not a partition"
            if name or not options
            else f" has {', '.join(sorted(options))} without kind"
        )
        kinds = [kind for kind, section in KINDS.items() if name or options <= section.model_fields.keys()]
        return f"{key}{wrong}; {did_you_mean(str(name), kinds or KINDS)}, or {OWN} for your own"
    if kind == "value_error":
        error = details["ctx"]["error"]
        return f"{key + ': ' if key and not isinstance(error, SettingsError) else ''}{error}"
    expected = _EXPECTED.get(kind, "").format(**details.get("ctx", {}))
    return f"{key} is {value}: expected {expected or details['msg'].removeprefix('Input should be ')}"


_FORMS: dict[str, type[BaseModel]] = {**KINDS, OWN: OwnOptions, "<share>": HeldOut}  # of values, by their tags


def _section(path: Sequence[str]) -> list[str]:
    """The known keys of the section at `path`."""
    model: type[BaseModel] = Settings
    for part in path:
        if part in _FORMS:
            model = _FORMS[part]
        elif part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else model
    extra = KEYS_OF_A_FILE if model is Settings else ()
    return [*(name for name in model.model_fields if model is not Settings or name not in DERIVED), *extra]
