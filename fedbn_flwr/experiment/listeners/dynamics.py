"""Records the training dynamics of batch norm in norms.jsonl (`evaluate.dynamics`), and plots them.

The figures come from arrays that the server has anyway: the statistics in the clients' replies, and their mean. No
client computes or sends anything more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.common import log

from fedbn_flwr.errors import MessageError, MissingPackage
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import number_of, read_reply
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.results.folder import RunFolder

from ..norm_layers import NormLayers, Statistics
from ..settings import strategy_name
from .listener import Listener, RunState


class Dynamics(Listener):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._before: Statistics | None = None  # of the previous round; None if nothing is recorded

    def on_start(self, state: RunState) -> None:
        arrays, traits = unpack(state.arrays), state.prepared.rule.traits
        self.layers = NormLayers(arrays)
        reason = None
        if not self.layers.names:
            reason = "the model has no batch norm with running statistics"
        elif Role.STATISTICS in traits.kept - traits.returned:
            reason = f"with these settings, {strategy_name(state.run.strategy)} leaves the statistics on the clients"
        if reason is None:
            self._before = self.layers.statistics(arrays)
        else:
            log(WARNING, "%s: evaluate.dynamics records nothing: %s", state.prepared.name, reason)

    def on_replies(self, state: RunState, replies: Sequence[Message]) -> None:
        before, now = self._before, None
        if before is not None:
            self._before = now = self.layers.statistics(unpack(state.arrays))
        if before is None or now is None or not state.is_evaluated:
            return
        state.dynamics = {
            "round": state.round,
            "layers": self.layers.drift(before, now),
            "clients": self._clients(replies, now),
        }
        self.folder.add_line("norms.jsonl", state.dynamics)

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

    def on_end(self, state: RunState) -> None:
        if lines := self.folder.lines("norms.jsonl"):
            from fedbn_flwr.results.report.pictures import dynamics_plot

            with suppress(MissingPackage):  # the report says that there are no plots
                dynamics_plot(lines).write(self.folder.path / "norms.png")
