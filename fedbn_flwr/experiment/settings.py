"""The settings of an experiment, frozen; `check.py` makes them from a file.

Only this folder uses them: `prepare.py` and `node.py` pass plain arguments to the rest of the library.
docs/experiments.md explains the keys.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
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

from fedbn_flwr.data.partition.kinds import KINDS, Options, OwnOptions
from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.models import build as models
from fedbn_flwr.named import is_name
from fedbn_flwr.norms.convert import check_kind
from fedbn_flwr.strategies import check_strategy

from .engine import Engine as Engine
from .evaluation import Evaluate as Evaluate
from .evaluation import Few, Names, Positive, Section
from .expansion import Cell, Size
from .published import Published
from .trackers import Track


def _size(value: Any) -> int | tuple[int, int]:
    """Parse both forms with one error message; a union would report one for each form."""
    sides = (value,) if isinstance(value, int) else value
    if isinstance(sides, list | tuple) and all(type(side) is int and 0 < side <= 10_000 for side in sides):
        if len(sides) == 1 and isinstance(value, int):
            return value
        if len(sides) == 2:
            return sides[0], sides[1]
    raise ValueError(f"found {value!r}; expected pixels per side, or [height, width], at most 10000")


# Serialised unchanged: Pydantic would warn because a JSON list matches neither type.
Pixels = Annotated[int | tuple[int, int], PlainValidator(_size), PlainSerializer(lambda size: size)]


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
            [Annotated[kind.options, Tag(name)] for name, kind in KINDS.items()] + [Annotated[OwnOptions, Tag(OWN)]],
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
    name: str = "digits"  # "digits", a name of the catalogue, a folder, a hub name, or module:callable
    options: Arguments = Arguments()  # of module:callable
    root: str | None = None  # folder of local copies, root/name; None: $FEDBN_DATA
    revision: str | None = None  # of a hub's data set: a commit, tag or branch; None: main
    image: str | None = None  # column; None: the one of image type
    label: str | None = None
    domain: str | None = None  # column; None: "domain" if there is one
    domains: Names = ()  # domains to use; empty: all
    train: str | None = None  # split names
    test: str | None = None
    classes: Positive | None = None  # checked against the data if given
    class_names: Names = ()  # in the order of the model's outputs; empty: those of the data, sorted
    channels: Positive | None = None  # likewise
    size: Pixels | None = None  # resize to size x size, or to a height and a width
    # How images of another aspect ratio are resized: stretch, or crop (keep the centre). None: the catalogue's
    fit: Literal["stretch", "crop"] | None = None
    crop: Positive | None = None  # segmentation: side of the random crops to train on
    # moments: mean zero and standard deviation one per channel over the training set; unit: pixels from 0 to 1;
    # official: by the catalogue's mean and standard deviation. None: official if the catalogue has them, else moments
    normalise: Normalise | None = None
    # None: the catalogue's
    augment: Augment | None = None
    pad: int = Field(default=2, ge=1, le=1_000)  # pixels of padding before a random crop
    stream: Literal[True, False, "auto"] = "auto"  # decode images when needed; auto: if they exceed `memory`
    memory: float = Field(default=8.0, gt=0)  # GiB that decoded images may take
    readers: Few = 2  # decoding threads per client
    partition: Partition = KINDS["iid"].options()
    images: Positive | None = None  # training images: a fixed draw of this many; None: all
    test_images: Positive | None = None
    random: bool = False  # random images in the form of the data set

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

    @model_validator(mode="after")
    def _options_have_a_callable(self) -> Data:
        if self.options.model_extra and not is_name(self.name):
            first = next(iter(self.options.model_extra))
            raise ValueError(f"options.{first} is an argument of a data set module:callable, but name is {self.name!r}")
        return self


class Renorm(Section):
    """Batch renormalisation: bounds of r and d, and the first and last steps of their widening."""

    r_max: float = Field(default=3.0, ge=1)
    d_max: float = Field(default=5.0, ge=0)
    warmup: int = Field(default=5_000, ge=0)
    r_steps: int = Field(default=40_000, ge=0)
    d_steps: int = Field(default=25_000, ge=0)

    @model_validator(mode="after")
    def _open_after_the_warm_up(self) -> Renorm:
        for name, steps in (("r_steps", self.r_steps), ("d_steps", self.d_steps)):
            if steps < self.warmup:
                raise ValueError(f"{name} ({steps}) is less than warmup ({self.warmup}), when bounds begin to widen")
        return self


class Model(Section):
    name: Annotated[str, AfterValidator(models.check_name)] = "cnn"  # or module:callable
    norm: Annotated[str, AfterValidator(check_kind)] = "bn"  # or module:callable
    weights: str | None = None  # a safetensors file, or torchvision's name such as DEFAULT
    groups: Positive = 2  # of group norm
    branch_scale: float = Field(default=1.0, gt=0, le=1)  # of `won`: the factor of residual branches
    brn: Renorm = Renorm()
    classes: Positive | None = None
    image_size: Annotated[int, Field(ge=1, le=10_000)] | None = (
        None  # what the network is built for; None: the size of the data
    )
    stem: Literal["auto", "small", "large"] = "auto"


def _named(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("name"), str)):
        return value
    raise ValueError(f"found {value!r}; expected a name, or a mapping with a name and options")


# A part by its name, or by a mapping of its name and options.
Named = Annotated[str | Mapping[str, Any], PlainValidator(_named), PlainSerializer(lambda value: value)]


def name_in(part: str | Mapping[str, Any]) -> str:
    return part if isinstance(part, str) else str(part["name"])


_Message = Literal["train", "evaluate", "query"]


def _by_message(value: Any) -> Any:
    return dict.fromkeys(get_args(_Message), value) if isinstance(value, list | tuple) else value


Mods = Annotated[Mapping[_Message, Annotated[tuple[Named, ...], Field(strict=False)]], BeforeValidator(_by_message)]


def _weights(value: Any) -> Literal["balanced"] | tuple[float, ...]:
    if value == "balanced":
        return "balanced"
    weights = value if isinstance(value, list | tuple) else ()
    if any(weights) and all(type(weight) in (int, float) and weight >= 0 for weight in weights):
        return tuple(map(float, weights))
    raise ValueError(f"found {value!r}; expected balanced, or a list with a weight for each class, zero or more")


Weights = Annotated[
    Literal["balanced"] | tuple[float, ...], PlainValidator(_weights), PlainSerializer(lambda value: value)
]


MILESTONES = (0.5, 0.75)


class Schedule(Section):
    kind: str = "constant"  # constant, step, cosine, exponential, or module:function
    warmup: int = Field(default=0, ge=0)  # rounds in which the rate rises to `lr`
    # step: multiply by gamma at each milestone, given as a fraction of the rounds or as a round
    milestones: Annotated[tuple[float, ...], Field(strict=False)] = MILESTONES
    gamma: float | None = Field(default=None, gt=0, le=1)  # step: 0.1; exponential: required
    # Multiplies the rate in all rounds after the one in which the strategy freezes or switches.
    switch: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _kind_is_known(self) -> Schedule:
        kinds = ("constant", "step", "cosine", "exponential")
        if self.kind not in kinds and ":" not in self.kind:
            raise ValueError(f"kind is {self.kind!r}; {did_you_mean(self.kind, kinds)}, or module:function")
        if self.kind == "exponential" and self.gamma is None:
            raise ValueError("kind is 'exponential', which needs gamma, the factor of each round, for instance 0.99")
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Schedule:
        if self.kind in ("constant", "cosine") and self.gamma is not None:
            raise ValueError(f"gamma ({self.gamma:g}) is for kind step or exponential, but kind is {self.kind!r}")
        if self.kind in ("constant", "cosine", "exponential") and self.milestones != MILESTONES:
            raise ValueError(f"milestones ({list(self.milestones)}) are for kind step, but kind is {self.kind!r}")
        for milestone in self.milestones:
            if milestone <= 0 or (milestone > 1 and milestone % 1):
                raise ValueError(
                    f"milestones has {milestone:g}; expected a fraction of the rounds, above 0 and at most 1, or a "
                    "round (2, 3, ...)"
                )
        return self


def _of_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class Train(Section):
    lr: float = Field(default=0.1, gt=0)
    optimizer: Named = "sgd"  # of torch.optim, or module:callable
    momentum: float = Field(default=0.0, ge=0, lt=1)
    keep_momentum: bool = False  # each client keeps the optimiser's state from round to round
    weight_decay: float | None = Field(default=None, ge=0)  # None: the optimiser's default
    norm_weight_decay: float | None = Field(default=None, ge=0)  # of the parameters of normalisers
    bias_weight_decay: float | None = Field(default=None, ge=0)  # of the biases of other layers
    clip: float | None = Field(default=None, gt=0)  # largest norm of the gradients of a step
    loss: Named = "cross_entropy"  # or module:callable
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    class_weights: Weights | None = None
    batch_size: Positive = 32
    epochs: Positive | None = None  # passes over the client's data per round; excludes steps
    steps: Positive | None = None
    schedule: Annotated[Schedule, BeforeValidator(_of_kind)] = Schedule()
    channels_last: bool = False  # memory format [N, H, W, C]: faster convolutions, different last bits
    precision: Literal["float32", "bfloat16"] = "float32"  # of training passes, by autocast
    compile: bool = False  # training passes by PyTorch's compiler

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other; give one")
        return self

    @model_validator(mode="after")
    def _there_is_momentum_to_keep(self) -> Train:
        if self.keep_momentum and not self.momentum and name_in(self.optimizer).lower() == "sgd":
            raise ValueError("keep_momentum has no effect while momentum is 0; set momentum, for instance to 0.9")
        return self

    @model_validator(mode="after")
    def _options_of_cross_entropy(self) -> Train:
        loss = name_in(self.loss)
        if loss == "cross_entropy":
            if isinstance(self.loss, Mapping) and len(self.loss) > 1:
                raise ValueError(
                    f"loss is {self.loss!r}; the options of cross_entropy are keys of their own, label_smoothing and "
                    "class_weights"
                )
            return self
        if ":" not in loss:
            raise ValueError(f"loss is {loss!r}; expected cross_entropy, or module:function for your own")
        for key in ("label_smoothing", "class_weights"):
            if getattr(self, key):
                raise ValueError(f"{key} ({getattr(self, key)}) is an option of cross_entropy, but loss is {loss!r}")
        return self


Strategy = Annotated[Mapping[str, Any], AfterValidator(check_strategy)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # without control characters, which terminals obey


DERIVED = ("label", "cell", "size")  # keys of a run that no file gives


class Settings(Section):
    """One training run."""

    name: Line = "experiment"
    label: Line = ""
    rounds: Positive = 10
    clients: Positive = 5
    seed: int = Field(default=0, ge=0, lt=2**63)
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    strategy: Strategy = Field(default_factory=lambda: {"name": "FedAvg"})
    evaluate: Evaluate = Evaluate()
    engine: Engine = Engine()
    track: Track = ()  # records the run in other programs too
    published: Published | None = None  # for this run; an experiment gives it by label
    mods: Mods = Field(default_factory=dict)  # Flower's mods around the messages that clients handle
    cell: Cell = Cell()
    size: Size = Size()

    @property
    def trained(self) -> int:
        """The number of clients that train, those of the first partitions."""
        return self.clients - self.evaluate.unseen

    @model_validator(mode="after")
    def _some_client_trains(self) -> Settings:
        if self.trained < 1:
            raise ValueError(
                f"evaluate.unseen is {self.evaluate.unseen}, but there are {self.clients} clients; expected at most "
                f"{self.clients - 1}, so that one trains"
            )
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Settings:
        if (warmup := self.train.schedule.warmup) >= self.rounds:
            raise ValueError(f"train.schedule.warmup is {warmup}, but there are {self.rounds} rounds; expected fewer")
        return self

    @model_validator(mode="after")
    def _renormalisation_begins(self) -> Settings:
        if self.model.norm != "brn" or self.train.steps is None:
            return self
        if (warmup := self.model.brn.warmup) >= (steps := self.rounds * self.train.steps):
            raise ValueError(
                f"model.norm: brn is batch norm in a client's first {warmup} steps (model.brn.warmup), and a client "
                f"takes at most {steps} steps in this run; set a smaller warmup"
            )
        return self


class Experiment(Section):
    """One run, or several that differ in their settings under `runs` and in their seeds."""

    name: str
    description: str = ""
    runs: tuple[Settings, ...]
    seeded: bool = False  # whether it has `seeds`, also if only one of them is run
    run_config: Mapping[str, str]  # `experiment` and `set` of a Flower run that carries it out


def strategy_name(spec: Mapping[str, Any]) -> str:
    base = spec.get("base")
    return f"{spec['name']}({strategy_name(base)})" if isinstance(base, Mapping) else str(spec["name"])
