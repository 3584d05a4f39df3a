"""Strategies that send each client its own content, and report what clients received."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedbn_flwr.client.rule import ClientRule, Key, Tensors
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.reply import with_arrays, with_config, with_content
from fedbn_flwr.strategies import Wrapper

BIAS = "3.bias"
Received = dict[int, tuple[float, float, float]]  # by client: values in its model, config and record


class OwnModel:
    """A mixin for strategies: in the model for client i, the values of the bias are i."""

    def outgoing(self, round: Any, messages: Sequence[Message]) -> Sequence[Message]:
        return [with_arrays(message, partial(_own, message.metadata.dst_node_id - 1)) for message in messages]


def _own(client: int, arrays: ArrayRecord) -> ArrayRecord:
    given = unpack(arrays)
    return pack({**given, BIAS: np.full_like(given[BIAS], client)})


class Addressed(Wrapper):
    """Sends each node its id, in the config and in a record; `received` is what clients report."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.received: list[Received] = []

    def config(self, round: Any) -> dict[str, Any]:
        return {"address": -1}

    def outgoing(self, round: Any, messages: Sequence[Message]) -> Sequence[Message]:
        return [self._addressed(message, message.metadata.dst_node_id) for message in messages]

    def _addressed(self, message: Message, node: int) -> Message:
        own = with_config(message, {"address": node})
        return with_content(own, RecordDict({**own.content, "address": pack({"node": np.array(float(node))})}))

    def after_round(self, round: Any, replies: Any, weights: Any) -> None:
        clients = [self.base.roster.client(reply.message.metadata.src_node_id) for reply in replies]
        values = [tuple(reply.metrics[name] for name in ("model", "config", "record")) for reply in replies]
        self.received.append(dict(zip(clients, values, strict=True)))


class AddressedClient(ClientRule):
    keys = {"address": Key("int", "report what was received")}

    def begin(self, w: Tensors) -> dict[str, Any]:
        self.model = float(w[BIAS].flatten()[0])
        return {}

    def finish(self, memo: Any, steps: int, metrics: Any, records: Any) -> None:
        record = float(self.local.records["address"]["node"])
        metrics.update(model=self.model, config=float(self.local.config["address"]), record=record)
