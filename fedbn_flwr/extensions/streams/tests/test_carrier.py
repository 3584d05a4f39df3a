"""FedTAN over streams: the numbers and the ledger of the exchange over messages, and clients that fail."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import client_app, strategies
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.extensions.streams import server
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.strategies import FixBN, GlobalMomentum
from tests.support.addressed import Addressed, OwnModel
from tests.support.federations import Federations, nodes_in_means, same, with_fault
from tests.support.marks import slow_except
from tests.support.models import two_norms, two_norms_with_dropout
from tests.support.network import make_keys, missing_tools
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBN_EXCHANGE_ADDRESS", "127.0.0.1:0")  # any free port


def train(fed: Any, strategy: Any, rounds: int, **grid: Any) -> tuple[dict[str, np.ndarray], list[Traffic]]:
    models: list[ArrayRecord] = []
    pages: list[Traffic] = []
    with fed.grid(**grid) as local:
        metered = MeteredGrid(local)

        def note(_: int, arrays: ArrayRecord) -> None:
            models.append(arrays)
            pages.append(metered.take())

        strategy.start(metered, fed.arrays(), num_rounds=rounds, evaluate_fn=note)
    return unpack(models[-1]), pages


STRATEGIES: dict[str, Callable[..., Any]] = {
    "fused": lambda **k: FedTAN(fraction_evaluate=0.0, **k),
    "paper, by batch": lambda **k: FedTAN(fraction_evaluate=0.0, exchange="paper", weights="batch", **k),
    "forward only": lambda **k: FedAvgGlobalStats(fraction_evaluate=0.0, **k),
    "FedTANII": lambda **k: FedTANII(fraction_evaluate=0.0, fedtan_rounds=2, **k),
    "FixBN": lambda **k: FixBN(FedTAN(fraction_evaluate=0.0, **k), freeze_round=1, freeze=["statistics", "affine"]),
    "GlobalMomentum": lambda **k: GlobalMomentum(FedTAN(fraction_evaluate=0.0, **k)),
}


@pytest.mark.parametrize("name", slow_except([*STRATEGIES][::2], STRATEGIES))
def test_streams_give_the_arrays_and_the_ledger_of_messages_bit_for_bit(federation: Federations, name: str) -> None:
    fed = federation((6, 9, 4), model=two_norms_with_dropout, lr=0.1, momentum=0.9, steps=2)
    make = STRATEGIES[name]
    by_messages, of_messages = train(fed, make(direct=False), 3)
    by_streams, of_streams = train(fed, make(), 3, workers=3)
    assert same(by_messages, by_streams)
    if name == "GlobalMomentum":  # streams send the momentum with the model, messages with the last agreement
        of_streams = [replace(page, elements_down_per_client=0) for page in of_streams]
        of_messages = [replace(page, elements_down_per_client=0) for page in of_messages]
    assert of_messages == of_streams
    assert of_messages[1].communication_rounds > 1, "there was something to exchange"


class OwnFedTAN(OwnModel, strategies.FedTAN):
    pass


def test_every_client_receives_its_own_model_config_and_records(federation: Federations) -> None:
    fed = federation((6, 6, 6), batches=1, model=two_norms, lr=0.1)
    strategy = Addressed(OwnFedTAN(min_batch=1, fraction_evaluate=0.0))
    train(fed, strategy, 2, workers=3)
    assert strategy.received == [{client: (client, client + 1, client + 1) for client in range(3)}] * 2


def test_clients_that_cannot_be_alive_at_once_are_refused(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)
    with pytest.raises(SettingsError, match=r"all 3 clients alive at once.*serves 2 at a time.*engine\.workers"):
        train(fed, FedTAN(fraction_evaluate=0.0), 1, workers=2)
    train(fed, FedTAN(fraction_evaluate=0.0, direct=False), 1, workers=2)
    one = federation((6,), model=two_norms, dtype=torch.float64)
    single = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
    by_messages, by_streams = (train(one, FedTAN(direct=direct, **single), 2)[0] for direct in (False, True))
    assert same(by_messages, by_streams), "one client needs no worker"


# --- clients that fail ---


def killed(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed(_: Any) -> None:
    raise OSError("the disk is gone")


def diverged(client: Any) -> None:
    client.model[3].weight.data.fill_(torch.nan)


@pytest.mark.parametrize(
    ("spoil", "says"),
    # Of a killed client, the end of its stream and that of its process arrive in any order.
    [(killed, "its connection to the exchange service broke|its process died"),
     (failed, "the disk is gone"),
     (diverged, "values that are not finite .*diverged")],
)  # fmt: skip
def test_a_client_lost_during_a_round_is_left_out_of_the_weights(
    federation: Federations, flower_log: pytest.LogCaptureFixture, spoil: Callable[[Any], None], says: str
) -> None:
    """Client 1 takes part only in the first exchange: streams lose it as messages do."""
    fed = federation((6, 8, 5), batches=1, model=two_norms, dtype=torch.float64, lr=0.1, steps=1)
    results = []
    for direct in (False, True):
        strategy = FedTAN(fraction_evaluate=0.0, direct=direct)
        used = nodes_in_means(strategy)
        results.append(train(fed, strategy, 1, app=with_fault(fed, 1, spoil), workers=3)[0])
        assert len(used[0]) == 2
    reasons = re.findall("exchange 2: left out client 1 (.*)", flower_log.text)
    assert len(reasons) == 2
    assert all(re.search(says, reason) for reason in reasons), reasons
    by_messages, by_streams = results
    assert same(by_messages, by_streams)


def test_too_few_clients_end_the_run_with_all_reasons(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)
    strategy = FedTAN(fraction_evaluate=0.0, min_train_nodes=3)
    with pytest.raises(RunFailed, match=r"(?s)exchange 2: 2 of 3 .*client 1 .*the disk is gone"):
        train(fed, strategy, 1, app=with_fault(fed, 1, failed), workers=3)


def test_reasons_of_earlier_exchanges_are_named_as_well(federation: Federations) -> None:
    fed = federation((6, 6, 6), model=two_norms)

    def make(context: Any) -> Any:
        client = fed.make_client(context)
        match context.node_config["partition-id"]:
            case 0:
                raise OSError("no such folder")
            case 1:
                client.model[2].register_forward_pre_hook(lambda *_: failed(client))
        return client

    strategy = FedTAN(fraction_evaluate=0.0, min_train_nodes=2)
    with pytest.raises(RunFailed, match=r"(?s)exchange 2: 1 of 2 .*no such folder"):
        train(fed, strategy, 1, app=client_app(make), workers=3)


@pytest.mark.slow
def test_a_client_that_stalls_is_left_out_when_its_time_is_over(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """It later finds that the others have continued, and its model is not used."""
    fed = federation((6, 8, 5), batches=1, model=two_norms, steps=1)
    strategy = FedTAN(fraction_evaluate=0.0, exchange_timeout=10)
    used = nodes_in_means(strategy)
    train(fed, strategy, 1, app=with_fault(fed, 1, lambda _: time.sleep(20)), workers=3)
    assert len(used[0]) == 2
    assert "client 1" in flower_log.text
    assert "sent nothing to the exchange service within 10 s" in flower_log.text


@pytest.mark.slow
def test_a_client_that_hangs_costs_at_most_half_of_the_round(
    federation: Federations, flower_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the train messages of all would end while they wait for it, and none could be used."""
    monkeypatch.setattr(server, "_WARNING_SECONDS", 1)
    fed = federation((6, 8, 5), batches=1, model=two_norms, steps=1)
    strategy = FedTAN(fraction_evaluate=0.0)
    used = nodes_in_means(strategy)
    with fed.grid(with_fault(fed, 1, lambda _: time.sleep(60)), workers=3) as local:
        local.start()
        strategy.start(PollingGrid(local), fed.arrays(), num_rounds=1, timeout=20)
    assert used == [[1, 3]]
    assert "all wait for client 1 (node 2) since 1 s" in flower_log.text
    assert "exchange 2: left out client 1 (node 2): it sent nothing to the exchange service within" in flower_log.text


def test_clients_that_train_without_exchanges_are_not_waited_for(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """The grid observes replies: of a client that trains without exchanges, and an error of a process that died."""
    fed = federation((6, 8, 5, 4), batches=1, model=two_norms, steps=1)
    ours, foreign = fed.app(), ClientApp()

    @foreign.train()
    def plain(message: Message, context: Context) -> Message:
        match context.node_config["partition-id"]:
            case 0:
                killed(None)
            case 1:
                arrays, metrics = message.content.array_records["arrays"], MetricRecord({protocol.NUM_EXAMPLES: 8})
                return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
        return ours(message, context)

    with fed.grid(foreign, workers=4) as local:
        local.start()
        # A wait for either client would last 3000 s.
        strategy = FedTAN(fraction_evaluate=0.0, exchange_timeout=3000)
        used = nodes_in_means(strategy)
        strategy.start(PollingGrid(local), fed.arrays(), num_rounds=1)
    assert len(used[0]) == 2
    assert "node 1: its process died (signal 9)" in flower_log.text
    assert "node 2: it trained without the exchanges" in flower_log.text


# --- the deployment's settings ---


@pytest.mark.skipif(bool(missing_tools()), reason="openssl is not installed")
def test_tls_with_the_deployments_certificate(
    federation: Federations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ours", "other"):
        assert make_keys(tmp_path / name).returncode == 0
    keys = tmp_path / "ours" / "exchange"
    for name, file in {"CERTIFICATE": "server.pem", "KEY": "server.key", "CA": "ca.crt"}.items():
        monkeypatch.setenv(f"FEDBN_EXCHANGE_{name}", str(keys / file))
    fed = federation((6, 6), model=two_norms)
    by_messages, _ = train(fed, FedTAN(fraction_evaluate=0.0, direct=False), 2)
    by_streams, _ = train(fed, FedTAN(fraction_evaluate=0.0), 2, workers=2)
    assert same(by_messages, by_streams)
