"""Rules compose by wrapping: `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.aggregate import Arrays, fault
from fedbn_flwr.messages.arrays import arrays_in, unpack
from fedbn_flwr.norms.roles import Role, roles, split

from ._memory import inside, nested, restore, state


def check(strategy: Strategy, num_rounds: int) -> None:
    """Raise SettingsError where a rule cannot do what it was told in so many rounds."""
    hook = getattr(strategy, "check", None)
    if hook is not None:
        hook(num_rounds)


def prepare(strategy: Strategy, num_rounds: int, arrays: ArrayRecord) -> None:
    """Tell a rule, before the first round, how many follow and where the model begins.

    Flower's own strategies have no such hook and need none.
    """
    hook = getattr(strategy, "prepare", None)
    if hook is not None:
        hook(num_rounds, arrays)


def global_model(strategy: Strategy, server_round: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
    """The model that somebody outside the federation would use after a round.

    The aggregated one, for most rules; HeteroBN may first ask clients for statistics.
    """
    hook = getattr(strategy, "global_model", None)
    if hook is None:
        return arrays
    found = hook(server_round, arrays, grid)
    assert isinstance(found, ArrayRecord)
    return found


def personal(strategy: Strategy) -> bool:
    """Whether clients end with models of their own, each to be judged by itself."""
    return bool(getattr(strategy, "personal", False))


def kept_by_clients(strategy: Strategy) -> str | None:
    """What a rule's clients keep of their own from round to round, in words; None where training needs nothing."""
    found = getattr(strategy, "kept_by_clients", None)
    return None if found is None else str(found)


def has_global_model(strategy: Strategy) -> bool:
    """Whether what the server holds is a model that somebody trained."""
    return bool(getattr(strategy, "has_global_model", True))


def replaces_norm(strategy: Strategy) -> bool:
    """Whether a rule's clients compute something else in place of batch norm's own arithmetic."""
    return bool(getattr(strategy, "replaces_norm", False))


def with_record(messages: Iterable[Message], name: str, record: ArrayRecord) -> list[Message]:
    """Messages that carry `record` as well; those given keep their content."""
    changed = []
    for message in messages:
        changed.append(copy.copy(message))
        changed[-1].content = RecordDict({**message.content, name: record})
    return changed


def without_record(replies: Iterable[Message], name: str) -> list[Message]:
    """Replies as a rule that knows nothing of the record `name` expects them; those given keep their content."""
    changed = []
    for reply in replies:
        changed.append(copy.copy(reply))
        if reply.has_content():
            changed[-1].content = RecordDict({key: value for key, value in reply.content.items() if key != name})
    return changed


def take_record(replies: Iterable[Message], name: str, model: ArrayRecord) -> tuple[list[Message], dict[int, Arrays]]:
    """Replies without the record `name`, and these records by node; those given keep their content.

    A record holds something for each parameter of `model` that trains. Which these are the server cannot know (a
    buffer looks the same, and some may be frozen): those that most replies have. A reply whose record does not fit
    becomes an error that says so, and is out of the round before anything of it is used.
    """
    replies = list(replies)
    like = unpack(split(model, roles(model), {Role.WEIGHTS, Role.AFFINE})[0])
    read, problems = {}, {}
    for reply in (reply for reply in replies if reply.has_content()):
        node = reply.metadata.src_node_id
        if name not in arrays_in(reply.content):
            problems[node] = "is missing (is the client served by fedbn_flwr.client_app, with a BNClient?)"
            continue
        try:
            read[node] = unpack(arrays_in(reply.content)[name])
        except Exception as error:  # what a client sends may be anything
            problems[node] = f"cannot be read: {error}"
    votes = Counter(frozenset(arrays) for arrays in read.values() if arrays.keys() <= like.keys())
    keys = max(votes, key=lambda keys: (votes[keys], len(keys)), default=frozenset(like))
    problems |= {node: problem for node, arrays in read.items() if (problem := fault(arrays, like, keys)) is not None}
    kept = []
    for reply in without_record(replies, name):
        if (problem := problems.get(reply.metadata.src_node_id)) is not None and reply.has_content():
            reply = refused(reply, f"its record {name!r}: {problem}")
        kept.append(reply)
    return kept, read


def shares(strategy: Strategy) -> Mapping[int, float] | None:
    """Whose replies made a strategy's last mean, in order, and with what weights; None where it does not tell."""
    return getattr(strategy, "shares", None)


def refused(reply: Message, reason: str) -> Message:
    """The reply as an error, for a strategy that lists the errors it met; the one given is left as it is."""
    # Not Message(error, reply_to=...): the reply's own addresses are to stay.
    changed = copy.copy(reply)
    changed.__dict__["_content"] = None
    changed.__dict__["_error"] = Error(ErrorCode.MOD_FAILED_PRECONDITION, reason)
    return changed


def check_some_left(server_round: int, replies: Iterable[Message]) -> None:
    """Raise RunFailed where every reply is an error: Flower's strategies would go on with the old model."""
    replies = list(replies)
    if replies and not any(reply.has_content() for reply in replies):
        reasons = sorted(f"node {r.metadata.src_node_id}: {' '.join(str(r.error.reason).split())}" for r in replies)
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise RunFailed(f"round {server_round}: 0 of {len(replies)} clients sent a usable reply:{listed}")


def notes(strategy: Strategy) -> dict[str, Any]:
    """What a rule decided in a run (the round it froze, say), for the run's summary."""
    hook = getattr(strategy, "notes", None)
    return dict(hook()) if hook is not None else {}


class Wrapper(Strategy):
    """A strategy around another; overrides what it changes and passes on the rest."""

    inner: type[Strategy] | None = None  # of a rule that makes the other itself, and takes its arguments

    def __init__(self, strategy: Strategy) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"{type(self).__name__} wraps a strategy, for instance {type(self).__name__}(FedAvg(), ...); "
                f"found {type(strategy).__name__}"
            )
        self.strategy = strategy

    @property
    def personal(self) -> bool:
        return personal(self.strategy)

    @property
    def kept_by_clients(self) -> str | None:
        return kept_by_clients(self.strategy)

    @property
    def has_global_model(self) -> bool:
        return has_global_model(self.strategy)

    @property
    def replaces_norm(self) -> bool:
        return replaces_norm(self.strategy)

    def check(self, num_rounds: int) -> None:
        check(self.strategy, num_rounds)

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        prepare(self.strategy, num_rounds, arrays)

    def state(self) -> RecordDict:
        """What this and the strategy inside remember; a rule with a memory of its own adds it."""
        return RecordDict(nested("base", state(self.strategy)))

    def restore(self, records: RecordDict) -> None:
        restore(self.strategy, inside("base", records))

    def global_model(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        return global_model(self.strategy, server_round, arrays, grid)

    def notes(self) -> dict[str, Any]:
        return notes(self.strategy)

    @property
    def shares(self) -> Mapping[int, float] | None:
        return shares(self.strategy)

    def summary(self) -> None:
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        check(self, num_rounds)
        prepare(self, num_rounds, initial_arrays)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
