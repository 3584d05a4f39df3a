"""A round of a run as a value, and the base class of the listeners that it passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedbn_flwr.data import Moments
from fedbn_flwr.data.dataset import Schema, agreed_names
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.server.poll import Poll, Roster
from fedbn_flwr.trees import Tree

from ..parts import Parts
from ..settings import Settings

ByClient = Mapping[int, Mapping[str, float]]  # metrics by the number of the client


@dataclass(frozen=True)
class Federation:
    """The nodes of a run, as they answered before its first round."""

    nodes: Mapping[int, int] = field(default_factory=dict)  # by client
    state_rounds: Mapping[int, int] = field(default_factory=dict)  # by client, of the state in its node's state folder
    own_data: bool = False  # at least one node has data of its own, or a domain
    sites: int = 0  # the nodes with data of their own
    columns: Mapping[int, Schema] = field(default_factory=dict)  # by client, of its own data
    unseen: Mapping[int, int] = field(default_factory=dict)  # the nodes of the clients that never train, by client

    @property
    def schema(self) -> Schema:
        """On which the sites with data of their own agree."""
        return self.columns[min(self.columns)] if self.columns else {}


@dataclass(frozen=True)
class Running:
    """What all rounds of a run have in common."""

    prepared: Parts
    grid: MeteredGrid
    folder: RunFolder
    identity: Config  # the config keys that name the run to its clients
    federation: Federation = Federation()  # empty until the nodes have answered
    agreed: Moments | None = None  # the moments of all sites' inputs and targets, once the sites have agreed on them

    @property
    def run(self) -> Settings:
        return self.prepared.run

    @property
    def config(self) -> Config:
        """The config that the messages of all rounds share: the run, and on what the sites agreed before the first."""
        moments, names = map(list, self.agreed or ()), agreed_names(self.federation.schema)
        return {
            **self.identity,
            **dict(zip((protocol.MEANS, protocol.DEVIATIONS), moments, strict=False)),
            **{key: each for key, each in names.items() if each},
        }

    def ask(
        self,
        what: str,
        kind: str,
        problem: Callable[[Reply], str | None],
        arrays: ArrayRecord | None = None,
        config: Config = MappingProxyType({}),
        *,
        records: Collection[str] | None = None,
        nodes: Mapping[int, int] | None = None,
    ) -> dict[int, Reply]:
        """The clients' answers to a question outside of training, without those that have a problem.

        All clients must answer: otherwise RunFailed names the others, as the log does. Of `nodes`, some of them by
        client, none must. `what` names the question in messages, and `records` is passed to `read_reply`.
        """
        asked = self.federation.nodes if nodes is None else nodes
        roster = Roster({node: client for client, node in self.federation.nodes.items()})
        poll = Poll(roster, [*asked.values()], len(asked) if nodes is None else 0)
        content = RecordDict({} if arrays is None else {self.prepared.rule.base.arrayrecord_key: arrays})
        content["config"] = ConfigRecord({**self.config, **config})
        questions = [Message(content, node, kind) for node in asked.values()]
        poll.ask(self.grid, what, questions, self.run.engine.timeout, problem, records=records)
        return poll.answers()


@dataclass(frozen=True)
class FinishedRound:
    """A finished round, or 0 before the first one. A listener returns it with what it adds."""

    number: int
    arrays: ArrayRecord  # what training continues from
    model: ArrayRecord  # for use outside the federation
    is_evaluated: bool = False
    is_last: bool = False
    trained: Mapping[int, int] = field(default_factory=dict)  # client -> the last round in which it trained
    replies: Mapping[int, Reply] = field(default_factory=dict)  # that are used, by client, where a listener reads them
    line: Tree = field(default_factory=dict)  # in the history
    clients: ByClient = field(default_factory=dict)
    is_best: bool = False  # the best one so far, by validation
    stopped: str = ""  # why no round follows although there were more, in words
    stop: BaseException | None = None  # ends the run after this round: the user asked to stop, or its time is over
    checkpoint_round: int = 0  # the round of the last checkpoint

    def with_metrics(self, line: Tree, clients: ByClient = MappingProxyType({}), **others: Any) -> FinishedRound:
        """With more metrics in the history, more values of clients, and these other fields."""
        both = {client: {**self.clients.get(client, {}), **values} for client, values in clients.items()}
        return replace(self, line={**self.line, **line}, clients={**self.clients, **both}, **others)


class Listener:
    """Hooks that are called during a run; by default they do nothing."""

    after: tuple[type[Listener], ...] = ()  # the listeners whose results it reads

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        """Before the first round, or the first one after resuming."""

    def on_messages(self, running: Running) -> None:
        """Before the messages of a round are sent."""

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        """After a round, in the order of the listeners."""
        return finished

    def on_end(self, running: Running, error: BaseException | None) -> None:
        """After the last round, or after an error that ended the run before it."""
