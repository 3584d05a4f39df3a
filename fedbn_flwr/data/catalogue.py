"""The data sets of the papers by name: where they are stored, and how the papers prepare them.

To add a data set, add an entry to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from . import Moments, Size


@dataclass(frozen=True)
class Entry:
    """One data set. None means not known, or taken from the data."""

    title: str
    classes: int
    channels: int  # or the inputs of a table
    size: int | None  # images are resized to size x size, as in the papers; None: not resized
    examples: int | None = None  # to train on
    hub: str | None = None  # name on the Hugging Face hub
    embedded: str = ""  # the package that has the data; neither a hub nor a local copy has them
    test: str = "test"  # the hub's split with public labels to test on
    image: str = "image"  # names of columns
    label: str = "label"
    domain: str | None = None
    domains: tuple[str, ...] = ()  # all domains of the set; a local copy may have fewer
    keep: tuple[str, ...] = ()  # the classes of the set, if the hub's copy has more
    moments: Moments | None = None  # published mean and standard deviation per channel
    augment: tuple[str, ...] = ()
    fit: Literal["stretch", "crop"] = "stretch"  # how images with another aspect ratio become size x size
    crop: int | None = None  # segmentation: side of the training crops in pixels
    ids: tuple[int, ...] | None = None  # segmentation: the value of each class in a mask
    names: tuple[str, ...] = ()  # of the classes, if the data has no names
    files: str = "train*.parquet and test*.parquet"  # expected in a local copy

    @property
    def pixels(self) -> Size | None:
        return None if self.size is None else (self.size, self.size)


_CROP = ("crop", "flip")
_RESIZED = ("resized_crop", "flip")
_TURNED = ("flip", "rotate")  # as in FedBN's code

_BY_DOMAIN = "DOMAIN/CLASS/*.jpg"

# Over all pixels of the training set, except ImageNet's standard deviation, which is torchvision's.
_TINY = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# The evaluation classes of Cityscapes and their label ids (the train ids are 0, 1, ... in this order).
_CITYSCAPES = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}

# The ten classes of DomainNet with the most images, as in FedBN's code.
_DOMAINNET10 = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)

CATALOGUE: Mapping[str, Entry] = {
    "digits": Entry(
        "1,797 handwritten digits",
        classes=10,
        channels=1,
        size=8,
        examples=1_438,  # every fifth is a test image
        embedded="fedbn-flwr",
    ),
    "heart": Entry(
        "Heart Disease, patients of four hospitals",
        classes=2,
        channels=13,
        size=None,
        examples=486,
        embedded="fedbn-flwr",
        domain="domains",
        domains=("cleveland", "hungarian", "switzerland", "va"),
    ),
    "watch": Entry(
        "smartwatches of ten persons during shoulder exercises",
        classes=7,
        channels=6,
        size=None,
        embedded="seglearn",
    ),
    "cifar10": Entry(
        "CIFAR-10",
        classes=10,
        channels=3,
        size=32,
        examples=50_000,
        hub="uoft-cs/cifar10",
        image="img",
        moments=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        augment=_CROP,
    ),
    "cifar100": Entry(
        "CIFAR-100, its 100 fine classes",
        classes=100,
        channels=3,
        size=32,
        examples=50_000,
        hub="uoft-cs/cifar100",
        image="img",
        label="fine_label",
        moments=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        augment=_CROP,
    ),
    "mnist": Entry(
        "MNIST",
        classes=10,
        channels=1,
        size=28,
        examples=60_000,
        hub="ylecun/mnist",
        moments=((0.1307,), (0.3081,)),
    ),
    "fashion_mnist": Entry(
        "Fashion-MNIST",
        classes=10,
        channels=1,
        size=28,
        examples=60_000,
        hub="zalando-datasets/fashion_mnist",
        moments=((0.2860,), (0.3530,)),
    ),
    "tiny_imagenet": Entry(
        "Tiny-ImageNet",
        classes=200,
        channels=3,
        size=64,
        examples=100_000,
        hub="zh-plus/tiny-imagenet",
        test="valid",
        moments=_TINY,
        augment=_RESIZED,
    ),
    "tiny_imagenet_25": Entry(
        "every eighth class of Tiny-ImageNet",
        classes=25,
        channels=3,
        size=64,
        examples=12_500,
        moments=_TINY,
        augment=_RESIZED,
    ),
    "imagenet": Entry(
        "ImageNet-1K",
        classes=1000,
        channels=3,
        size=224,
        examples=1_281_167,
        hub="ILSVRC/imagenet-1k",
        test="validation",
        moments=_IMAGENET,
        augment=_RESIZED,
        fit="crop",
    ),
    "digits_five": Entry(
        "Digits-Five",
        classes=10,
        channels=3,
        size=28,
        examples=37_190,  # 7,438 of each domain, as in FedBN's code
        domain="domain",
        domains=("mnist", "svhn", "usps", "synth", "mnist_m"),
        moments=((0.5,) * 3, (0.5,) * 3),  # not measured: the values in FedBN's code
    ),
    "office_caltech10": Entry(
        "Office-Caltech-10",
        classes=10,
        channels=3,
        size=256,
        examples=2_050,  # of 2,533: every fifth of a class is a test image
        domain="domain",
        domains=("amazon", "caltech", "dslr", "webcam"),
        augment=_TURNED,
        files=f"train*.parquet and test*.parquet, or {_BY_DOMAIN}",
    ),
    "domainnet10": Entry(
        "DomainNet, its ten most common classes",
        classes=10,
        channels=3,
        size=256,
        hub="wltjr1007/DomainNet",
        domain="domain",
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        keep=_DOMAINNET10,
        augment=_TURNED,
        files=f"train*.parquet and test*.parquet, or {_BY_DOMAIN}",
    ),
    "cityscapes": Entry(
        "Cityscapes, segmentation",
        classes=19,
        channels=3,
        size=None,
        examples=2_975,
        label="mask",
        moments=_IMAGENET,  # as is usual
        augment=("flip",),
        crop=768,
        ids=tuple(_CITYSCAPES.values()),
        names=tuple(_CITYSCAPES),
        files="leftImg8bit/ and gtFine/",
    ),
}


def describe_datasets() -> dict[str, str]:
    """One line for each value of `data.name`."""
    lines = {
        name: f"{entry.title}: {entry.classes} classes"
        + (f", {entry.size}x{entry.size}" if entry.size else "")
        + (f", crops of {entry.crop}x{entry.crop}" if entry.crop else "")
        + ("" if entry.size or entry.crop else f", {entry.channels} inputs")
        + (f", domains {', '.join(entry.domains)}" if entry.domains else "")
        + f" ({_source(entry)})"
        for name, entry in CATALOGUE.items()
    }
    return {
        **lines,
        "FILE": "a table of your own: .csv, .parquet or .npz, see docs/data.md",
        "FOLDER": "a folder with train* and test* files of these kinds, or with train/CLASS/* and test/CLASS/*",
        "OWNER/NAME": "any image classification data set on the Hugging Face hub",
        "MODULE:CALLABLE": "a data set of your own: a function that returns training and test images",
    }


def _source(entry: Entry) -> str:
    if entry.embedded:
        return "embedded" if entry.embedded == "fedbn-flwr" else f"in the package {entry.embedded}"
    return f"{entry.hub} on the hub" if entry.hub else "local copy: data.root"
