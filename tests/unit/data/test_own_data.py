"""Data sets, partitions, augmentations and normalisations of the user, by the name `module:callable`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedbn_flwr.data.batches import ClientBatches, TestBatches, own_augmentation
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import partition
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import UserError
from tests.unit.data.conftest import Own

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


# --- data sets ---------------------------------------------------------------


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(column[row] for column in self.columns)


def split(kind: str) -> Any:
    pictures = [Image.fromarray(pixels) for pixels in PIXELS]
    match kind:
        case "channels last":
            return PIXELS, LABELS
        case "channels first":
            return torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.from_numpy(LABELS)
        case "mapping":
            return {"inputs": PIXELS, "labels": LABELS.tolist()}
        case "torch":
            return Pairs(pictures, LABELS.tolist())
        case "tensors":
            return Pairs(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.from_numpy(LABELS))
        case _:
            features = datasets.Features(picture=datasets.Image(), kind=datasets.ClassLabel(names=["0", "1", "2"]))
            return datasets.Dataset.from_dict({"picture": pictures, "kind": LABELS}, features=features)


@pytest.mark.parametrize("kind", ["channels last", "channels first", "mapping", "torch", "tensors", "datasets"])
def test_every_form_of_a_data_set_has_the_same_images(own: Own, kind: str) -> None:
    found = load(Source(name=own(lambda: {"train": split(kind), "test": split(kind)})))
    assert found.train.inputs.equal(torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert found.train.labels.tolist() == LABELS.tolist()
    assert (found.channels, found.size, found.class_names) == (3, (6, 8), ("0", "1", "2"))


def test_a_data_set_gets_its_options_and_its_draws_are_repeated(own: Own) -> None:
    def made(count: int, root: str | None = None) -> Any:
        images = np.random.rand(count, 4, 4), [random.randrange(2) for _ in range(count)]
        return {"train": images, "test": images, "classes": ["even", root]}

    name = own(made)
    one, two = (load(Source(name=name, root="here", options={"count": 20})) for _ in range(2))
    assert one.class_names == ("even", "here")
    assert one.train.inputs.equal(two.train.inputs)
    assert one.train.labels.equal(two.train.labels)


def test_images_of_floating_point_numbers_are_normalised_by_their_own_moments(own: Own) -> None:
    images = RNG.normal(40, 7, (12, 2, 5, 5))
    found = load(Source(name=own(lambda: {"train": (images, LABELS), "test": (images, LABELS)})))
    mean, deviation = found.moments
    np.testing.assert_allclose(mean, images.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(deviation, images.std((0, 2, 3)), rtol=1e-6)
    ((inputs, _),) = TestBatches(found.test, found.moments, 12)
    expected = (images - np.reshape(mean, (1, 2, 1, 1))) / np.reshape(deviation, (1, 2, 1, 1))
    np.testing.assert_allclose(inputs, expected, atol=2e-6)
    batches = ClientBatches(
        found.train, torch.arange(12), ((0.0,) * 2, (1.0,) * 2), batch_size=12, client=0, seed=0,
        augment=["resized_crop", "crop", "flip", "rotate"],
    )  # fmt: skip
    (inputs, _), *_ = batches.epoch(1, 0)
    assert inputs.dtype == torch.float32
    assert (inputs != inputs.round()).any()


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_whole_numbers_of_any_type_are_pixels(own: Own, kind: Any) -> None:
    found = load(
        Source(name=own(lambda: {"train": (PIXELS.astype(kind), LABELS), "test": (list(PIXELS.astype(kind)), LABELS)}))
    )
    for part in (found.train, found.test):
        assert part.inputs.equal(torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


def test_changed_files_of_a_dataset_dict_are_read_again(own: Own, tmp_path: Path) -> None:
    features = datasets.Features(picture=datasets.Image(), kind=datasets.ClassLabel(names=["only"]))

    def made() -> Any:
        split = datasets.Dataset.from_dict({"picture": [str(tmp_path / "0.png")], "kind": [0]}, features=features)
        return datasets.DatasetDict(train=split, test=split)

    name = own(made)
    for pixels in PIXELS[:2]:
        Image.fromarray(pixels).save(tmp_path / "0.png")
        assert load(Source(name=name)).train.inputs[0].equal(torch.from_numpy(pixels).permute(2, 0, 1))


def test_masks_make_a_segmentation_data_set(own: Own) -> None:
    masks = np.where(RNG.random((12, 6, 8)) < 0.1, 255, RNG.integers(0, 3, (12, 6, 8)))
    found = load(
        Source(name=own(lambda: {"train": (PIXELS, masks), "test": (PIXELS, masks), "classes": ["a", "b", "c"]}))
    )
    assert found.dense
    assert found.train.targets.equal(torch.from_numpy(masks).byte())
    unnamed = load(Source(name=own(lambda: {"train": (PIXELS, masks), "test": (PIXELS, masks)})))
    assert unnamed.class_names == ("0", "1", "2")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a list": ([1, 2], {}, "returned a list; expected a mapping with 'train' and 'test'"),
    "no test": ({"train": 1, "valid": 2}, {}, "returned a dict with 'train', 'valid'; expected a mapping"),
    "a number": ({"train": 1, "test": 2}, {}, "train is a int with no items; expected a pair"),
    "no labels": (
        {"train": {"inputs": PIXELS}, "test": (PIXELS, LABELS)},
        {},
        "name the column with data.label; its columns: inputs",
    ),
    "a wrong key": (
        {"train": {"image": PIXELS, "labels": LABELS}, "test": (PIXELS, LABELS)},
        {},
        "name the column with data.inputs; its columns: image",
    ),
    "lengths": (
        {"train": (PIXELS, LABELS[:5]), "test": (PIXELS, LABELS)},
        {},
        "has 12 inputs, 5 labels; expected as many",
    ),
    "shapes": (
        {"train": (PIXELS, LABELS), "test": (PIXELS[:, :5], LABELS)},
        {},
        "'inputs' has arrays of several shapes, with sides of 6, 5; expected one",
    ),
    "labels": (
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS), "classes": ["a"]},
        {},
        "1 classes, so labels must be 0 to 0, but they are 0 to 2",
    ),
    "part labels": (
        {"train": (PIXELS, LABELS / 2), "test": (PIXELS, LABELS)},
        {"task": "classification"},
        "labels of type float64",
    ),
    "not finite": (
        {"train": (np.where(PIXELS > 9, PIXELS, np.inf), LABELS), "test": (PIXELS, LABELS)},
        {},
        r"has infinite values in inputs \(\d+\)",
    ),
    "large": ({"train": (PIXELS.astype(int) * 300, LABELS), "test": (PIXELS, LABELS)}, {}, "from 0 to 255"),
    "very large": (
        {"train": (PIXELS.astype(np.uint64) << 56, LABELS), "test": (PIXELS, LABELS)},
        {},
        "uint64 pixels; expected whole",
    ),
    "another shape": (
        {"train": (PIXELS[:, :, :, :1], LABELS), "test": (PIXELS, LABELS)},
        {},
        "'inputs' has arrays of several shapes, with sides of 1, 3; expected one",
    ),
    "a mapping": (
        {"train": ({"inputs": PIXELS}, LABELS), "test": (PIXELS, LABELS)},
        {},
        r"'inputs' has .*mapping; several arrays are columns, whose names are in data\.inputs",
    ),
    "complex": (
        {"train": (PIXELS * 1j, LABELS), "test": (PIXELS, LABELS)},
        {},
        "'inputs' has values that are not numbers, texts, or arrays",
    ),
    "texts": (
        {"train": (LABELS.astype(str), LABELS), "test": (PIXELS, LABELS)},
        {},
        "train and test have columns of different types; .*: Field inputs",
    ),
    "column": (
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS)},
        {"inputs": "x"},
        r"data\.inputs='x' is not a "
        "column",
    ),
    "a column of domains": (
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS)},
        {"domain": "x"},
        r"data\.domain='x' is not a column",
    ),
    "domain": (
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS)},
        {"domains": ["a"]},
        "data.domain='domain' is not a column",
    ),
    "items": ({"train": Pairs([1, 2]), "test": (PIXELS, LABELS)}, {}, "Pairs with items of type tuple"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_data_set_is_one_message(own: Own, case: str) -> None:
    made, options, message = WRONG[case]
    with pytest.raises(UserError, match=message) as caught:
        load(Source(name=own(lambda: made), **options))
    assert "\n" not in str(caught.value)


# --- partitions --------------------------------------------------------------

ALL = torch.arange(60) % 5


def test_a_partition_is_called_with_what_it_names(own: Own) -> None:
    def by_label(labels: Any, clients: int, classes: int, seed: int, *, first: int) -> Any:
        assert (classes, first, 0 <= seed < 2**32) == (5, 2, True)
        return [np.flatnonzero(labels == (client + first) % classes) for client in range(clients)]

    parts = partition(ALL, 5, 3, 0, own(by_label), first=2)
    assert [set(ALL[part].tolist()) for part in parts] == [{2}, {3}, {4}], "images may be left out"
    assert all(part.equal(part.sort().values) for part in parts)


def test_its_draws_are_those_of_the_seed_also_from_global_generators(own: Own) -> None:
    def drawn(labels: Any, clients: int, generator: np.random.Generator) -> Any:
        order = generator.permutation(len(labels))[np.random.permutation(len(labels))]
        random.shuffle(rows := order.tolist())
        return np.array_split(torch.tensor(rows)[torch.randperm(len(rows))], clients)

    name, before = own(drawn), (random.getstate(), torch.get_rng_state())
    one, same, other = (partition(ALL, 5, 4, seed, name) for seed in (1, 1, 2))
    assert all(a.equal(b) for a, b in zip(one, same, strict=True))
    assert not all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert (random.getstate(), before[1].tolist()) == (before[0], torch.get_rng_state().tolist())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("text", "returned a str of 4; expected a list of 2 arrays"),
        ([[0], [1], [2]], "returned a list of 3; expected a list of 2"),
        ([[0], []], r"leaves 1 of 2 clients without examples \(clients 1\)"),
        ([[0, 1], [1, 2]], "client 1 has the row 1, which client 0 has too"),
        ([[0, 0], [1]], "client 0 has the row 0, which client 0 has too"),
        ([[0], [60]], "client 1 has the row 60; expected 0 to 59"),
        ([[0], [-1]], "client 1 has the row -1; expected 0 to 59"),
        ([[0.5], [1]], "client 0 has float64 values"),
        ([[True, False], [1]], "client 0 has bool values"),
    ],
)
def test_what_is_wrong_with_a_partition_names_the_client(own: Own, found: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"data\.partition.*own_parts:part.*{message}"):
        partition(ALL, 5, 2, 0, own(lambda labels, clients: found))


def test_a_partition_that_draws_by_itself_is_refused(own: Own) -> None:
    def free(labels: Any, clients: int) -> Any:
        return np.array_split(np.random.default_rng().permutation(60), clients)

    with pytest.raises(UserError, match=r"returned two different partitions .* the argument `generator`"):
        partition(ALL, 5, 2, 0, own(free))


# --- augmentation and normalisation ------------------------------------------

IMAGES = Examples(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.from_numpy(LABELS))


def batches(name: str, seed: int = 0, **options: Any) -> Tensor:
    made = ClientBatches(
        IMAGES, torch.arange(12), ((0.0,) * 3, (1.0,) * 3), batch_size=5, client=1, seed=seed,
        own=[own_augmentation(name, **options)],
    )  # fmt: skip
    return torch.cat([images for images, _ in made.epoch(1, 0)])


def test_an_augmentation_of_a_batch_draws_from_its_generator(own: Own) -> None:
    def darken(images: Tensor, generator: torch.Generator, most: float) -> Tensor:
        return (images * (1 - most * torch.rand(len(images), 1, 1, 1, generator=generator))).to(images.dtype)

    name = own(darken)
    assert batches(name, most=0.9).equal(batches(name, most=0.9))
    assert not batches(name, most=0.9).equal(batches(name, seed=1, most=0.9))
    assert batches(name, most=0.0).sort().values.equal(batches(own(lambda images, generator: images)).sort().values)


def test_a_transform_of_torchvision_draws_for_each_image_from_the_seed() -> None:
    name = "torchvision.transforms.v2:RandomErasing"
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = batches(name, p=1.0, value=255)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert one.equal(batches(name, p=1.0, value=255))
    erased = (one == 1).all(1)
    assert len({tuple(image.flatten().tolist()) for image in erased}) > 6, "each image has an area of its own"


def test_an_augmentation_of_a_dict_returns_a_dict(own: Own) -> None:
    tokens, mask = torch.arange(24).view(12, 2), torch.ones(12, 2, dtype=torch.bool)
    given = {"inputs": tokens, "mask": mask}
    shift = own_augmentation(own(lambda batch, generator: {**batch, "inputs": batch["inputs"] + 1}))
    assert shift(given, LABELS, torch.Generator())[0]["inputs"].equal(tokens + 1)
    shift = own_augmentation(own(lambda batch, generator: {**batch, "inputs": batch["inputs"] / 2}))
    with pytest.raises(UserError, match=r"returned a float32 tensor \[12, 2\] .*expected a int64 tensor \[12, 2\]"):
        shift(given, LABELS, torch.Generator())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            lambda images, generator: None,
            r"returned a NoneType .*expected a uint8 tensor \[5, 3, height, width\]",
        ),
        (
            lambda images, generator: images.float(),
            r"returned a float32 tensor \[5, 3, 6, 8\] .*expected a uint8",
        ),
        (
            lambda images, generator: images[:2],
            r"returned a uint8 tensor \[2, 3, 6, 8\] .* inputs \[5, 3, 6, 8\]",
        ),
        (lambda image: image[:1], r"returned a uint8 tensor \[5, 1, 6, 8\]"),
        (lambda image: image / 0 @ 1, "failed: "),
    ],
)
def test_what_is_wrong_with_an_augmentation_is_one_message(own: Own, part: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"data\.augment: 'own_parts:part' " + message):
        batches(own(part))


def halves(labels: np.ndarray, clients: int, /, **options: object) -> list[np.ndarray]:
    assert options == OPTIONS
    return np.array_split(np.arange(len(labels)), clients)


class Unchanged:
    def __init__(self, **options: object) -> None:
        assert options == OPTIONS

    def __call__(self, image: Tensor) -> Tensor:
        return image


OPTIONS = {"name": "a", "key": "b", "labels": 1, "classes": 2, "clients": 3, "seed": 4, "groups": 5}


def test_options_of_partitions_and_augmentations_may_have_any_name() -> None:
    parts = partition(ALL, 5, 2, 0, f"{__name__}:halves", **OPTIONS)
    assert torch.cat(parts).tolist() == list(range(len(ALL)))
    augment = own_augmentation(f"{__name__}:Unchanged", **OPTIONS)
    images = torch.rand(2, 1, 4, 4)
    assert augment(images, torch.zeros(2), torch.Generator())[0].equal(images)
