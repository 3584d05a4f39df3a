"""Means of the metrics that clients report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict

from . import protocol
from .reply import metrics_of


def mean_of_metrics(contents: Sequence[RecordDict], key: str) -> MetricRecord:
    """The mean of each metric over the clients that report it as one number, weighted by the metric `key`.

    A client leaves out a metric that is undefined on its examples, such as the AUC if all have one class. A metric
    needs two clients, or half of them: one client cannot fill a run's files.
    """
    records = [metrics_of(content) for content in contents]
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        if name == key or not has_mean(name):
            continue
        own: list[tuple[Any, Any]] = [
            (record[name], record[key]) for record in records if not isinstance(record.get(name, []), list)
        ]
        total = sum(weight for _, weight in own)
        if total and len(own) >= min(2, len(records) / 2):
            means[name] = sum(value * (weight / total) for value, weight in own)
    return MetricRecord(means)


def has_mean(name: str) -> bool:
    """Whether a metric is neither an identifier nor a number of examples, such as that of another test set."""
    return name not in (protocol.PARTITION, protocol.BATCH_EXAMPLES) and not name.endswith(protocol.NUM_EXAMPLES)


def common_metrics(replies: Sequence[protocol.Config]) -> list[MetricRecord]:
    """The metrics of each reply that are one number in all replies: strategies of Flower expect these only."""
    numbers = [{key for key, value in metrics.items() if not isinstance(value, list)} for metrics in replies]
    common = set.intersection(*numbers) if numbers else set()
    return [MetricRecord({key: value for key, value in metrics.items() if key in common}) for metrics in replies]
