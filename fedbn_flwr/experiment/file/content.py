"""The content of an experiment: YAML of a shipped file, another file or text, with what it extends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedbn_flwr.errors import SettingsError, nearest
from fedbn_flwr.named import path_of
from fedbn_flwr.results.yaml_text import parse_yaml
from fedbn_flwr.trees import Draft, Tree, flat_settings

KEYS_OF_A_FILE = {  # in addition to the keys of a run
    "description": "one line",
    "extends": (
        "a shipped experiment (`fixbn/table4`), or a file relative to this one, to start from. Its `name`, "
        "`description`, `runs` and `sweep` aren't taken over; if the other file "
        "tunes a key that has a value here, the value here wins"
    ),
    "seeds": "a list of seeds; every run is repeated for each seed, and the report shows mean and standard deviation",
    "runs": (
        "a mapping from labels to the settings that differ; a `strategy` with another name, or a `partition` of "
        "another kind, replaces the section as a whole"
    ),
    "sweep": "conditions: lists of values by key, all of which are run and shown, see [Sweeps and sizes](sweeps.md)",
    "tune": "hyperparameters: lists of values by key; the best values are chosen on held-out training examples",
    "sizes": "smaller sizes of the experiment: a mapping from names to changes, for `--size NAME`",
}


def shipped_experiments() -> dict[str, Path]:
    """The files by name: first those outside of a paper's folder, then PAPER/TABLE."""
    package = Path(__file__).parents[2]
    inside_a_wheel = (package / "apps").is_dir()  # in a checkout or an app bundle it is next to the package
    folder = (package if inside_a_wheel else package.parent) / "apps" / "experiments"
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (file.parent, file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def read_content(source: str) -> tuple[Tree, str]:
    """The parsed content of an experiment, with the settings of the one that it extends, and its name."""
    if "\n" in source or source.lstrip().startswith("{"):
        return follow_extends(check_mapping(parse_yaml(source), "experiment"), path_of("")), "experiment"
    path, name = _file(source, path_of(""))
    return follow_extends(_content(path), path.parent), name


def text_of(source: str) -> str:
    """The text of the file of an experiment."""
    return _text(_file(source, Path())[0])


# What an experiment does not take from the one that it extends.
_OWN = ("name", "description", "runs", "sweep")
_CHAIN = 5  # files that extend each other


def follow_extends(content: Tree, folder: Path, through: tuple[Path, ...] = ()) -> Tree:
    """The content merged with that of `extends`, whose path is relative to `folder`."""
    if "extends" not in content:
        return content
    source = content["extends"]
    if not isinstance(source, str):
        raise SettingsError(f"extends is {source!r}; expected a shipped experiment or a file ending in .yaml")
    path, _ = _file(source, folder)
    if len(through) == _CHAIN:
        raise SettingsError(
            f"extends: {str(path)!r} is file {_CHAIN + 1} of a chain, expected at most {_CHAIN}; one of them extends "
            f"itself, or leave some out: {', '.join(file.name for file in through)}"
        )
    parent = follow_extends(_content(path), path.parent, (*through, path))
    base, own = write_out(without(parent, *_OWN)), write_out(without(content, "extends"))
    if isinstance(base.get("tune"), Mapping):
        base["tune"] = drop_given(base["tune"], own)
    return merge(base, own)


def drop_given(lists: Tree, own: Tree) -> Tree:
    """The lists by key, without the keys that `own` sets, entirely or in part."""
    given = [f"{key}." for key in flat_settings(own)]
    return {
        key: values
        for key, values in flat_settings(lists).items()
        if not any(own_key.startswith(f"{key}.") or f"{key}.".startswith(own_key) for own_key in given)
    }


def _file(source: str, folder: Path) -> tuple[Path, str]:
    """The file of an experiment, and the experiment's name."""
    path = folder / os.path.expanduser(source)  # left as it is if there is no such user
    if path.suffix in (".yaml", ".yml"):
        return path, path.stem
    shipped = shipped_experiments()
    if source not in shipped:
        meant = f"{source}.yaml" if path.parent.joinpath(f"{path.name}.yaml").is_file() else nearest(source, shipped)
        raise SettingsError(
            f"there is no experiment {source!r}: it is neither a file ending in .yaml nor a shipped experiment; "
            f"{f'did you mean {meant!r}? ' if meant else ''}`fedbn list experiments` shows those that are shipped"
        )
    return shipped[source], source.replace("/", "-")


def _content(path: Path) -> Tree:
    return check_mapping(parse_yaml(_text(path), repr(str(path))), repr(str(path)))


def check_mapping(content: object, source: str) -> Tree:
    if not isinstance(content, Mapping):
        found = "nothing" if content is None else type(content).__name__
        raise SettingsError(f"{source}: expected a mapping of keys, found {found}")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:  # or it isn't UTF-8, or the path has a NUL
        files = [file.name for file in path.parent.glob("*.y*ml")] if isinstance(error, FileNotFoundError) else ()
        hint = f"; did you mean {str(path.with_name(meant))!r}?" if (meant := nearest(path.name, files)) else ""
        raise SettingsError(
            f"cannot read the experiment {str(path)!r}: {getattr(error, 'strerror', None) or error}{hint}"
        ) from None


# Mappings whose keys depend on their name or kind: two strategies have different arguments.
_WHOLE = ("strategy", "base", "partition", "optimizer", "loss", "track")

_INSTEAD = {  # keys that replace another one, by section
    "": {"seed": "seeds"},
    "train": {"steps": "epochs", "epochs": "steps"},
    "test": {"share": "folds", "folds": "share"},
}

# Sections in sections; for those with a key here a file may give only its value.
_NAMED: dict[str, dict[str, str | None]] = {
    "": {"data": "name", "model": "name", "strategy": "name", "engine": "name", "track": "name"},
    "data": {"partition": "kind", "test": None},
    "train": {"optimizer": "name", "loss": "name", "schedule": "kind"},
    "strategy": {"base": "name"},
    "base": {"base": "name"},
}


def write_out(settings: Tree, section: str = "") -> Draft:
    """Write `strategy: FedTAN` as `strategy: {name: FedTAN}`, in the `runs` and `sizes` of an experiment too."""
    found = dict(settings)
    for key, value in settings.items():
        name = _NAMED.get(section, {}).get(key)
        if isinstance(value, str) and name is not None:
            found[key] = {name: value}
        elif isinstance(value, Mapping) and (name is not None or not section):
            found[key] = write_out(value, key)
    for key in ("runs", "sizes") if not section else ():
        if isinstance(parts := found.get(key), Mapping):
            found[key] = {
                label: write_out(part) if isinstance(part, Mapping) else part for label, part in parts.items()
            }
    return found


def without(settings: Tree, *keys: str) -> Draft:
    return {key: value for key, value in settings.items() if key not in keys}


def merge(base: Tree, changes: Tree, section: str = "") -> Draft:
    """Apply `changes` to `base`, recursively; another strategy or kind of partition replaces the old one as a whole.

    A `seed` selects that seed, even if the base has `seeds`; and `steps` count instead of the base's `epochs`. The
    options of a part are not settings, whatever their names.
    """
    instead = _INSTEAD.get(section, {})
    result = without(base, *(instead[key] for key, value in changes.items() if key in instead and value is not None))
    for key, value in changes.items():
        old, name = result.get(key), _NAMED.get(section, {}).get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            is_another = key in _WHOLE and name in value and value[name] != old.get(name)
            inner = "" if section == "sizes" else key if not section or key in _NAMED.get(section, {}) else "options"
            result[key] = dict(value) if is_another else merge(old, value, inner)
        else:
            result[key] = value
    return result


def nested(pairs: Iterable[tuple[str, object]]) -> Draft:
    """Settings from values by key: `("train.lr", 0.1)` is `{"train": {"lr": 0.1}}`; the last value of a key counts."""
    found: Draft = {}
    for key, value in pairs:
        section, (*path, last) = found, key.split(".")
        for number, part in enumerate(path, start=1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                above = ".".join(path[:number])
                raise SettingsError(f"{above} is {section!r}; expected a mapping, since {key} has a value")
        section[last] = value
        found = write_out(found)
    return found
