"""Capabilities: any grid has the defaults, and a grid around another has the other's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import LocalGrid
from fedbn_flwr.engines.capabilities import Capabilities, GridAround, capabilities
from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.engines.network import PollingGrid
from tests.support.federations import Federations


def test_a_foreign_grid_serves_all_nodes_at_once_and_hides_their_states() -> None:
    engine = capabilities(type("ForeignGrid", (Grid,), dict.fromkeys(Grid.__abstractmethods__))())
    assert engine.start() is None
    assert engine.contexts() is None
    engine.count_exchange([], [])


def test_a_grid_around_another_passes_on_its_capabilities(federation: Federations) -> None:
    fed = federation((4, 4))
    with fed.grid(workers=2) as local:
        outer = capabilities(GridAround(MeteredGrid(local)))
        assert outer.start() == 2
        contexts = outer.contexts()
        assert contexts is not None
        contexts[2].state = RecordDict({"kept": ArrayRecord()})
        assert list(local.contexts()[2].state) == ["kept"]


CALLS = {name for name in {*vars(Grid), *vars(Capabilities)} if not name.startswith("_")} - {"run"}
WITHOUT_RESULT = {"set_run", "observe", "count_exchange", "report"}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_grid_around_another_passes_on_every_call_with_its_arguments(name: str) -> None:
    calls = list[Any]()

    def called(self: Grid, *args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "a result"

    inner = type("Inner", (Capabilities, Grid), dict.fromkeys(Grid.__abstractmethods__) | {name: called})()
    declared = getattr(Capabilities, name, None) or getattr(Grid, name)
    parameters = [*inspect.signature(declared).parameters.values()][1:]  # without `self`
    args = tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)
    kwargs = {each.name: each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert getattr(GridAround(inner), name)(*args, **kwargs) == (None if name in WITHOUT_RESULT else "a result")
    assert calls == [(args, kwargs)]


def test_an_exchange_is_counted_through_another_grid(federation: Federations) -> None:
    fed = federation((4, 4))
    metered = MeteredGrid(fed.grid())
    arrays = {key: value.numpy() for key, value in fed.model.state_dict().items()}
    capabilities(GridAround(metered)).count_exchange([arrays], [arrays, arrays])
    traffic = metered.take()
    assert (traffic.communication_rounds, traffic.messages_up, traffic.messages_down) == (1, 1, 2)
    assert traffic.bytes_down == 2 * traffic.bytes_up > 0


def test_replies_are_observed_through_another_grid(federation: Federations) -> None:
    grid, seen = MeteredGrid(PollingGrid(LocalGrid(federation((4, 4)).app(), 2))), list[int]()
    grid.observe(lambda reply: seen.append(reply.metadata.src_node_id))
    questions = [Message(RecordDict(), node, "query.partition") for node in (1, 2)]
    list(grid.send_and_receive(questions))
    assert sorted(seen) == [1, 2]
