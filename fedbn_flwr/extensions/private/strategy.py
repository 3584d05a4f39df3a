"""Differential privacy of clients (McMahan et al. 2018, https://arxiv.org/abs/1710.06963) for models with batch norm.

The change of each client's model is clipped to a norm, the changes are added, and Gaussian noise is added to the sum.
Weights, gamma and beta have one norm, and batch norm's statistics have another. Counters do not change. Arrays that the
wrapped strategy freezes, or does not send, get no noise.

The wrapped strategy sees only the private mean: it receives the same model with the weight 1 from every client. So
whatever it does with them, for instance a step of FedAdam, costs no more privacy.

- All clients have equal weights. With weights by examples, one client's part of the mean could be arbitrarily large,
  and the numbers of examples would be released.
- The sum is divided by the number of clients that were *asked*, which does not depend on their data. A client without
  a valid reply counts as a change of zero.
- Epsilon and delta are exact for the releases that a client takes part in, without amplification by sampling. That
  would require a secret choice of clients, but every client knows that it was asked, and the run's files list all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import seeding
from fedbn_flwr.errors import LOG, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import config_of, configs_in, pack, unpack
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.reply import Reply, arrays_of, with_content
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import Round, Traits, Wrapper, frozen_roles
from fedbn_flwr.trees import Tree

from .noise import Change, KeysByPart, applied, change_of, clipped, epsilon_of, gaussian, parts_of

# The guarantees that the strategy inside must give (`server/wrapper.py`).
_NEEDS = {
    "inside": "{outer} must clip or check the change of each client; use one of the two",
    "mean": "{outer} does not account for this",
    "statistics": "{outer} noises them; wrap it: {outer}(MeanStatistics({inside}(...)), ...)",
}
_Norm = Annotated[float, Gt(0), Lt(math.inf), "a norm above zero"]
# Epsilon is above 5000 with less than 0.01.
_Multiple = Annotated[
    Annotated[float, Ge(0.01), Lt(math.inf)] | Annotated[float, Ge(0), Le(0)],
    "a multiple of the norm: 0.01 or more, or 0 for none",
]


@dataclass(frozen=True)
class _Release:
    """What the clients of a round release."""

    nodes: tuple[int, ...]  # that were asked
    keys: tuple[str, ...]  # of the arrays that clients send
    parts: KeysByPart  # what is released
    cost: float  # 1 / noise^2, of weights and statistics together


class Private(Wrapper):
    """Differential privacy of clients, around any strategy that sends only a model and takes its mean.

    Parameters
    ----------
    strategy : Strategy
        The strategy that receives the private mean, for instance `FedAvg()`.
    clip : float (default: 1.0)
        C, the largest L2 norm of a client's change of weights, gamma and beta.
    noise : float (default: 1.0)
        z: the noise in the sum of the changes has the standard deviation z * C. With 0, changes are only clipped, and
        nothing is private.
    statistics_clip : float (default: 1.0)
        The largest norm of a client's change of statistics; means count in units of the standard deviation, and
        variances as logarithms.
    statistics_noise : float | None (default: None)
        The noise multiplier of the statistics; None means the value of `noise`. Statistics need no noise if they stay
        on the clients (`SiloBN(global_norm="initial")`) or keep their initial values (`FixBN(..., freeze_round=0)`).
    delta : float (default: 1e-5)
        The delta for which epsilon is reported. It should be well below 1 / number of clients.
    noise_seed : int | None (default: None)
        None draws the noise from the system's random numbers; with a number the run can be repeated exactly, but it is
        not private, since anyone can subtract the noise again.
    metrics : bool (default: False)
        Report the mean of the clients' training metrics, such as the loss, although epsilon does not cover them.
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
    traits = Traits(may_be_outlier=False)  # one client must not decide whether another one's change counts
    breaks = {"inside": "adds noise to the mean"}

    def __init__(
        self,
        strategy: Strategy,
        *,
        clip: _Norm = 1.0,
        noise: _Multiple = 1.0,
        statistics_clip: _Norm = 1.0,
        statistics_noise: _Multiple | None = None,
        delta: Annotated[float, Gt(0), Lt(1), "a number between 0 and 1"] = 1e-5,
        noise_seed: Annotated[int | None, "an integer, or None for secret noise"] = None,
        metrics: bool = False,
    ) -> None:
        super().__init__(strategy, _NEEDS)
        # What clients would release without noise.
        if besides := self.traits.also_sent:
            raise SettingsError(f"{self.chain[1]} sends something that Private does not account for: {besides[0]}")
        if self.traits.pooled:  # the sums of clipped and noised changes have no such variance
            raise SettingsError(
                "statistics is 'pooled', but Private adds noise to the mean of the clients' variances, and the part "
                "between the clients cannot be added to that; use statistics='mean'"
            )
        if self.traits.sent_back and (layers := sorted(self.traits.local - {*Role})):
            raise SettingsError(
                f"kept is {layers}, and clients send it for the global model. There it is far from their own, so that "
                "little would be left of the shared layers when Private clips the whole change; use "
                "global_kept='initial'"
            )
        if not self.traits.has_global_model:
            raise SettingsError(f"{self.chain[1]} sends no model, so there is nothing to make private")
        statistics_noise = noise if statistics_noise is None else statistics_noise
        self.clips = {"weights": float(clip), "statistics": float(statistics_clip)}  # by part of a change
        self.noises = {"weights": float(noise), "statistics": float(statistics_noise)}
        self.delta, self.noise_seed, self.metrics = float(delta), noise_seed, metrics
        # A round that is repeated after a stop counts as another release, unless its noise is the same.
        self.promised = ("total", "releases") if noise_seed is None else ()
        self._release: _Release | None = None

    # --- the hooks ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        self._num_rounds = num_rounds

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Strategies of Flower only compare the replies' arrays with each other."""
        return None if self._release is None else arrays_problem(reply.arrays, unpack(round.arrays), self._release.keys)

    def outgoing(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        self._release = None
        if not messages:
            return messages
        content, arrays = messages[0].content, round.arrays  # the messages of a round are equal
        asked, role_of = config_of(content), roles(arrays)
        sent, returned = arrays_of(content), protocol.kept_keys(asked, role_of) if asked.get(protocol.RETURN) else set()
        keys = tuple(key for key in arrays if key in sent or key in returned)  # that clients send in reply
        parts = parts_of({key: unpack(arrays)[key] for key in keys}, role_of, frozenset(Role) - frozen_roles(asked))
        nodes = tuple(message.metadata.dst_node_id for message in messages)
        # Without noise the report has no epsilon.
        cost = math.fsum(1 / self.noises[part] ** 2 for part, some in parts.items() if some and self.noises[part])
        self._release = _Release(nodes, keys, parts, cost)
        self.memory.total += cost
        self.memory.releases += 1
        return messages

    def accepted(self, round: Round, replies: Sequence[Reply]) -> list[Reply]:
        """From every client the private mean, with the weight 1."""
        release, before = self._release, unpack(round.arrays)
        assert release is not None
        self._charge(release)
        mean = {**before, **applied(release.parts, self._mean(round.number, release, before, replies), before)}
        arrays = {key: mean[key] for key in release.keys}
        return [self._shown(reply, arrays) for reply in replies]

    def notes(self) -> Tree:
        """Epsilon and delta of all releases so far; `not_accounted` lists further values that were released."""
        return {**super().notes(), "privacy": self._report()}

    # --- messages ---

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        self.memory.evaluated |= bool(messages)
        return messages

    def _shown(self, reply: Reply, arrays: Arrays) -> Reply:
        shown = reply.metrics if self.metrics else {}
        metrics = MetricRecord({**shown, protocol.NUM_EXAMPLES: 1, self.base.weighted_by_key: 1})
        content = RecordDict({**configs_in(reply.message.content), "arrays": pack(arrays), "metrics": metrics})
        return replace(reply, arrays=arrays, metrics=metrics, message=with_content(reply.message, content))

    # --- privacy ---

    def _mean(self, server_round: int, release: _Release, before: Arrays, replies: Sequence[Reply]) -> Change:
        """The mean change, with noise."""
        total = change_of(release.parts, before, before)  # zeros
        for reply in replies:
            for part, change in change_of(release.parts, before, reply.arrays).items():
                total[part] = total[part] + clipped(change, self.clips[part])
        mean = {}
        for part, value in total.items():
            fixed = None if self.noise_seed is None else seeding.seed_for(self.noise_seed, part, server_round)
            noise = gaussian(value.size, self.noises[part] * self.clips[part], fixed)
            mean[part] = (value + noise) / len(release.nodes)
        return mean

    def _charge(self, release: _Release) -> None:
        """Charge a round to the clients that were asked, if all are known; otherwise it counts for every client."""
        memory = self.memory
        known = self.base.roster.numbers
        if known.keys() >= {*release.nodes}:
            memory.known += release.cost
            for partition in {known[node] for node in release.nodes}:
                memory.spent[partition] = memory.spent.get(partition, 0.0) + release.cost

    def _report(self) -> Tree:
        memory = self.memory
        # A client took part in the rounds with its partition, and perhaps in rounds whose clients are not all known,
        # such as unfinished ones.
        most = min(memory.total, max(memory.spent.values(), default=0.0) + memory.total - memory.known)
        unprotected, mu = "", math.sqrt(most)
        if not all(self.noises.values()):
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
        return {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": self.delta,
            "neighbours": "one client's changes left out",
            "epsilon_replace_one": replaced if math.isfinite(replaced) else None,
            "against": against,
            "private": not unprotected,
            "clip": self.clips["weights"],
            "noise": self.noises["weights"],
            "statistics_clip": self.clips["statistics"],
            "statistics_noise": self.noises["statistics"],
            "releases": memory.releases,
            **({"not_private_because": unprotected} if unprotected else {}),
            **({"not_accounted": unaccounted} if unaccounted else {}),
            "in_words": words,
        }

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        if round.number == self._num_rounds:
            LOG.info("%s", self._report()["in_words"])
