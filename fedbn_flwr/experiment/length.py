"""How many rounds a run has: more than it began with, when it is resumed, or fewer, when nothing gets better.

`evaluate.patience` follows from the history alone, so that a resumed run ends after the same round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.tasks import goodness
from fedbn_flwr.trees import Json

from .parts import Parts, learning_rate


class Peak:
    """The best round by a metric of the history, the first of equal ones; a better one differs by more than `least`."""

    def __init__(self, key: MetricKey, lines: Iterable[Json], least: float = 0.0) -> None:
        self.key, self.least = key, least
        self.best, self.round = -math.inf, 0
        for line in lines:
            self.rises(line)

    def rises(self, line: Json) -> bool:
        """Whether the round of this line is the best so far; a round that was not measured is not."""
        found = goodness(self.key.name, line.get(str(self.key), math.nan))
        if is_better := found > self.best + self.least:
            self.best, self.round = found, line["round"]
        return is_better


def patience_of(parts: Parts, lines: Iterable[Json]) -> Peak:
    """What `evaluate.patience` compares rounds by: validation examples, or without them the main metric of the run."""
    evaluate = parts.run.evaluate
    key = MetricKey(parts.task.main, "validation" if evaluate.validation else "")
    return Peak(key, lines, evaluate.min_difference)


def stopped(parts: Parts, peak: Peak, number: int) -> str:
    """Why the run ends after this round before its last one, in words; empty if it goes on."""
    patience = parts.run.evaluate.patience
    if patience is None or not peak.round or number - peak.round < patience or number >= parts.run.rounds:
        return ""
    by = f" by more than {peak.least:g}" if peak.least else ""
    value = f"{peak.key.title} {abs(peak.best):.4g}"
    return f"stopped after round {number}: none was better{by} than round {peak.round} ({value})"


def check_rounds(parts: Parts, begun: Json, done: int, where: str) -> None:
    """Raise SettingsError if the first `done` rounds would have been others in a run of as many rounds as this one.

    `begun` has the settings with which the run in the folder `where` began.
    """
    run, was = parts.run, begun.get("rounds", parts.run.rounds)
    if run.rounds < done:
        raise SettingsError(f"{where!r} cannot end after round {run.rounds}: it has {done} rounds")
    if was == run.rounds or not done:
        return
    before, found = run.model_copy(update={"rounds": was}), list[str]()
    if any(learning_rate(before, number) != learning_rate(run, number) for number in range(1, done + 1)):
        found.append(f"train.schedule ({run.train.schedule.kind})")
    arrays, states = pack(initial_arrays(parts.model)), list[list[bytes]]()
    for rounds in (was, run.rounds):
        parts.rule.begin(rounds, arrays)
        states.append([dump([vars(link.memory)]) for link in parts.rule.chain])
    for link, *two in zip(parts.rule.chain, *states, strict=True):
        if two[0] != two[1]:
            found.append(f"strategy.{getattr(link, 'argument', 'name')} of {link}")
    if found:
        raise SettingsError(
            f"{where!r} cannot be resumed with {run.rounds} rounds instead of {was}: {' and '.join(found)} "
            f"depends on the number of rounds, so that the {done} rounds there would have been others; where it is a "
            "fraction give it as a round, or start a new run with another --out"
        )
