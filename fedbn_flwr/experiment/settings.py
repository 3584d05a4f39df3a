"""The settings of an experiment, frozen, and what is wrong with the keys and values of a mapping.

Only this folder uses them: `prepare.py` and `node.py` pass plain arguments to the rest of the library.
The pages of docs/settings list the keys, with the descriptions below.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.kinds import KINDS, Options, OwnOptions
from fedbn_flwr.data.schema import Positive, Problem, Section, Several, expects, setting
from fedbn_flwr.data.source import HeldOut, Source
from fedbn_flwr.errors import SettingsError, did_you_mean, few
from fedbn_flwr.models import MODELS, check_options
from fedbn_flwr.named import check_name, is_name
from fedbn_flwr.norms import NORMS
from fedbn_flwr.results.metric_key import UNSEEN, NewcomerStatistics
from fedbn_flwr.results.text import file_name, shorten
from fedbn_flwr.tasks import LOSSES, METRICS
from fedbn_flwr.trees import Tree

from . import sources
from .file.content import KEYS_OF_A_FILE
from .registry import check_strategy

# --- types that a file can write in several forms, such as a part by its name, or with its options ---

AUGMENTATIONS = ("flip", "crop", "resized_crop", "rotate")
OWN, A_NORM = "module:callable", "a kind of normalisation"


def _kind_of(partition: object) -> object:
    """The tag that selects the options of a partition."""
    kind = partition.get("kind") if isinstance(partition, Mapping) else getattr(partition, "kind", None)
    return OWN if isinstance(kind, str) and is_name(kind) else kind


if TYPE_CHECKING:
    Partition = Options
else:  # one of the registered kinds, chosen by `kind`, or one of the user
    Partition = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in {**KINDS, OWN: OwnOptions}.items())],  # noqa: UP007  # of a tuple
        Discriminator(_kind_of),
    ]


def _part_spec(value: Any) -> str | Tree:
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str):
        return name if value == {"name": name} else value
    raise ValueError(f"found {value!r}; expected a name, or a mapping with a name and options")


# A part of a run, such as an optimiser, by its name, or by a mapping of its name and options.
PartSpec = Annotated[str | Tree, PlainValidator(_part_spec), PlainSerializer(lambda value: value)]


def name_in(part: str | Tree) -> str:
    return part if isinstance(part, str) else str(part["name"])


def options_in(part: str | Tree | None) -> Tree:
    return {key: value for key, value in part.items() if key != "name"} if isinstance(part, Mapping) else {}


def tracker_of(part: str | Tree) -> str:
    """The `module:callable` of a tracker."""
    name = name_in(part)
    return "fedbn_flwr.experiment.tensorboard:TensorBoard" if name == "tensorboard" else name


def _augmentation(part: str | Tree) -> str | Tree:
    """One of these names without options, or a part of the user."""
    if not is_name(name_in(part)) and part not in AUGMENTATIONS:
        hint = did_you_mean(name_in(part), AUGMENTATIONS)
        raise ValueError(f"{name_in(part)!r} is not an augmentation; {hint}, or module:callable for your own")
    return part


def _optimizer(part: str | Tree) -> str | Tree:
    check_name("train.optimizer", name_in(part).lower(), sources.optimizers(), "an optimiser")
    return part


Augment = Several[Annotated[PartSpec, AfterValidator(_augmentation)]]

Weights = Annotated[
    Literal["balanced"] | Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)],
    expects("balanced, or a list with a weight for each class, zero or more"),
]
# Arguments without a name belong to the default strategy, as in `strategy.fraction_train=0.5`.
Strategy = Annotated[Tree, AfterValidator(lambda spec: check_strategy({"name": "FedAvg", **spec}))]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # without control characters, which terminals obey


# --- the sections ---


def of_catalogue(name: str) -> Tree:
    """The catalogue's values for the settings of a data set that are left out."""
    if (entry := CATALOGUE.get(name)) is None:
        return {"normalise": "moments", "augment": (), "fit": None if is_name(name) else "stretch"}
    return {
        # The embedded digits are not resized; nor are a site's own images, if the experiment names no data set.
        "size": None if entry.embedded else entry.size,
        "normalise": "moments" if entry.moments is None else "official",
        "augment": entry.augment,
        "fit": entry.fit,
        "crop": entry.crop,
    }


class Data(Source):
    crop: Positive | None = setting(None, "segmentation: train on random crops with this many pixels per side")
    normalise: Literal["moments", "own", "unit", "official"] | None = setting(
        None,
        "`official`: the published mean and standard deviation of a listed data set; `moments`: mean zero"
        " and standard deviation one per channel over the training set; `own`: the same over each site's own "
        "training examples (with `partition: {kind: natural}`, and without `missing: mean`); "
        "`unit`: pixel values from 0 to 1",
    )
    targets: Literal["scale"] | None = setting(
        None,
        "`scale`: scale regression targets to mean 0 and standard deviation 1 over all clients' training examples "
        "(needs `normalise: moments`); evaluations and predictions stay in the original units",
    )
    augment: Augment | None = setting(
        None,
        "any of `resized_crop` (a crop of 8 to 100 % of the area, resized to the full size), `crop` (zero"
        " padding by `data.pad` pixels, then a random crop), `flip` (horizontal) and `rotate` (up to 30 "
        "degrees in either direction, as in FedBN), drawn per image, and [augmentations of your own or of"
        " torchvision](own-parts.md#augmentation) by `module:callable`; `[]` for none",
    )
    pad: int = setting(2, "padding in pixels for `crop`", ge=1, le=1_000)
    partition: Partition = setting(KINDS["iid"](), "who has which examples: see `fedbn list partitions`")

    @model_validator(mode="after")
    def _has_values_of_the_catalogue(self) -> Self:
        for key, value in of_catalogue(self.name).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)  # pydantic doesn't count it as set
        return self

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        official = [name for name, entry in CATALOGUE.items() if entry.moments is not None]
        yield (
            self.normalise == "official" and self.name not in official,
            f"normalise is 'official', but {self.name!r} has no official mean and standard deviation; use moments "
            f"or unit (official values are known for {', '.join(official)})",
        )
        yield (
            self.normalise == "own" and self.partition.kind != "natural",
            "normalise is 'own', which is for the sites of partition natural, but partition.kind is "
            f"{self.partition.kind!r}; use moments",
        )


class Renorm(Section):
    """Batch renormalisation: bounds of r and d, and the first and last steps of their widening."""

    r_max: float = Field(default=3.0, ge=1)
    d_max: float = Field(default=5.0, ge=0)
    warmup: int = Field(default=5_000, ge=0)
    r_steps: int = Field(default=40_000, ge=0)
    d_steps: int = Field(default=25_000, ge=0)

    def problems(self) -> Iterator[Problem]:
        for name, steps in (("r_steps", self.r_steps), ("d_steps", self.d_steps)):
            said = f"{name} ({steps}) is less than warmup ({self.warmup}), when bounds begin to widen"
            yield steps < self.warmup, said


class Model(Section):
    name: Annotated[str, AfterValidator(lambda name: check_name("model.name", name, MODELS, "a model"))] = setting(
        "cnn", "a [network](#networks), or `module:callable`, a [network of your own](own-parts.md#network)"
    )
    options: Tree = setting({}, "further arguments of the network, for instance `{hidden: 64}` of `mlp`")
    norm: Annotated[str, AfterValidator(lambda name: check_name("model.norm", name, NORMS, A_NORM))] = setting(
        "bn",
        "what replaces every batch norm: a [normaliser](#normalisers), or `module:callable`, a [normaliser of "
        "your own](own-parts.md#normaliser)",
    )
    weights: str | None = setting(
        None, "a safetensors or `.pt` file of pretrained weights, see [Your own parts](own-parts.md#pretrained-weights)"
    )
    groups: Positive = setting(2, "number of groups of `gn` and `gn+ws`; it must divide the channels of each layer")
    branch_scale: float = setting(
        1.0,
        "with `won`, a factor of the residual branches of `resnet20` and torchvision's ResNets; [0.2"
        " lets them train](strategies/fedwon.md#residual-networks)",
        gt=0,
        le=1,
    )
    brn: Renorm = setting(
        Renorm(),
        "bounds of batch renormalisation: r = 1 and d = 0 in a client's first `warmup` steps, then wider until "
        "`r_steps` and `d_steps`; `warmup` must be smaller than the number of steps that a client takes in the "
        "run",
    )
    stem: Literal["auto", "small", "large"] = setting(
        "auto",
        "first layers of torchvision's networks: `large`, as in torchvision; `small`, without the first "
        "strides; `auto`, small for images of up to 64 pixels",
    )

    def problems(self) -> Iterator[Problem]:
        if self.name in MODELS:
            check_options(self.name, self.options, sources.arguments_of_model(self.name))
        yield from ()


MILESTONES = (0.5, 0.75)


class Schedule(Section):
    kind: str = setting(
        "constant",
        "learning rate schedule: `constant`, `step`, `cosine` or `module:function`; "
        "`schedule: cosine` is short for `schedule: {kind: cosine}` ([Training](training.md#schedules))",
    )
    milestones: Several[float] = setting(
        MILESTONES,
        "for `step`: rounds, or fractions of all rounds below 1, after which the rate is multiplied by `gamma`",
    )
    gamma: float | None = setting(None, "for `step`: the factor at each milestone", gt=0, le=1)
    switch: float | None = setting(
        None,
        "a factor of the learning rate in every round after the one in which the strategy freezes (`FixBN`, "
        "`FedTANII`) or switches (`FedBS`)",
        gt=0,
        le=1,
    )

    def problems(self) -> Iterator[Problem]:
        kind, kinds, has_steps = self.kind, ("constant", "step", "cosine"), self.kind not in ("constant", "cosine")
        hint = did_you_mean(kind, kinds)
        yield kind not in kinds and ":" not in kind, f"kind is {kind!r}; {hint}, or module:function"
        of_step = f"for kind step, but kind is {kind!r}"
        yield not has_steps and self.gamma is not None, f"gamma ({self.gamma}) is {of_step}"
        yield not has_steps and self.milestones != MILESTONES, f"milestones ({list(self.milestones)}) are {of_step}"
        for milestone in self.milestones:
            yield (
                milestone <= 0 or (milestone > 1 and milestone % 1),
                f"milestones has {milestone:g}; expected a fraction of the rounds, above 0 and below 1, or a round "
                "(1, 2, ...)",
            )


class ClientTrain(Section):
    """How a client trains where it differs from the others; the config of its node has the same keys, with hyphens."""

    client: Annotated[int, Field(ge=0)] = setting(0, "the number of the client")
    batch_size: Positive | None = setting(None, "examples in a step")
    epochs: Positive | None = setting(None, "passes over its examples in a round")
    steps: Positive | None = setting(None, "optimiser steps in a round, instead of epochs")
    lr_factor: float | None = setting(None, "a factor of the learning rate", gt=0, le=1_000)
    device: Literal["auto", "cpu", "cuda"] | None = setting(None, "`cpu`, `cuda` or `auto`")

    def problems(self) -> Iterator[Problem]:
        yield _both_are_given(self)


def _both_are_given(own: ClientTrain | Train) -> Problem:
    said = f"epochs ({own.epochs}) and steps ({own.steps}) exclude each other; give one"
    return own.epochs is not None and own.steps is not None, said


class Train(Section):
    lr: float = setting(0.1, "learning rate", gt=0)
    optimizer: Annotated[PartSpec, AfterValidator(_optimizer)] = setting(
        "sgd",
        "`sgd`, `adam`, `adamw`, the name of another class of `torch.optim`, or `module:callable`; with "
        "options `{name: adamw, betas: [0.9, 0.95]}` ([Training](training.md#optimisers))",
    )
    momentum: float = setting(0.0, "momentum of SGD, or of another optimiser that has one", ge=0, lt=1)
    keep_momentum: bool = setting(
        False,
        "each client keeps its optimiser's state (momentum, Adam's moments) for the next round in which it "
        "trains; otherwise a round begins without a state (`GlobalMomentum`: with the mean of all clients' "
        "momentum)",
    )
    weight_decay: float | None = setting(
        None, "weight decay; by default PyTorch's for this optimiser, 0.01 for AdamW and 0 for most others", ge=0
    )
    clip: float | None = setting(
        None,
        "the largest norm of a step's gradients, over all parameters; larger gradients are scaled down "
        "([Training](training.md#clipping))",
        gt=0,
    )
    loss: PartSpec | None = setting(
        None,
        "`cross_entropy`, `bce`, `mse`, `mae`, `huber` (or `{name: huber, delta: 2.0}`), or `module:callable`; "
        "see [Training](training.md#loss)",
    )
    label_smoothing: float = setting(0.0, "label smoothing of `cross_entropy` and `bce`", ge=0, lt=1)
    class_weights: Weights | None = setting(
        None,
        "weights of the classes in `cross_entropy` and `bce`: a list, or `balanced`, inversely proportional to "
        "the client's own training examples of each class",
    )
    batch_size: Positive = setting(
        32, "examples in a step; a last batch of one example is dropped, because batch norm cannot compute its variance"
    )
    epochs: Positive | None = setting(None, "passes over a client's examples in a round")
    steps: Positive | None = setting(None, "optimiser steps in a round, instead of epochs")
    of_clients: Annotated[tuple[ClientTrain, ...], Field(strict=False)] = setting(
        (),
        "clients that train otherwise than the others, `[{client: 0, steps: 5}, {client: 3, batch_size: 8}]`, by "
        "`batch_size`, `epochs`, `steps`, `lr_factor` and `device`; a site may say so "
        "[itself](sites.md#how-a-site-trains)",
    )
    schedule: Schedule = Schedule()
    channels_last: Annotated[bool | Literal["auto"], expects("true, false or 'auto'")] = setting(
        "auto",
        "train with the channels-last memory format; `auto`: where it makes this library's networks faster, which "
        "is on a CPU ([Performance](performance.md#channels-last)). The last bits of a result differ",
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        "`bfloat16` trains under PyTorch's autocast: convolutions and matrix products in bfloat16; "
        "weights, statistics, SGD's updates, evaluation and FedTAN's first step stay in float32",
    )
    compile: bool = setting(
        False,
        "compile training with PyTorch's compiler ([Performance](performance.md#compiled-passes)), which "
        "changes the last bits of results; on a GPU, record it as a CUDA graph, with the same results",
    )

    def problems(self) -> Iterator[Problem]:
        loss, weights = name_in(self.loss or ""), self.class_weights
        without_effect, by_sgd = self.keep_momentum and not self.momentum, name_in(self.optimizer).lower() == "sgd"
        unknown = options_in(self.loss).keys() - {*LOSSES.get(loss, ())} if not is_name(loss) else ()
        yield _both_are_given(self)
        yield (
            weights is not None and not any(weights),
            "class_weights are all 0; expected a weight above 0 for some class",
        )
        yield (
            without_effect and by_sgd,
            "keep_momentum has no effect while momentum is 0; set momentum, for instance to 0.9",
        )
        yield (
            loss not in ("", *LOSSES) and not is_name(loss),
            f"loss is {loss!r}; {did_you_mean(loss, LOSSES)}, or module:function for your own",
        )
        yield (
            unknown,
            f"loss {loss} has no option {', '.join(sorted(unknown))}; train.label_smoothing and train.class_weights "
            "are keys of their own",
        )
        for option in ("label_smoothing", "class_weights") if loss not in ("", "cross_entropy", "bce") else ():
            value = getattr(self, option)
            yield value, f"{option} ({value}) is an option of cross_entropy and bce, but loss is {loss!r}"


class Unseen(Section):
    """Clients that never train, to measure what a strategy gives to a newcomer."""

    clients: Several[Annotated[int, Field(ge=0)]] = setting(
        (),
        "numbers of the clients that never train, for instance `[3]`; they are evaluated as newcomers "
        "([New clients](clients.md#new-clients))",
    )
    statistics: Annotated[Several[NewcomerStatistics], Field(min_length=1)] = setting(
        UNSEEN,
        "the newcomers' batch norm: `mean`, the mean of the clients' batch norm; `batch`, the same with the "
        "statistics of the newcomer's own training inputs; `own`, as the strategy gives it to a new client",
    )

    def problems(self) -> Iterator[Problem]:
        yield len({*self.clients}) < len(self.clients), f"clients is {list(self.clients)}; list each client once"


class Evaluate(Section):
    every: Positive = setting(
        1, "rounds between evaluations of the global model on the test examples; the last round is always evaluated"
    )
    clients: Annotated[bool | Literal["own"] | None, expects("true, false or 'own'")] = setting(
        None,
        "`true`: clients evaluate their models on all test examples and on their own; `own`: only on their own; "
        "`false`: not at all; the default is below the table",
    )
    domains: bool = setting(
        False,
        "if clients evaluate, they also test on the examples of every domain, not only of their own: "
        "[`accuracy_DOMAIN`](clients.md#values-of-each-client)",
    )
    server: bool = setting(
        True,
        "`false`: the server has no data and reports the clients' means on their test examples; needs the classes "
        "and the shape of the inputs, such as `data: {classes: 10, channels: 3, size: 32}` "
        "([Deployment](deployment.md#data-at-each-site))",
    )
    unseen: Unseen = Unseen()
    statistics: Literal["model", "reestimated"] = setting(
        "model",
        "the statistics for evaluating the global model: its own, or `reestimated` over all test examples, see below",
    )
    batch_size: Positive = setting(
        100,
        "examples per batch; on a CPU the server evaluates in `engine.workers` threads, each with a batch in memory",
    )
    dynamics: bool = setting(
        False,
        "record in every evaluated round how batch norm's statistics change, by layer and client, in "
        "`norms.jsonl` ([Watching](watching.md#dynamics-of-batch-norm))",
    )
    metrics: Several[str] = setting(
        (),
        "metrics in addition to the metrics of the task: any of `balanced_accuracy`, `macro_f1`, `auc`, "
        "`dice`, `mean_iou` that suits the task, and `module:function` ([Training](training.md#metrics))",
    )
    validation: float = setting(
        0.0,
        "share of each client's training examples to hold out for choosing the best round, see "
        "[Clients](clients.md#best-round)",
        ge=0,
        le=0.5,
    )
    models: Several[str] = setting(
        (),
        "with `rounds: 0`, what the clients evaluate: run folders, or files of weights by safetensors or "
        "`torch.save`, on the server's disk; also `fedbn evaluate --model`",
    )
    survey: bool = setting(
        False,
        "with `rounds: 0`, the clients say how their data differ, see [How the sites differ](clients.md#how-the-sites-"
        "differ); also `fedbn survey`",
    )
    patience: Positive | None = setting(
        None,
        "rounds without a better result after which the run ends, on the validation examples or, without them, the "
        "test examples, see [Clients](clients.md#when-nothing-gets-better)",
    )
    min_difference: float = setting(0.0, "how much better a result must be to count for `patience`", ge=0)

    def problems(self) -> Iterator[Problem]:
        never = self.clients is False
        yield (
            self.min_difference and self.patience is None,
            f"min_difference ({self.min_difference:g}) is for patience; give a number of rounds",
        )
        for name in self.metrics:
            hint = did_you_mean(name, METRICS)
            yield name not in METRICS and ":" not in name, f"metrics has {name!r}; {hint}, or module:function"
        yield never and not self.server, "server and clients are both false; one of them must evaluate"
        yield (
            never and self.domains,
            "domains is true, which is for clients that evaluate, but clients is false; leave one out",
        )
        yield (
            not self.server and self.statistics == "reestimated",
            "statistics is 'reestimated', which needs the server's test examples, but server is false",
        )


class Engine(Section):
    name: Literal["local", "ray"] = setting("local", "`local`, or `ray` for a [cluster](cluster.md); also `--engine`")
    workers: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"], expects("0, a number of processes, or 'auto'")
    ] = setting(
        "auto",
        "processes of the local engine: 0 runs everything in one process, `auto` takes one per core (with a "
        "GPU, 0). On Ray: the number of actors, `auto` for as many as fit",
    )
    address: str | None = setting(
        None,
        "address of a running Ray cluster, for instance `10.0.0.1:6379`; by default `$RAY_ADDRESS`; if that isn't "
        "set, Ray starts on this machine",
    )
    cpus_per_client: float | None = setting(
        None, "cores that Ray reserves for each actor; by default `engine.threads`", ge=0.01
    )
    gpus_per_client: float | None = setting(
        None,
        "GPUs that Ray reserves for each actor, or a fraction of one; by default one if the cluster has GPUs "
        "and `engine.device` isn't `cpu`",
        ge=0,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "`cpu`, `cuda`, or `auto` for a GPU if available; also `--device`"
    )
    threads: int = setting(1, "PyTorch threads per client; the engines agree bit for bit at 1", ge=1, le=1_000)
    together: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], expects("a number of clients above 0, or 'auto'")
    ] = setting(
        1,
        "clients that one process trains at once: only [small networks](performance.md#small-networks) of linear "
        "layers, whose results then differ in the last bits. `auto`: ten, if that is faster on this machine's CPU",
    )
    timeout: float = setting(
        3600,
        "seconds that the server waits for the replies to its messages; it doesn't apply where clients train in the "
        "waiting process (`engine.workers: 0`, and several runs side by side by `--jobs`)",
        gt=0,
        le=1_000_000,
    )
    node_timeout: float = setting(
        120,
        "seconds to wait for all nodes before the first round, and for `min_train_nodes` (2) before each later "
        "round; on Ray, for an actor to start",
        gt=0,
        le=1_000_000,
    )
    checkpoint_every: Positive | None = setting(
        None, "rounds between checkpoints, see [Resuming](run-folder.md#resuming)"
    )

    def problems(self) -> Iterator[Problem]:
        is_ray, workers, gpus = self.name == "ray", self.workers, self.gpus_per_client
        here, found = workers in (0, "auto"), "name is 'ray'" if is_ray else f"workers is {workers}"
        yield (
            is_ray and workers == 0,
            "workers is 0, but on Ray clients run in actors; give a number of them, or 'auto'",
        )
        yield (
            not is_ray and self.threads > 1 and not here,
            f"threads={self.threads} needs workers=0, found {workers}: a worker has one thread",
        )
        yield (
            self.together not in (1, "auto") and (is_ray or not here),
            f"together={self.together} trains clients in one process, but {found}; leave one of them out",
        )
        for key in ("address", "cpus_per_client", "gpus_per_client") if not is_ray else ():
            value = getattr(self, key)
            yield value is not None, f"{key} is {value!r}, which is for name ray, but name is {self.name!r}"
        yield (
            self.device == "cuda" and gpus == 0,
            "device is 'cuda', but gpus_per_client is 0; give a number, such as 1 or 0.25, or 'cpu'",
        )
        yield self.device == "cpu" and gpus, f"device is 'cpu', but gpus_per_client is {gpus}; leave it out"


PAPER = "paper"  # the size of an experiment as its file has it


class Cell(Section):
    """The place of a run in its experiment."""

    row: str = ""  # the label in `runs`
    sweep: Tree = Field(default_factory=dict)  # its condition: a value for each key
    tune: Tree = Field(default_factory=dict)  # the values that it tries
    place: Sequence[int] = ()  # the indices of its row and of its values in the file; reports sort by it

    @property
    def values(self) -> Tree:
        return {**self.sweep, **self.tune}


DERIVED = ("label", "cell", "size")  # keys of a run that no file sets


class Settings(Section):
    """The settings of one run, checked and with their defaults."""

    name: Line = setting("experiment", "prefix of the output folder")
    label: Line = ""
    rounds: int = setting(
        10,
        "rounds of training; with 0 the clients only [evaluate given models](clients.md#models-without-training)",
        ge=0,
        le=1_000_000,
    )
    clients: Positive = setting(5, "number of clients, partitions and nodes")
    seed: int = setting(
        0,
        "seed of the initial weights, the partition, the order of examples, augmentation, dropout and the sampling "
        "of clients",
        ge=0,
        lt=2**63,
    )
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    strategy: Strategy = setting({"name": "FedAvg"}, "a [strategy](settings/strategy.md) and its arguments")
    evaluate: Evaluate = Evaluate()
    engine: Engine = Engine()
    track: Several[PartSpec] = setting(
        (),
        "trackers that record the run: `tensorboard`, `module:callable`, a mapping with `name` and settings, "
        "or a list; see [Watching](watching.md#trackers)",
    )
    cell: Cell = Cell()
    size: str = PAPER

    @property
    def source(self) -> Data:
        """The data of the run, with the test split that its seed draws."""
        return self.data.of_seed(self.seed)

    @property
    def training_clients(self) -> int:
        """How many clients may train: all but those that are held out as newcomers."""
        return self.clients - len(self.evaluate.unseen.clients)

    def problems(self) -> Iterator[Problem]:
        unseen = self.evaluate.unseen.clients
        yield (
            unseen and (max(unseen) >= self.clients or not self.training_clients),
            f"evaluate.unseen.clients is {list(unseen)}, but clients is {self.clients}; expected some of the numbers 0 "
            f"to {self.clients - 1}, so that others train",
        )
        numbers = [own.client for own in self.train.of_clients]
        for number in numbers:
            yield (
                number >= self.clients or numbers.count(number) > 1,
                f"train.of_clients has client {number}, but clients is {self.clients}; expected each of the numbers 0 "
                f"to {self.clients - 1} at most once",
            )
        warmup, steps = self.model.brn.warmup, self.rounds * (self.train.steps or 0)
        for key, does in (("models", "are evaluated"), ("survey", "is made")):
            yield (
                getattr(self.evaluate, key) and self.rounds,
                f"evaluate.{key} {does} instead of training, but rounds is {self.rounds}; set it to 0",
            )
        models = len(self.evaluate.models)
        yield (
            self.evaluate.survey and models > 1,
            f"evaluate.survey is for one network, but evaluate.models has {models}",
        )
        yield (
            self.model.norm == "brn" and steps and warmup >= steps,
            f"model.norm: brn is batch norm in a client's first {warmup} steps (model.brn.warmup), and a client takes "
            f"at most {steps} steps in this run; set a smaller warmup",
        )


@dataclass(frozen=True)
class Layer:
    """Settings that one place gives; an experiment merges them in order."""

    origin: str  # "command line", "sweep", "tune", "size NAME", "run LABEL", "file", "data set" or "default"
    settings: Tree


@dataclass(frozen=True)
class Experiment:
    """One run, or several that differ in their settings under `runs` and in their seeds."""

    name: str
    runs: tuple[Settings, ...]
    description: str = ""
    seeded: bool = False  # whether it has `seeds`, even if only one of them is run
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)  # by the label of a run

    @functools.cached_property
    def by_folder(self) -> dict[str, Settings]:
        """The runs by the names of their folders: the label, with the seed if the experiment has seeds."""
        names = [file_name(run.label) for run in self.runs]
        if self.seeded or len(set(names)) < len(names):
            names = [f"{name}-seed{run.seed}" for name, run in zip(names, self.runs, strict=True)]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise SettingsError(
                f"two runs are both called {twice[0]!r}; give each run its own label and list each seed once"
            )
        return dict(zip(names, self.runs, strict=True))


def strategy_name(spec: Tree) -> str:
    name, base = str(spec.get("name", "FedAvg")), spec.get("base")
    return f"{name}({strategy_name(base)})" if isinstance(base, Mapping) else name


# --- from a mapping ---

_EXPLAINED = 10  # problems; each may list the known keys


def check_settings(settings: Tree) -> Settings:
    try:
        return Settings.model_validate(dict(settings))
    except ValidationError as error:
        raise SettingsError(few(map(_explain, error.errors()), _EXPLAINED, "; ")) from None


# Words of an experiment file, where pydantic uses Python's.
_EXPECTED = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "string_pattern_mismatch": "one line without control characters",
    "float_type": "a number",
    "int_type": "a whole number",
    "greater_than": "a number above {gt:.10g}",
    "greater_than_equal": "at least {ge:.10g}",
    "less_than": "a number below {lt:.10g}",
    "less_than_equal": "at most {le:.10g}",
}


def _explain(details: ErrorDetails) -> str:
    # Pydantic adds the kind of a partition, and the form of a value (`<share>`), to the path; they aren't in the file.
    parts = [str(part) for part in details["loc"]]
    key = ".".join(
        part
        for i, part in enumerate(parts)
        if part not in ("<share>", "<value>") and "partition" not in parts[i - 1 : i]
    )
    found, kind, value = details["input"], details["type"], shorten(repr(details["input"]), 200)
    if kind == "extra_forbidden":
        elsewhere = [f"{name}.{parts[-1]}" for name in Settings.model_fields if parts[-1] in _section([name])]
        hint = f"did you mean {' or '.join(elsewhere)}? " if elsewhere and len(parts) == 1 else ""
        return f"unknown key {key!r} (= {value}); {hint or did_you_mean(parts[-1], _section(parts[:-1]))}".rstrip()
    if kind == "missing":
        return f"{key!r} is missing"
    if kind.startswith("union_tag"):  # of a partition
        given = found if isinstance(found, Mapping) else {"kind": found}
        name, options = given.get("kind"), given.keys() - {"kind"}
        wrong = (
            f".kind={name!r} is not a partition"
            if name or not options
            else f" has {', '.join(sorted(options))} without kind"
        )
        kinds = [kind for kind, section in KINDS.items() if name or options <= section.model_fields.keys()]
        return f"{key}{wrong}; {did_you_mean(str(name), kinds or KINDS)}, or {OWN} for your own"
    if kind == "value_error":
        error = details["ctx"]["error"]
        return f"{key + ': ' if key and not isinstance(error, SettingsError) else ''}{error}"
    expected = _EXPECTED.get(kind, "").format(**details.get("ctx", {}))
    return f"{key} is {value}: expected {expected or details['msg'].removeprefix('Input should be ')}"


_FORMS: dict[str, type[BaseModel]] = {**KINDS, OWN: OwnOptions, "<share>": HeldOut}  # of values, by their tags


def _section(path: Sequence[str]) -> list[str]:
    """The known keys of the section at `path`."""
    model: type[BaseModel] = Settings
    for part in path:
        if part in _FORMS:
            model = _FORMS[part]
        elif part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else model
    extra = KEYS_OF_A_FILE if model is Settings else ()
    return [*(name for name in model.model_fields if model is not Settings or name not in DERIVED), *extra]
