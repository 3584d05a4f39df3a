"""One table that every rule must pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from flwr.app import ArrayRecord, Message
from torch import nn

from fedbn_flwr import BNClient, LocalGrid, client_app, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.registry import STRATEGIES, build_strategy
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import HBN, FedAvg, FedBN, FedBS, FedProx, FedTAN, FedTANII, FedWon, FixBN, HeteroBN, SiloBN
from tests.support.federations import Changed, near, same
from tests.support.fixtures import Batches
from tests.support.marks import slow_except

# The settings that a rule requires, and the normaliser that it is for.
SPECS: dict[str, dict[str, Any]] = {
    "FBN": {"name": "FixBN", "freeze_round": 0, "refresh": 0.1},
    "FedPer": {"name": "FedAvg", "kept": ["last"]},
    "FixBN": {"freeze_round": 1},
    "FedTANII": {"fedtan_rounds": 1},
    "FedRep": {"head_epochs": 1},
    "Private": {"noise_seed": 0},
}
NORMS = {"HeteroBN": "sbn", "FedWon": "won", "HBN": "hbn"}
EVERY = sorted({*STRATEGIES, *SPECS})
every_rule = pytest.mark.parametrize("rule", EVERY)


# Rules that look for norm layers among the modules, with the settings that make them do so in the first round. The
# others have the clients of FedAvg, or combine these.
SEARCHING: dict[str, dict[str, Any]] = {
    "FedAvgGlobalStats": {},
    "FedBN": {},
    "FedTAN": {},
    "FedWon": {},
    "FixBN": {"freeze_round": 0},
    "HBN": {},
    "HeteroBN": {},
    "SiloBN": {},
}


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": tiny,
    "resnet18": lambda: torchvision.models.resnet18(num_classes=3),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=3, width_mult=0.1),
    # A few of densenet121's layers; the names of its norms follow no scheme.
    "densenet": lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=3),
}


class Case:
    """Three clients of different sizes, and a model with the rule's normaliser."""

    def __init__(
        self, rule: str, model: str = "tiny", side: int = 6, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = convert_norm(MODELS[model](), NORMS.get(rule, "bn")).to(dtype)
            images = [torch.randn(2, n, 3, side, side).to(dtype) * (1 + n) + n for n in (3, 4, 6)]
            self.data = [Batches([(each, torch.arange(len(each)) % 3) for each in client]) for client in images]
        self.model, self.data = (
            self.model.to(dtype),
            [Batches([(x.to(dtype), y) for x, y in each]) for each in self.data],
        )
        self.spec = {"name": rule, **SPECS.get(rule, {}), **settings}
        self.tensors: dict[
            int, ModelTensors
        ] = {}  # of each node: a copy for each message would take a fifth of the time

    def strategy(self) -> Any:
        return build_strategy(self.spec, fraction_evaluate=0.0, min_batch=1)

    def make_client(self, context: Any) -> BNClient:
        data = self.data[int(context.node_config["partition-id"])]
        if context.node_id not in self.tensors:
            self.tensors[context.node_id] = ModelTensors(copy.deepcopy(self.model))
        return BNClient(self.tensors[context.node_id], data, data, lr=0.05, momentum=0.9, context=context)

    def grid(self, make: Any = None, **options: Any) -> LocalGrid:
        return LocalGrid(client_app(make or self.make_client), 3, **options)

    def arrays(self) -> ArrayRecord:
        state, role_of = self.model.state_dict(), roles(self.model)
        return pack({k: v.numpy().copy() for k, v in state.items() if role_of[k] is not Role.COUNTER})

    def run(self, rounds: int = 3, grid: Any = None, strategy: Any = None) -> dict[str, np.ndarray]:
        models: list[ArrayRecord] = []
        (strategy or self.strategy()).start(
            grid or self.grid(), self.arrays(), num_rounds=rounds, evaluate_fn=lambda _, arrays: models.append(arrays)
        )
        return unpack(models[-1])


@functools.cache
def plain(rule: str, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """The model of an ordinary run, which tests compare with others."""
    return Case(rule, dtype=dtype).run()


@every_rule
def test_a_run_keeps_keys_shapes_and_dtypes_and_moves_the_model(rule: str) -> None:
    before, after = unpack(Case(rule).arrays()), plain(rule)
    assert list(after) == list(before)
    for key, value in after.items():
        assert (value.shape, value.dtype) == (before[key].shape, before[key].dtype)
        assert np.isfinite(value).all()
        if key.endswith("running_var"):
            assert value.min() >= 0
    if rule != "Standalone":  # its server's model does not change
        assert after["0.weight"].tobytes() != before["0.weight"].tobytes()


@every_rule
def test_neither_the_order_of_replies_nor_node_ids_matter(rule: str) -> None:
    """In float64: rounding to float32 would hide another order of the sums."""
    case = Case(rule, dtype=torch.float64)
    back = Changed(case.grid(node_ids=[77, 5, 31]), lambda _, replies: replies[::-1])
    assert same(plain(rule, torch.float64), case.run(grid=back))


@every_rule
def test_a_second_run_of_a_strategy_and_its_nodes_begins_anew(rule: str) -> None:
    case = Case(rule)
    grid, strategy = case.grid(), case.strategy()
    for _ in range(2):
        assert same(plain(rule), case.run(grid=grid, strategy=strategy))


@pytest.mark.parametrize("rule", slow_except({"FedAvg", "FedBN", "FedTAN", "FixBN", "Scaffold"}, EVERY))
def test_the_same_run_in_workers_is_the_same(rule: str) -> None:
    case = Case(rule)
    with case.grid(workers=2) as grid:  # each with one thread
        assert same(case.run(grid=case.grid(threads=1)), case.run(grid=grid))


@every_rule
def test_replies_are_not_modified(rule: str) -> None:
    case, kept = Case(rule), list[tuple[Message, list[str], bytes]]()

    def print_of(message: Message) -> bytes:
        records = message.content.array_records
        return b"".join(array.data for record in records.values() for array in record.values())

    def watch(_: Any, replies: list[Message]) -> list[Message]:
        kept.extend((reply, list(reply.content), print_of(reply)) for reply in replies)
        return replies

    case.run(2, Changed(case.grid(), watch))
    assert kept
    for reply, records, content in kept:
        assert (list(reply.content), print_of(reply)) == (records, content)


@every_rule
def test_a_client_that_fails_in_a_round_is_survived(rule: str) -> None:
    case = Case(rule)

    def make(context: Any, config: Any) -> BNClient:
        if context.node_config["partition-id"] == 1 and config.get("server-round") == 2:
            raise OSError("no space left")
        return case.make_client(context)

    after = case.run(grid=case.grid(make))
    assert all(np.isfinite(value).all() for value in after.values())


@every_rule
@pytest.mark.parametrize("factor", slow_except({10}, [10, 0.1]))
def test_weights_have_no_scale(rule: str, factor: float) -> None:
    """A common factor in all clients' numbers of examples changes nothing."""
    case = Case(rule, dtype=torch.float64)

    def scale(_: Any, replies: list[Message]) -> list[Message]:
        for metrics in [each for reply in replies for each in reply.content.metric_records.values()]:
            if "num-examples" in metrics:
                metrics["num-examples"] = metrics["num-examples"] * factor
        return replies

    near(plain(rule, torch.float64), case.run(grid=Changed(case.grid(), scale)), rtol=1e-9, atol=1e-11)


# A masked reply looks like noise to the server; its client checks it (test_secure.py).
@pytest.mark.parametrize("rule", [rule for rule in EVERY if rule != "Secure"])
def test_a_poisoned_reply_never_reaches_the_model(rule: str) -> None:
    case = Case(rule)

    def poison(_: Any, replies: list[Message]) -> list[Message]:
        for reply in replies:
            for name, record in reply.content.array_records.items() if reply.metadata.src_node_id == 2 else ():
                reply.content[name] = pack({key: np.full_like(v, np.nan) for key, v in unpack(record).items()})
        return replies

    after = case.run(grid=Changed(case.grid(), poison))
    assert all(np.isfinite(value).all() for value in after.values())


@pytest.mark.parametrize("model", slow_except({"mobilenet_v2"}, ["resnet18", "mobilenet_v2", "densenet"]))
@pytest.mark.parametrize("rule", slow_except({"FedBN", "FixBN", "FedTAN"}, SEARCHING))
def test_rules_find_the_norms_of_deep_networks(rule: str, model: str) -> None:
    case = Case(rule, model, side=32, **SEARCHING[rule])
    before, after = unpack(case.arrays()), case.run(1)
    assert list(after) == list(before)
    assert all(np.isfinite(value).all() for value in after.values())


@every_rule
def test_the_ledger_sees_as_many_messages_up_as_down(rule: str) -> None:
    case = Case(rule)
    metered = MeteredGrid(case.grid())
    case.run(2, metered)
    traffic = metered.take()
    # A message without arrays ends its exchanges of a round; it is no exchange of its own.
    ends = 2 if rule == "FedAvgGlobalStats" else 0
    assert traffic.messages_down == traffic.messages_up == 3 * (traffic.communication_rounds + ends)
    assert traffic.communication_rounds >= 2


@every_rule
def test_integers_and_scalars_survive_the_mean(rule: str) -> None:
    """The server's model may have scalars and integers, which the mean returns unchanged."""
    case = Case(rule)
    case.model.register_buffer("steps", torch.tensor(16))
    case.model.register_buffer("scale", torch.tensor(0.3, dtype=torch.float64))
    after = case.run(2)
    assert (after["steps"].shape, after["steps"].dtype, int(after["steps"])) == ((), np.int64, 16)
    assert after["scale"].shape == ()
    assert float(after["scale"]) == 0.3 or rule == "Private"  # which adds noise


# Arguments that mean nothing, and the words that say so.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (partial(FedAvg, fraction_train=2.0), "fraction_train is 2.0; expected a number >= 0 and <= 1"),
    (partial(FedAvg, min_train_nodes=-1), "min_train_nodes is -1; expected a number of nodes"),
    (partial(FedAvg().start, None, ArrayRecord(), num_rounds="3"), "num_rounds is '3'; expected an integer"),
    (partial(FedAvg, FedAvg()), "fraction_train is .*FedAvg object.*; expected a number >= 0 and <= 1"),
    (partial(FedBN, global_norm="mean"), "global_norm is 'mean'; expected 'average' or 'initial'"),
    (partial(FedBS, epsilon=-0.1), "epsilon is"),
    (partial(FedBS, epsilon=float("nan")), "epsilon is"),
    (partial(FedBS, patience=0), "patience is"),
    (partial(FedBS, proximal_mu=-1), "proximal_mu is"),
    (partial(FedProx, proximal_mu=-0.1), r"proximal_mu is -0\.1"),
    (partial(FedTAN, exchange="both"), "exchange is 'both'"),
    (partial(FedTAN, weights="none"), "weights is 'none'"),
    (partial(FedTAN, min_batch=0), "min_batch is 0; expected a number of examples"),
    (partial(FedTAN, exchange_timeout=7200), "exchange_timeout is 7200; expected seconds, .*up to 3600"),
    (partial(FedTAN, weighted_by_key="w"), "weighted_by_key is 'w', but the exchanges of FedTAN weight .* 'num-exa"),
    (partial(FedTAN, weights="batch", weighted_by_key="num-examples"), "weight clients by 'batch-examples'"),
    (partial(FedTANII, fedtan_rounds=-1), "fedtan_rounds is -1"),
    (partial(FedTANII, weighted_by_key="batch-examples"), "weight clients by 'num-examples'"),
    (partial(FedWon, clip=-0.1), r"clip is -0\.1; expected a number >= 0 or None"),
    *(
        (partial(FixBN, FedAvg(), freeze_round=at), "freeze_round is")
        for at in (-1, -0.5, 1.5, True, "half", None, float("nan"))
    ),
    *(
        (partial(FixBN, FedAvg(), freeze=only), r"freeze is .* one or both of \['affine', 'statistics'\]")
        for only in ([], ["weights"], "statistic", ["statistics", "counter"])
    ),
    (partial(HeteroBN, statistics="global"), "expected 'batch', 'query' or 'pooled'"),
    (partial(HeteroBN, statistics=None), "expected 'batch', 'query' or 'pooled'"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_arguments_that_mean_nothing_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((SettingsError, TypeError), match=words):
        make()


NO_NORM = r", and no array of the model is a batch norm's .* add batch norm to the network or, .* send the whole state "
NO_NORM += r"dict: ArrayRecord\(model.state_dict\(\)\). .* set model.norm=bn. Or use "


@pytest.mark.parametrize(
    ("make", "norm", "words"),
    [
        (FedBN, "gn", rf"FedBN keeps batch norm \(affine and statistics\) on the clients{NO_NORM}FedAvg"),
        (SiloBN, "none", rf"SiloBN keeps batch norm \(statistics\) on the clients{NO_NORM}FedAvg"),
        (FedTAN, "gn", f"FedTAN exchanges batch norm's statistics{NO_NORM}FedAvg"),
        (partial(FixBN, FedAvg()), "gn", f"FixBN freezes batch norm{NO_NORM}the base strategy alone"),
        (partial(FixBN, FedAvg()), "parameters", f"FixBN freezes batch norm{NO_NORM}the base strategy alone"),
        (HBN, "bn", "HBN trains hybrid batch norm, and the model has none; use model.norm=hbn, or convert_norm.*"),
        (HeteroBN, "bn", r"HeteroBN .*, but the model tracks .* \('1.running_mean'\); use model.norm=sbn, or .*"),
        (FedWon, "bn", r"FedWon is .*, but the model has batch norm \('1.running_mean'\); use a model with .*=won, .*"),
    ],
)
def test_strategies_name_what_their_model_lacks_before_training(make: Any, norm: str, words: str) -> None:
    """The parameters alone are not the whole model."""
    state = dict(tiny().named_parameters()) if norm == "parameters" else convert_norm(tiny(), norm).state_dict()
    with pytest.raises(SettingsError, match=f"^{words}$"):
        make().begin(2, pack({key: value.detach().numpy() for key, value in state.items()}))
