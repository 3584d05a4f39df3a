"""Differential privacy of clients (McMahan et al. 2018, https://arxiv.org/abs/1710.06963) that knows batch norm.

The change of each client's model is clipped to a norm, the changes are added, and Gaussian noise is added to the sum.
Weights, gamma and beta have one norm; the statistics of batch norm have a norm of their own (`statistics: noise`) or
stay on the client (`keep`). Counters are neither sent nor part of a norm. What a rule inside freezes has no noise.

The wrapped strategy sees only the private mean: it receives one and the same model from every client, and the weight 1
for each. What it does with them, for instance a step of FedAdam, cannot cost more privacy.

- All clients have equal weights, since with weights by examples one client's part of the mean could be arbitrarily
  large, and the numbers of examples would be released.
- The sum is divided by the number of clients that were *asked*, which does not depend on their data. A client that does
  not answer, or whose reply is refused, counts as a change of zero.
- Epsilon and delta are exact for the releases that a client takes part in, with no amplification by sampling:
  amplification requires a secret choice of clients, but every client knows that it was asked, and the run's files
  list who was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import seeding
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, fault
from fedbn_flwr.messages.arrays import configs_in, pack, record_of, unpack
from fedbn_flwr.messages.gate import Reply, arrays_of, with_arrays, with_content
from fedbn_flwr.norms.roles import Role, roles, split_by_role
from fedbn_flwr.strategies import Round, Wrapper
from fedbn_flwr.strategies.fixbn import frozen_roles  # type: ignore[import-untyped]

from .noise import Change, Parts, applied, change_of, clipped, epsilon_of, gaussian, parts_of

# By `statistics`: the properties that the strategy inside must have (`check_composition` in `strategies/_wrapper.py`).
_MEAN = {
    "inside": "{outer} must clip or check the change of each client; use one of the two",
    "mean": "{outer} does not account for this",
}
_NEEDS = {
    "noise": _MEAN | {"statistics": "{outer} noises them; wrap it: {outer}(MeanStatistics({inside}(...)), ...)"},
    "keep": _MEAN,
}
_Norm = Annotated[float, Gt(0), Lt(math.inf), "a norm above zero"]
# Epsilon is above 5000 with less than 0.01.
_Multiple = Annotated[
    Annotated[float, Ge(0.01), Lt(math.inf)] | Annotated[float, Ge(0), Le(0)],
    "a multiple of the norm: 0.01 or more, or 0 for none",
]


@dataclass(frozen=True)
class _Asked:
    """What the messages of a round ask for."""

    nodes: tuple[int, ...]
    expected: tuple[str, ...]  # the keys that the wrapped strategy expects in a reply
    received: tuple[str, ...]  # those that clients send
    parts: Parts  # what is released
    cost: float  # 1 / noise^2, of weights and statistics together


class Private(Wrapper):
    """Differential privacy of clients, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        The strategy that receives the private mean, for instance `FedAvg()`.
    clip : float (default: 1.0)
        C, the largest L2 norm of a client's change of weights, gamma and beta.
    noise : float (default: 1.0)
        z: the noise in the sum of the changes has the standard deviation z * C. With 0 changes are only clipped, and
        nothing is private.
    statistics : "noise" | "keep" (default: "noise")
        The statistics of batch norm: "noise" clips and noises the change of mean and log variance; "keep" leaves the
        statistics on the client, as SiloBN does. `FixBN(..., freeze_round=0)` inside leaves them at the initial
        model's values.
    statistics_clip : float (default: 1.0)
        With "noise": the largest norm of a client's change of statistics. Means are in units of the standard deviation.
    statistics_noise : float | None (default: None)
        With "noise": the noise multiplier of the statistics; None means that of `noise`.
    delta : float (default: 1e-5)
        The delta for which epsilon is reported. It should be well below 1 / number of clients.
    noise_seed : int | None (default: None)
        None draws the noise from the system's random numbers; with a number the run can be repeated exactly, and is
        not private, since the noise can be subtracted again.
    constants : sequence of str (default: ())
        Buffers that no client changes, such as a table of positions, by name or pattern ("*.positions"): they get no
        noise. The server cannot distinguish them from weights.
    metrics : bool (default: False)
        Report the mean of the clients' metrics of training, for instance the loss, which is not accounted for.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        # Sums of 1 / noise^2: over all rounds begun, those whose clients are all known, and those with each partition.
        total: float = 0.0
        known: float = 0.0
        spent: dict[int, float] = field(default_factory=dict)
        releases: int = 0  # rounds begun
        evaluated: bool = False  # clients sent metrics of evaluations

    memory: Memory
    lacks = {"inside": "adds noise to the mean"}

    def __init__(
        self,
        strategy: Strategy,
        *,
        clip: _Norm = 1.0,
        noise: _Multiple = 1.0,
        statistics: Literal["noise", "keep"] = "noise",
        statistics_clip: _Norm = 1.0,
        statistics_noise: _Multiple | None = None,
        delta: Annotated[float, Gt(0), Lt(1), "a number between 0 and 1"] = 1e-5,
        noise_seed: Annotated[int | None, "an integer, or None for secret noise"] = None,
        constants: Sequence[str] = (),
        metrics: bool = False,
    ) -> None:
        super().__init__(strategy, _NEEDS[statistics])
        self._check_sent()
        statistics_noise = noise if statistics_noise is None else statistics_noise
        self.clips = {"weights": float(clip), "statistics": float(statistics_clip)}  # by part of a change
        self.noises = {"weights": float(noise), "statistics": float(statistics_noise)}
        self.parts = tuple(self.clips) if statistics == "noise" else ("weights",)  # which have noise
        self.statistics, self.delta, self.noise_seed = statistics, float(delta), noise_seed
        self.constants = (constants,) if isinstance(constants, str) else tuple(constants)
        self.metrics = metrics
        self.unsent = frozenset({Role.COUNTER, Role.STATISTICS} if statistics == "keep" else {Role.COUNTER})
        # A round that is repeated after a stop is a release of its own, unless its noise is the same.
        self.promised = ("total", "releases") if noise_seed is None else ()
        if statistics == "keep":
            memory = self.traits.client_memory or "their own statistics"
            kept = {**self.traits.kept, **dict.fromkeys(self.unsent, False)}
            self.traits = replace(self.traits, client_memory=memory, kept=kept)
        self._asked: _Asked | None = None

    def _check_sent(self) -> None:
        """Refuse a strategy whose clients would release something without noise."""
        traits, name = self.traits, self._inside
        if traits.traffic is not None or traits.min_batch:
            raise SettingsError(f"{name} also sends what Private does not account for: {traits.traffic}")
        if not traits.has_global_model:
            raise SettingsError(f"{name} sends no model, so there is nothing to make private")

    # --- the hooks ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        for name in self.constants:
            if not fnmatch.filter(arrays, name):
                raise SettingsError(
                    f"constants has {name!r}, which no array of the model has; {did_you_mean(name, arrays)}"
                )
        seen: dict[tuple[Any, ...], str] = {}
        for key, value in unpack(arrays).items():
            if value.dtype.kind != "f" or roles(arrays)[key] is not Role.WEIGHTS or not (value != value.flat[:1]).any():
                continue  # constant ones may be equal, as biases of zero are
            other = seen.setdefault((value.shape, hashlib.sha256(value.tobytes()).digest()), key)
            if other != key:
                raise SettingsError(
                    f"{other!r} and {key!r} have the same values, so they may be one parameter with two names, and "
                    "Private would add other noise to each name; expected a model without shared parameters"
                )

    def _unusable(self, reply: Reply, sent: Arrays) -> str | None:
        """A reply has the arrays that the clients were asked for; numbers of examples are not used."""
        assert self._asked is not None
        return fault(reply.arrays, sent, self._asked.received)

    def _accepted(self, round: Round, replies: Iterable[Message]) -> list[Reply]:
        """From every client the private mean, with the weight 1."""
        found, asked, before = super()._accepted(round, replies), self._asked, unpack(round.arrays)
        assert asked is not None
        self._charge(asked)
        mean = {**before, **applied(asked.parts, self._mean(round.number, asked, before, found), before)}
        arrays = {key: mean[key] for key in asked.expected}
        return [self._shown(reply, arrays) for reply in found]

    def notes(self) -> dict[str, Any]:
        """Epsilon and delta of what was released so far; `not_accounted` lists what was released besides."""
        return {**super().notes(), "privacy": self._report()}

    # --- messages ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages, self._asked = list(super().configure_train(server_round, arrays, config, grid)), None
        if not messages:
            return messages
        before, expected = unpack(arrays), _answered(messages[0], arrays)  # the messages of a round are equal
        messages = self._without_unsent(messages)
        received = _answered(messages[0], arrays)
        constant = {key for name in self.constants for key in fnmatch.filter(arrays, name)}
        released = frozenset(Role) - frozen_roles(next(iter(configs_in(messages[0].content).values())))
        parts = parts_of({key: before[key] for key in received if key not in constant}, roles(arrays), released)
        nodes = tuple(message.metadata.dst_node_id for message in messages)
        # Without noise the report has no epsilon.
        cost = math.fsum(1 / self.noises[part] ** 2 for part, some in parts.items() if some and self.noises[part])
        self._asked = _Asked(nodes, expected, received, parts, cost)
        self.memory.total += cost
        self.memory.releases += 1
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        self.memory.evaluated |= bool(messages)
        return self._without_unsent(messages)

    def _without_unsent(self, messages: Sequence[Message]) -> list[Message]:
        """The messages without these arrays, which do not ask clients for them either."""
        given = {id(each): each for each in (arrays_of(message.content) for message in messages)}  # most share one
        reduced = {at: record_of(split_by_role(each, roles(each), self.unsent)[1]) for at, each in given.items()}
        changed = [with_arrays(message, lambda record: reduced[id(record)]) for message in messages]
        for message in changed:
            for name, config in configs_in(message.content).items():
                if protocol.RETURN in config:
                    rest = protocol.roles_of(config, protocol.RETURN, frozenset(Role)) - self.unsent
                    message.content[name] = ConfigRecord({**config, protocol.RETURN: protocol.join(rest)})
        return changed

    def _shown(self, reply: Reply, arrays: Arrays) -> Reply:
        shown = reply.metrics if self.metrics else {}
        metrics = MetricRecord({**shown, protocol.NUM_EXAMPLES: 1, self.chain[-1].weighted_by_key: 1})
        content = RecordDict({"arrays": pack(arrays), "metrics": metrics, **configs_in(reply.message.content)})
        return replace(reply, arrays=arrays, metrics=metrics, message=with_content(reply.message, content))

    # --- privacy ---

    def _mean(self, server_round: int, asked: _Asked, before: Arrays, replies: Sequence[Reply]) -> Change:
        """The mean change, with noise."""
        total = change_of(asked.parts, before, before)  # zeros
        for reply in replies:
            for part, change in change_of(asked.parts, before, reply.arrays).items():
                total[part] = total[part] + clipped(change, self.clips[part])
        mean = {}
        for part, value in total.items():
            fixed = None if self.noise_seed is None else seeding.seed_for(self.noise_seed, part, server_round)
            noise = gaussian(value.size, self.noises[part] * self.clips[part], fixed)
            mean[part] = (value + noise) / len(asked.nodes)
        return mean

    def _charge(self, asked: _Asked) -> None:
        """Charge a round to the clients that were asked, if all are known; otherwise it counts for every client."""
        memory = self.memory
        known = self.chain[-1].memory.partitions
        if known.keys() >= {*asked.nodes}:
            memory.known += asked.cost
            for partition in {known[node] for node in asked.nodes}:
                memory.spent[partition] = memory.spent.get(partition, 0.0) + asked.cost

    def _report(self) -> dict[str, Any]:
        memory = self.memory
        # A client took part in the rounds with its partition, and perhaps in those whose clients are not all known:
        # rounds that were not finished are among them.
        most = min(memory.total, max(memory.spent.values(), default=0.0) + memory.total - memory.known)
        unprotected, mu = "", math.sqrt(most)
        if not all(self.noises[part] for part in self.parts):
            unprotected, mu = "there is no noise", math.inf
        elif self.noise_seed is not None:
            unprotected = f"the noise can be repeated: noise_seed is {self.noise_seed}"
        replaced = epsilon_of(2 * mu, self.delta)  # a replaced change differs by up to twice the norm
        epsilon, against = epsilon_of(mu, self.delta), "all who see the model, but not the server"
        unaccounted = ["metrics of the clients' training"] * self.metrics
        unaccounted += ["metrics of evaluations on clients"] * memory.evaluated
        words = f"epsilon {epsilon:.4g}" if math.isfinite(epsilon) else "no bound"
        words = f"privacy: {words} at delta {self.delta:g} against {against}"
        words += f"; NOT PRIVATE: {unprotected}" if unprotected else ""
        words += f"; not accounted for: {', '.join(unaccounted)}" if unaccounted else ""
        of_statistics = {"statistics_clip": self.clips["statistics"], "statistics_noise": self.noises["statistics"]}
        return {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": self.delta,
            "neighbours": "one client's changes left out",
            "epsilon_replace_one": replaced if math.isfinite(replaced) else None,
            "against": against,
            "private": not unprotected,
            "clip": self.clips["weights"],
            "noise": self.noises["weights"],
            "norm_statistics": self.statistics,
            "releases": memory.releases,
            **({"not_private_because": unprotected} if unprotected else {}),
            **(of_statistics if self.statistics == "noise" else {}),
            **({"not_accounted": unaccounted} if unaccounted else {}),
            "in_words": words,
        }

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        if round.number == self._rounds:
            log(INFO, "%s", self._report()["in_words"])


def _answered(message: Message, arrays: ArrayRecord) -> tuple[str, ...]:
    """The keys of the model that clients send in reply."""
    asked, sent = next(iter(configs_in(message.content).values())), arrays_of(message.content)
    returned, of = protocol.roles_of(asked, protocol.RETURN, frozenset(Role)), roles(arrays)
    return tuple(key for key in arrays if key in sent or of[key] in returned)
