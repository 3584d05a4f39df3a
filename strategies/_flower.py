"""Flower's own strategies by name, for experiments, with batch norm's statistics averaged around them.

A server optimiser must not step along statistics, since a variance could become negative. A robust rule must not
measure distances by them, and counters are no weights: `MeanStatistics` keeps both from the strategy. For robust rules
the statistics are the median of the clients' values instead of their mean, which one malicious client could set to any
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import seeding
from fedbn_flwr.messages import protocol

from .meanstatistics import MeanStatistics

T = TypeVar("T")


@dataclass(frozen=True)
class OfFlower:
    """A strategy of Flower that an experiment can name."""

    strategy: type[Strategy]
    does: str
    robust: bool = False  # it withstands some malicious clients
    needs: Callable[[int], int] | None = None  # the clients that it needs for this many malicious ones
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where Flower's do not suit the clients here


FLOWER: dict[str, OfFlower] = {
    "FedAdam": OfFlower(flower.FedAdam, "Adam on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedYogi": OfFlower(flower.FedYogi, "Yogi on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedAdagrad": OfFlower(
        flower.FedAdagrad, "Adagrad on the server, along the clients' mean change (Reddi et al. 2021)"
    ),
    "FedAvgM": OfFlower(flower.FedAvgM, "momentum on the server (Hsu et al. 2019)"),
    "QFedAvg": OfFlower(
        flower.QFedAvg,
        "clients with a higher loss count more, by the exponent q (Li et al. 2020)",
        defaults={"train_loss_key": protocol.TRAIN_LOSS},
    ),
    "FedMedian": OfFlower(flower.FedMedian, "the median of the clients' values (Yin et al. 2018)", True),
    "FedTrimmedAvg": OfFlower(
        flower.FedTrimmedAvg, "the mean without the share beta of values at each end (Yin et al. 2018)", True
    ),
    "Krum": OfFlower(
        flower.Krum,
        "the model that is nearest to its neighbours (Blanchard et al. 2017)",
        True,
        lambda bad: 2 * bad + 3,
    ),
    "MultiKrum": OfFlower(
        flower.MultiKrum,
        "the mean of the models that are nearest to their neighbours (Blanchard et al. 2017)",
        True,
        lambda bad: 2 * bad + 3,
    ),
    "Bulyan": OfFlower(
        flower.Bulyan,
        "models chosen by Krum, and the mean of the values around their median (El Mhamdi et al. 2018)",
        True,
        lambda bad: 4 * bad + 3,
    ),
}


class FlowerRule(MeanStatistics):
    """A strategy of Flower; where it chooses clients at random, `seed` and the round decide."""

    def __init__(self, strategy: Strategy, *, robust: bool, seed: int) -> None:
        super().__init__(strategy, statistics="median" if robust else "mean")
        self.seed = seed

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing("train", server_round):
            return list(super().configure_train(server_round, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing("evaluate", server_round):
            return list(super().configure_evaluate(server_round, arrays, config, grid))

    def _drawing(self, purpose: str, server_round: int) -> Any:
        return seeding.all_streams(seeding.seed_for(self.seed, f"choose-{purpose}", server_round))

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "strategy_of_flower": type(self.strategy).__name__}
