"""Imports run from the top of this list to the bottom only, and no two modules import each other."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The folders of the project, from top to bottom: a module may import its own folder and those below it.
FOLDERS = (
    "apps",
    "fedbn_flwr.extensions.",  # each extension; `fedbn_flwr.extensions` itself, which finds them, is at the bottom
    "fedbn_flwr.commands",
    "fedbn_flwr.experiment",
    "fedbn_flwr.results",
    "strategies",
    "fedbn_flwr.server",
    "fedbn_flwr.engines",
    "fedbn_flwr.client",
    "fedbn_flwr.exchange",
    "fedbn_flwr.models",
    "fedbn_flwr.data",
    "fedbn_flwr.messages",
    "fedbn_flwr.norms",
    "fedbn_flwr.tasks",
    "fedbn_flwr.batch",
    "fedbn_flwr.storage",
    "fedbn_flwr.seeding",
    "fedbn_flwr.named",
    "fedbn_flwr.cores",
    "fedbn_flwr.declared",
    "fedbn_flwr.extensions",
    "fedbn_flwr.internals",
    "fedbn_flwr.errors",
    "fedbn_flwr.trees",
)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# `fedbn_flwr/strategies.py` is the public name of `strategies/`, and `fedbn_flwr/__init__.py` imports on first use.
PUBLIC = {"fedbn_flwr", "fedbn_flwr.strategies"}
FILES = {
    module_name(file): file
    for top in ("fedbn_flwr", "strategies", "apps")
    for file in (ROOT / top).rglob("*.py")
    if "tests" not in file.parts
}
# Packages in Flower's documentation. The names in their `__all__` are public, and all others are internal to Flower.
OF_FLOWER = ("flwr.app", "flwr.client", "flwr.clientapp", "flwr.common", "flwr.serverapp", "flwr.serverapp.strategy")
PACKAGES = {name for name, file in FILES.items() if file.name == "__init__.py"}


def resolve(name: str) -> str | None:
    """The module of this project that an imported name belongs to, or None."""
    if name.startswith("fedbn_flwr.strategies"):
        name = name.removeprefix("fedbn_flwr.")
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def imported(name: str) -> set[str]:
    """All names that a module imports, also inside functions and for type checking."""
    package = name if name in PACKAGES else name.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = ".".join(parents[: len(parents) - node.level + 1])
                base = f"{above}.{base}" if base else above
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imports(name: str) -> set[str]:
    """The modules of this project among them."""
    return {module for target in imported(name) if (module := resolve(target)) is not None} - {name}


def folder(name: str) -> int:
    for number, prefix in enumerate(FOLDERS):
        if name == prefix or name.startswith(prefix.rstrip(".") + "."):
            return number
    raise LookupError(f"{name} is in no folder of FOLDERS")


def test_imports_are_found() -> None:
    assert {"fedbn_flwr.seeding", "fedbn_flwr.messages.protocol"} <= imports("fedbn_flwr.client.client")
    assert "fedbn_flwr.errors" in imports("fedbn_flwr.norms.convert")
    assert "fedbn_flwr.experiment.run.launch" in imports("fedbn_flwr.commands.run")
    assert "fedbn_flwr.messages.aggregate" in imports("strategies.fedavg")


@pytest.mark.parametrize("name", sorted(FILES.keys() - PUBLIC))
def test_imports_run_downwards(name: str) -> None:
    upwards = {target for target in imports(name) - PUBLIC if folder(target) < folder(name)}
    assert not upwards, f"{name} imports {sorted(upwards)}, which are above it"


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"fedbn_flwr.internals"}))
def test_internal_names_of_flower_come_from_one_module(name: str) -> None:
    public = {f"{package}.{each}" for package in OF_FLOWER for each in importlib.import_module(package).__all__}
    assert not {each for each in imported(name) if each.split(".")[0] == "flwr"} - public


def test_the_list_is_the_list_of_folders() -> None:
    tops = {name if not name.startswith("fedbn_flwr.") else ".".join(name.split(".")[:2]) for name in FILES}
    folders = {folder.rstrip(".") for folder in FOLDERS}
    assert {top.split(".")[0] if not top.startswith("fedbn_flwr") else top for top in tops} - PUBLIC == folders


def test_no_extension_imports_another() -> None:
    for name in FILES:
        if name.startswith("fedbn_flwr.extensions."):
            own = ".".join(name.split(".")[:3])
            targets = {".".join(target.split(".")[:3]) for target in imports(name)}
            others = {target for target in targets & PACKAGES if target.startswith("fedbn_flwr.extensions.")}
            assert others <= {own}, (name, others)


def test_the_package_imports_nothing_at_once() -> None:
    tree = ast.parse(FILES["fedbn_flwr"].read_text(encoding="utf-8"))
    assert not [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]


def test_no_cycles() -> None:
    graph = {name: imports(name) - PUBLIC for name in FILES if name not in PUBLIC}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' > '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


# What may be called the same: the two halves of an extension, and those of the core in the rooms `server` and `client`.
HALVES = {"client", "strategy"}
TWINS = ("fedbn_flwr.server", "fedbn_flwr.client")


def test_a_word_is_the_name_of_one_module() -> None:
    found: dict[str, set[str]] = {}
    for name in sorted(FILES.keys() - PACKAGES - PUBLIC):
        room, _, word = name.rpartition(".")
        if not (name.startswith("fedbn_flwr.extensions.") and word in HALVES):
            found.setdefault(word, set()).add("a half" if room in TWINS else name)
    assert not {word: names for word, names in found.items() if len(names) > 1}
