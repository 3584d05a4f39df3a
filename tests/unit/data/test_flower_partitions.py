"""Kinds of partition that Flower has too: every client has the same examples as from flwr-datasets."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.data.partitions import partition
from fedbn_flwr.errors import DataError


def by_flower(name: str, labels: np.ndarray, clients: int, seed: int, **options: Any) -> list[list[int]]:
    from flwr_datasets import partitioner as partitioners  # it takes a second, in each process that collects tests

    partitioner = getattr(partitioners, name)(num_partitions=clients, partition_by="label", seed=seed, **options)
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels, "row": np.arange(len(labels))})
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return [sorted(partitioner.load_partition(i)["row"][:]) for i in range(clients)]


def dirichlet(draw: st.DrawFn, clients: int, images: int) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    alpha, least = draw(st.sampled_from([1e-3, 0.1, 0.5, 1.0, 30.0])), draw(st.integers(0, 6))
    options = {"alpha": alpha, "min_partition_size": least, "self_balancing": False}
    return "dirichlet", {"alpha": alpha, "min_size": least}, "DirichletPartitioner", options


def shards(draw: st.DrawFn, clients: int, images: int) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    each = draw(st.integers(1, 4))
    options = {"shard_size": -(-images // (clients * each)), "keep_incomplete_shard": True}
    return "shards", {"shards_per_client": each}, "ShardPartitioner", options


@st.composite
def cases(draw: st.DrawFn, kind: Any) -> tuple[Any, ...]:
    clients, images = draw(st.integers(1, 12)), draw(st.integers(12, 120))
    labels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, draw(st.integers(2, 10)), images)
    return labels, clients, draw(st.integers(0, 2**31 - 1)), *kind(draw, clients, images)


@pytest.mark.parametrize("kind", [dirichlet, shards], ids=lambda kind: kind.__name__)
def test_the_images_are_those_of_flower(kind: Any) -> None:
    compared = 0

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(case=cases(kind))
    def compare(case: tuple[Any, ...]) -> None:
        nonlocal compared
        labels, clients, seed, name, options, flower, flower_options = case
        try:
            expected = by_flower(flower, labels, clients, seed, **flower_options)
        except ValueError:
            expected = None
        try:
            parts = partition(torch.from_numpy(labels), 10, clients, seed, name, **options)
        except DataError:
            # Also where Flower leaves out images, or clients have none.
            assert expected is None or sum(map(len, expected)) < len(labels) or not all(expected) or name == "shards"
            return
        assert [part.tolist() for part in parts] == expected
        compared += 1

    compare()
    assert compared >= 15, "most draws were refused"
