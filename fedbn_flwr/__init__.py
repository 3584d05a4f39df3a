"""Federated learning of networks with batch normalisation, on Flower and PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.app import client_app
    from .client.client import BNClient
    from .engines.local import LocalGrid
    from .models.build import build_model
    from .norms.convert import convert_norm
    from .norms.roles import Role, roles

__version__ = "0.1.0"
__all__ = ["BNClient", "LocalGrid", "Role", "build_model", "client_app", "convert_norm", "roles"]

_MODULES = {
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
