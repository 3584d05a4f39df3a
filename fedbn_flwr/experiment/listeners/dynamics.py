"""Records the training dynamics of batch norm in norms.jsonl (`evaluate.dynamics`).

The figures come from arrays that the server has anyway: the statistics in the clients' replies, and their mean. No
client computes or sends anything more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.common import log

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import number_of, read_reply
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.results.folder import RunFolder

from ..norm_layers import NormLayers, Statistics
from ..settings import strategy_name
from .listener import Listener, Round, Running


class Dynamics(Listener):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._before: Statistics | None = None  # of the previous round; None if nothing is recorded

    def on_start(self, running: Running, at: Round) -> Round:
        arrays, traits = unpack(at.arrays), running.prepared.rule.traits
        self.layers = NormLayers(arrays)
        reason = None
        if not self.layers.names:
            reason = "the model has no batch norm with running statistics"
        elif Role.STATISTICS in traits.unsent:
            reason = f"with these settings, {strategy_name(running.run.strategy)} leaves the statistics on the clients"
        if reason is None:
            self._before = self.layers.statistics(arrays)
        else:
            log(WARNING, "%s: evaluate.dynamics records nothing: %s", running.prepared.name, reason)
        return at

    def on_round(self, running: Running, at: Round) -> Round:
        before, now = self._before, None
        if before is not None:
            self._before = now = self.layers.statistics(unpack(at.arrays))
        if before is None or now is None or not at.is_evaluated:
            return replace(at, replies=())
        clients = self._clients(at.replies, now)
        line = {"round": at.number, "layers": self.layers.drift(before, now), "clients": clients}
        self.folder.add_line("norms.jsonl", line)
        return replace(at, replies=(), dynamics=line)

    def _clients(self, replies: Sequence[Message], overall: Statistics) -> dict[str, Any]:
        found = {}
        for reply in sorted(filter(Message.has_content, replies), key=number_of):
            try:
                statistics = self.layers.statistics(read_reply(reply).arrays)
            except MessageError:  # the strategy has reported this reply
                continue
            if statistics is not None:
                found[str(number_of(reply))] = self.layers.deviation(statistics, overall)
        return found
