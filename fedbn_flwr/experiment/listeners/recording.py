"""Writes the files of a run: history and summary, with traffic and seconds, the checkpoint and the global model."""

from __future__ import annotations

import time
from dataclasses import replace

from flwr.app import ArrayRecord, RecordDict

from fedbn_flwr.client.evaluation import name_of
from fedbn_flwr.engines.worker import return_freed_memory
from fedbn_flwr.errors import Diverged, RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.folder.checkpoint import Snapshot
from fedbn_flwr.results.folder.reader import CLIENTS_DIGEST, deciding, digest_of
from fedbn_flwr.results.folder.summary import GLOBAL_MODEL, Summary, time_stamp
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.server.flower import Foreign
from fedbn_flwr.storage import to_json
from fedbn_flwr.strategies import Rule, state_of
from fedbn_flwr.tasks import CLASSIFICATION

from ..parts import Parts
from ..settings import PAPER, Settings, strategy_name
from .evaluate import Choose, Evaluate, Unseen
from .listener import FinishedRound, Listener, Running
from .progress import Reporter


class History(Listener):
    after = (Evaluate, Unseen, Choose, Reporter)

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self.mark = time.monotonic()
        self.summary = begin_summary(running.prepared)
        if (before := running.folder.readable_summary()) is not None:
            self.summary.notes = before.notes  # until the next round begins or ends
        for line in running.folder.history():
            self.summary.account(line)
        self.summary.stopped = finished.stopped or None
        running.folder.write_summary(self.summary)

    def on_messages(self, running: Running) -> None:
        if promises := promises_of(running.prepared.rule):
            running.folder.write_promises(promises)
            self._write(running)  # in case this process is killed

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        now = time.monotonic()
        clients = {"round": finished.number, "clients": dict(sorted(finished.clients.items()))}
        about = {CLIENTS_DIGEST: digest_of(to_json(clients)), "seconds": now - self.mark}
        finished = finished.with_metrics({**vars(running.grid.take()), **about})
        self.mark = now
        running.folder.add_line("history.jsonl", finished.line)
        running.folder.add_line("clients.jsonl", clients)
        self.summary.account(finished.line)
        self.summary.stopped = finished.stopped or None
        self._write(running)
        return finished

    def _write(self, running: Running) -> None:
        self.summary.own_data_sites = running.federation.sites or None
        self.summary.notes = dict(running.prepared.rule.notes())
        running.folder.write_summary(self.summary)

    def on_end(self, running: Running, error: BaseException | None) -> None:
        if error is None:
            self.summary.status = "finished"
            self.summary.notes = dict(running.prepared.rule.notes())  # if the run was resumed after its last round
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.summary.status = "interrupted"
        else:
            self.summary.status, self.summary.error = "failed", str(error)
            if isinstance(error, Diverged):
                self.summary.diverged_in = self.summary.rounds + 1
        running.folder.write_summary(self.summary)


def begin_summary(prepared: Parts) -> Summary:
    run, of_clients = prepared.run, "the clients' models on their test examples, mean"
    of_model = of_clients if prepared.dataset is None else GLOBAL_MODEL
    return Summary(
        name=run.name,
        label=run.label,
        strategy=strategy_name(run.strategy),
        model=run.model.name,
        norm=run.model.norm,
        seed=run.seed,
        parameters=sum(parameter.numel() for parameter in prepared.model.parameters()),
        device=str(prepared.device),
        began=time_stamp(),
        accuracy_of=of_model if prepared.rule.traits.has_global_model else "the clients' models, mean",
        personal=bool(prepared.rule.traits.local) or None,
        clients_due=prepared.rule.base.num_training(run.training_clients),
        metrics=tuple(name_of(metric) for metric in prepared.metrics),
        size=run.size if run.size != PAPER else None,
        task=prepared.task.name if prepared.task is not CLASSIFICATION else None,
    )


class Saving(Listener):
    after = (Reporter, History)  # whether the run stops, and the digest of the rounds

    latest: tuple[Snapshot, ArrayRecord] | None = None  # of the last round, with the model, until they are written
    best: tuple[ArrayRecord, int] | None = None  # model and number of the best round, until it is in the run folder

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        # Not in each round: pydantic hides the KeyboardInterrupt of a signal.
        self.settings = deciding(running.run.model_dump(mode="json"))

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        run = running.run
        self.latest = self._snapshot(running, finished), finished.model
        self.best = (finished.model, finished.number) if finished.is_best else self.best
        every = 1 if promises_of(running.prepared.rule) else checkpoint_every(run)  # to repeat a round costs
        if finished.number % every and not (finished.is_last or finished.stop):
            return finished
        self._write(running)
        return replace(finished, checkpoint_round=finished.number)

    def on_end(self, running: Running, error: BaseException | None) -> None:
        # Nodes that store their state themselves are of the last round; the engine's may be in the middle of the next.
        self._write(running, has_states=running.grid.contexts() is None)

    def _snapshot(self, running: Running, finished: FinishedRound) -> Snapshot:
        strategy, unsaved = None, None
        try:
            strategy = state_of(running.prepared.rule)
        except ValueError as error:
            if not isinstance(running.prepared.rule.base, Foreign):  # whose attributes are not declared
                raise RunFailed(
                    f"round {finished.number}: the state of the strategy cannot be saved: {error}"
                ) from None
            unsaved = str(error)
        return Snapshot(
            round=finished.number,
            token=running.identity[protocol.TOKEN],
            model=RecordDict({"arrays": finished.arrays}),
            strategy=strategy,
            unsaved=unsaved,
            trained=dict(finished.trained),
            settings=self.settings,
            history=running.folder.digest,
        )

    def _write(self, running: Running, *, has_states: bool = True) -> None:
        """Write the models of the last and the best round and, if the nodes have its states, a checkpoint."""
        if self.latest is None:
            return
        (snapshot, model), folder = self.latest, running.folder
        folder.write_model(unpack(model), snapshot.round)
        if self.best is not None:
            best, number = self.best
            folder.write_model(unpack(best), number, "model-best.safetensors")
            self.best = None
        if has_states and snapshot.round:  # after round 0 there is nothing to continue
            contexts = running.grid.contexts() or {}
            folder.write_checkpoint(snapshot, ((node, context.state) for node, context in contexts.items()))
            return_freed_memory()  # of the files' content, to make room for the replies of the next round
        self.latest = None


def checkpoint_every(run: Settings) -> int:
    return run.engine.checkpoint_every or max(1, run.rounds // 20)


def promises_of(rule: Rule) -> dict[str, float]:
    """The numbers that the rule, and the rules inside it, write to the disk before the messages of a round are sent."""
    return {name: getattr(link.memory, name) for link in rule.chain for name in link.promised}


def keep_promises(rule: Rule, folder: RunFolder, done: int) -> None:
    """Count the rounds that stopped sessions began after the checkpoint of round `done`."""
    kept = folder.promises()
    for link in rule.chain:
        for name in link.promised:
            if done and name not in kept:
                raise SettingsError(
                    f"{str(folder.path)!r} cannot be resumed: its file 'promises' does not have {name!r} of the rounds "
                    "that were begun; restore the folder from a copy, or start again with another --out"
                )
            setattr(link.memory, name, max(getattr(link.memory, name), kept.get(name, 0)))
