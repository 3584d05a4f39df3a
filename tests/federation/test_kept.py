"""Arrays that stay on the clients, by name or by the strategy: one table, against plain PyTorch in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, client_app, run
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.preview import explain
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.norms.roles import Role, roles, selected
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedNova,
    FedProx,
    FedRep,
    FedTAN,
    FixBN,
    GlobalMomentum,
    MeanStatistics,
    Private,
    Scaffold,
    Secure,
    SiloBN,
    Standalone,
)
from tests.support.federations import Federations, differing, last_model, near, replaced, same
from tests.support.twins import by_hand, loss_of

STATISTICS = {"1.running_mean", "1.running_var"}
AFFINE = {"1.weight", "1.bias"}
COUNTER = {"1.num_batches_tracked"}
HEAD = {"4.weight", "4.bias"}
ALL = STATISTICS | AFFINE | HEAD | {"0.weight"}

# Each method by what the server stores of the arrays that stay, and the keys of the small network that stay.
METHODS: dict[str, tuple[Callable[[Any], FedAvg], set[str]]] = {
    "FedPer": (lambda stored: FedAvg(kept=["last"], global_kept=stored), HEAD),
    "LG-FedAvg": (lambda stored: FedAvg(kept=["0", "1"], global_kept=stored), ALL - HEAD),
    "MTFL": (lambda stored: FedAvg(kept=["affine"], global_kept=stored), AFFINE),
    "a head and statistics": (lambda stored: FedAvg(kept=["4", "statistics"], global_kept=stored), HEAD | STATISTICS),
    "FedBN": (lambda stored: FedBN(global_norm=stored), AFFINE | STATISTICS),
    "SiloBN": (lambda stored: SiloBN(global_norm=stored), STATISTICS),
    "FedRep": (lambda stored: FedRep(head_epochs=3, global_kept=stored), HEAD),
    "FedRep of more": (lambda stored: FedRep(head_epochs=3, kept=["1", "4"], global_kept=stored), ALL - {"0.weight"}),
    "Standalone": (lambda stored: Standalone(), ALL),
}
every_method = pytest.mark.parametrize("method", METHODS)


# --- names -------------------------------------------------------------------


def test_names_are_roles_the_last_layer_and_patterns_of_keys_and_layers() -> None:
    net = nn.ModuleDict({
        "conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "head1": nn.Linear(2, 2), "head2": nn.Linear(2, 3),
    })  # fmt: skip
    role_of = roles(net)
    norm = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    for names, expected in {
        "affine": {"norm.weight", "norm.bias"},
        "counter": {"norm.num_batches_tracked"},
        "norm": norm,  # patterns select no counters
        "no*": norm,
        "head?": {f"head{i}.{name}" for i in (1, 2) for name in ("weight", "bias")},
        "head*.bias": {"head1.bias", "head2.bias"},
        "head": set(),
        "last": {"head2.weight", "head2.bias"},
    }.items():
        assert selected(role_of, [names]) == expected, names
    nn.utils.parametrizations.weight_norm(net["head2"])
    assert selected(roles(net), ["last"]) == {key for key in roles(net) if key.startswith("head2.")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept": ["fc"]}, r"kept has 'fc', and the model has no such arrays; its layers are 0, 1, 4\."),
        ({"kept": ["4", "[1"]}, r"kept has '\[1', and the model has no such arrays"),
        ({"kept": ["*"]}, r"which leaves nothing to average; use Standalone"),
        ({"kept": "*running_var"}, r"has one of '1.running_mean' and '1.running_var'; keep both or none"),
    ],
)
def test_names_that_cannot_be_kept_raise_an_error_before_training(
    federation: Federations, options: dict[str, Any], message: str
) -> None:
    fed = federation((8, 12))
    with pytest.raises(SettingsError, match=message):
        FixBN(FedAvg(**options), freeze_round=1).start(fed.grid(), fed.arrays(), num_rounds=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg(kept=["a,b"]), "without commas"),
        (lambda: FedAvg(kept=[""]), "without commas"),
        (lambda: FedAvg(kept=3), "expected a name or a list of"),  # type: ignore[arg-type]
        (lambda: FedBN(global_kept="initial"), "global_kept"),
        # A client's own head is far from the global one, so clipping would shrink the step of the shared layers.
        (
            lambda: Private(FedAvg(kept=["last"])),
            r"kept is \['last'\], and clients send it .* use global_kept='initial'",
        ),
    ],
)
def test_arguments_that_mean_nothing_raise_an_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((SettingsError, TypeError), match=message):
        make()


class Tied(nn.Module):
    """One tensor has two names."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)))[:, :10]


def test_a_tensor_of_two_names_is_not_half_kept(federation: Federations) -> None:
    fed = federation((8, 12), model=Tied)
    with pytest.raises(RunFailed, match=r"'last.weight' stays on the client and 'first.weight' does not.*one tensor"):
        FedAvg(kept=["last*"]).start(fed.grid(), fed.arrays(), num_rounds=1)


def test_an_experiment_raises_the_errors_when_it_is_prepared() -> None:
    file = "{data: {name: digits}, model: {name: %s}, strategy: {name: FedAvg, kept: %s}}"
    with pytest.raises(SettingsError, match="kept has 'fcc', and the model has no such arrays"):
        prepare(load_experiment(file % ("mlp", "[fcc]"), []))
    (prepared,) = prepare(load_experiment(file % ("mlp", "last"), []))
    assert prepared.rule.notes() == {"kept": ["last"]}
    stays = prepared.rule.traits.local_keys(prepared.model.state_dict())
    assert stays == {"classify.weight", "classify.bias", "bn.num_batches_tracked"}
    with pytest.raises(SettingsError, match=r"'last.weight' stays on the client and 'first.weight' does not"):
        prepare(load_experiment(file % (f"'{__name__}:Tied'", "['last*']"), []))


# --- against a twin ----------------------------------------------------------


def at_work(fed: Any) -> tuple[Any, dict[int, BNClient]]:
    """The federation's app, which keeps one client for each node, and these clients."""
    living: dict[int, BNClient] = {}
    return client_app(lambda context: living.setdefault(context.node_id, fed.make_client(context))), living


@every_method
@pytest.mark.parametrize("stored", ["average", "initial"])
@pytest.mark.parametrize("serve", [at_work, replaced])
def test_three_rounds_and_their_evaluation_equal_the_method_by_hand(
    federation: Federations, method: str, stored: str, serve: Any
) -> None:
    """Also where only `Context.state` survives from one message to the next."""
    make, local = METHODS[method]
    fed = federation((8, 12), dtype=torch.float64, lr=0.1, momentum=0.9, weight_decay=0.01, epochs=2)
    (app, clients), strategy = serve(fed), make(stored)
    result = strategy.start(fed.grid(app), fed.arrays(), num_rounds=3)
    mean, models = by_hand(fed, 3, local, 3 if "FedRep" in method else 0)
    found, first = unpack(result.arrays), unpack(fed.arrays())
    assert set(found) == ALL
    stays = local if stored == "initial" or method == "Standalone" else set()
    near({key: value for key, value in found.items() if key not in stays}, mean, rtol=1e-10, atol=1e-12)
    assert all(found[key].tobytes() == first[key].tobytes() for key in stays)
    # The last message of each client was an evaluation: its model is as the next round would load it.
    for node, model in zip((1, 2), models, strict=True):
        near(model.state_dict(), clients[node].model.state_dict(), rtol=1e-10, atol=1e-12)
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(loss_of(fed, models), rel=1e-10)


@every_method
@pytest.mark.parametrize("stored", ["average", "initial"])
def test_kept_arrays_are_never_sent_down_and_initial_sends_none_up(
    federation: Federations, method: str, stored: str
) -> None:
    make, local = METHODS[method]
    fed, strategy = federation((8, 12)), make(stored)
    shared = sum(array.numpy().size for key, array in fed.arrays().items() if key not in local)
    grid = MeteredGrid(fed.grid())
    strategy.start(grid, fed.arrays(), num_rounds=2)
    traffic = grid.take()
    total = sum(array.numpy().size for array in fed.arrays().values())
    assert traffic.elements_down_per_client == shared
    sends_all = stored == "average" and method != "Standalone"
    assert traffic.elements_up_per_client == (total if sends_all else shared)
    assert traffic.messages_down == traffic.messages_up == 4


@pytest.mark.parametrize(
    ("fedbn", "setting"),
    [
        ({}, {"kept": ["affine", "statistics"]}),
        ({"global_norm": "initial"}, {"kept": ["1"], "global_kept": "initial"}),
        ({"kept": ["4"]}, {"kept": ["1", "last"]}),
    ],
)
def test_fedbn_is_the_setting_affine_and_statistics_bit_for_bit(
    federation: Federations, fedbn: Any, setting: Any
) -> None:
    fed = federation((8, 12))
    assert same(last_model(fed, FedBN(**fedbn), 3), last_model(fed, FedAvg(**setting), 3))


@pytest.mark.parametrize("method", ["FedPer", "FedBN"])
def test_counters_of_the_server_s_model_stay_too(federation: Federations, method: str) -> None:
    """A server of another project starts with the whole state dict; the mean of the counters stays an integer."""
    fed, strategy = federation((8, 12), batches=2), METHODS[method][0]("average")
    app, clients = replaced(fed)
    result = strategy.start(fed.grid(app), ArrayRecord(fed.model.state_dict()), num_rounds=3)
    assert [int(client.model[1].num_batches_tracked) for client in clients.values()] == [6, 6]
    counter = result.arrays["1.num_batches_tracked"].numpy()
    assert (counter.dtype, int(counter)) == (np.int64, 6)


def test_the_clients_of_a_new_run_and_new_clients_begin_with_a_new_model_s_head(federation: Federations) -> None:
    fed = federation((8, 12, 6))
    grid = fed.grid()
    half = functools.partial(FedAvg, fraction_train=0.34, min_train_nodes=1, kept=["last"])  # one a round
    first, second = (half().start(grid, fed.arrays(), num_rounds=3) for _ in range(2))
    assert second.evaluate_metrics_clientapp == first.evaluate_metrics_clientapp


# --- with other strategies ---------------------------------------------------


def test_fedprox_pulls_the_shared_layers_only(federation: Federations) -> None:
    """Two steps of SGD by hand, the second with mu (w - w_t) for all parameters but those of the head."""
    fed = federation((8, 12), dtype=torch.float64, lr=0.2)
    app, clients = replaced(fed)
    FedProx(proximal_mu=0.5, kept=["last"], fraction_evaluate=0.0).start(fed.grid(app), fed.arrays(), num_rounds=1)
    model = copy.deepcopy(fed.model).train()
    received = {name: value.detach().clone() for name, value in model.named_parameters()}
    for inputs, labels in fed.data[0].batches:
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for name, value in model.named_parameters():
                pull = 0.0 if name in HEAD else 0.5
                value -= 0.2 * (value.grad + pull * (value - received[name]))
    near(model.state_dict(), clients[1].model.state_dict(), rtol=1e-12, atol=1e-14)


def test_kept_layers_have_no_control_variates_and_their_momentum_stays_too(federation: Federations) -> None:
    fed = federation((8, 12), momentum=0.9)
    controls, momentum = Scaffold(kept=["last"]), GlobalMomentum(FedAvg(kept=["last"]))
    for strategy in (controls, momentum):
        strategy.start(fed.grid(), fed.arrays(), num_rounds=2)
    assert controls.memory.total.keys() == momentum.memory.momentum.keys() == {"0.weight"} | AFFINE


def test_fednova_averages_kept_layers_plainly_and_the_others_by_steps(federation: Federations) -> None:
    fed = federation((8, 12), dtype=torch.float64, lr=0.1)
    for data, count in zip(fed.data, (1, 3), strict=True):
        data.batches = data.batches * count
    app, clients = replaced(fed)
    result = unpack(
        FedNova(kept=["last"], fraction_evaluate=0.0).start(fed.grid(app), fed.arrays(), num_rounds=1).arrays
    )
    n = [data.num_examples for data in fed.data]
    models, x = [clients[node].model.state_dict() for node in (1, 2)], fed.model.state_dict()
    p = [each / sum(n) for each in n]
    tau = p[0] * 1 + p[1] * 3
    for key in HEAD:
        mean = sum(share * model[key] for share, model in zip(p, models, strict=True))
        np.testing.assert_allclose(result[key], mean, rtol=1e-12)
    for key in {"0.weight"} | AFFINE:
        change = sum(s * (m[key] - x[key]) / a for s, m, a in zip(p, models, (1, 3), strict=True))
        np.testing.assert_allclose(result[key], x[key] + tau * change, rtol=1e-10)


@pytest.mark.parametrize("names", [["last"], ["affine"], ["last", "affine", "statistics"]])
def test_fedtan_s_first_step_is_that_of_the_union_with_each_client_s_own_layers(
    federation: Federations, names: list[str]
) -> None:
    """Two rounds of one step by hand: batch norm over both batches, and what stays by client."""
    fed = federation((8, 8), dtype=torch.float64, batches=1, lr=0.1)
    app, clients = replaced(fed)
    strategy = FedTAN(kept=names, min_batch=1, fraction_evaluate=0.0)
    result = unpack(strategy.start(fed.grid(app), fed.arrays(), num_rounds=2).arrays)
    start = {name: value.detach() for name, value in fed.model.named_parameters()}
    kept = selected(roles(fed.model), names)
    shared = {name: value for name, value in start.items() if name not in kept}
    own = [{name: value for name, value in start.items() if name in kept} for _ in fed.data]
    batches = [data.batches[0] for data in fed.data]
    inputs = torch.cat([x for x, _ in batches])
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    for _ in range(2):
        shared, *own = ({k: v.clone().requires_grad_() for k, v in each.items()} for each in (shared, *own))
        y = F.conv2d(inputs, shared["0.weight"])
        normal = F.batch_norm(y, mean, var, training=True)  # of both, and updates the running statistics
        losses = []
        for part, mine, (_, labels) in zip(normal.split(8), own, batches, strict=True):
            w = shared | mine
            hidden = F.relu(part * w["1.weight"].view(-1, 1, 1) + w["1.bias"].view(-1, 1, 1)).flatten(1)
            losses.append(F.cross_entropy(F.linear(hidden, w["4.weight"], w["4.bias"]), labels))
        (0.5 * (losses[0] + losses[1])).backward()
        shared = {name: (value - 0.1 * value.grad).detach() for name, value in shared.items()}
        # A client's own loss moves what stays there: twice the gradient of the mean.
        own = [{name: (value - 0.2 * value.grad).detach() for name, value in each.items()} for each in own]
    expected = shared | {"1.running_mean": mean, "1.running_var": var}
    near(expected, result, rtol=1e-9, atol=1e-12)
    for node, each in zip((1, 2), own, strict=True):
        near(each, clients[node].model.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["FedPer", "FedBN", "SiloBN"])
def test_fixbn_around_it_freezes_the_statistics_of_each_client(federation: Federations, method: str) -> None:
    make, local = METHODS[method]
    fed, ends = federation((8, 12), dtype=torch.float64), []
    for rounds in (2, 4):
        app, clients = replaced(fed)
        FixBN(make("average"), freeze_round=2).start(fed.grid(app), fed.arrays(), num_rounds=rounds)
        ends.append([client.model.state_dict() for client in clients.values()])
    for before, after in zip(*ends, strict=True):
        near({key: before[key] for key in STATISTICS}, after)
        assert differing(before, after) - COUNTER == ALL - STATISTICS
    assert differing(*ends[1]) == local


def test_a_client_that_would_have_to_set_some_statistics_after_the_freeze_raises_an_error(
    federation: Federations,
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
        )

    fed = federation((8, 12), model=net)
    FixBN(FedAvg(kept=["3"]), freeze_round=1).start(fed.grid(), fed.arrays(), num_rounds=2)  # all trained before
    with pytest.raises(RunFailed, match=r"first trains after the freeze.*own '3.running_mean', while '1.running_mean'"):
        FixBN(FedAvg(kept=["3"]), freeze_round=0).start(fed.grid(), fed.arrays(), num_rounds=2)


@pytest.mark.parametrize("names", [["last"], ["affine"], ["statistics"]])
@pytest.mark.parametrize("global_kept", ["average", "initial"])
def test_around_it_others_change_the_shared_part_only(
    federation: Federations, names: list[str], global_kept: Any
) -> None:
    """Secure's rounding aside, and without noise and clipping that Private would add, the result is FedAvg's."""
    fed = federation((8, 12), dtype=torch.float64, lr=0.05)
    rule = functools.partial(FedAvg, kept=names, global_kept=global_kept, fraction_evaluate=0.0)
    plain = unpack(rule().start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
    for around, tolerance in (
        (FixBN(rule(), freeze_round=2), 0.0),
        (MeanStatistics(rule()) if (names, global_kept) != (["statistics"], "initial") else rule(), 0.0),
        (Secure(rule()), 1e-6),
    ):
        found = unpack(around.start(fed.grid(), fed.arrays(), num_rounds=2).arrays)
        for key, value in plain.items():
            np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance, err_msg=f"{around} {key}")


def test_private_releases_nothing_of_kept_layers_that_are_not_sent(federation: Federations) -> None:
    fed = federation((8, 12))
    rule = Private(FedAvg(kept=["last", "statistics"], global_kept="initial"), noise=1.0, noise_seed=1)
    result, first = unpack(rule.start(fed.grid(), fed.arrays(), num_rounds=2).arrays), unpack(fed.arrays())
    for key in ALL:
        assert (result[key].tobytes() == first[key].tobytes()) == (key in HEAD | STATISTICS), key
    assert rule.memory.total == 2.0  # two rounds, weights only
    Private(FedAvg(kept=["affine"]))  # they may be sent


@pytest.mark.parametrize(
    ("rule", "stored", "local"),
    [(functools.partial(FedAvg, kept=["last"]), "global_kept", HEAD), (FedBN, "global_norm", AFFINE | STATISTICS)],
)
def test_bounds_do_not_shorten_updates_by_what_stays(
    federation: Federations, rule: Any, stored: str, local: set[str]
) -> None:
    """The server may store the clients' own arrays or not: none of them uses what it stores."""
    fed, options = federation((8, 24, 16)), {"fraction_evaluate": 0.0, "bounds": {"clip_norm": 0.05}}
    average, initial = (last_model(fed, rule(**options, **{stored: kind}), 4) for kind in ("average", "initial"))
    near({key: average[key] for key in ALL - local}, initial)


def test_a_run_s_models_of_clients_differ_in_what_stays_and_only_there(tmp_path: Path) -> None:
    strategy = {"name": "FedAvg", "kept": ["last"]}
    result = run("quick", out=tmp_path, rounds=2, strategy=strategy, progress=False, engine={"workers": 0})
    one, two = (result.model(client=client).state_dict() for client in (0, 1))
    different = {key for key in differing(one, two) if "num_batches" not in key}
    assert different == selected(roles(result.model(client=0)), ["last"])
    assert "clients_own_accuracy" in result.summary.values


def test_explain_counts_what_stays(federation: Federations) -> None:
    file = "{data: {name: digits}, model: {name: mlp, norm: bn}, strategy: {name: FedAvg, kept: [last]}}"
    (found,) = explain(load_experiment(file, []))
    assert found.down == ("weights", "affine", "statistics")
    assert found.up == ("weights", "affine", "statistics", "own weights")
    assert len(found.model["own weights"]) == 2


def test_a_server_of_another_model_names_the_array(federation: Federations) -> None:
    """The client finds what stays in its own model, and compares."""
    fed = federation((8, 12))
    arrays = {key: value for key, value in unpack(fed.arrays()).items() if not key.startswith("4")}
    with pytest.raises(RunFailed, match=r"did not send '4.weight' \(2 keys of weights are missing\)"):
        FedAvg(kept=["affine"]).start(fed.grid(), pack(arrays), num_rounds=1)
    assert Role.WEIGHTS in roles(arrays).values()
