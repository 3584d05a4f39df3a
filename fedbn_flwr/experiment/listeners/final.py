"""Evaluates the global model on clients that never trained, after the last round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log

from fedbn_flwr.messages import protocol
from fedbn_flwr.results.folder.clients import is_count

from ..run.cohort import failures
from .listener import Listener, Round, Running
from .of_clients import by_metric, values_of


class Final(Listener):
    def on_round(self, running: Running, at: Round) -> Round:
        """Send the whole global model, its batch norm included; the run is complete without those that fail."""
        if not at.is_last:
            return at
        options = running.run.evaluate
        keys: dict[str, Any] = {**running.identity, protocol.ROUND: at.number, protocol.TEST_SETS: protocol.OWN}
        if options.finetune_steps:
            keys[protocol.TUNE_STEPS] = options.finetune_steps
            keys[protocol.TUNE_LR] = options.finetune_lr or running.run.train.lr
        content = RecordDict({"arrays": at.arrays, "config": ConfigRecord(keys)})
        messages = [Message(content, node, MessageType.EVALUATE) for node in running.unseen.values()]
        replies = list(running.grid.send_and_receive(messages, timeout=running.run.engine.timeout))
        for problem in failures(running.run, len(messages), replies):
            log(WARNING, "after the last round: without %s", problem)
        measured = {client: _renamed(values) for client, values in values_of(replies, "test_examples").items()}
        means = {name: statistics.fmean(each) for name, each in by_metric(measured).items() if not is_count(name)}
        return at.with_figures(means, measured)


def _renamed(values: Mapping[str, float]) -> dict[str, float]:
    """`own_accuracy` as `unseen_accuracy`, `tuned_own_accuracy` as `unseen_accuracy_tuned`."""
    tuned, own = f"{protocol.TUNED}_", f"{protocol.OWN}_"
    return {
        f"unseen_{name.removeprefix(tuned).removeprefix(own)}" + ("_tuned" if name.startswith(tuned) else ""): value
        for name, value in values.items()
    }
