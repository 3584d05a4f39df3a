"""Writes the checkpoint, from which the run can be resumed, and the global model."""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.folder import RunFolder, deciding
from fedbn_flwr.results.folder.checkpoint import Snapshot
from fedbn_flwr.strategies import CannotSave, state_of

from ..run.resume import promises_of
from .listener import Listener, RunState


class Checkpoint(Listener):
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.latest: tuple[Snapshot, ArrayRecord] | None = None  # of the last finished round, with the global model

    def on_round(self, state: RunState) -> None:
        run = state.run
        self.latest = _snapshot(state), state.model
        every = run.engine.checkpoint_every or max(1, run.rounds // 20)
        if promises_of(state.prepared.rule):  # to repeat a round costs
            every = 1
        if state.round % every == 0 or state.is_last or state.stop:
            self._write(state, *self.latest)

    def on_end(self, state: RunState) -> None:
        if self.latest is None:
            return
        if state.grid.node_states() is None:  # the nodes store their state of this round themselves
            self._write(state, *self.latest)
        else:  # the engine's nodes may be in the middle of a round
            self._write_models(state, self.latest[1])

    def _write_models(self, state: RunState, model: ArrayRecord) -> None:
        self.folder.write_model(unpack(model))
        if state.best is not None:
            self.folder.write_model(unpack(state.best), "model-best.safetensors")
            state.best = None

    def _write(self, state: RunState, snapshot: Snapshot, model: ArrayRecord) -> None:
        self._write_models(state, model)
        states = state.grid.node_states()
        clients = None if states is None else ((node, states.read_state(node)) for node in state.grid.get_node_ids())
        self.folder.write_checkpoint(snapshot, clients)
        state.kept_round = snapshot.round


def _snapshot(state: RunState) -> Snapshot:
    strategy: RecordDict | None = None
    unsaved = None
    try:
        strategy = state_of(state.prepared.rule)
    except CannotSave as error:
        unsaved = str(error)
    arrays = RecordDict({"arrays": state.arrays})
    settings = deciding(state.run.model_dump(mode="json"))
    token = state.identity[protocol.TOKEN]
    return Snapshot(state.round, token, arrays, strategy, unsaved, dict(state.trained), settings)
