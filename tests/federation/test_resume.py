"""Nothing is lost when a run is stopped: files, strategies' memory, and whole runs against uninterrupted ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from hypothesis import given
from hypothesis import strategies as draw

from fedbn_flwr import LocalGrid, cli, client_app
from fedbn_flwr.client.state_folder import StateFolder, remembered, return_to
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run import serve
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.results import checkpoint
from fedbn_flwr.results.checkpoint import CheckpointFolder, Snapshot
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.strategies import (
    CannotSave,
    FedBS,
    FixBN,
    GlobalMomentum,
    MeanStatistics,
    Rule,
    Wrapper,
    as_rule,
)
from tests.support.command import ROOT, environment
from tests.support.sessions import BASE, CASES, OPTIMISERS, PLAIN, Elsewhere, Stopping, outcome, overrides, session

# --- records as bytes ----------------------------------------------------------

ODD = RecordDict(
    {
        "arrays": ArrayRecord(
            {
                key: Array(value)
                for key, value in {
                    "scalar": np.array(0.1),
                    "empty": np.zeros((0, 3), np.float16),
                    "nan": np.array([np.nan, -0.0, np.inf, 5e-324]),
                    "yes": np.array([True, False]),
                    "big": np.array(2**64 - 1, np.uint64),
                    "i8": np.arange(-3, 3, dtype=np.int8).reshape(2, 3),
                    "a/b": np.ones((1, 1), np.float32),
                }.items()
            }
        ),
        "a": ArrayRecord({"b/c": Array(np.ones(2)), "": Array(np.zeros(1))}),
        "none": ArrayRecord(),
        "metrics": MetricRecord({"f": 0.1 + 0.2, "i": 3, "one": 1.0, "list": [1.5, 2.5], "nan": float("inf")}),
        "config": ConfigRecord({"t": True, "s": "ä\n", "b": b"\x00\xff", "l": [b"\x01"], "e": [], "i": 2**53 + 1}),
    }
)


def content(records: RecordDict) -> list[Any]:
    """All there is in records, types and bits included."""
    return [
        (
            name,
            type(record).__name__,
            [
                (key, value.dtype, tuple(value.shape), value.numpy().tobytes())
                if isinstance(value, Array)
                else (key, repr(value))
                for key, value in record.items()
            ],
        )
        for name, record in records.items()
    ]


def test_records_come_back_exactly() -> None:
    assert content(parse(dump(ODD))) == content(ODD)
    assert content(parse(dump(RecordDict()))) == []


@given(draw.dictionaries(draw.text(), draw.floats() | draw.integers(-(2**62), 2**62) | draw.booleans() | draw.binary()))
def test_any_numbers_come_back_exactly(values: dict[str, Any]) -> None:
    records = RecordDict({"config": ConfigRecord(values)})
    assert content(parse(dump(records))) == content(records)


def test_every_changed_byte_is_noticed() -> None:
    data = dump(RecordDict({"a": pack({"w": np.arange(5.0)}), "c": ConfigRecord({"x": 0.25})}))
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with contextlib.suppress(ValueError):  # or it is a space that nobody reads
            assert content(parse(bytes(changed))) == content(parse(data))
        with pytest.raises(ValueError, match="damaged"):
            parse(data[:place])


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(ValueError, match="layer, w is of dtype complex64"):
        dump(RecordDict({"layer": ArrayRecord({"w": Array(np.zeros(1, np.complex64))})}))


# --- checkpoints on disk ---------------------------------------------------------


def snapshot(server_round: int) -> Snapshot:
    value = np.full(3, server_round, np.float32)
    return Snapshot(
        server_round, "ab" * 16, RecordDict({"arrays": pack({"w": value})}), RecordDict({"m": pack({"v": value})}),
        trained={0: server_round},
    )  # fmt: skip


def memories(server_round: int) -> Iterator[tuple[int, RecordDict]]:
    for node in range(3):
        yield node, RecordDict({"own": pack({"n": np.array(10 * server_round + node)})})


def told(found: CheckpointFolder) -> tuple[Any, ...]:
    read = found.read()
    assert read.strategy is not None
    clients = [(node, content(records)) for node, records in found.clients() or ()]
    return read.round, read.token, dict(read.trained), content(read.model), content(read.strategy), clients


def expected(server_round: int) -> tuple[Any, ...]:
    of = snapshot(server_round)
    assert of.strategy is not None
    clients = [(node, content(records)) for node, records in memories(server_round)]
    return of.round, of.token, dict(of.trained), content(of.model), content(of.strategy), clients


def test_a_checkpoint_comes_back_and_replaces_the_one_before(tmp_path: Path) -> None:
    found = CheckpointFolder(tmp_path / "checkpoint")
    assert found.round() == 0
    for server_round in (2, 4):
        found.write(snapshot(server_round), memories(server_round))
        assert found.round() == server_round
        assert told(found) == expected(server_round)
    assert sorted(path.name for path in found.path.iterdir()) == ["latest.json", "round-4"]
    found.write(dataclasses.replace(snapshot(5), strategy=None, unsaved="why"), None)
    assert (found.read().strategy, found.read().unsaved, found.clients()) == (None, "why", None)


def _write_and_die(path: Path, at: int) -> None:
    """Ends this process, as kill -9 would, before the `at`th call that changes something on the disk."""
    calls = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    def torn(stream: Any) -> None:
        """A file that is half on the disk."""
        nonlocal calls
        calls += 1
        if calls == at:
            stream.flush()
            stream.truncate(stream.tell() // 2)
            os._exit(9)
        sync(stream)

    sync = checkpoint._sync
    checkpoint._sync = torn
    for name in ("fsync", "replace", "mkdir", "unlink", "open", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    CheckpointFolder(path).write(snapshot(4), memories(4))
    os._exit(0)


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    fork, at, status, rounds = multiprocessing.get_context("fork"), 0, 9, []
    while status == 9:
        at += 1
        found = CheckpointFolder(tmp_path / str(at))
        found.write(snapshot(2), memories(2))
        process = fork.Process(target=_write_and_die, args=(found.path, at))
        process.start()
        process.join(30)
        status = process.exitcode or 0
        rounds.append(found.round())
        assert told(found) == expected(found.round()), f"killed before call {at}"
        found.write(snapshot(6), memories(6))  # whatever lies about
        assert told(found) == expected(6)
        assert sorted(path.name for path in found.path.iterdir()) == ["latest.json", "round-6"]
    assert status == 0
    assert rounds == sorted(rounds)
    assert rounds.count(2) > 15
    assert rounds.count(4) > 3


@pytest.mark.parametrize(
    "name", ["latest.json", "state.json", "model.safetensors", "strategy.safetensors", "clients.bin", "clients.jsonl"]
)
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, how: str) -> None:
    found = CheckpointFolder(tmp_path / "checkpoint")
    found.write(snapshot(4), memories(4))
    (file,) = found.path.rglob(name)
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if how == "cut" else data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
    if (name, how) == ("latest.json", "gone"):
        assert found.round() == 0
        return
    with pytest.raises(SettingsError, match=f"checkpoint' cannot be read: {name} is damaged"):
        told(found)


# --- what Flower's own strategies remember -----------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_attributes_of_flower_s_strategies_come_back(name: str) -> None:
    before, after = PLAIN[name](), PLAIN[name]()
    inner = getattr(before, "strategy", before)
    if hasattr(inner, "m_t"):
        inner.m_t = {"w": np.arange(3.0), "scalar": np.array(0.1)}
        inner.v_t = {"w": np.ones(3, np.float64)}
    if hasattr(before, "momentum_vector"):
        before.momentum_vector = [np.array(1.5), np.ones(2, np.float32)]
        before.current_arrays = pack({"w": np.ones(2)})
    if hasattr(before, "registered_nodes"):
        before.registered_nodes = {2**63 + 5: 0, 3: 1}
    if hasattr(before, "clipping_norm"):
        before.clipping_norm = np.float64(0.1) * 3
    as_rule(after).restore(parse(dump(as_rule(before).state())))
    assert content(as_rule(after).state()) == content(as_rule(before).state())
    again = getattr(after, "strategy", after)
    for key, value in vars(inner).items():
        assert type(getattr(again, key)) is type(value), key
    if hasattr(before, "clipping_norm"):
        assert (type(after.clipping_norm), after.clipping_norm) == (np.float64, before.clipping_norm)  # type: ignore[attr-defined]


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    strategy = flower.FedAvg()
    strategy.generator = np.random.default_rng(0)  # type: ignore[attr-defined]
    with pytest.raises(CannotSave, match=r"FedAvg\.generator is a Generator, which cannot be saved; keep numbers"):
        FixBN(MeanStatistics(strategy), freeze_round=1).state()


def test_the_rule_in_the_documentation_comes_back() -> None:
    blocks = (ROOT / "docs" / "plugin.md").read_text().split("```python\n")
    (code,) = [block.split("```")[0] for block in blocks if "class Patient" in block]
    scope: dict[str, Any] = {}
    exec(code, scope)
    before, after = GlobalMomentum(scope["Patient"]()), GlobalMomentum(scope["Patient"]())
    before.strategy.memory.waited = 3  # type: ignore[attr-defined]
    as_rule(after).restore(parse(dump(as_rule(before).state())))
    assert after.strategy.memory.waited == 3  # type: ignore[attr-defined]


def test_a_rule_within_rules_keeps_its_own() -> None:
    make = lambda: FixBN(GlobalMomentum(FixBN(FedBS(patience=3), freeze_round="auto")), freeze_round="auto")  # noqa: E731
    before, after = make(), make()
    for each in (before, after):
        each.begin(9, pack({"n.running_mean": np.zeros(1), "n.running_var": np.ones(1)}))
    inner: Any = before.strategy
    inner.memory.momentum = unpack(pack({"w": np.array([0.25])}))
    inner.strategy.memory.last_free, before.memory.last_free = 3, 5
    inner.strategy.strategy.memory.alike = 2
    inner.strategy.strategy.memory.partitions = {7: 0}
    as_rule(after).restore(parse(dump(as_rule(before).state())))
    assert content(as_rule(after).state()) == content(as_rule(before).state())
    other: Any = after.strategy
    assert (after.memory.last_free, other.strategy.memory.last_free) == (5, 3)
    assert other.strategy.strategy.memory == inner.strategy.strategy.memory
    assert other.memory.momentum["w"] == 0.25


# --- whole runs ----------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def run(case: str) -> Path:
        if case not in found:
            found[case] = tmp_path_factory.mktemp("straight") / "run"
            session(case, found[case])
        return found[case]

    return run


def memory_of(out: Path) -> tuple[Any, ...]:
    """The last checkpoint: what strategy and clients remember."""
    found = CheckpointFolder(out / "checkpoint")
    read = found.read()
    assert read.strategy is not None
    clients = []
    for node, records in found.clients() or ():
        records["fedbn.run"] = ConfigRecord()  # has the run's token
        clients.append((node, content(records)))
    return read.round, dict(read.trained), content(read.model), content(read.strategy), clients


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    case: str, workers: int, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    session(case, tmp_path / "run", 3 if workers else 2, workers=workers)
    assert RunFolder(tmp_path / "run").summary()["status"] == "interrupted"
    session(case, tmp_path / "run", workers=workers)
    assert outcome(tmp_path / "run") == outcome(straight(case))
    assert memory_of(tmp_path / "run") == memory_of(straight(case))


def test_the_table_reaches_what_it_is_for(straight: Callable[[str], Path]) -> None:
    """Rules that change in the middle of a run do so in these, after a first stop and before the end."""
    assert RunFolder(straight("FixBN auto")).summary()["freeze_round"] == 3
    assert RunFolder(straight("FedBS")).summary()["switch_round"] == 4
    for case in ("FedAdam", "FedAvgM", "Scaffold", "GlobalMomentum"):
        read = CheckpointFolder(straight(case) / "checkpoint").read()
        assert read.strategy is not None
        arrays = [array for record in read.strategy.array_records.values() for array in record.values()]
        assert any(np.any(array.numpy()) for array in arrays)


SERVERS = ["FixBN auto", "FedAdam", "GlobalMomentum"]  # whose memory is the server's


@pytest.mark.parametrize("case", ["FedBN", "Scaffold", "keep_momentum", "brn", *SERVERS])
def test_the_test_of_the_tests_a_forgotten_memory_changes_the_numbers(
    case: str, straight: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(case, tmp_path / "run", 3)
    if case in SERVERS:
        for kind in (Rule, Wrapper, type(as_rule(flower.FedAvg()))):
            monkeypatch.setattr(kind, "restore", lambda rule, records: None)
    else:
        monkeypatch.setattr(LocalGrid, "write_state", lambda self, node, records: None)
    session(case, tmp_path / "run")
    assert outcome(tmp_path / "run") != outcome(straight(case))


def test_the_second_ctrl_c_in_a_round_goes_back_to_the_last_checkpoint(
    straight: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients have trained on by then: what they remember is of no whole round, and nothing of it is kept."""

    def make(context: Context, config: Mapping[str, Any]) -> Any:
        if (config.get("server-round"), context.node_config["partition-id"]) == (3, 2):
            raise KeyboardInterrupt
        return make_client(context, config)

    monkeypatch.setitem(CASES, "FedBN", CASES["FedBN"] + "\nengine: {checkpoint_every: 2}")
    run_config = {"experiment": BASE, "set": " ".join(f"'{word}'" for word in overrides("FedBN"))}
    monkeypatch.setattr(Stopping, "end_round", lambda *_: None)
    session("FedBN", tmp_path / "run", grid=LocalGrid(client_app(make), 3, run_config=run_config), interrupted=True)
    run = RunFolder(tmp_path / "run")
    assert (run.summary()["status"], run.checkpoint.round(), len(run.history())) == ("interrupted", 2, 2)
    session("FedBN", tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(straight("FedBN"))


def test_a_strategy_that_cannot_be_saved_trains_and_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Strategy:
        inner = flower.FedAvg()
        inner.generator = np.random.default_rng(0)  # type: ignore[attr-defined]
        return MeanStatistics(inner)

    monkeypatch.setitem(OPTIMISERS, "FedAdam", make)
    session("FedAdam", tmp_path / "run", 2)
    with pytest.raises(SettingsError, match=r"cannot be resumed: FedAvg\.generator is a Generator"):
        session("FedAdam", tmp_path / "run")


def test_what_decides_no_number_may_change_and_a_history_must_be_whole(tmp_path: Path) -> None:
    session("FedAvg", tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    config = run.config()
    run.check({**config, "engine": {**config["engine"], "workers": 2, "timeout": 9.0}}, resume=True)
    with pytest.raises(SettingsError, match="engine was"):
        run.check({**config, "engine": {**config["engine"], "threads": 2}}, resume=True)
    history = tmp_path / "run" / "history.jsonl"
    whole = history.read_text()
    history.write_text(whole + '{"round": 4, "accu')  # cut off by a crash
    assert [line["round"] for line in run.history()] == [1, 2, 3]
    history.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(SettingsError, match=r"of round 3, and history\.jsonl has the rounds \[1, 2\]"):
        session("FedAvg", tmp_path / "run")


def test_a_run_that_was_killed_behind_its_last_round_finishes(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """HeteroBN's model file has statistics that are in no checkpoint."""
    shutil.copytree(straight("HeteroBN"), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.write_summary(run.summary() | {"status": "running"})
    session("HeteroBN", tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(straight("HeteroBN"))


# --- nodes that keep their memory on their own disks --------------------------------


NEED_CLIENTS = ["FedBN", "SiloBN", "Standalone", "Scaffold", "keep_momentum", "brn", "FixBN of FedBN", "some clients"]


@pytest.mark.parametrize("case", [*NEED_CLIENTS, "FedTAN", "FixBN auto"])
def test_clients_go_on_with_what_their_own_disks_hold(
    case: str, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nodes have new ids in each session, and nothing in memory."""
    for stop, nodes in ((2, (1, 2, 3)), (3, (71, 5, 33)), (0, (8, 9, 4))):
        session(case, tmp_path / "run", stop, grid=Elsewhere(case, tmp_path / "state", nodes))
    assert outcome(tmp_path / "run")[0] == outcome(straight(case))[0]
    kept = ("other_messages", "other_bytes")  # who holds which partition is asked anew
    lines = [[{k: v for k, v in line.items() if k not in kept} for line in outcome(out)[1]]
             for out in (tmp_path / "run", straight(case))]  # fmt: skip
    assert lines[0] == lines[1]


@pytest.mark.parametrize("case", NEED_CLIENTS)
def test_a_rule_that_needs_its_clients_memory_is_refused_where_it_is_lost(case: str, tmp_path: Path) -> None:
    session(case, tmp_path / "run", 2, grid=Elsewhere(case, None))
    with pytest.raises(SettingsError, match=r"needs what its clients keep of their own \(their .*client \d has none"):
        session(case, tmp_path / "run", grid=Elsewhere(case, None))
    with pytest.raises(SettingsError, match=r"client \d has that of round 0, and trained in round 2"):
        session(case, tmp_path / "run", grid=Elsewhere(case, tmp_path / "empty"))
    with pytest.raises(SettingsError, match="has none"):  # nor in the checkpoint, on the local engine
        session(case, tmp_path / "run")


@pytest.mark.parametrize("case", ["FedAvg", "FixBN", "FedTAN", "GlobalMomentum", "HeteroBN", "FedAdam"])
def test_other_rules_are_resumed_on_any_engine(case: str, straight: Callable[[str], Path], tmp_path: Path) -> None:
    session(case, tmp_path / "run", 2, grid=Elsewhere(case, None))
    session(case, tmp_path / "run", 3)
    session(case, tmp_path / "run", grid=Elsewhere(case, None, (9, 8, 7)))
    assert outcome(tmp_path / "run")[0] == outcome(straight(case))[0]


def test_a_server_that_lost_rounds_gets_the_same_numbers(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The server's disk is put back to an older copy; nodes are ahead, and forget what has not been."""
    session("FedBN", tmp_path / "run", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    # A node keeps what the server may come back to, which it has told to be round 2 from now on.
    session("FedBN", tmp_path / "run", 4, grid=Elsewhere("FedBN", tmp_path / "state"))
    rounds = {file.name for file in (tmp_path / "state").rglob("round-*")}
    assert rounds == {f"round-{n}.safetensors" for n in (2, 3, 4)}
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    session("FedBN", tmp_path / "run", grid=Elsewhere("FedBN", tmp_path / "state", workers=2))
    assert outcome(tmp_path / "run")[0] == outcome(straight("FedBN"))[0]


def test_a_node_that_restarts_in_the_middle_of_a_run_goes_on(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Its context is empty from one message to the next, in training and before its evaluation."""

    class Forgetful(Elsewhere):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            for node in (1, 2, 3):
                self.local.write_state(node, RecordDict())
            return super().send_and_receive(messages, timeout=timeout)

    grid = Forgetful("FedBN", tmp_path / "state")
    session("FedBN", tmp_path / "run", grid=grid)
    assert outcome(tmp_path / "run") == outcome(straight("FedBN"))
    assert len(list((tmp_path / "state").iterdir())) == 1
    # Another run of the same name in the same folder begins with nothing, although the first left its own there.
    session("FedBN", tmp_path / "again", grid=Forgetful("FedBN", tmp_path / "state"))
    assert outcome(tmp_path / "again") == outcome(straight("FedBN"))
    assert len(list((tmp_path / "state").iterdir())) == 2


def config_of(**more: Any) -> dict[str, Any]:
    return {"fedbn.run": "a", "fedbn.run-token": "0" * 32, **more}


def node(folder: Path, partition: int = 0) -> Context:
    return Context(1, 1, {"partition-id": partition, "state": str(folder)}, RecordDict(), {})


def test_a_folder_keeps_what_the_server_may_come_back_to(tmp_path: Path) -> None:
    context = node(tmp_path)
    for server_round, kept in ((1, 0), (2, 0), (4, 2), (6, 5), (7, 5)):
        config = config_of(**{"server-round": server_round, "fedbn.kept-round": kept})
        with remembered(Message(RecordDict(), 1, "train"), config, context):
            context.state["own"] = pack({"round": np.array(server_round)})
    folder = StateFolder.of(config_of(), context)
    assert folder is not None
    assert folder.rounds() == [4, 6, 7], "round 4 is the latest before 5"
    for kind, asked, found in (("train", 7, 6), ("evaluate", 7, 7), ("train", 6, 4), ("train", 5, 4), ("train", 4, 0)):
        config = config_of(**{"server-round": asked})
        with contextlib.suppress(OSError), remembered(Message(RecordDict(), 1, kind), config, context):
            record = context.state.array_records.get("own")
            assert (0 if record is None else int(record["round"].numpy())) == found, (kind, asked)
            raise OSError  # a round that fails leaves no trace
    assert folder.rounds() == [4, 6, 7]
    assert return_to(config_of(**{"server-round": 6}), context) == {"state-round": 6}
    assert folder.rounds() == [4, 6]
    assert return_to(config_of(), context) == {}, "asked for its partition alone"
    assert folder.rounds() == [4, 6]
    other = node(tmp_path, 1)
    assert return_to(config_of(**{"server-round": 6}), other) == {"state-round": 0}


def test_without_a_folder_or_a_token_nothing_is_written(tmp_path: Path) -> None:
    plain = Context(1, 1, {}, RecordDict(), {})
    assert return_to(config_of(**{"server-round": 0}), plain) == {}
    assert return_to({"fedbn.run": "a", "server-round": 0}, node(tmp_path / "none")) == {}
    with remembered(Message(RecordDict(), 1, "train"), {"server-round": 1}, node(tmp_path / "none")):
        pass
    assert not (tmp_path / "none").exists()


def test_a_run_s_name_is_no_way_out_of_the_folder(tmp_path: Path) -> None:
    folder = StateFolder.of(config_of(**{"fedbn.run": "../../etc/x"}), node(tmp_path / "state"))
    assert folder is not None
    assert folder.path.resolve().is_relative_to(tmp_path / "state")
    with pytest.raises(MessageError, match="expected 32 hexadecimal digits"):
        StateFolder.of(config_of(**{"fedbn.run-token": "../" * 10 + "ab"}), node(tmp_path / "state"))


def test_a_folder_that_cannot_be_used_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    grid = Elsewhere("FedBN", tmp_path / "file" / "state")
    with pytest.raises(RunFailed, match=r"cannot begin:(.|\n)*client 0 .*state='.*file/state' is no folder that"):
        session("FedBN", tmp_path / "run", grid=grid)


def test_a_damaged_memory_of_a_node_is_named(tmp_path: Path) -> None:
    session("FedBN", tmp_path / "run", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    for file in (tmp_path / "state").rglob("round-2.safetensors"):
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(RunFailed, match=r"client 0 could not train: .*round-2\.safetensors' cannot be read: it is"):
        session("FedBN", tmp_path / "run", grid=Elsewhere("FedBN", tmp_path / "state"))


# --- the same by `serve` and by the command -------------------------------------------


def test_a_flower_run_is_resumed_by_its_run_config(straight: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    session("FedBN", out / "FedBN", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    words = " ".join(f"'{word}'" for word in overrides("FedBN"))
    config = {"experiment": BASE, "set": words, "out": str(out)}
    with pytest.raises(SettingsError, match="holds a run already"):
        serve(Elsewhere("FedBN", tmp_path / "state"), config)
    serve(Elsewhere("FedBN", tmp_path / "state"), config | {"resume": True})
    assert outcome(out / "FedBN")[0] == outcome(straight("FedBN"))[0]
    with pytest.raises(SettingsError, match="resume is true, but out is empty"):
        serve(Elsewhere("FedBN", None), {"experiment": BASE, "resume": True})


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """A run of some seconds, whose clients live in worker processes; and where it was carried out undisturbed."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "e.yaml").write_text(BASE.replace("rounds: 5", "rounds: 20").replace("workers: 0", "workers: 2"))
    words = ["run", str(folder / "e.yaml"), "strategy={name: FedBN}", "engine.checkpoint_every=1"]
    assert cli.main([*words, "--out", str(folder / "straight")]) == 0
    return words, folder / "straight" / "FedBN"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_command_leaves_a_folder_that_resumes(
    sent: signal.Signals, command: tuple[list[str], Path], tmp_path: Path
) -> None:
    """Killed in no particular moment."""
    words, straight = command
    stopped = tmp_path / "stopped"
    with subprocess.Popen(
        [sys.executable, "-m", "fedbn_flwr.cli", *words, "--out", str(stopped)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        latest = stopped / "FedBN" / "checkpoint" / "latest.json"
        deadline = time.monotonic() + 120
        while not (latest.exists() and json.loads(latest.read_text())["round"] >= 2):
            assert time.monotonic() < deadline, "two rounds took two minutes"
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(sent)
        _, error = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130), error
    assert "Traceback" not in error
    run = RunFolder(stopped / "FedBN")
    assert run.summary()["status"] == ("running" if sent == signal.SIGKILL else "interrupted")
    assert 2 <= run.checkpoint.round() < 20
    assert cli.main([*words, "--out", str(stopped), "--resume"]) == 0
    assert outcome(stopped / "FedBN") == outcome(straight)
