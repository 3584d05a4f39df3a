"""The mods of an experiment, by `module:callable`, around each message that a client handles."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.client.mod.utils import make_ffn
from flwr.clientapp.typing import Mod

from fedbn_flwr import named
from fedbn_flwr.messages.arrays import configs_in

from .file.layers import from_run_config
from .node import run_of
from .settings import Experiment, Settings, name_in, options_in


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
    return make_ffn(call_next, mods_of(run))(message, context)


def client_mods(experiment: Experiment) -> list[Mod]:
    """The mods of a ClientApp for this experiment."""
    return [functools.partial(experiment_mods, experiment=experiment)] if any(r.mods for r in experiment.runs) else []


def mods_of(run: Settings) -> list[Mod]:
    return [_made(json.dumps(part)) for part in run.mods]


@functools.lru_cache(maxsize=32)  # a process keeps the state of a mod from message to message
def _made(text: str) -> Mod:
    part = json.loads(text)
    name, options = name_in(part), options_in(part)
    made: Mod = named.call("mods", name, **options) if options else named.load("mods", name)
    return made
