"""A node's state: the run that it belongs to, and the rounds that its folder keeps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.client.node_state import NodeState, return_to_round, stored_state
from fedbn_flwr.errors import MessageError, UserError
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.results.read.trained import latest_state


def test_a_state_folder_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing': there is no such folder; give the one that the node config names"):
        latest_state(tmp_path / "nothing", "0" * 32, 1)


def test_a_state_of_another_run_is_dropped() -> None:
    records = RecordDict({"of the user": ConfigRecord({"x": 1})})
    state = NodeState(records, "first")
    state.save("local", {"w": np.ones(2)})
    assert list(NodeState(records, "first").load("local")) == ["w"]
    assert list(NodeState(records).load("local")) == ["w"]
    assert NodeState(records, "second").load("local") == {}
    assert "of the user" in records


def config_of(**more: Any) -> dict[str, Any]:
    return {"fedbn.run": "a", "fedbn.run-token": "0" * 32, **more}


def message(kind: str) -> Message:
    return LocalGrid(ClientApp(), 1).create_message(RecordDict(), kind, 1, "")


def node(folder: Path, partition: int = 0) -> Context:
    return Context(1, 1, {"partition-id": partition, "state": str(folder)}, RecordDict(), {})


def rounds(folder: Path) -> list[int]:
    """Those whose state of client 0 is stored."""
    return sorted(int(file.name.removeprefix("round-")) for file in folder.glob("*/client-0/round-*"))


def test_a_folder_keeps_the_rounds_the_server_may_return_to(tmp_path: Path) -> None:
    context = node(tmp_path)
    for server_round, kept in ((1, 0), (2, 0), (4, 2), (6, 5), (7, 5)):
        config = config_of(**{"server-round": server_round, "fedbn.checkpoint-round": kept})
        with stored_state(message("train"), config, context):
            context.state["own"] = pack({"round": np.array(server_round)})
    assert rounds(tmp_path) == [4, 6, 7], "round 4 is the latest before 5"
    for kind, asked, found in (("train", 7, 6), ("evaluate", 7, 7), ("train", 6, 4), ("train", 5, 4), ("train", 4, 0)):
        config = config_of(**{"server-round": asked})
        with contextlib.suppress(OSError), stored_state(message(kind), config, context):
            record = context.state.array_records.get("own")
            assert (0 if record is None else int(record["round"].numpy())) == found, (kind, asked)
            raise OSError  # a round that fails leaves no trace
    assert rounds(tmp_path) == [4, 6, 7]
    assert return_to_round(config_of(**{"server-round": 6}), context) == {"state-round": 6}
    assert rounds(tmp_path) == [4, 6]
    assert return_to_round(config_of(), context) == {}, "the query is for the partition only"
    assert rounds(tmp_path) == [4, 6]
    other = node(tmp_path, 1)
    assert return_to_round(config_of(**{"server-round": 6}), other) == {"state-round": 0}


def test_without_a_folder_or_a_token_nothing_is_written(tmp_path: Path) -> None:
    plain = Context(1, 1, {}, RecordDict(), {})
    assert return_to_round(config_of(**{"server-round": 0}), plain) == {}
    assert return_to_round({"fedbn.run": "a", "server-round": 0}, node(tmp_path / "none")) == {}
    with stored_state(message("train"), {"server-round": 1}, node(tmp_path / "none")):
        pass
    assert not (tmp_path / "none").exists()


def test_a_run_s_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    config = config_of(**{"fedbn.run": "../../etc/x", "server-round": 1})
    with stored_state(message("train"), config, node(tmp_path / "state")):
        pass
    (file,) = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert file.resolve().is_relative_to(tmp_path / "state")
    with pytest.raises(MessageError, match="expected 32 hexadecimal digits"):
        return_to_round({**config, "fedbn.run-token": "../" * 10 + "ab"}, node(tmp_path / "state"))


def train(folder: Path, server_round: int) -> None:
    """A message in a new process, whose context is empty."""
    context = node(folder)
    config = config_of(**{"server-round": server_round, "fedbn.checkpoint-round": server_round - 1})
    with stored_state(message("train"), config, context):
        before = context.state.array_records.get("own")
        count = 0 if before is None else int(before["n"].numpy())
        context.state["own"] = pack({"n": np.array(count + 1)})


def test_a_process_killed_while_it_saves_leaves_the_round_before(tmp_path: Path) -> None:
    def killed() -> None:
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        train(tmp_path, 2)

    train(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert rounds(tmp_path) == [1]
    train(tmp_path, 3)
    left = sorted(file.name for file in tmp_path.glob("*/client-0/*"))
    assert left == ["round-1", "round-3"], "nothing unfinished is left"
    context = node(tmp_path)
    with stored_state(message("evaluate"), config_of(**{"server-round": 3}), context):
        assert int(context.state.array_records["own"]["n"].numpy()) == 2, "each message began with an empty context"


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_damaged_state_is_named(tmp_path: Path, cut: int) -> None:
    train(tmp_path, 1)
    (file,) = tmp_path.glob("*/client-0/round-1")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - cut] if cut else data[:99] + b"?" + data[100:])
    with pytest.raises(
        MessageError, match=r"the node's state '.*/client-0/round-1' is damaged: .*; restore the folder"
    ):
        train(tmp_path, 2)
