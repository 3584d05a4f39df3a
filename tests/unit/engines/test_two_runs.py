"""Two runs in one process do not disturb each other: what a run needs of it is its own, or stays as it was."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedbn_flwr import LocalGrid
from fedbn_flwr.experiment.logs import working_at, write_json


def test_lines_of_the_log_have_the_fields_of_their_own_run(capsys: pytest.CaptureFixture[str]) -> None:
    both = Barrier(2, timeout=60)

    def run(name: str) -> None:
        working_at(run=name)
        both.wait()
        write_json("INFO", name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ("FedAvg", "FedBN")))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["run"] for line in lines) == ["FedAvg", "FedBN"]
    assert all(line["run"] == line["message"] for line in lines)


def test_a_grid_leaves_the_identity_that_flower_gave_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("run", 7), ("node", 8), ("task", 9)):
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", value)
    with LocalGrid(ClientApp(), 2) as grid:
        (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    assert reply.metadata.src_node_id == 1
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (7, 8, 9)
