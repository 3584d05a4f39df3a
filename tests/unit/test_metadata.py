"""The metadata that package indices, Flower's hub and other tools read."""

from __future__ import annotations

import tomllib

import pytest
import yaml
from flwr.cli.build import get_filtered_fab_paths
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format
from packaging.requirements import Requirement

import fedbn_flwr
from tests.support.command import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_that_of_pyproject() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert fedbn_flwr.__version__ == PROJECT["project"]["version"] == citation["version"]


def test_the_constraints_pin_what_the_readme_installs_and_name_no_index() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    pinned: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            (pin,) = Requirement(line).specifier
            pinned.setdefault(Requirement(line).name, []).append(pin.version)
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*extras.values(), PROJECT["project"]["dependencies"], PROJECT["dependency-groups"]["dev"]]
    for asked in (Requirement(text) for texts in needed for text in texts):
        if asked.name != PROJECT["project"]["name"]:
            assert all(asked.specifier.contains(version) for version in pinned[asked.name.lower()]), asked


def test_flowers_hub_accepts_the_metadata() -> None:
    config, warnings = load_and_validate(ROOT / "pyproject.toml")
    assert warnings == []
    metadata = normalize_and_validate_fab_format(config)
    assert metadata.fab_format_version == 1
    assert metadata.flwr_version_min == "1.26"  # of the plug-in part; the application names its version when it starts
    assert metadata.flwr_version_target == "1.41.0"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_an_app_bundle_has_all_files_of_the_packages() -> None:
    """Flower refuses a bundle with patterns for files of kinds that it does not pack, such as .html."""
    files = {
        file.relative_to(ROOT).as_posix(): file
        for top in ("apps", "fedbn_flwr", "strategies")
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    others = {name: ROOT / name for name in ("LICENSE", "README.md", ".gitignore")}
    packed = get_filtered_fab_paths(files | others, PROJECT)
    of_tests = {name for name, file in files.items() if "tests" in file.relative_to(ROOT).parts}
    assert files.keys() - packed == {"fedbn_flwr/py.typed"} | of_tests
