"""The mods of an experiment: Flower's by name, or `module:callable`, around each message that a client handles."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import mod as flower_mods
from flwr.clientapp.typing import Mod

from fedbn_flwr import named
from fedbn_flwr.client.mods import weights_only
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.arrays import configs_in

from .file.layers import from_run_config
from .node import run_of
from .settings import Experiment, Settings, name_in


def experiment_mods(
    message: Message,
    context: Context,
    call_next: Callable[[Message, Context], Message],
    *,
    experiment: Experiment | None = None,
) -> Message:
    """A mod that applies those of the run that the message names; `experiment` is by default that of the run config."""
    config = next(iter(configs_in(message.content).values()), ConfigRecord())
    run = run_of(experiment or from_run_config(context.run_config), config)
    for mod in reversed(mods_of(run, message.metadata.message_type.partition(".")[0])):
        call_next = functools.partial(_call, mod, call_next)
    return call_next(message, context)


def client_mods(experiment: Experiment) -> list[Mod]:
    """The mods of a ClientApp for this experiment."""
    return [functools.partial(experiment_mods, experiment=experiment)] if any(r.mods for r in experiment.runs) else []


def check_mods(run: Settings) -> None:
    for kind in run.mods:
        mods_of(run, kind)


def mods_of(run: Settings, kind: str) -> list[Mod]:
    return [_made(json.dumps(part)) for of, parts in run.mods.items() if of == kind for part in parts]


def _call(mod: Mod, call_next: Callable[[Message, Context], Message], message: Message, context: Context) -> Message:
    return mod(message, context, call_next)


@functools.lru_cache(maxsize=32)  # a process keeps the state of a mod from message to message
def _made(text: str) -> Mod:
    part: str | Mapping[str, Any] = json.loads(text)
    name, options = name_in(part), {} if isinstance(part, str) else {k: v for k, v in part.items() if k != "name"}
    hides = options.pop("weights_only", False)
    found: Any
    if ":" in name:
        found = named.load("mods", name)
    elif name in flower_mods.__all__:
        found = getattr(flower_mods, name)
    else:
        raise SettingsError(f"mods has {name!r}; {did_you_mean(name, flower_mods.__all__)}, or module:callable")
    if isinstance(found, type) or options:
        try:
            found = found(**options)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"mods: {name} with {options}: {error}") from None
    return weights_only(found) if hides else found
