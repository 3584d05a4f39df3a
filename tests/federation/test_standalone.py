"""Standalone: each client trains its own model, and all start from the same one."""

from __future__ import annotations

import copy

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch.nn import functional as F

from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.strategies import Standalone
from tests.support.federations import Federations, near, replaced


def test_each_client_is_plain_sgd_on_its_own_data(federation: Federations) -> None:
    """Also where only `Context.state` survives from one message to the next."""
    fed = federation((8, 12), dtype=torch.float64, lr=0.2, epochs=2)
    app, clients = replaced(fed)
    Standalone().start(fed.grid(app), fed.arrays(), num_rounds=3)
    for client, data in zip(clients.values(), fed.data, strict=True):
        twin = copy.deepcopy(fed.model).train()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
        for inputs, labels in data.batches * 6:
            optimizer.zero_grad()
            F.cross_entropy(twin(inputs), labels).backward()
            optimizer.step()
        near(twin.state_dict(), client.model.state_dict(), rtol=1e-12)


def test_no_array_is_sent_and_the_server_s_model_stays(federation: Federations) -> None:
    fed = federation()
    grid = MeteredGrid(fed.grid())
    result = Standalone().start(grid, fed.arrays(), num_rounds=2)
    traffic = grid.take()
    assert (traffic.messages_down, traffic.messages_up) == (4, 4)
    assert (traffic.bytes_down, traffic.bytes_up, traffic.other_bytes) == (0, 0, 0)
    for key, value in unpack(fed.arrays()).items():
        assert result.arrays[key].numpy().tobytes() == value.tobytes()
    assert set(result.evaluate_metrics_clientapp[2]) == {"loss", "accuracy"}


def test_an_incomplete_model_is_refused_too(federation: Federations) -> None:
    fed = federation()
    first, *_ = fed.arrays().items()
    content = RecordDict({"arrays": ArrayRecord(dict([first])), "config": ConfigRecord()})
    (reply,) = fed.grid().send_and_receive([Message(content, 1, "train")])
    assert "the server did not send '4.weight' (2 keys of weights are missing)" in reply.error.reason
    (reply,) = fed.grid().send_and_receive([Message(RecordDict({"arrays": pack({})}), 1, "train")])
    assert not reply.has_error()
