"""From settings to objects: data and who holds it, model, strategy, and the client that a node runs."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr import seeding
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.model_tensors import ModelTensors, flatten_storage
from fedbn_flwr.client.training import CosineSchedule, StepSchedule
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.catalogue import CATALOGUE, find
from fedbn_flwr.data.load import DataSet, load
from fedbn_flwr.data.partition.registry import BY_CLASS, partition, share_test
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.models.build import build_model
from fedbn_flwr.norms.roles import computes_as_batch_norm
from fedbn_flwr.results.partition import PartitionCounts
from fedbn_flwr.strategies import build_strategy, check, has_global_model, replaces_norm

from . import settings
from .find import from_run_config, run_names
from .settings import Experiment, Settings


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device is 'cuda', but PyTorch finds no GPU here; use auto or cpu")
    return torch.device(name)


def resolve(run: Settings) -> Settings:
    """The run with what the catalogue says of its data filled in; what the file says stays."""
    data, entry = run.data, find(run.data.name)
    moments = entry is not None and entry.moments is not None
    if data.normalise == "official" and not moments:
        known = ", ".join(name for name, each in CATALOGUE.items() if each.moments is not None)
        raise SettingsError(
            f"data.normalise is 'official', but {data.name!r} has no official mean and deviation; use moments or unit "
            f"(official is known for {known})"
        )
    changes = {
        "size": data.size or (entry.size if entry else None),
        "normalise": data.normalise or ("official" if moments else "moments"),
        "augment": data.augment if data.augment is not None else (entry.augment if entry else ()),
        "fit": data.fit or (entry.fit if entry else "stretch"),
        "crop": data.crop or (entry.crop if entry else None),
    }
    return run.model_copy(update={"data": data.model_copy(update=changes)})


# What has no say in which images there are, or who holds them.
_PLAIN: Mapping[str, Any] = {"augment": None, "normalise": None, "pad": 2, "crop": None}


def load_data(data: settings.Data, device: str) -> DataSet:
    # Runs that differ in how the data is split or augmented share one copy of it.
    split = data.partition
    plain = data.model_copy(
        update={
            "partition": split if isinstance(split, settings.Natural) else settings.Iid(kind="iid"),
            **_PLAIN,
        }
    )
    return _loaded(plain, device)


@functools.lru_cache(maxsize=2)
def _loaded(data: settings.Data, device: str) -> DataSet:
    dataset = load(
        data.name,
        root=data.root,
        image=data.image,
        label=data.label,
        domain=data.domain,
        domains=data.domains,
        natural=data.partition.column if isinstance(data.partition, settings.Natural) else None,
        train=data.train,
        test=data.test,
        size=data.size,
        fit=data.fit,
        classes=data.classes,
        stream=data.stream,
        memory=data.memory,
        readers=data.readers,
    ).to(torch.device(device))
    for key, found in (("classes", dataset.classes), ("channels", dataset.channels)):
        if (given := getattr(data, key)) is not None and given != found:
            raise SettingsError(f"data.{key} is {given}, but {data.name!r} has {found} {key}")
    return dataset


@functools.lru_cache(maxsize=8)
def partition_of(data: settings.Data, clients: int, seed: int, device: str) -> list[Tensor]:
    dataset = load_data(data, device)
    options = data.partition.model_dump()
    kind, column = options.pop("kind"), options.pop("column", None)
    if dataset.dense and kind in BY_CLASS:
        raise SettingsError(
            f"data.partition.kind is {kind!r}, which goes by the class of each image, but {data.name!r} has a label "
            "for each pixel; use iid, domain or natural"
        )
    groups = dataset.natural if column is not None else dataset.domains
    return partition(dataset.train.labels.cpu(), dataset.classes, clients, seed, kind, groups=groups, **options)


@functools.lru_cache(maxsize=8)
def own_test(data: settings.Data, clients: int, seed: int, device: str) -> list[Tensor]:
    dataset = load_data(data, device)
    parts = partition_of(data, clients, seed, device)
    train, test = dataset.train.labels.cpu(), dataset.test.labels.cpu()
    if (domains := dataset.domains) is not None and domains.test is not None:
        # A class of one domain and that of another are two: what a client holds of each, it is tested on.
        train, test = train + dataset.classes * domains.train, test + dataset.classes * domains.test
    return share_test(parts, train, test, seed)


def rows_by_domain(dataset: DataSet) -> dict[str, Tensor]:
    """Indices of each domain's test images, by a name that can be part of a metric's."""
    domains = dataset.domains
    if domains is None or domains.test is None:
        return {}
    rows = {name: (domains.test == number).nonzero()[:, 0] for number, name in enumerate(domains.names)}
    return {re.sub(r"\W+", "_", name): found for name, found in rows.items() if len(found)}


def moments_of(run: Settings, dataset: DataSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation by which images are normalised."""
    if run.data.normalise == "unit":
        return (0.0,) * dataset.channels, (1.0,) * dataset.channels
    entry = find(run.data.name)
    if run.data.normalise == "official" and entry is not None and entry.moments is not None:
        if len(entry.moments[0]) != dataset.channels:
            raise SettingsError(
                f"data.normalise is 'official' with {len(entry.moments[0])} channels for {run.data.name!r}, but these "
                f"images have {dataset.channels}; use moments or unit"
            )
        return entry.moments
    return dataset.moments


@dataclass(frozen=True)
class Shape:
    """What a model must know of the images; a DataSet knows it too."""

    classes: int
    channels: int
    size: tuple[int, int]
    dense: bool  # whether each pixel has a label


def _shape_without_data(run: Settings) -> Shape:
    """As the experiment says it, for a server that has no data."""
    data = run.data
    missing = [f"data.{key}" for key in ("classes", "channels", "size") if getattr(data, key) is None]
    if missing:
        raise SettingsError(
            f"evaluate.server is false, so the server reads no data, and {', '.join(missing)} must be given, for "
            "instance data: {classes: 10, channels: 3, size: 32}"
        )
    assert data.classes is not None
    assert data.channels is not None
    assert data.size is not None
    size = (data.size, data.size) if isinstance(data.size, int) else data.size
    return Shape(data.classes, data.channels, size, dense=data.crop is not None)


def make_model(run: Settings, dataset: DataSet | Shape) -> nn.Module:
    """The run's model, its first weights a function of the seed."""
    classes = run.model.classes or dataset.classes
    if classes != dataset.classes:
        raise SettingsError(f"model.classes is {classes}, but {run.data.name!r} has {dataset.classes} classes")
    options = {"groups": run.model.groups, **run.model.brn.model_dump()}  # a norm takes its own
    with seeding.streams(seeding.seed_for(run.seed, "initial model"), torch.device("cpu")):
        return build_model(
            run.model.name,
            classes,
            run.model.norm,
            in_channels=dataset.channels,
            image_size=run.model.image_size or dataset.size,
            stem=run.model.stem,
            **options,
        )


def make_strategy(run: Settings) -> Strategy:
    # Everybody trains unless the file says otherwise; whether clients evaluate is `evaluate.clients`. A run begins with
    # all clients (experiment.check_nodes), and goes on without those that it loses.
    least = 1 if run.clients == 1 else 2
    _check_demands(run.strategy, run.clients)
    strategy = build_strategy(
        run.strategy,
        seed=run.seed,
        min_train_nodes=least,
        min_evaluate_nodes=least,
        min_available_nodes=least,
        node_timeout=run.engine.node_timeout,
    )
    check(strategy, run.rounds)
    if run.evaluate.clients is False and not has_global_model(strategy):
        raise SettingsError(
            f"evaluate.clients is false, but {strategy_name(run.strategy)} trains no global model, and only clients "
            "can be evaluated; leave evaluate.clients out"
        )
    return strategy


def _check_demands(spec: Mapping[str, Any], clients: int) -> None:
    """A round that needs more nodes than there are would wait for them, and end the run."""
    for key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if isinstance(needed := spec.get(key), int) and needed > clients:
            raise SettingsError(f"strategy.{key} of {spec.get('name')} is {needed}, but there are {clients} clients")
    if isinstance(base := spec.get("base"), Mapping):
        _check_demands(base, clients)


def strategy_name(spec: Mapping[str, Any]) -> str:
    base = spec.get("base")
    return f"{spec['name']}({strategy_name(base)})" if isinstance(base, Mapping) else str(spec["name"])


def learning_rate(run: Settings, server_round: int) -> float:
    schedule = run.train.schedule
    if schedule.kind == "cosine":
        return CosineSchedule(run.train.lr)(server_round, run.rounds)
    milestones = schedule.milestones if schedule.kind == "step" else ()
    return StepSchedule(run.train.lr, milestones, schedule.gamma)(server_round, run.rounds)


@dataclass(frozen=True)
class Prepared:
    """All that a run needs, made and checked before training starts."""

    run: Settings
    name: str
    dataset: DataSet | None  # None: the server has no data
    model: nn.Module
    strategy: Strategy
    device: torch.device


def prepare_run(run: Settings, name: str) -> Prepared:
    run = resolve(run)
    device = choose_device(run.engine.device)
    strategy = make_strategy(run)
    dataset = None
    if run.evaluate.server:
        dataset = load_data(run.data, str(device))
        partition_of(run.data, run.clients, run.seed, str(device))
        moments_of(run, dataset)
    shape = dataset or _shape_without_data(run)
    _check_labels(run, shape)
    model = make_model(run, shape).to(device)
    _check_norm(run, model, strategy)
    _try_model(run, model, shape, device)
    return Prepared(run, name, dataset, model, strategy, device)


def prepare(experiment: Experiment) -> list[Prepared]:
    """All runs, or one error that says what is wrong with one; what is quick to check is checked first."""
    names = run_names(experiment)
    for run in experiment.runs:
        make_strategy(run)
    return [prepare_run(run, name) for run, name in zip(experiment.runs, names, strict=True)]


def _check_labels(run: Settings, dataset: DataSet | Shape) -> None:
    """What a file says of crops fits the labels: one for each image, or one for each pixel."""
    name, cut = run.data.name, run.data.crop
    if not dataset.dense:
        if cut is not None:
            raise SettingsError(
                f"data.crop is {cut}, but {name!r} has one label for each image; it is for data with a label for each "
                "pixel (data.augment has crops of images: crop, resized_crop)"
            )
        return
    if moved := [each for each in run.data.augment or () if each != "flip"]:
        raise SettingsError(
            f"data.augment has {moved[0]!r}, but {name!r} has a label for each pixel, which would stay where it is; "
            "there are flip, and data.crop"
        )
    if cut is not None and cut > min(dataset.size):
        height, width = dataset.size
        raise SettingsError(f"data.crop is {cut}, but the images of {name!r} have {height}x{width} pixels")


def _check_norm(run: Settings, model: nn.Module, strategy: Strategy) -> None:
    if not replaces_norm(strategy):
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not computes_as_batch_norm(module):
            raise SettingsError(
                f"strategy {strategy_name(run.strategy)} computes batch norm over the clients' batches in place of "
                f"plain batch norm, but {name!r} of {run.model.name!r} is a {type(module).__name__}, whose own "
                "arithmetic would be lost; use model.norm: bn, or another strategy"
            )


def _try_model(run: Settings, model: nn.Module, dataset: DataSet | Shape, device: torch.device) -> None:
    """Two images through the model: a wrong size shows here rather than on a client."""
    model.eval()
    sizes = [dataset.size]
    if run.data.crop is not None:
        sizes.insert(0, (run.data.crop, run.data.crop))
    for height, width in dict.fromkeys(sizes):
        try:
            with torch.no_grad():
                # Two, as static batch norm has no variance of one value.
                logits = model(torch.zeros(2, dataset.channels, height, width, device=device))
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SettingsError(
                f"model.name={run.model.name!r} does not take the {dataset.channels}x{height}x{width} images of "
                f"{run.data.name!r}: {reason}"
            ) from None
        if isinstance(logits, Tensor) and logits.ndim == 4 and not dataset.dense:
            raise SettingsError(
                f"model.name={run.model.name!r} has an answer for each pixel, but {run.data.name!r} has one label for "
                "each image; use a model of images, such as resnet18, or data with a label for each pixel"
            )
        if isinstance(logits, Tensor) and logits.ndim == 2 and dataset.dense:
            raise SettingsError(
                f"model.name={run.model.name!r} has one answer for each image, but {run.data.name!r} has a label for "
                "each pixel; use a model of pixels, such as deeplabv3plus_mobilenet_v2"
            )
        expected = [2, dataset.classes, *((height, width) if dataset.dense else ())]
        if not isinstance(logits, Tensor) or list(logits.shape[: len(expected)]) != expected:
            found = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise SettingsError(
                f"model.name={run.model.name!r} answers a batch of 2 images with {found}; expected logits of shape "
                f"{expected}, as {run.data.name!r} has {dataset.classes} classes"
            )


def who_holds_what(experiment: Experiment) -> list[PartitionCounts]:
    """The partitions of an experiment, counted: one for each that its runs use, with the first seed of each."""
    found: dict[tuple[settings.Data, int], list[str]] = {}
    seeds: dict[tuple[settings.Data, int], int] = {}
    for run in map(resolve, experiment.runs):
        key = run.data.model_copy(update=_PLAIN), run.clients
        seeds.setdefault(key, run.seed)
        found.setdefault(key, []).append(run.label)
    held = []
    for (data, clients), labels in found.items():
        dataset = load_data(data, "cpu")
        parts = partition_of(data, clients, seeds[data, clients], "cpu")
        # Where each pixel has a label, images are counted, whatever is in them.
        classes = ("images",) if dataset.dense else dataset.class_names
        counts = [torch.bincount(dataset.train.labels[part], minlength=len(classes)).tolist() for part in parts]
        options = {key: value for key, value in data.partition.model_dump().items() if value is not None}
        words = [options.pop("kind"), *(f"{key}={value}" for key, value in options.items())]
        title = f"{data.name}: {', '.join(words)}, clients={clients}, seed={seeds[data, clients]}"
        if len(found) > 1:  # whose it is
            names = list(dict.fromkeys(labels))
            title += f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        held.append(PartitionCounts(title, classes, tuple(map(tuple, counts)), _names_of(data, dataset, parts)))
    return held


def _names_of(data: settings.Data, dataset: DataSet, parts: Sequence[Tensor]) -> tuple[str, ...]:
    """What the clients of a split by groups are called: the group of their images."""
    groups = {"domain": dataset.domains, "natural": dataset.natural}.get(data.partition.kind)
    return () if groups is None else tuple(groups.names[int(groups.train[part[0]])] for part in parts)


# --- the client's half -------------------------------------------------------


def make_client(context: Context, config: Mapping[str, Any]) -> BNClient:
    """The client of the node `context`, in the run that `config` names (the first, where it names none)."""
    experiment = from_run_config(context.run_config)
    names = run_names(experiment)
    name = str(config.get(protocol.RUN, names[0]))
    if name not in names:
        raise SettingsError(f"the server asks for the run {name!r}, this client's experiment has {names}")
    run = resolve(experiment.runs[names.index(name)])
    torch.set_num_threads(run.engine.threads)
    device = choose_device(run.engine.device)
    node = context.node_config
    client, clients = int(node.get("partition-id", -1)), int(node.get("num-partitions", run.clients))
    if clients != run.clients or not 0 <= client < clients:
        raise SettingsError(
            f"this node is partition-id={node.get('partition-id')} of num-partitions={clients}, the experiment has "
            f'clients={run.clients}; set --node-config "partition-id=... num-partitions={run.clients}"'
        )
    if "data" in node or "domain" in node:  # a site that has its own: all of it is this client's
        mine: dict[str, Any] = {"partition": settings.Iid(kind="iid")}
        mine["domains"] = (str(node["domain"]),) if "domain" in node else ()
        if "data" in node:
            mine |= {"name": str(node["data"]), "root": None}
        dataset = load_data(run.data.model_copy(update=mine), str(device))
        _check_labels(run, dataset)
        indices, own = torch.arange(len(dataset.train.labels)), torch.arange(len(dataset.test.labels))
    else:
        dataset = load_data(run.data, str(device))
        indices = partition_of(run.data, clients, run.seed, str(device))[client]
        own = own_test(run.data, clients, run.seed, str(device))[client]
    last = run.train.channels_last
    shelf = _shelf((run.model, run.seed, last, dataset.channels, dataset.size, dataset.classes), str(device))
    if (parts := shelf.take()) is None:
        model = make_model(run, dataset).to(device)
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parts = ModelTensors(model if ":" in run.model.name else flatten_storage(model))
    made = BNClient(
        parts,
        ClientBatches(
            dataset.train,
            indices,
            moments_of(run, dataset),
            batch_size=run.train.batch_size,
            client=client,
            seed=run.seed,
            augment=run.data.augment or (),
            pad=run.data.pad,
            cut=run.data.crop if dataset.dense else None,
        ),
        functools.partial(_tests_of, run, dataset, own),
        lr=functools.partial(learning_rate, run),
        epochs=run.train.epochs,
        steps=run.train.steps,
        momentum=run.train.momentum,
        keep_momentum=run.train.keep_momentum,
        weight_decay=run.train.weight_decay,
        channels_last=last,
        precision=torch.bfloat16 if run.train.precision == "bfloat16" else None,
        seed=run.seed,
        device=device,
        context=context,
    )
    if ":" not in run.model.name:  # what a network of the user's own remembers outside its state dict is not known
        shelf.keep(parts)
        weakref.finalize(made, shelf.give_back, parts)
    return made


def _tests_of(run: Settings, dataset: DataSet, own: Tensor) -> dict[str, TestBatches]:
    """What a client is tested on: all test images, those that are its own, and of these each domain's."""
    test = functools.partial(TestBatches, dataset.test, moments_of(run, dataset), run.evaluate.batch_size)
    tests = {"": test(), "own": test(own)} if len(own) else {"": test()}
    for domain, rows in rows_by_domain(dataset).items():
        if len(both := own[torch.isin(own, rows)]):
            tests[f"own@{domain}"] = test(both)
    return tests


class ModelPool:
    """Models of one kind that no client uses now: building one takes longer than many a round of training."""

    def __init__(self) -> None:
        self._idle: list[ModelTensors] = []
        self._first: list[Tensor] = []  # what such a model is built with

    def take(self) -> ModelTensors | None:
        """A model as it was built, or None."""
        if not self._idle:
            return None
        parts = self._idle.pop()
        for parameter in parts.parameters.values():
            parameter.grad = None
        torch._foreach_copy_(list(parts.tensors.values()), self._first)
        return parts

    def keep(self, parts: ModelTensors) -> None:
        if not self._first:
            self._first = [value.clone() for value in parts.tensors.values()]

    def give_back(self, parts: ModelTensors) -> None:
        if parts.are_current():
            self._idle.append(parts)


@functools.lru_cache(maxsize=4)
def _shelf(kind: Hashable, device: str) -> ModelPool:
    return ModelPool()
