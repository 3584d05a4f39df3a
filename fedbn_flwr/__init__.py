"""Federated learning of networks with batch normalisation, on Flower and PyTorch."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.app import client_app
    from .client.client import BNClient
    from .engines.local import LocalGrid
    from .experiment.api import evaluate, run, run_all
    from .experiment.settings import Settings
    from .models.build import build_model
    from .norms.compound import declare_batch_norm
    from .norms.convert import convert_norm
    from .norms.roles import Role, roles
    from .results.result import Result
    from .results.several import Results

    __version__: str

__all__ = [
    "run",
    "run_all",
    "evaluate",
    "Result",
    "Results",
    "Settings",
    "BNClient",
    "client_app",
    "LocalGrid",
    "build_model",
    "convert_norm",
    "declare_batch_norm",
    "roles",
    "Role",
]

_MODULES = {
    "run": ".experiment.api",
    "run_all": ".experiment.api",
    "evaluate": ".experiment.api",
    "survey": ".experiment.api",
    "diagnose": ".extensions.diagnose.measure",
    "Result": ".results.result",
    "Results": ".results.several",
    "Settings": ".experiment.settings",
    "BNClient": ".client.client",
    "client_app": ".client.app",
    "LocalGrid": ".engines.local",
    "Role": ".norms.roles",
    "build_model": ".models.build",
    "convert_norm": ".norms.convert",
    "declare_batch_norm": ".norms.compound",
    "roles": ".norms.roles",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        # Imported on first use: the command line prints its help without importing torch.
        if name == "__version__":
            return _version()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name], __name__), name)


@functools.cache
def _version() -> str:
    """The version in pyproject.toml, which a checkout and a Flower app bundle have, or in the metadata of a wheel."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    text = project.read_text(encoding="utf-8") if project.is_file() else ""
    found = re.search(r'^name = "fedbn-flwr"\nversion = "(.+)"', text, re.MULTILINE)
    return found[1] if found else importlib.metadata.version("fedbn-flwr")


def __dir__() -> list[str]:
    """What a shell completes: without the imports of this file."""
    return [*__all__, "__version__"]
