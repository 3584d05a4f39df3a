"""Whatever a parser of ours reads, it accepts or refuses it with an error of its own under 2 kB."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.commands import cli
from fedbn_flwr.commands.common import parse_pairs
from fedbn_flwr.errors import FedbnError, SettingsError, StorageError, UserError
from fedbn_flwr.experiment.file.layers import from_run_config, parse_overrides, split_changes
from fedbn_flwr.experiment.node import checked_client_number, min_batch_of
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.results.folder.checkpoint import CheckpointFile, Snapshot
from fedbn_flwr.storage import read_store, write_store
from tests.support.fuzz import VALUES, cases, changed, check_refusal, damaged, frames, with_header


def attempt(function: Callable[[], Any], *errors: type[Exception]) -> Any:
    """The result, or None if it is refused with one of these errors."""
    try:
        return function()
    except errors as error:
        if isinstance(error, FedbnError):
            check_refusal(error)
        return None


# --- text of a command line ---------------------------------------------------

ATOMS = [
    "rounds", "train.lr", "strategy", "data.partition", "name", "=", "==", " ", ".", "{", "}", "[", "]", "'", '"', ",",
    ":", "#", "&a", "*a", "!!int x", "1", "0.1", "1e400", "nan", "true", "~", "é", "\0", "\ud800", "\n", "\t", "\\",
    "x" * 300, "1" * 5000, "][", "a=1", "set='rounds=1'", "resume=true", "out='x'", "x.toml", "/", "..", "-", "--",
    "[" * 200, "a." * 60,
]  # fmt: skip
words = st.lists(st.sampled_from(ATOMS) | st.text(max_size=4), max_size=8).map("".join)


@settings(max_examples=cases(300))
@given(st.lists(words, max_size=4))
def test_any_overrides(given: list[str]) -> None:
    attempt(lambda: parse_overrides(given), SettingsError)


@settings(max_examples=cases(250))
@given(words)
def test_any_changes_of_a_run_config(text: str) -> None:
    found = attempt(lambda: split_changes(text), SettingsError)
    assert found is None or all(isinstance(word, str) for word in found)
    attempt(lambda: from_run_config({"experiment": "quick", "set": text}), UserError)


@settings(max_examples=cases(150))
@given(words, st.sampled_from(["--run-config", "--node-config", "--run-config=", "-c"]))
def test_any_pairs_for_flower(text: str, option: str) -> None:
    attempt(lambda: parse_pairs([text], option), SettingsError)


NODE_KEYS = st.sampled_from(["partition-id", "num-partitions", "state", "data-pth", "x"])
NODE_VALUES = st.sampled_from([value for value in VALUES if isinstance(value, str | int | float)])


@settings(max_examples=cases(100))
@given(st.dictionaries(NODE_KEYS, NODE_VALUES))
def test_any_node_config(node: dict[str, Any]) -> None:
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    attempt(lambda: min_batch_of(node), SettingsError)
    assert attempt(lambda: checked_client_number(context, 3), SettingsError) in (None, 0, 1, 2)


# --- stores, checkpoints ----------------------------------------------

RECORDS = RecordDict({
    "arrays": pack({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}),
    "config": ConfigRecord({"a": 1, "b": [1.5], "c": b"xy", "d": True}),
    "metrics": MetricRecord({"m": 0.5}),
})  # fmt: skip
SNAPSHOT = Snapshot(3, "ab" * 16, RECORDS, dump([RECORDS]), trained={0: 3})


@settings(max_examples=cases(150))
@given(frames([dump(RECORDS)]))
def test_any_records(data: bytes) -> None:
    attempt(lambda: parse(data, RecordDict), ValueError)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFile:
    found = CheckpointFile(tmp_path_factory.mktemp("run") / "checkpoint")
    found.write(SNAPSHOT, [(1, RECORDS)])
    return found


@settings(max_examples=cases(150))
@given(seed=st.integers(0, 2**32))
def test_any_store(checkpoint: CheckpointFile, seed: int) -> None:
    data, file = checkpoint.path.read_bytes(), checkpoint.path.with_name("damaged")
    file.write_bytes(damaged(data, seed))
    attempt(lambda: read_store(file), StorageError)
    found = attempt(lambda: (CheckpointFile(file).read(), list(CheckpointFile(file).clients())), SettingsError)
    if found is not None:  # what changed is a field of the zip file without a meaning here
        assert read_store(file) == read_store(checkpoint.path)


@settings(max_examples=cases(100))
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["state", "model", "strategy", "clients/1"]))
def test_any_content_of_a_checkpoint(checkpoint: CheckpointFile, seed: int, name: str) -> None:
    """Its checksums are right."""
    entries = read_store(checkpoint.path)
    if name == "state":
        entries[name] = json.dumps(changed(json.loads(entries[name]), seed)).encode()
    else:
        entries[name] = (with_header if seed % 2 else damaged)(entries[name], seed)
    file = CheckpointFile(checkpoint.path.with_name("other"))
    write_store(file.path, entries.items())
    attempt(lambda: (file.read(), list(file.clients())), SettingsError)


@pytest.mark.parametrize("name", ["out", "\0", "~no-such-user/x.yaml", "x" * 5000 + ".yaml", "/dev/null.yaml"])
def test_any_path_of_an_experiment(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error.encode()) < 2100
