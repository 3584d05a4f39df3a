"""Capabilities: any grid has the defaults, and a grid around another has the other's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import LocalGrid
from fedbn_flwr.engines.capabilities import Capabilities, GridAround, capabilities
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.experiment.metered import MeteredGrid
from tests.support.federations import Federations


def test_a_foreign_grid_serves_all_nodes_at_once_and_hides_their_states() -> None:
    engine = capabilities(type("ForeignGrid", (Grid,), dict.fromkeys(Grid.__abstractmethods__))())
    assert engine.start() is None
    assert engine.contexts() is None
    engine.count_exchange([], [])


CALLS = {name for name in {*vars(Grid), *vars(Capabilities)} if not name.startswith("_")} - {"run"}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_grid_around_another_passes_on_every_call_with_its_arguments(name: str) -> None:
    calls = list[Any]()

    def called(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "a result"

    inner = type("Inner", (Capabilities, Grid), dict.fromkeys(Grid.__abstractmethods__) | {name: called})()
    declared = getattr(Capabilities, name, None) or getattr(Grid, name)
    parameters = [*inspect.signature(declared).parameters.values()][1:]  # without `self`
    args = tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)
    kwargs = {each.name: each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert getattr(GridAround(inner), name)(*args, **kwargs) == "a result"
    assert calls == [(args, kwargs)]


def test_replies_are_observed_through_another_grid(federation: Federations) -> None:
    grid, seen = MeteredGrid(PollingGrid(LocalGrid(federation((4, 4)).app(), 2))), list[int]()
    grid.observe(lambda reply: seen.append(reply.metadata.src_node_id))
    questions = [Message(RecordDict(), node, "query.partition") for node in (1, 2)]
    list(grid.send_and_receive(questions))
    assert sorted(seen) == [1, 2]
