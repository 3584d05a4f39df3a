"""The base of every rule: what it decides in ten hooks, what it is in `traits`, what it remembers in `memory`.

In the order of a run: `check`, `begin`; in each round `instructions` and `records` go out to the clients, `problem`
judges each reply, `weights` and `combine` make the new model, `after_round` updates the memory; then `global_model`
for who evaluates, and `notes` for the summary. A rule overrides the hooks that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.screening import Reply
from fedbn_flwr.norms.roles import Role

from ._records import load, save


@dataclass(frozen=True, eq=False)
class Round:
    """A round as a rule sees it."""

    number: int
    total: int | None  # rounds of the run; None where the run was not started by our `start`
    arrays: ArrayRecord  # the global model that the round begins with
    config: Mapping[str, Any]  # what all clients are sent, without this rule's own instructions
    grid: Grid


@dataclass(frozen=True)
class Traits:
    """What a rule is, whatever happens in a run."""

    personal: bool = False  # clients end with models of their own, each to be evaluated by itself
    has_global_model: bool = True  # the server's arrays are a trained model
    replaces_norm: bool = False  # clients compute something else in place of batch norm's own arithmetic
    client_memory: str | None = None  # what training needs clients to keep from round to round, in words
    kept: frozenset[Role] = frozenset()  # the roles that stay on the client: it is never sent them
    returned: frozenset[Role] = frozenset()  # of these, the ones that it nevertheless sends back


class Rule(Strategy):
    """A strategy that is written as hooks; `FedAvg` and `Wrapper` say when they are called."""

    @dataclass
    class Memory:
        """What the rule remembers from round to round: reset by `begin`, saved and restored with a run.

        A rule with a memory declares a dataclass of this name, derived from its base's, whose fields have defaults:
        numbers, strings, arrays, and lists and dicts of these.
        """

    traits: Traits = Traits()
    memory: Memory
    num_rounds: int | None = None
    # Whose replies made the last mean (node ids, in order) and their weights; None for a strategy without this.
    shares: Mapping[int, float] | None = None

    # --- the hooks ---

    def check(self, num_rounds: int) -> None:
        """Raise SettingsError where the settings do not suit so many rounds; called before any data are loaded."""

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Prepare for a run that begins with this model; raise SettingsError where the rule does not suit it."""
        self.memory = self.Memory()
        self.num_rounds = num_rounds

    def instructions(self, round: Round) -> Mapping[str, Any]:
        """The config keys that ask clients to do their part of the rule."""
        return {}

    def records(self, round: Round) -> Mapping[str, Arrays]:
        """Arrays beside the model, by record name; clients send such records back, for the parameters they train.

        An empty record is not sent, but expected back.
        """
        return {}

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Why a reply must not be used, or None."""
        return None

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        """Each reply's weight, up to scale: the client's number of examples."""
        return [reply.number(protocol.NUM_EXAMPLES) for reply in replies]

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model."""
        raise NotImplementedError

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Update the memory from the replies that made the new model."""

    def global_model(self, round: Round) -> ArrayRecord:
        """The model for use outside the federation after a round, in which `round.arrays` came out."""
        return round.arrays

    def notes(self) -> Mapping[str, Any]:
        """What the rule decided in the run, for the run's summary."""
        return {}

    # --- the run ---

    def state(self) -> RecordDict:
        """The memory as records."""
        return save(vars(self.memory), type(self).__name__)

    def restore(self, records: RecordDict) -> None:
        """The inverse of `state`, after `begin`, in a rule made with the same arguments."""
        self.memory = self.Memory(**load(records))

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
        self.check(num_rounds)
        self.begin(num_rounds, initial_arrays)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)


def returned_roles(traits: Traits, present: Collection[Role]) -> frozenset[Role]:
    """The kept roles that clients send back: a server that holds no counters has no use for them."""
    return traits.kept & traits.returned & frozenset(present)
