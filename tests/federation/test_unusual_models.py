"""Models with unusual dtypes, modules and names: they train with every rule, or one line names the module or key."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, client_app, run
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment, parse_yaml
from fedbn_flwr.experiment.preview import explain
from fedbn_flwr.experiment.registry import build_strategy
from fedbn_flwr.messages.arrays import arrays_in, pack, size_of, unpack
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.trained import global_model
from tests.support.fixtures import Batches
from tests.support.marks import slow_except
from tests.support.sessions import carried_out, outcome

RULES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FixBN": {"freeze_round": 1},
    "FedTAN": {"min_batch": 1},
    "FedBN": {},
    "Scaffold": {},
}


class As(nn.Module):
    """The network in another dtype; examples and logits stay float32."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.to(self.dtype))
        return logits.float()


class WithBuffers(nn.Module):
    """A network with buffers of its own, which do not change its output."""

    def __init__(self, network: nn.Module, **buffers: Tensor) -> None:
        super().__init__()
        self.network = network
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits + sum(buffer.float().sum() for buffer in self.buffers(recurse=False)) * 0


class Gate(nn.Module):
    """No norm, although its parameters have the names of a norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.running_mean, self.running_var = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.full((4,), -1.0))

    def forward(self, images: Tensor) -> Tensor:
        return images + self.running_mean[:, None, None]


def net(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(4)) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def half_of_it(dtype: torch.dtype) -> nn.Module:
    """Convolution and linear layer in `dtype`, batch norm in float32, as mixed precision has it."""
    model = net()
    first, last = As(model[0], dtype), As(nn.Sequential(model[3], model[4]), dtype)
    return nn.Sequential(first, model[1], model[2], last)


def tracked() -> nn.Module:
    return nn.InstanceNorm2d(4, affine=True, track_running_stats=True)


def tracked_first() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), tracked())


MIXED = "a batch norm that tracks nothing, and one"
TRAIN: dict[str, Callable[[], nn.Module]] = {
    "bfloat16": lambda: As(net(), torch.bfloat16),
    "float16": lambda: As(net(), torch.float16),
    "float64": lambda: As(net(), torch.float64),
    "bfloat16 and float32": lambda: half_of_it(torch.bfloat16),
    "float16 and float32": lambda: half_of_it(torch.float16),
    "a bfloat16 buffer": lambda: WithBuffers(net(), scale=torch.tensor([0.1, 0.7]).bfloat16()),
    "integers and booleans": lambda: WithBuffers(net(), mask=torch.tensor([True, False]), at=torch.arange(3)),
    "a running_var by itself": lambda: WithBuffers(net(), running_var=torch.full((3,), -2.0)),
    "a name that ends in running_var": lambda: WithBuffers(
        net(), log_running_var=torch.full((3,), -2.0), running_mean_of_loss=torch.tensor(-1.0)
    ),
    "a scalar running_var": lambda: WithBuffers(net(), running_var=torch.tensor(-2.0)),
    "tracked instance norm and batch norm": lambda: nn.Sequential(tracked_first(), *net()[1:]),
    "data parallel": lambda: nn.DataParallel(net()),
    MIXED: lambda: nn.Sequential(net()[0], nn.BatchNorm2d(4, track_running_stats=False), *net()[1:]),
    "computed gamma": lambda: net(lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(4))),
    "sync batch norm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(net()),
    "channels last": lambda: net().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


def federation(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, LocalGrid]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        images = [torch.randn(2, size, 2, 4, 4) * (1 + size) + size for size in (4, 6)]
    data = [Batches([(batch, torch.arange(len(batch)) % 3) for batch in batches]) for batches in images]

    def make_client(context: Any) -> BNClient:
        own = data[int(context.node_config["partition-id"])]
        return BNClient(copy.deepcopy(model), own, own, lr=0.05, context=context, **options)

    return model, LocalGrid(client_app(make_client), len(data))


def trained(model: nn.Module, grid: LocalGrid, rule: str, rounds: int = 2, **settings: Any) -> list[ArrayRecord]:
    """The global model before the first round and after each."""
    strategy = build_strategy({"name": rule, **RULES[rule], **settings})
    models: list[ArrayRecord] = []
    strategy.start(
        grid, pack(initial_arrays(model)), num_rounds=rounds, evaluate_fn=lambda _, arrays: models.append(arrays)
    )
    assert len(models) == rounds + 1
    return models


# FedBN refuses the mixed one.
@pytest.mark.parametrize(("name", "rule"), sorted({*itertools.product(TRAIN, RULES)} - {(MIXED, "FedBN")}))
def test_a_model_trains_travels_and_is_stored(name: str, rule: str, tmp_path: Path) -> None:
    model, grid = federation(TRAIN[name])
    models = trained(model, grid, rule)
    before, after = unpack(models[0]), unpack(models[-1])
    changed = [key for key in before if before[key].tobytes() != after[key].tobytes()]
    assert any(role is Role.WEIGHTS and key in changed for key, role in roles(before).items())
    for key, value in after.items():
        assert (value.dtype, value.shape) == (before[key].dtype, before[key].shape), key
        assert np.isfinite(value).all(), key
    of_client = roles(model)
    statistics = {key for key, role in of_client.items() if role is Role.STATISTICS}
    assert {key for key, role in roles(before).items() if role is Role.STATISTICS} == statistics
    RunFolder(tmp_path).write_model(after, 1)
    stored = load_file(tmp_path / "model.safetensors")
    assert {key: value.tobytes() for key, value in stored.items()} == {k: value.tobytes() for k, value in after.items()}


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"FedTAN"}))
def test_instance_norm_that_tracks_is_a_norm_to_server_and_client(rule: str) -> None:
    model, grid = federation(lambda: net(tracked))
    models = [unpack(arrays) for arrays in trained(model, grid, rule, rounds=3)]
    moves = [models[k]["1.running_mean"].tobytes() != models[k - 1]["1.running_mean"].tobytes() for k in (1, 2, 3)]
    assert moves == ([True, False, False] if rule == "FixBN" else [True, True, True])


def test_fedtan_refuses_a_model_whose_only_statistics_are_of_instance_norm() -> None:
    model, grid = federation(lambda: net(tracked))
    with pytest.raises(RunFailed, match=r"FedTAN needs a layer that .* this client's model has none"):
        trained(model, grid, "FedTAN")


def with_quantised_linear() -> nn.Module:
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        model = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, torch.qint8)
    torch.backends.quantized.engine = engine
    return model  # type: ignore[no-any-return]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, as a FutureWarning since 2.15
        return nn.Sequential(torch.jit.script(net()))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (
        lambda: nn.Sequential(net()[:4], nn.LazyLinear(3)),
        "'1' is a LazyLinear of unknown size; call the model on a batch before you pass it on",
    ),
    "lazy norm": (lambda: net(nn.LazyBatchNorm2d), "'1' is a LazyBatchNorm2d of unknown size"),
    "quantised": (with_quantised_linear, "'4._packed_params.*quantise the trained model"),
    "a quantised buffer": (
        lambda: WithBuffers(net(), table=torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "'table' of the model is qint8",
    ),
    "complex parameter": (
        lambda: nn.ParameterDict({"wave": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}),
        "'wave' of the model is complex64 .* Store torch.view_as_real",
    ),
    "complex buffer": (
        lambda: WithBuffers(net(), wave=torch.zeros(2, dtype=torch.complex128)), "'wave' of the model is complex128"
    ),
    "float8": (lambda: WithBuffers(net(), table=torch.ones(2).to(torch.float8_e4m3fn)), "'table' .* float8_e4m3fn"),
    "sparse": (lambda: WithBuffers(net(), table=torch.eye(2).to_sparse()), "float32 .sparse_coo"),
    "extra state": (lambda: nn.Sequential(WithExtraState(2, 3)), "'0._extra_state' of the model is a dict"),
    "script": (scripted, "'0' is a RecursiveScriptModule"),
    "parameters with a norm's names": (
        lambda: nn.Sequential(net(), Gate()), "'1.running_mean' of the model is not a statistic of a norm layer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_server_and_client_before_training(name: str) -> None:
    make, message = REFUSED[name]
    for refuse in (initial_arrays, ModelTensors):
        with pytest.raises(SettingsError, match=message) as refused:
            refuse(make())
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"running_mean": torch.zeros(2), "running_var": torch.full((2,), -1.0)}, "'running_var' has negative values"),
        ({"mask": torch.tensor([0.0, -torch.inf])}, "1 of 2 values that are not finite. If it is a mask, register"),
        (
            {"mask": torch.tensor([0.0, -1.7e308], dtype=torch.float64)},
            "at most 4.7e.153 in float64. If it is a mask, register",
        ),
    ],
)
def test_a_run_does_not_begin_with_values_for_which_every_reply_would_be_refused(
    buffers: dict[str, Tensor], message: str
) -> None:
    model, grid = federation(lambda: WithBuffers(net(), **buffers))
    with pytest.raises(SettingsError, match=message):
        trained(model, grid, "FedAvg")


def test_the_server_refuses_complex_arrays_of_other_programs() -> None:
    strategy = build_strategy({"name": "FedAvg"})
    _, grid = federation(net)
    with pytest.raises(SettingsError, match="'wave' is complex64; expected real numbers"):
        strategy.start(grid, ArrayRecord({"wave": torch.zeros(2, dtype=torch.complex64)}), num_rounds=1)


def test_different_values_of_one_tensor_are_refused() -> None:
    """`Private` adds noise to each key, and the model would keep the last one."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tensors, arrays = ModelTensors(model), dict(initial_arrays(model))
    tensors.load_all(arrays, {})
    arrays["1.weight"] = arrays["1.weight"] + 1
    with pytest.raises(MessageError, match=r"different values for '0\.weight' and '1\.weight', which are one tensor"):
        tensors.load_all(arrays, {})


# --- bfloat16 ---


def test_bfloat16_travels_as_float32_and_returns_without_a_change_of_any_bit() -> None:
    model = half_of_it(torch.bfloat16)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    model.register_buffer("every", every[every.isfinite()].clone())
    arrays = initial_arrays(model)
    assert {value.dtype for value in arrays.values()} == {np.dtype("float32")}
    assert size_of(unpack(pack(arrays)))[1] == 4 * sum(value.size for value in arrays.values())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = ModelTensors(model)
    records = parse(dump(RecordDict({"arrays": pack(tensors.values_of(arrays))})), RecordDict)
    stored = unpack(arrays_in(records)["arrays"])
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    tensors.load(stored)
    for key, value in model.state_dict().items():
        if key in arrays:
            assert value.dtype is before[key].dtype
            assert value.equal(before[key]), key


def test_frozen_statistics_of_bfloat16_keep_the_server_s_bits() -> None:
    """The mean is float32, so a client returns it rounded, which is no change."""
    model, grid = federation(lambda: As(net(), torch.bfloat16))
    models = [unpack(arrays) for arrays in trained(model, grid, "FixBN", rounds=3)]
    key = "network.1.running_mean"
    rounded = torch.from_numpy(models[1][key].copy()).bfloat16().float().numpy()
    assert models[1][key].tobytes() != rounded.tobytes()
    assert models[1][key].tobytes() == models[3][key].tobytes() != models[0][key].tobytes()


def in_bfloat16(num_classes: int) -> nn.Module:
    """For `model.name`, with the embedded digits."""
    layers = (nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, num_classes))
    return As(nn.Sequential(*layers), torch.bfloat16)


EXPERIMENT = """
rounds: 3
clients: 2
model: {name: "tests.federation.test_unusual_models:in_bfloat16"}
train: {lr: 0.1, momentum: 0.9, keep_momentum: true, steps: 3, batch_size: 32}
evaluate: {every: 1, clients: true}
engine: {device: cpu, checkpoint_every: 1}
"""


@pytest.mark.parametrize("rule", ["{name: FixBN, freeze_round: 1}", "{name: FedBN}"])
def test_an_experiment_in_bfloat16_counts_its_bytes_and_resumes_to_the_same_bits(rule: str, tmp_path: Path) -> None:
    experiment = load_experiment(EXPERIMENT, [f"strategy={rule}"])
    (explained,) = explain(experiment)
    for name, stop in (("whole", 0), ("parts", 1), ("parts", 0)):
        carried_out(experiment, tmp_path / name, stop)
        assert len(RunFolder(tmp_path / name).history()) == (stop or 3)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "parts")
    sent = {role for role in explained.model if role != "counter" and (role == "weights" or "FixBN" in rule)}
    assert RunFolder(tmp_path / "whole").history()[0]["bytes_down"] == 2 * explained.bytes_of(sent)
    trained = global_model(RunFolder(tmp_path / "whole"), "model.safetensors")
    assert {value.dtype for value in trained.parameters()} == {torch.bfloat16}


@dataclass
class Output(OrderedDict[str, Any]):
    """As the models of the package transformers return it."""

    logits: Tensor
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class OfTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = net()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        return Output(self.network(pixel_values))


@pytest.mark.parametrize("loss", ["default", "smoothed", "own"])
@pytest.mark.parametrize("rule", RULES)
def test_the_logits_of_a_model_s_output_are_found(rule: str, loss: str) -> None:
    """The model trains and is evaluated as the one inside it, which returns the logits."""
    losses: dict[str, Any] = {"default": {}, "smoothed": {"loss": make_loss("cross_entropy", label_smoothing=0.1)}}
    own = {"loss": lambda outputs, labels: F.cross_entropy(outputs.logits, labels)}
    results = []
    for model, options in [(OfTransformers(), losses.get(loss, own)), (OfTransformers().network, losses.get(loss, {}))]:
        first, grid = federation(lambda model=model: model, metrics=["auc", top_score], channels_last=False, **options)
        strategy: Any = build_strategy({"name": rule, **RULES[rule]})
        results.append(strategy.start(grid, pack(initial_arrays(first)), num_rounds=2))
    wrapped, plain = results
    for key, value in unpack(plain.arrays).items():
        np.testing.assert_array_equal(unpack(wrapped.arrays)[f"network.{key}"], value, key)
    assert wrapped.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert {"loss", "accuracy", "auc", "top-score"} <= set(wrapped.evaluate_metrics_clientapp[2])


def top_score(logits: Tensor, labels: Tensor) -> float:
    return float(logits.max())


class Auxiliary(nn.Module):
    """In training mode the logits and those of a head that shares their layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head, self.other = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.body(images)
        logits: Tensor = self.head(features)
        return (logits, self.other(features)) if self.training else logits


class Plain(Auxiliary):
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


class Quiet(Plain):
    """Its `train` returns nothing."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


def test_an_experiment_takes_a_network_whose_train_returns_nothing(tmp_path: Path) -> None:
    ends = []
    for name in ("Plain", "Quiet"):
        model, strategy = {"name": f"{__name__}:{name}"}, {"name": "FedTAN", "min_batch": 1}
        result = run(EXPERIMENT, model=model, strategy=strategy, rounds=2, out=tmp_path / name, progress=False)
        ends.append(load_file(result.folder / "model.safetensors"))
        assert not result.model().training
    plain, quiet = ends
    assert all(quiet[key].tobytes() == value.tobytes() for key, value in plain.items())


def of_the_first(outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return nn.functional.cross_entropy(outputs, labels)
    return nn.functional.cross_entropy(outputs[0], labels) + 0 * outputs[1].sum()


def of_both(outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return nn.functional.cross_entropy(outputs, labels)
    return sum(nn.functional.cross_entropy(each, labels) for each in outputs) / 2  # type: ignore[return-value]


@pytest.mark.parametrize(
    "rule",
    slow_except({"{name: FedTAN, min_batch: 1}"}, ["{name: FixBN, freeze_round: 1}", "{name: FedTAN, min_batch: 1}"]),
)
def test_a_loss_of_one_s_own_takes_what_a_network_returns_in_training_mode(rule: str, tmp_path: Path) -> None:
    def ends(model: str, loss: str) -> dict[str, Any]:
        out = tmp_path / f"{model}-{loss}"
        changes = {"model": {"name": f"{__name__}:{model}"}, "train": {"loss": f"{__name__}:{loss}"}}
        run(EXPERIMENT, **changes, strategy=parse_yaml(rule), rounds=2, out=out, progress=False)
        (file,) = out.glob("*/model.safetensors")
        return load_file(file)

    def equal(left: dict[str, Any], right: dict[str, Any], keys: str) -> bool:
        return all(np.array_equal(left[key], right[key]) for key in left if key.startswith(keys))

    first, plain, both = (
        ends("Auxiliary", "of_the_first"),
        ends("Plain", "of_the_first"),
        ends("Auxiliary", "of_both"),
    )
    assert equal(first, plain, "")
    assert not equal(first, both, "body")
    assert not equal(first, both, "other")
