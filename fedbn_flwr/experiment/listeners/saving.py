"""Writes the checkpoint, from which the run can be resumed, and the global model."""

from __future__ import annotations

from dataclasses import replace

from flwr.app import ArrayRecord, RecordDict

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.folder import RunFolder, deciding
from fedbn_flwr.results.folder.checkpoint import Snapshot
from fedbn_flwr.strategies import CannotSave, state_of

from ..run.resume import promises_of
from .listener import Listener, Round, Running


class Saving(Listener):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.latest: tuple[Snapshot, ArrayRecord] | None = None  # of the last finished round, with the global model
        self.best: ArrayRecord | None = None  # the model of the best round, until it is in the run folder

    def on_round(self, running: Running, at: Round) -> Round:
        run = running.run
        self.latest = _snapshot(running, at), at.model
        self.best = at.model if at.is_best else self.best
        every = run.engine.checkpoint_every or max(1, run.rounds // 20)
        if promises_of(running.prepared.rule):  # to repeat a round costs
            every = 1
        if at.number % every and not (at.is_last or at.stop):
            return at
        self._write(running, *self.latest)
        return replace(at, kept_round=at.number)

    def on_end(self, running: Running, error: BaseException | None) -> None:
        if self.latest is None:
            return
        if running.grid.node_states() is None:  # the nodes store their state of this round themselves
            self._write(running, *self.latest)
        else:  # the engine's nodes may be in the middle of a round
            self._write_models(self.latest[1])

    def _write_models(self, model: ArrayRecord) -> None:
        self.folder.write_model(unpack(model))
        if self.best is not None:
            self.folder.write_model(unpack(self.best), "model-best.safetensors")
            self.best = None

    def _write(self, running: Running, snapshot: Snapshot, model: ArrayRecord) -> None:
        self._write_models(model)
        states, nodes = running.grid.node_states(), running.grid.get_node_ids()
        clients = ((node, states.read_state(node)) for node in nodes) if states is not None else ()
        self.folder.write_checkpoint(snapshot, clients)


def _snapshot(running: Running, at: Round) -> Snapshot:
    strategy: RecordDict | None = None
    unsaved = None
    try:
        strategy = state_of(running.prepared.rule)
    except CannotSave as error:
        unsaved = str(error)
    arrays = RecordDict({"arrays": at.arrays})
    settings = deciding(running.run.model_dump(mode="json"))
    token = running.identity[protocol.TOKEN]
    return Snapshot(at.number, token, arrays, strategy, unsaved, dict(at.trained), settings)
