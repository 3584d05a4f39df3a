"""The settings of an experiment, frozen; `check.py` makes them from a file.

Only this folder uses them: `prepare.py` and `node.py` pass plain arguments to the rest of the library.
docs/experiments.md explains the keys.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    model_validator,
)

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.partition.kinds import KINDS, Options, OwnOptions
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.experiment.registry import check_strategy
from fedbn_flwr.models import build as models
from fedbn_flwr.named import is_name
from fedbn_flwr.norms.convert import check_kind
from fedbn_flwr.results.text import file_name
from fedbn_flwr.tasks import LOSSES

from .file.expansion import PAPER, Cell
from .file.figures import Published
from .sections import Engine as Engine
from .sections import Evaluate as Evaluate
from .sections import Few, Names, Positive, Section, expects
from .trackers import Track

Side = Annotated[int, Field(gt=0, le=10_000)]
Pixels = Annotated[
    Side | Annotated[tuple[Side, Side], Field(strict=False)],
    expects("pixels per side, or [height, width], at most 10000"),
]


def _columns(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


# One column or several.
Columns = Annotated[
    Names, BeforeValidator(_columns), PlainSerializer(lambda names: names[0] if len(names) == 1 else names or None)
]


Split = Annotated[
    str | Annotated[float, Field(gt=0, lt=1)],
    expects("the name of a split, or a share between 0 and 1 to hold out"),
]
Categories = Annotated[
    Mapping[str, Annotated[tuple[Annotated[str, BeforeValidator(str)], ...], Field(strict=False, min_length=1)]],
    expects("lists of values by column, for instance {sex: [f, m]}"),
]
Ranges = Annotated[
    Mapping[str, Annotated[tuple[float, float], Field(strict=False)]],
    expects("the smallest and the largest value, {age: [0, 120]}"),
]
AUGMENTATIONS = ("flip", "crop", "resized_crop", "rotate")
OWN = "module:callable"


def _kind_of(partition: Any) -> str | None:
    """The tag that selects the options of a partition."""
    kind = partition.get("kind") if isinstance(partition, Mapping) else getattr(partition, "kind", None)
    if not isinstance(kind, str):
        return None
    return OWN if is_name(kind) else kind if kind in KINDS else None


if TYPE_CHECKING:
    Partition = Options
else:  # one of the registered kinds, chosen by `kind`, or one of the user
    Partition = Annotated[
        functools.reduce(
            operator.or_,
            [Annotated[kind, Tag(name)] for name, kind in KINDS.items()] + [Annotated[OwnOptions, Tag(OWN)]],
        ),
        Discriminator(_kind_of),
    ]


class Part(Section):
    """A part of the user with arguments: `{name: module:callable, ...}`."""

    model_config = ConfigDict(extra="allow")

    name: str


class Arguments(Section):
    """The arguments of a part of the user, whose names only that part knows."""

    model_config = ConfigDict(extra="allow")


def _augmentation(value: Any) -> str | Part:
    """Parse both forms with one error message."""
    part = Part.model_validate(value) if isinstance(value, Mapping) else value
    name = part.name if isinstance(part, Part) else part
    if not isinstance(name, str) or not (is_name(name) or (name in AUGMENTATIONS and part is name)):
        known = did_you_mean(str(name), AUGMENTATIONS)
        raise ValueError(f"{name!r} is not an augmentation; {known}, or module:callable for your own")
    return part


Augmentation = Annotated[str | Part, PlainValidator(_augmentation), PlainSerializer(lambda part: part)]
Augment = Annotated[tuple[Augmentation, ...], Field(strict=False)]


def _normalisation(name: Any) -> str:
    if not isinstance(name, str) or not (name in NORMALISATIONS or is_name(name)):
        known = did_you_mean(str(name), NORMALISATIONS)
        raise ValueError(f"{name!r} is not a normalisation; {known}, or module:callable for your own")
    return name


NORMALISATIONS = ("moments", "unit", "official")
Normalise = Annotated[str, PlainValidator(_normalisation)]


class Data(Section):
    name: str = Field(
        default="digits",
        description=(
            "`digits` (1,797 images of 8x8 pixels, part of the package), a name that `fedbn list datasets` "
            "shows (`cifar10`, `office_caltech10`, ...), a folder, or a name on the Hugging Face hub; see "
            "[Data](data.md); or `module:callable`, a [data set of your own](own-parts.md#data-set)"
        ),
    )
    options: Arguments = Field(
        default=Arguments(), description="arguments of a data set `module:callable`, see [Your own parts](own-parts.md)"
    )
    root: str | None = Field(
        default=None, description="a folder of local copies: `root/cifar10` is read instead of the hub"
    )
    revision: str | None = Field(
        default=None,
        description=(
            "the commit, tag or branch of a data set of the hub; `environment.json` has the commit that a run"
            " used (`data_commit`)"
        ),
    )
    inputs: Columns = Field(
        default=(),
        description=(
            "column of inputs, or a list of columns; by default the column of images, or else all columns of numbers "
            "that have no other use, see [Data](data.md#your-own-data)"
        ),
    )
    label: Columns = Field(
        default=(),
        description="label column, or a list of columns; for segmentation the column with the masks",
    )
    task: Literal["classification", "binary", "multilabel", "regression", "segmentation"] | None = Field(
        default=None,
        description=(
            "what the labels are for: `classification`, `binary`, `multilabel`, `regression` or `segmentation`; by "
            "default by their type: texts and whole numbers are classes, floats are numbers to predict, several "
            "columns of 0 and 1 are several labels"
        ),
    )
    domain: str | None = Field(
        default=None, description="the column with each example's domain; accuracy is reported per domain"
    )
    domains: Names = Field(default=(), description="the domains to use")
    group: str | None = Field(
        default=None,
        description="the column with each example's site, patient or user: the clients of `partition: {kind: natural}`",
    )
    train: str | None = Field(
        default=None, description="name of the training split; in a folder, the prefix of its files"
    )
    test: Split | None = Field(
        default=None,
        description=(
            "name of the test split; in a folder, the prefix of its files (`val*` is used if there is no `test*`); or "
            "a share, as 0.2, of the examples to hold out as test split, the same for all seeds, in proportion of "
            "classes, domains and groups"
        ),
    )
    categories: Categories = Field(
        default_factory=dict,
        description="the values of columns of texts, `{sex: [f, m]}`: one input of 0 or 1 for each value",
    )
    ranges: Ranges = Field(
        default_factory=dict,
        description="`{age: [0, 120]}`: data with values outside of these limits are refused, with their number",
    )
    missing: Literal["mean"] | None = Field(
        default=None,
        description="`mean`: a missing value of an input becomes the column's mean; otherwise the data are refused",
    )
    shape: Annotated[tuple[Positive | None, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "shape of the inputs of one example, checked against the data: `[30]`, `[9, 128]` for series of 9 "
            "channels, `[9, null]` for series of any length"
        ),
    )
    tokens: Positive | None = Field(
        default=None, description="inputs are whole numbers below this one; by default the largest and one"
    )
    classes: Positive | None = Field(
        default=None,
        description=(
            "number of classes, labels or numbers to predict, checked against the data; required for segmentation data "
            "sets that are not listed in [Data](data.md)"
        ),
    )
    class_names: Names = Field(
        default=(),
        description=(
            "the classes in the order of the model's outputs; then the data, for instance those of one site, "
            "may lack some of them"
        ),
    )
    channels: Positive | None = Field(default=None, description="checked against the data")
    size: Pixels | None = Field(
        default=None,
        description=(
            "resize images to this many pixels per side, or to `[height, width]`; required if images differ in size"
        ),
    )
    fit: Literal["stretch", "crop"] | None = Field(
        default=None,
        description=(
            "how an image of another size is resized: `stretch`, or `crop`, which keeps the aspect ratio and the centre"
        ),
    )
    crop: Positive | None = Field(
        default=None, description="segmentation: train on random crops with this many pixels per side"
    )
    normalise: Normalise | None = Field(
        default=None,
        description=(
            "`official`: the published mean and standard deviation of a listed data set; `moments`: mean zero"
            " and standard deviation one per channel over the training set; `unit`: pixel values from 0 to 1;"
            " or `module:callable`, a [normalisation of your own](own-parts.md#normalisation)"
        ),
    )
    augment: Augment | None = Field(
        default=None,
        description=(
            "any of `resized_crop` (a crop of 8 to 100 % of the area, resized to the full size), `crop` (zero"
            " padding by `data.pad` pixels, then a random crop), `flip` (horizontal) and `rotate` (up to 30 "
            "degrees in either direction, as in FedBN), drawn per image, and [augmentations of your own or of"
            " torchvision](own-parts.md#augmentation) by `module:callable`; `[]` for none"
        ),
    )
    pad: int = Field(default=2, ge=1, le=1_000, description="padding in pixels for `crop`")
    stream: Literal[True, False, "auto"] = Field(
        default="auto",
        description=(
            "`true`: images stay on disk and are decoded when needed; `false`: all images are decoded into "
            "memory; `auto`: according to `data.memory`"
        ),
    )
    memory: float = Field(default=8.0, gt=0, description="GiB; decoded images up to this size are kept in memory")
    readers: Few = Field(default=2, description="decoding threads per client for images on disk")
    partition: Partition = Field(
        default=KINDS["iid"](), description="who has which examples: see `fedbn list partitions`"
    )
    examples: Positive | None = Field(
        default=None,
        description=(
            "use this many training examples, drawn in the proportions of classes and domains, see [Sweeps and "
            "sizes](sweeps.md#fewer-examples)"
        ),
    )
    test_examples: Positive | None = Field(default=None, description="likewise for test examples")
    random: bool = Field(
        default=False,
        description="random examples in the form of the data set, which is not read; figures then mean nothing",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_are_counted(cls, content: Any) -> Any:
        names = content.get("class_names") if isinstance(content, dict) else None
        if not isinstance(names, list | tuple) or not names:
            return content
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError(f"class_names is {names!r}; expected different texts, in quotes if they are numbers")
        if content.get("classes") not in (None, len(names)):
            raise ValueError(f"classes is {content['classes']}, but class_names has {len(names)}; leave classes out")
        return {**content, "classes": len(names)}

    def faults(self) -> dict[str, bool]:
        first = next(iter(self.options.model_extra or ()), "")
        return {
            f"options.{first} is an argument of a data set module:callable, but name is {self.name!r}": bool(first)
            and not is_name(self.name)
        }


class Renorm(Section):
    """Batch renormalisation: bounds of r and d, and the first and last steps of their widening."""

    r_max: float = Field(default=3.0, ge=1)
    d_max: float = Field(default=5.0, ge=0)
    warmup: int = Field(default=5_000, ge=0)
    r_steps: int = Field(default=40_000, ge=0)
    d_steps: int = Field(default=25_000, ge=0)

    def faults(self) -> dict[str, bool]:
        return {
            f"{name} ({steps}) is less than warmup ({self.warmup}), when bounds begin to widen": steps < self.warmup
            for name, steps in (("r_steps", self.r_steps), ("d_steps", self.d_steps))
        }


class Model(Section):
    name: Annotated[str, AfterValidator(models.check_name)] = Field(
        default="cnn",
        description="a network of `fedbn list models`, see below, or `module:callable`, a network of your own",
    )
    norm: Annotated[str, AfterValidator(check_kind)] = Field(
        default="bn",
        description=(
            "a normaliser of `fedbn list norms` in place of every batch norm, see below; or `module:callable`, a "
            "[normaliser of your own](own-parts.md#normaliser)"
        ),
    )
    weights: str | None = Field(
        default=None,
        description=(
            "pretrained weights: a file that ends in `.safetensors`, or a name of torchvision such as "
            "`DEFAULT`, see [Your own parts](own-parts.md#pretrained-weights)"
        ),
    )
    groups: Positive = Field(
        default=2, description="number of groups of `gn` and `gn+ws`; it must divide the channels of each layer"
    )
    branch_scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "with `won`, a factor of the residual branches of `resnet20` and torchvision's ResNets; [0.2 lets"
            " them train](strategies/fedwon.md#residual-networks)"
        ),
    )
    brn: Renorm = Field(
        default=Renorm(),
        description=(
            "bounds of batch renormalisation: r = 1 and d = 0 for the first `warmup` steps of a client, then "
            "widened linearly up to `r_steps` and `d_steps`; a run whose `train.steps` end before `warmup` is"
            " refused"
        ),
    )
    classes: Positive | None = Field(default=None, description="checked against the data")
    image_size: Side | None = Field(default=None, description="image size in pixels that the network is built for")
    stem: Literal["auto", "small", "large"] = Field(
        default="auto",
        description=(
            "first layers of torchvision's networks: `large`, as in torchvision; `small`, without the first "
            "strides; `auto`, small for images of up to 64 pixels"
        ),
    )


def _named(value: Any) -> str | Mapping[str, Any]:
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str):
        return name if value == {"name": name} else value
    raise ValueError(f"found {value!r}; expected a name, or a mapping with a name and options")


# A part by its name, or by a mapping of its name and options.
Named = Annotated[str | Mapping[str, Any], PlainValidator(_named), PlainSerializer(lambda value: value)]


def name_in(part: str | Mapping[str, Any]) -> str:
    return part if isinstance(part, str) else str(part["name"])


_Message = Literal["train", "evaluate", "query"]


def _by_message(value: Any) -> Any:
    return dict.fromkeys(get_args(_Message), value) if isinstance(value, list | tuple) else value


Mods = Annotated[Mapping[_Message, Annotated[tuple[Named, ...], Field(strict=False)]], BeforeValidator(_by_message)]


Weights = Annotated[
    Literal["balanced"] | Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)],
    expects("balanced, or a list with a weight for each class, zero or more"),
]
MILESTONES = (0.5, 0.75)


class Schedule(Section):
    kind: str = Field(
        default="constant",
        description=(
            "learning rate schedule: `constant`, `step`, `cosine`, `exponential` or `module:function`; "
            "`schedule: cosine` is short for `schedule: {kind: cosine}` ([Training](training.md#schedules))"
        ),
    )
    warmup: int = Field(
        default=0,
        ge=0,
        description="rounds in which the learning rate rises linearly to `lr` before the schedule begins",
    )
    milestones: Annotated[tuple[float, ...], Field(strict=False)] = Field(
        default=MILESTONES,
        description=(
            "for `step`: rounds, or fractions of all rounds, after which the learning rate is multiplied by `gamma`"
        ),
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="the factor: at each milestone for `step`, in each round for `exponential`",
    )
    switch: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=(
            "a factor of the learning rate in all rounds after the one in which the strategy freezes "
            "(`FixBN`, `FedTANII`) or switches (`FedBS`)"
        ),
    )

    def faults(self) -> dict[str, bool]:
        kinds = ("constant", "step", "cosine", "exponential")
        kind, odd = self.kind, next((each for each in self.milestones if each <= 0 or (each > 1 and each % 1)), 1)
        return {
            f"kind is {kind!r}; {did_you_mean(kind, kinds)}, or module:function": kind not in kinds and ":" not in kind,
            "kind is 'exponential', which needs gamma, the factor of each round, for instance 0.99": self.gamma is None
            and kind == "exponential",
            f"gamma ({self.gamma}) is for kind step or exponential, but kind is {kind!r}": self.gamma is not None
            and kind in ("constant", "cosine"),
            f"milestones ({list(self.milestones)}) are for kind step, but kind is {kind!r}": self.milestones
            != MILESTONES
            and kind in ("constant", "cosine", "exponential"),
            f"milestones has {odd:g}; expected a fraction of the rounds, above 0 and at most 1, or a round "
            "(2, 3, ...)": odd != 1,
        }


class Train(Section):
    lr: float = Field(default=0.1, gt=0, description="learning rate")
    optimizer: Named = Field(
        default="sgd",
        description=(
            "`sgd`, `adam`, `adamw`, the name of another class of `torch.optim`, or `module:callable`; with "
            "options `{name: adamw, betas: [0.9, 0.95]}` ([Training](training.md#optimisers))"
        ),
    )
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="momentum of SGD, or of another optimiser that has one"
    )
    keep_momentum: bool = Field(
        default=False,
        description=(
            "each client keeps the state of its optimiser (momentum, Adam's moments) for the next round it "
            "takes part in; otherwise each round begins without one (with `GlobalMomentum`, with the mean of "
            "all clients' momentum)"
        ),
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="weight decay; by default that of `torch.optim`, 0.01 for AdamW and 0 for most others",
    )
    norm_weight_decay: float | None = Field(
        default=None, ge=0, description="weight decay of the parameters of normalisers"
    )
    bias_weight_decay: float | None = Field(
        default=None, ge=0, description="weight decay of the biases of other layers"
    )
    clip: float | None = Field(
        default=None,
        gt=0,
        description=(
            "the largest norm of the gradients of a step, over all parameters; larger gradients are scaled "
            "down ([Training](training.md#clipping))"
        ),
    )
    loss: Named | None = Field(
        default=None,
        description=(
            "`cross_entropy`, `bce`, `mse`, `mae`, `huber` (or `{name: huber, delta: 2.0}`), or `module:callable`; by "
            "default that of the task ([Training](training.md#loss))"
        ),
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="label smoothing of `cross_entropy` and `bce`")
    class_weights: Weights | None = Field(
        default=None,
        description=(
            "weights of the classes in `cross_entropy` and `bce`: a list, or `balanced`, inversely proportional to "
            "the numbers of the client's own training examples"
        ),
    )
    batch_size: Positive = Field(
        default=32,
        description=(
            "examples in a step; a last batch of one example is dropped, because batch norm cannot compute its variance"
        ),
    )
    epochs: Positive | None = Field(default=None, description="passes over a client's examples per round")
    steps: Positive | None = Field(default=None, description="optimiser steps per round, instead of epochs")
    schedule: Schedule = Schedule()
    channels_last: bool = Field(
        default=False,
        description=(
            "train with the channels-last memory format: convolutions are faster "
            "([Performance](performance.md)), but the last bits of a result differ"
        ),
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "`bfloat16` trains under PyTorch's autocast: convolutions and matrix products in bfloat16; "
            "weights, statistics, SGD's updates, evaluation and FedTAN's first step stay in float32"
        ),
    )
    compile: bool = Field(
        default=False,
        description=(
            "compile training passes by PyTorch's compiler ([Performance](performance.md#compiled-passes)); last bits "
            "differ"
        ),
    )

    def faults(self) -> dict[str, bool]:
        loss, own = name_in(self.loss or ""), is_name(name_in(self.loss or ""))
        options = self.loss.keys() - {"name", *LOSSES.get(loss, ())} if isinstance(self.loss, Mapping) else set()
        option = next((key for key in ("label_smoothing", "class_weights") if getattr(self, key)), "")
        return {
            f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other; give one": self.epochs is not None
            and self.steps is not None,
            "class_weights are all 0; expected a weight above 0 for some class": self.class_weights is not None
            and not any(self.class_weights),
            "keep_momentum has no effect while momentum is 0; set momentum, for instance to 0.9": self.keep_momentum
            and not self.momentum
            and name_in(self.optimizer).lower() == "sgd",
            f"loss is {loss!r}; {did_you_mean(loss, LOSSES)}, or module:function for your own": self.loss is not None
            and not own
            and loss not in LOSSES,
            f"loss has {', '.join(sorted(options))}, which {loss} has not as options; train.label_smoothing and "
            "train.class_weights are keys of their own": not own and bool(options),
            f"{option} ({getattr(self, option, None)}) is an option of cross_entropy and bce, but loss is "
            f"{loss!r}": bool(option) and loss not in ("", "cross_entropy", "bce"),
        }


Strategy = Annotated[Mapping[str, Any], AfterValidator(check_strategy)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # without control characters, which terminals obey


DERIVED = ("label", "cell", "size")  # keys of a run that no file gives


class Settings(Section):
    """One training run."""

    name: Line = Field(default="experiment", description="prefix of the output folder")
    label: Line = ""
    rounds: Positive = Field(default=10, description="rounds of training")
    clients: Positive = Field(default=5, description="number of clients, partitions and nodes")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description=(
            "seed of the initial weights, the partition, the order of examples, augmentation, dropout and the sampling "
            "of clients"
        ),
    )
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    strategy: Strategy = Field(
        default_factory=lambda: {"name": "FedAvg"}, description="the strategy and its arguments, see [below](#strategy)"
    )
    evaluate: Evaluate = Evaluate()
    engine: Engine = Engine()
    track: Track = Field(
        default=(),
        description=(
            "trackers that record the run too: `tensorboard`, `module:callable`, a mapping with `name` and settings, "
            "or a list; see [Watching](watching.md#trackers)"
        ),
    )
    published: Published | None = Field(
        default=None,
        description=(
            "figures of a paper by label of their run, shown in the report, see [Report](report.md#published-figures)"
        ),
    )
    mods: Mods = Field(
        default_factory=dict,
        description=(
            "[Flower's mods](plugin.md#flowers-mods) around the messages that clients handle: a list of "
            "names, or lists by kind of message, `{train: [...], evaluate: [...], query: [...]}`"
        ),
    )
    cell: Cell = Cell()
    size: str = PAPER

    @property
    def trained(self) -> int:
        """The number of clients that train, those of the first partitions."""
        return self.clients - self.evaluate.unseen

    def faults(self) -> dict[str, bool]:
        warmup, of_brn, steps = self.train.schedule.warmup, self.model.brn.warmup, self.rounds * (self.train.steps or 0)
        return {
            f"evaluate.unseen is {self.evaluate.unseen}, but there are {self.clients} clients; expected at most "
            f"{self.clients - 1}, so that one trains": self.trained < 1,
            f"train.schedule.warmup is {warmup}, but there are {self.rounds} rounds; expected fewer": warmup
            >= self.rounds,
            f"model.norm: brn is batch norm in a client's first {of_brn} steps (model.brn.warmup), and a client takes "
            f"at most {steps} steps in this run; set a smaller warmup": self.model.norm == "brn"
            and self.train.steps is not None
            and of_brn >= steps,
        }


def resolve(run: Settings) -> Settings:
    """The run with the catalogue's values for the data settings that the experiment leaves out."""
    return run.model_copy(update={"data": run.data.model_copy(update=of_catalogue(run.data))})


def of_catalogue(data: Data) -> dict[str, Any]:
    """What the catalogue gives for settings that are left out."""
    entry = CATALOGUE.get(data.name)
    moments = entry is not None and entry.moments is not None
    if data.normalise == "official" and not moments:
        known = ", ".join(name for name, each in CATALOGUE.items() if each.moments is not None)
        raise SettingsError(
            f"data.normalise is 'official', but {data.name!r} has no official mean and standard deviation; use moments "
            f"or unit (official values are known for {known})"
        )
    found = {
        # The embedded digits are not resized; nor are a site's own images, if the experiment names no data set.
        "size": entry.size if entry and not entry.embedded else None,
        "normalise": "official" if moments else "moments",
        "augment": entry.augment if entry else (),
        "fit": entry.fit if entry else None if is_name(data.name) else "stretch",
        "crop": entry.crop if entry else None,
    }
    return {key: value for key, value in found.items() if value is not None and getattr(data, key) is None}


@dataclass(frozen=True)
class Layer:
    """Settings that one place gives; an experiment merges them in order."""

    origin: str  # "command line", "sweep", "tune", "size NAME", "run LABEL", "file", "data set" or "default"
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One run, or several that differ in their settings under `runs` and in their seeds."""

    name: str
    runs: tuple[Settings, ...]
    run_config: Mapping[str, str]  # `experiment` and `set` of a Flower run that carries it out
    description: str = ""
    seeded: bool = False  # whether it has `seeds`, also if only one of them is run
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)  # by the label of a run

    @functools.cached_property
    def named(self) -> dict[str, Settings]:
        """The runs by the names of their folders: the label, with the seed if the experiment has seeds."""
        labels = [file_name(run.label) for run in self.runs]
        with_seed = self.seeded or len(set(labels)) < len(labels)
        found: dict[str, Settings] = {}
        for label, run in zip(labels, self.runs, strict=True):
            name = f"{label}-seed{run.seed}" if with_seed else label
            if name in found:
                raise SettingsError(
                    f"two runs are both called {name!r}; give each run its own label and list each seed once"
                )
            found[name] = run
        return found


def strategy_name(spec: Mapping[str, Any]) -> str:
    base = spec.get("base")
    return f"{spec['name']}({strategy_name(base)})" if isinstance(base, Mapping) else str(spec["name"])
