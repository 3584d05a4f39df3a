"""The key of a metric as a value. Files and the command line have it as text: `clients_own_accuracy_amazon_std`.

The text is the four parts of the value, in their order; an empty one is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from fedbn_flwr.tasks import METRICS, SHARES, title_of

MIB = 1024**2

# Whose statistics clients use that never train (`evaluate.unseen.statistics`).
NewcomerStatistics = Literal["mean", "batch", "own"]
UNSEEN: tuple[NewcomerStatistics, ...] = get_args(NewcomerStatistics)

CLIENTS = "clients"  # on the test examples of all clients, or of all domains
OWN = "clients_own"  # on each client's own test examples

# Whose model and which examples a metric is about, in words; without one it is the global model on the test examples.
WHOSE = {
    "": "{}",
    CLIENTS: "clients' {}",
    OWN: "{} on own data",
    "own": "{} on own data",  # in clients.jsonl
    "unseen_mean": "newcomers' {}, mean batch norm",
    "unseen_batch": "newcomers' {}, own statistics",
    "unseen_own": "newcomers' {}, as the strategy has it",
    "validation": "validation {}",
    "train": "training {}",
    "best_test": "best {} on test",
    "best_round": "{} of the best round",
    f"best_round_{OWN}": "{} on own data of the best round",
    "best_validation": "best validation {}",
}
# Of an evaluated round. Metrics by domain are of the first three.
EVALUATED = ("", CLIENTS, OWN, *(f"unseen_{way}" for way in UNSEEN))
# Of the best round by validation, and of the best metric on the test examples, an optimistic choice.
BEST = tuple(whose for whose in WHOSE if whose.startswith("best_"))

_OVER_CLIENTS = {"std": "deviation over clients", "worst_tenth": "mean of the worst tenth"}
_COUNTS = ("examples", "test_examples")
_SPENT = {"bytes_down": ("MiB down", 1 / MIB, 2), "bytes_up": ("MiB up", 1 / MIB, 2), "seconds": ("seconds", 1, 1)}


@dataclass(frozen=True)
class MetricKey:
    """A key of the history, of the summary or of a client; how its values are shown."""

    name: str  # of a metric, or of a cost such as `rounds`
    whose: str = ""  # a key of WHOSE
    domain: str = ""
    statistic: str = ""  # over clients: std or worst_tenth

    @classmethod
    def parse(cls, key: str, *names: str) -> MetricKey:
        """A domain can only follow a metric that is known by its name: those of all tasks, and `names`."""
        if (found := _form(*names).fullmatch(key)) is None:
            return cls(key)
        whose, known, domain, name, statistic = found.groups("")
        return cls(known or name, whose, domain, statistic)

    @classmethod
    def of_message(cls, key: str) -> MetricKey:
        """The key of a metric in a message: `own-accuracy`, or of a domain `own@sea-accuracy`."""
        test_set, _, measure = key.partition("-")
        whose, at, domain = test_set.partition("@")
        name = (measure if at else key).replace("-", "_").replace("num_examples", "examples")
        return cls(name, whose, domain) if at else cls.parse(name)

    def __str__(self) -> str:
        return "_".join(filter(None, (self.whose, self.name, self.domain, self.statistic)))

    def of(self, whose: str) -> MetricKey:
        """The same metric of another model, or on other examples."""
        return replace(self, whose=whose)

    @property
    def of_best_round(self) -> MetricKey:
        return self.of(f"best_round_{OWN}" if self.whose == OWN else "best_round")

    @property
    def is_count(self) -> bool:
        """Whether it counts examples, for instance a client's own test examples of one domain."""
        return self.name in _COUNTS

    @property
    def is_fraction(self) -> bool:
        """Fractions are shown in percent."""
        return self.name in SHARES

    @property
    def unit(self) -> str:
        return "%" if self.is_fraction else ""

    @property
    def scale(self) -> float:
        """What a value is multiplied by before it is shown."""
        return 100 if self.is_fraction else _SPENT[self.name][1] if self.name in _SPENT else 1

    @property
    def title(self) -> str:
        name = _SPENT[self.name][0] if self.name in _SPENT else title_of(self.name)
        of_domain, over = self.domain and f"domain {self.domain}", _OVER_CLIENTS.get(self.statistic, "")
        return ", ".join(filter(None, (WHOSE[self.whose].format(name), of_domain, over)))

    @property
    def axis(self) -> str:
        """The title of an axis of values."""
        return self.title + (", %" if self.is_fraction else "")

    def digits(self, values: Collection[float]) -> int:
        """How many digits after the point to show: about five digits in all, at most four after the point."""
        if self.is_fraction or self.name in _SPENT:
            return 2 if self.is_fraction else _SPENT[self.name][2]
        if values and all(type(value) is int for value in values):
            return 0
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        size = math.floor(math.log10(largest)) if largest else 0
        return max(0, min(4, 4 - size), min(2 - size, 8))


@cache
def _form(*names: str) -> re.Pattern[str]:
    whose, known = (
        "|".join(map(re.escape, sorted(some, key=len, reverse=True)))
        for some in (filter(None, WHOSE), {*METRICS, *_COUNTS, *names})
    )
    return re.compile(rf"(?:({whose})_)?(?:({known})(?:_(.+?))??|(.+?))(?:_({'|'.join(_OVER_CLIENTS)}))?", re.DOTALL)
