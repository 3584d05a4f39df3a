"""A wrapper for Flower's mods: `weights_only(fixedclipping_mod)` clips weights, gamma and beta, and nothing else.

Counters and statistics of batch norm pass the mod by: **they are neither clipped nor noised, and have no guarantee.**
Use it as `client_app(make_client, mods={"train": [weights_only(fixedclipping_mod)]})`.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message

from fedbn_flwr import Role, roles

App = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, App], Message]


def weights(arrays: ArrayRecord) -> ArrayRecord:
    return ArrayRecord({key: arrays[key] for key, role in roles(arrays).items() if role in (Role.WEIGHTS, Role.AFFINE)})


def weights_only(mod: Mod) -> Mod:
    def outer(message: Message, context: Context, call_next: App) -> Message:
        received, replied = message.content["arrays"], ArrayRecord()

        def inner(message: Message, context: Context) -> Message:
            message.content["arrays"] = ArrayRecord({**received, **message.content["arrays"]})
            reply = call_next(message, context)
            if reply.has_content():
                replied.update(reply.content["arrays"])
                reply.content["arrays"] = weights(replied)
            return reply

        message.content["arrays"] = weights(received)
        reply = mod(message, context, inner)
        if reply.has_content():
            reply.content["arrays"] = ArrayRecord({**replied, **reply.content["arrays"]})
        return reply

    return outer
