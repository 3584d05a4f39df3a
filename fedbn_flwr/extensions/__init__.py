"""Extensions: what protects, accelerates or operates a federation, each in a folder of its own.

A core module never imports an extension. It asks here for the parts that the installed ones declare: the package of an
extension has a dictionary `PARTS` with entries such as `"strategies": {"Secure": "strategy:Secure"}`, that is kind of
part, name, and where it is. An extension is imported when one of its parts is used, so a folder that is deleted takes
only its parts with it. The kinds:

- bounds: "Bounds", and "from_settings", which makes them from a mapping such as `{max_share: 0.2}`
- carriers: functions that return what makes FedTAN's carriers, or None, by the environment's settings
- client_keys: by config key, the client rule that it selects
- client_mods: by config key, the mod around the handling of messages that have it: (message, context, call_next). Its
  `keys` document the config keys; it removes them from the message that it passes on
- commands: a function that adds a command to the parser of `fedbn`, for instance `fedbn check`
- engines: by the name that `engine.name` has, a context manager of an experiment that yields the grids of its runs
- pools: "together", a pool of the local engine that trains several clients at once
- passes: "compiled", which compiles the gradient of a round
- queries: by action, the function (content, context) that answers `query.ACTION`
- strategies: by name, the class; `fedbn_flwr.strategies` and `fedbn list strategies` have it
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


def parts(kind: str) -> list[Any]:
    """All parts of this kind, in the order of extensions and of their declarations."""
    return [part(kind, name) for name in declared(kind)]


def part(kind: str, name: str) -> Any:
    """The part of this kind and name; KeyError if no installed extension declares it."""
    return pkgutil.resolve_name(declared(kind)[name])
