"""The strategies, one file each; import them from `fedbn_flwr.strategies`.

A client imports the file of a rule that the server asks for; all others are imported when a name of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # Python's imports ask for some
        raise AttributeError(name)
    return __dir__() if name == "__all__" else getattr(import_module("._names", __package__), name)


def __dir__() -> list[str]:
    return [name for name in dir(import_module("._names", __package__)) if not name.startswith("_")]
