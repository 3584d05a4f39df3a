"""Evaluates the global model on clients that never trained, after the last round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.gate import one_line
from fedbn_flwr.results.folder.clients import is_count

from .listener import Listener, RunState
from .of_clients import by_metric, values_of


class Final(Listener):
    def on_round(self, state: RunState) -> None:
        if state.is_last:
            evaluate_unseen(state)


def evaluate_unseen(state: RunState) -> None:
    """Send the whole global model, its batch norm included, to the clients that never trained."""
    options = state.run.evaluate
    tuning: dict[str, float] = {}
    if options.finetune_steps:
        tuning = {
            protocol.TUNE_STEPS: options.finetune_steps,
            protocol.TUNE_LR: options.finetune_lr or state.run.train.lr,
        }
    replies = _evaluate(state, state.unseen.values(), state.arrays, **tuning)
    measured = {client: _renamed(values) for client, values in values_of(replies, "test_examples").items()}
    state.clients |= measured
    means = {name: statistics.fmean(each) for name, each in by_metric(measured).items()}
    state.line |= {name: value for name, value in means.items() if not is_count(name)}


def _renamed(values: dict[str, float]) -> dict[str, float]:
    """`own_accuracy` as `unseen_accuracy`, `tuned_own_accuracy` as `unseen_accuracy_tuned`."""
    tuned, own = f"{protocol.TUNED}_", f"{protocol.OWN}_"
    return {
        f"unseen_{name.removeprefix(tuned).removeprefix(own)}" + ("_tuned" if name.startswith(tuned) else ""): value
        for name, value in values.items()
    }


def _evaluate(state: RunState, nodes: Iterable[int], arrays: ArrayRecord, **keys: float) -> list[Message]:
    """The replies of nodes that evaluate these arrays on their own test examples."""
    config = ConfigRecord({**state.identity, protocol.ROUND: state.round, protocol.TEST_SETS: protocol.OWN, **keys})
    content = RecordDict({"arrays": arrays, "config": config})
    return _answers(state, [Message(content, node, MessageType.EVALUATE) for node in nodes])


def _answers(state: RunState, messages: list[Message]) -> list[Message]:
    """The replies that are no errors; the run is complete without the others."""
    replies = list(state.grid.send_and_receive(messages, timeout=state.run.engine.timeout))
    if silent := len(messages) - len(replies):
        log(WARNING, "after the last round: %d of %d nodes did not answer in time", silent, len(messages))
    for reply in replies:
        if reply.has_error():
            reason = one_line(str(reply.error.reason))
            log(WARNING, "after the last round: without node %d: %s", reply.metadata.src_node_id, reason)
    return [reply for reply in replies if reply.has_content()]
