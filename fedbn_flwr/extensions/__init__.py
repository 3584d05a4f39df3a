"""Extensions: what protects, accelerates or operates a federation, each in a folder of its own.

A core module never imports an extension. It asks here for the parts that the installed ones declare: the package of an
extension has a dictionary `PARTS` with entries such as `"strategies": {"Secure": "strategy:Secure"}`, that is kind of
part, name, and where it is. An extension is imported when one of its parts is used, so a folder that is deleted takes
only its parts with it. The kinds:

- carriers: classes of exchange services, `fedbn_flwr.exchange.carriers.Service`
- bounds: "Bounds", and "from_settings", which makes them from a mapping such as `{max_share: 0.2}`
"""

import importlib
import pkgutil
from functools import cache
from typing import Any


@cache
def declared(kind: str) -> dict[str, str]:
    """Where the parts of a kind are, as `module:attribute`, by name."""
    found = {}
    for extension in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        package = importlib.import_module(f"{__name__}.{extension}")
        found.update({name: f"{package.__name__}.{where}" for name, where in package.PARTS.get(kind, {}).items()})
    return found


def part(kind: str, name: str) -> Any:
    """The part of this kind and name; KeyError if no installed extension declares it."""
    return pkgutil.resolve_name(declared(kind)[name])
