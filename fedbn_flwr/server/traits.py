"""What a strategy declares about itself, the values that its hooks receive, and what it needs of bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.norms.roles import Role, roles, selected


@dataclass(frozen=True, eq=False)
class Round:
    """The round in which a hook is called."""

    number: int
    arrays: ArrayRecord  # the global model that the round begins with
    config: ConfigRecord  # of the messages to all clients; in `config()` without the keys of wrapped rules
    grid: Grid


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that do not change during a run.

    A class adds its own to its bases', and a wrapper adds its own to the wrapped strategy's.
    """

    # What the clients' steps must be: "linear", so that the mean of their first steps is the step along the mean of
    # their gradients (SGD without clipping), "momentum" (SGD with momentum), or "sgd".
    steps: frozenset[str] = frozenset()
    client_memory: tuple[str, ...] = ()  # the state that clients must keep from round to round, in words
    # What stays on the client, which the server never sends: names as in `norms.roles.selected`. If there are any, each
    # client has a model of its own, which is evaluated on that client.
    local: frozenset[str] = frozenset()
    sent_back: bool = True  # whether clients send it to the server all the same, for the global model
    # The smallest batch whose statistics clients exchange; 0 if the strategy exchanges none.
    min_batch: int = 0
    # Records that clients send back, with an array for every parameter that the client trains (the hook `records` sends
    # them), and whether the clients count equally in their mean or by their weights.
    records: Mapping[str, Literal["equal", "weighted"]] = field(default_factory=dict)
    pooled: bool = False  # whether variances have the part between the clients (`aggregate.pooled_mean`)
    may_be_outlier: bool = True  # whether a reply may be left out because of what the other clients sent

    def __or__(self, other: Traits) -> Traits:
        return Traits(
            steps=self.steps | other.steps,
            client_memory=(*dict.fromkeys(self.client_memory + other.client_memory),),
            local=self.local | other.local,
            sent_back=self.sent_back and other.sent_back,
            min_batch=max(self.min_batch, other.min_batch),
            records={**self.records, **other.records},
            pooled=self.pooled or other.pooled,
            may_be_outlier=self.may_be_outlier and other.may_be_outlier,
        )

    @property
    def never_sent(self) -> frozenset[str]:
        """What neither the server nor the clients send, by name."""
        return frozenset() if self.sent_back else self.local

    def local_keys(self, arrays: Mapping[str, object]) -> set[str]:
        """The keys of a model's arrays that stay on the client."""
        return selected(roles(arrays), self.local) if self.local else set()

    @property
    def also_sent(self) -> list[str]:
        """What travels along with the model's arrays, in words."""
        exchanged = ["statistics of batches, in each batch norm of a round's first step"] if self.min_batch else []
        size = "as large as the parameters: up in each round, down from round 2 on"
        return [*(f"record `{name}`, {size}" for name in self.records), *exchanged]

    @property
    def has_global_model(self) -> bool:
        """Whether the server's arrays are a trained model."""
        return not self.local.issuperset(Role)


_Hook = TypeVar("_Hook", bound=Callable[..., object])


def mean_is_enough(hook: _Hook) -> _Hook:
    """Mark a hook whose result does not change if every reply is replaced by their mean."""
    hook.mean_is_enough = True  # type: ignore[attr-defined]
    return hook


# --- bounds ---


@runtime_checkable
class InfluenceBounds(Protocol):
    """Bounds on the influence of one client, such as `fedbn_flwr.extensions.bounds`."""

    def notes(self) -> Mapping[str, object]:
        """The bounds that are set, by name."""

    def of_updates(self) -> Mapping[str, object]:
        """Those that limit a client's update."""

    def outliers(self, cohort: Mapping[int, Arrays], keys: Sequence[str]) -> Mapping[int, str]:
        """Why values of these arrays are too far from the other clients', by node."""

    def weights(self, weights: Sequence[float]) -> Sequence[float]:
        """The weights of the mean, where large ones are reduced."""

    def clip(self, replies: Sequence[Arrays], sent: Arrays, what: str) -> Sequence[Arrays]:
        """The clients' models, in which no array of `sent` has changed too much; `what` names the round in the log."""


def refuse_bounds(name: str, traits: Traits, bounds: InfluenceBounds | None) -> None:
    """Raise SettingsError if the strategy `name` averages something that its bounds do not limit."""
    if bounds is None:
        return
    refused = bounds.of_updates() if traits.records else {}
    reason = f"{name} averages more than the model, which one client could set to any value"
    if not traits.has_global_model:
        refused, reason = bounds.notes(), f"{name} trains no shared model, so there is nothing for bounds to limit"
    for key, value in refused.items():
        raise SettingsError(f"bounds.{key} is {value!r}, but {reason}")
