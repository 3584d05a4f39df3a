"""Two runs in one process do not disturb each other: what a run needs of it is its own, or stays as it was."""

from __future__ import annotations

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedbn_flwr import LocalGrid


def test_a_grid_leaves_the_identity_that_flower_gave_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("run", 7), ("node", 8), ("task", 9)):
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", value)
    with LocalGrid(ClientApp(), 2) as grid:
        (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "train")])
    assert reply.metadata.src_node_id == 1
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (7, 8, 9)
