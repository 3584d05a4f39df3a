"""Imports run downwards only, and no two files import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top floor down; a file may import what stands below it, and its own floor.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"apps"}),
    frozenset({"fedbn_flwr.cli"}),
    frozenset({"fedbn_flwr.experiment"}),
    frozenset({"fedbn_flwr.bench"}),
    frozenset({"fedbn_flwr.preparing"}),
    frozenset({"fedbn_flwr.lookup"}),
    frozenset({"strategies", "fedbn_flwr.strategies"}),  # the second is the first by its public name
    frozenset({"fedbn_flwr.serving"}),
    frozenset({"fedbn_flwr.client"}),
    frozenset({"fedbn_flwr.parts", "fedbn_flwr.sgd"}),
    frozenset({"fedbn_flwr.evaluation", "fedbn_flwr.replay"}),
    frozenset({"fedbn_flwr.training"}),
    frozenset({"fedbn_flwr.models"}),
    frozenset({"fedbn_flwr.layerwise"}),
    frozenset({"fedbn_flwr.data"}),
    frozenset({"fedbn_flwr.engine"}),
    frozenset({"fedbn_flwr.results"}),
    frozenset({"fedbn_flwr.statefolder"}),
    frozenset(
        f"fedbn_flwr.{name}"
        for name in (
            "settings",
            "aggregate",
            "packing",
            "grids",
            "roles",
            "state",
            "protocol",
            "draws",
            "errors",
            "recordfile",
        )
    ),
)


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for top in ("fedbn_flwr", "strategies", "apps") for file in (ROOT / top).rglob("*.py")}
PACKAGES = {name for name, file in FILES.items() if file.name == "__init__.py"}


def resolve(name: str) -> str | None:
    """The file of ours that an imported name leads to, or None."""
    if name.startswith("fedbn_flwr.strategies."):
        name = name.removeprefix("fedbn_flwr.")
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def imports(name: str) -> set[str]:
    """Every file of ours that the file imports, wherever in it, also inside functions and for types alone."""
    package = name if name in PACKAGES else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = ".".join(parents[: len(parents) - node.level + 1])
                base = f"{above}.{base}" if base else above
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {file for target in found if (file := resolve(target)) is not None} - {name}


def floor(name: str) -> int:
    for number, names in enumerate(FLOORS):
        if any(name == each or name.startswith(f"{each}.") for each in names):
            return number
    raise LookupError(f"{name} has no floor; give it one in FLOORS")


# The package's face: it names what stands above it and imports it when asked.
FACE = "fedbn_flwr"


def test_the_reader_of_imports_finds_them() -> None:
    """The test of the tests below: relative, absolute, of a package, inside a function."""
    assert {"fedbn_flwr.draws", "fedbn_flwr.protocol", "fedbn_flwr.roles"} <= imports("fedbn_flwr.client")
    assert "fedbn_flwr.errors" in imports("fedbn_flwr.models.norms")
    assert "fedbn_flwr.experiment" in imports("fedbn_flwr.cli")
    assert {"fedbn_flwr.aggregate", "strategies.wrapper"} <= imports("strategies.fedavg")


@pytest.mark.parametrize("name", sorted(FILES.keys() - {FACE}))
def test_imports_run_downwards(name: str) -> None:
    upwards = {target for target in imports(name) - {FACE} if floor(target) < floor(name)}
    assert not upwards, f"{name} imports {sorted(upwards)}, which stand above it"


def test_the_face_imports_roles_alone_at_once() -> None:
    tree = ast.parse(FILES[FACE].read_text(encoding="utf-8"))
    at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level}
    assert at_once == {"roles"}


def test_no_two_files_import_each_other() -> None:
    """Nor in a longer circle."""
    graph = {name: imports(name) - {FACE} for name in FILES if name != FACE}
    # The re-export and the folder it shows are two names of one thing.
    graph.pop("fedbn_flwr.strategies", None)
    graph = {
        name: {"strategies" if t == "fedbn_flwr.strategies" else t for t in targets} for name, targets in graph.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle of imports: {' > '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_nothing_imports_the_apps() -> None:
    for name in FILES:
        if not name.startswith("apps"):
            assert not {target for target in imports(name) if target.split(".")[0] == "apps"}, name
