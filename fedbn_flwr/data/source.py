"""What to load: the settings of a data set that say where its examples are, and in which form they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag, model_validator

from fedbn_flwr.data.schema import Positive, Problem, Section, Several, expects, setting
from fedbn_flwr.named import is_name
from fedbn_flwr.trees import Tree

from . import Size

PARTS = ("train", "test")
FOLDER = "folder"  # the column with the names of the folders of tables one level below

Side = Annotated[int, Field(gt=0, le=10_000)]
Pixels = Annotated[
    Side | Annotated[tuple[Side, Side], Field(strict=False)],
    expects("pixels per side, or [height, width], at most 10000"),
]


# One column or several.
Columns = Annotated[Several[str], PlainSerializer(lambda names: names[0] if len(names) == 1 else names or None)]


class HeldOut(Section):
    """A test split that is drawn from the examples."""

    share: float | None = setting(None, "the share of the examples, or of the values of `by`", gt=0, lt=1)
    by: str | None = setting(
        None,
        "a column, such as the patient: all examples with the same value are on one side, for training or for testing",
    )
    time: str | None = setting(
        None, "a column of numbers or dates: the last examples are the test split, with equal times on one side"
    )
    split: Annotated[Annotated[int, Field(ge=0)] | Literal["seed"] | None, expects("a number, or seed")] = setting(
        None, "which random draw: a number (0 by default), or `seed`, so that each seed has a test split of its own"
    )
    folds: int | None = setting(
        None,
        "instead of a share: cross-validation, in which each seed has one of this many folds as its test split; seeds "
        "0, 1, ... if you give none, and more seeds shuffle the examples again",
        ge=2,
        le=1_000,
    )

    def problems(self) -> Iterator[Problem]:
        yield (self.share is None) == (self.folds is None), "expected either share, such as 0.2, or folds, such as 5"
        for key in ("by", "split", "folds") if self.time is not None else ():
            value = getattr(self, key)
            yield value is not None, f"time is {self.time!r}, which holds out the last share; leave {key}={value!r} out"

    @property
    def is_drawn_per_seed(self) -> bool:
        return self.split == "seed" or (self.folds is not None and self.split is None)

    def of_seed(self, seed: int) -> HeldOut:
        return self.model_copy(update={"split": seed}) if self.is_drawn_per_seed else self

    @property
    def test_to_train(self) -> float:
        """The number of test examples for each training example."""
        share = self.share or 1 / (self.folds or 2)
        return share / (1 - share)


class Window(Section):
    """How series are cut into windows, each of which is an example."""

    length: Positive = setting(..., "the rows of a window")
    overlap: float = setting(0.0, "the share of a window that the next one has too", ge=0, lt=1)

    @property
    def step(self) -> int:
        """Rows between the first rows of two windows."""
        return max(1, round(self.length * (1 - self.overlap)))


Split = Annotated[
    Annotated[HeldOut, Tag("<share>")]
    | Annotated[
        str | Annotated[float, Field(gt=0, lt=1)],
        expects("the name of a split, a share between 0 and 1 to hold out, or {share: 0.2, by: patient}"),
        Tag("<value>"),
    ],
    Discriminator(lambda test: "<share>" if isinstance(test, Mapping | HeldOut) else "<value>"),
]
Categories = Annotated[
    Mapping[str, Annotated[Several[Annotated[str, BeforeValidator(str)]], Field(min_length=1)]],
    expects("lists of values by column, for instance {sex: [f, m]}"),
]
Ranges = Annotated[
    Mapping[str, Annotated[tuple[float, float], Field(strict=False)]],
    expects("the smallest and the largest value, {age: [0, 120]}"),
]


class Source(Section):
    """The sections `data` of experiments have these keys, and others on what clients do with the examples.

    A relative `name` counts from the working directory. Images have by default the size and the fit of the catalogue.
    """

    name: str = setting(
        "digits",
        "`digits` (1,797 images of 8x8 pixels), another name that `fedbn list datasets` shows, a folder (`./digits` if "
        "it has such a name), `./site/*` for folders of tables that are a client each, or a name on the Hugging Face "
        "hub; see [Data](data.md); or `module:callable`, a [data set of your own](own-parts.md#data-set)",
    )
    options: Tree = setting({}, "arguments of a data set `module:callable`, see [Your own parts](own-parts.md)")
    root: str | None = setting(None, "a folder of local copies: `root/cifar10` is read instead of the hub")
    revision: str | None = setting(
        None,
        "the commit, tag or branch of a data set on the hub; `environment.json` records the commit that a run "
        "used (`data_commit`)",
    )
    inputs: Columns = setting(
        (),
        "the column of inputs, or a list of columns; by default the column of images, otherwise all numeric columns "
        "that no other key names, see [Data](data.md#your-own-data)",
    )
    label: Columns = setting(
        (), "the column of labels, or a list of columns; for segmentation the column with the masks"
    )
    task: Literal["classification", "binary", "multilabel", "regression", "segmentation"] | None = setting(
        None,
        "what the labels are for: `classification`, `binary`, `multilabel`, `regression` or `segmentation`; by "
        "default it follows from their type: texts and integers are classes, floats are regression "
        "targets, several columns of 0 and 1 are a multi-label task",
    )
    domain: str | None = setting(None, "the column with each example's domain; accuracy is reported per domain")
    domains: Several[str] = setting((), "the domains to use")
    group: str | None = setting(
        None, "the column with each example's site, patient or user: the clients of `partition: {kind: natural}`"
    )
    series: str | None = setting(
        None,
        "the column that says to which series a row belongs, for a table with a row for each time: see "
        "[Data](data.md#series)",
    )
    time: str | None = setting(None, "the column by which the rows of a series are ordered; by default as in the table")
    window: Window | None = setting(
        None,
        "cuts each series into windows of one length: `{length: 200, overlap: 0.5}`; see [Data](data.md#series)",
    )
    train: str | None = setting(None, "name of the training split; in a folder, the prefix of its files")
    test: Split | None = setting(
        None,
        "name of the test split; in a folder, the prefix of its files (`val*` if there is no `test*`); or a "
        "share of the examples to hold out, such as 0.2; or a mapping, such as `{share: 0.2, by: patient}`, see "
        "[Data](data.md#the-test-split)",
    )
    categories: Categories = setting(
        {}, "the values of text columns, `{sex: [f, m]}`: each value becomes an input of 0 or 1"
    )
    ranges: Ranges = setting(
        {}, "`{age: [0, 120]}`: values outside these limits raise an error; a site's log says how many there are"
    )
    missing: Literal["mean", "drop"] | None = setting(
        None,
        "`mean` replaces missing inputs with the mean of their column, `drop` leaves out examples with missing "
        "inputs or labels; without it they raise an error",
    )
    shape: Several[Positive | None] = setting(
        (),
        "shape of the inputs of one example, checked against the data: `[30]`, `[9, 128]` for series of 9 "
        "channels, `[9, null]` for padded series of any length, with a mask",
    )
    tokens: Positive | None = setting(
        None, "inputs are tokens, whole numbers below this one; by default the largest token + 1"
    )
    classes: Positive | None = setting(
        None,
        "number of classes, labels or regression targets, checked against the data; required for segmentation "
        "data that [Data](data.md) doesn't list",
    )
    class_names: Several[str] = setting(
        (),
        "the classes in the order of the model's outputs; the data, for instance at one site, may then lack "
        "some of them",
    )
    channels: Positive | None = setting(
        None, "number of channels, checked against the data; with 3, greyscale images are repeated in all of them"
    )
    size: Pixels | None = setting(
        None, "resize images to this many pixels per side, or to `[height, width]`; required if images differ in size"
    )
    fit: Literal["stretch", "crop"] | None = setting(
        None,
        "how an image of another size is resized: `stretch`, or `crop`, which keeps the aspect ratio and the centre",
    )
    memory: float = setting(8.0, "GiB; a data set up to this size is copied to a GPU as a whole", gt=0)
    examples: Positive | None = setting(
        None,
        "use only this many training examples, in the proportions of classes and domains, see [Sweeps and "
        "sizes](sweeps.md#sizes)",
    )
    test_examples: Positive | None = setting(None, "the same for test examples")
    random: bool = setting(
        False, "random examples in the shape of the data set, which isn't read; accuracies then mean nothing"
    )

    @model_validator(mode="before")
    @classmethod
    def _folders_are_clients(cls, given: Any) -> Any:
        """`./site/*` is `./site` with a group, and so by default a client, for each folder."""
        if not (isinstance(given, Mapping) and str(given.get("name")).endswith("/*")):
            return given
        natural = {"partition": {"kind": "natural"}} if "partition" in cls.model_fields else {}
        return {"group": FOLDER, **natural, **given, "name": str(given["name"])[:-2]}

    @model_validator(mode="after")
    def _classes_are_counted(self) -> Self:
        if self.class_names:
            object.__setattr__(self, "classes", len(self.class_names))  # not among the keys that are set
        return self

    def problems(self) -> Iterator[Problem]:
        names = self.class_names
        yield len({*names}) < len(names), f"class_names is {list(names)}; expected different texts"
        yield (
            names and self.classes not in (None, len(names)),
            f"classes is {self.classes}, but class_names has {len(names)}; leave classes out",
        )
        for key, does in (("time", "orders the rows of a series"), ("window", "cuts series")):
            value = getattr(self, key)
            said = f"{key} is {value!r}, which {does}; give data.series, the column of their ids"
            yield value is not None and self.series is None, said
        for option in self.options if not is_name(self.name) else ():
            yield True, f"options.{option} is an argument of a data set module:callable, but name is {self.name!r}"

    @property
    def pixels(self) -> Size | None:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def held_out(self) -> HeldOut | None:
        """How the test split is drawn from the examples; None if the data have one."""
        test = HeldOut(share=self.test) if isinstance(self.test, float) else self.test
        return test if isinstance(test, HeldOut) else None

    def of_seed(self, seed: int) -> Self:
        """With the test split that this seed draws, if each seed draws its own."""
        test = self.held_out
        return self.model_copy(update={"test": test.of_seed(seed)}) if test and test.is_drawn_per_seed else self
