"""Extensions protect, accelerate or operate a federation. Each has its own folder.

A core module never imports an extension. It asks here for parts. Each extension's package declares them in a dictionary
`PARTS`, by kind and name: `"strategies": {"Secure": "strategy:Secure"}` is the class `Secure` in the module `strategy`.
An extension is imported when one of its parts is used. If you delete its folder, everything else continues to work.
What several of them need, and nothing else does, is a module beside the folders.
The kinds of parts:

- bounds: "Bounds", and "from_settings", which makes Bounds from a mapping such as `{max_share: 0.2}`
- carriers: functions that look for settings in the environment, and return a function that makes FedTAN's carriers, or
  None
- client_keys: by config key, the client rule that the key selects
- client_mods: by config key, a mod (message, context, call_next) for messages with this key. Its `keys` document the
  config keys; it removes them from the message that it passes on
- commands: a function that adds a command such as `fedbn check` to the parser of `fedbn`
- engines: by the value of `engine.name`, a context manager that yields what makes the pools of an experiment's runs
- pools: "together", a pool of the local engine that trains several clients at once; functions of a run's parts,
  "clients_at_once", how many it trains, and "in_words"; "hint", a function of several runs, whether it were faster;
  "ray", a Ray cluster, which makes pools of actors
- passes: "compiled", which compiles the gradient of a round
- queries: by action, a function (content, context) that answers `query.ACTION`
- strategies: by name, a class, which then appears in `fedbn_flwr.strategies` and `fedbn list strategies`
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from fedbn_flwr.errors import MissingPackage


@cache
def declared(kind: str) -> dict[str, str]:
    """The locations `module:attribute` of the parts of a kind, by name."""
    found = {}
    for extension in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg):
        package = importlib.import_module(f"{__name__}.{extension}")
        found.update({name: f"{package.__name__}.{where}" for name, where in package.PARTS.get(kind, {}).items()})
    return found


def parts(kind: str) -> list[Any]:
    """All parts of this kind, sorted by extension, in the order of declaration."""
    return [part(kind, name) for name in declared(kind)]


def part(kind: str, name: str) -> Any:
    """The part of this kind and name; MissingPackage if no extension declares it, because its folder was deleted."""
    if name not in declared(kind):
        raise MissingPackage(f"{name!r} of {kind} needs a folder that was deleted from fedbn_flwr/extensions")
    return pkgutil.resolve_name(declared(kind)[name])
