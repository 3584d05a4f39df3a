"""Federated learning of networks with batch normalisation, on Flower and PyTorch."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.app import client_app
    from .client.client import BNClient
    from .engines.local import LocalGrid
    from .experiment.api import run, run_all
    from .experiment.settings import Settings
    from .models.build import build_model
    from .norms.convert import convert_norm
    from .norms.roles import Role, roles
    from .results.result import Result, Results


def _version() -> str:
    """The version in pyproject.toml: a checkout and a Flower app bundle have the file, a wheel has its metadata."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "fedbn-flwr":
            return str(project["version"])
    from importlib import metadata  # a quarter of the time of `fedbn --help`

    return metadata.version("fedbn-flwr")


__version__ = _version()
__all__ = [
    "run",
    "run_all",
    "Result",
    "Results",
    "Settings",
    "BNClient",
    "client_app",
    "LocalGrid",
    "build_model",
    "convert_norm",
    "roles",
    "Role",
]

_MODULES = {
    "run": ".experiment.api",
    "run_all": ".experiment.api",
    "Result": ".results.result",
    "Results": ".results.result",
    "Settings": ".experiment.settings",
    "BNClient": ".client.client",
    "client_app": ".client.app",
    "LocalGrid": ".engines.local",
    "Role": ".norms.roles",
    "build_model": ".models.build",
    "convert_norm": ".norms.convert",
    "roles": ".norms.roles",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line prints its help without importing torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
