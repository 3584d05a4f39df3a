"""`weights_only(mod)`: one of Flower's mods without the statistics and counters of batch norm.

Flower's clipping and noise mods take the norm of the change of all arrays and change all of them. A counter of batch
norm can then exceed the clipping norm, and noise can make a variance negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Context, Message

from fedbn_flwr.messages.arrays import record_of
from fedbn_flwr.messages.gate import arrays_of, with_arrays, without_norm_state

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod  # elsewhere in older versions of Flower


def weights_only(mod: Mod) -> Mod:
    """`mod`, which sees messages and replies without the statistics and counters of batch norm.

    These travel unchanged: the mod neither clips them nor adds noise to them, so it does not protect them either.
    `fedbn_flwr.strategies.Private` does.
    """

    def outer(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        received, replied = arrays_of(message.content), ArrayRecord()

        def inner(shown: Message, context: Context) -> Message:
            nonlocal replied
            reply = call_next(with_arrays(shown, lambda part: record_of({**received, **part})), context)
            if reply.has_error():
                return reply
            replied = arrays_of(reply.content)
            return with_arrays(reply, without_norm_state)

        reply = mod(with_arrays(message, without_norm_state), context, inner)
        return reply if reply.has_error() else with_arrays(reply, lambda part: record_of({**replied, **part}))

    return outer
