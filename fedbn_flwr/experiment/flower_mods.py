"""The mods of an experiment: Flower's by name, or `module:callable`, around each message that a client handles."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import mod as flower_mods
from flwr.clientapp.typing import Mod

from fedbn_flwr import named
from fedbn_flwr.client.app import weights_only
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages.arrays import configs_in

from .file.layers import from_run_config
from .node import run_of
from .settings import Experiment, Settings


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
    return make_ffn(call_next, mods_of(run, message.metadata.message_type.partition(".")[0]))(message, context)


def client_mods(experiment: Experiment) -> list[Mod]:
    """The mods of a ClientApp for this experiment."""
    return [functools.partial(experiment_mods, experiment=experiment)] if any(r.mods for r in experiment.runs) else []


def check_mods(run: Settings) -> None:
    for kind in run.mods:
        mods_of(run, kind)


def mods_of(run: Settings, kind: str) -> list[Mod]:
    return [_made(json.dumps(part)) for of, parts in run.mods.items() if of == kind for part in parts]


@functools.lru_cache(maxsize=32)  # a process keeps the state of a mod from message to message
def _made(text: str) -> Mod:
    part = json.loads(text)
    options = {"name": part} if isinstance(part, str) else part
    name, hides = options.pop("name"), options.pop("weights_only", False)
    if ":" not in name and name not in flower_mods.__all__:
        raise SettingsError(f"mods has {name!r}; {did_you_mean(name, flower_mods.__all__)}, or module:callable")
    found: Any = named.load("mods", name) if ":" in name else getattr(flower_mods, name)
    if isinstance(found, type) or options:
        try:
            found = found(**options)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"mods: {name} with {options}: {error}") from None
    return weights_only(found) if hides else found
