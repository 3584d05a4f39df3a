"""Sources, partitions, batches and draws: no image lost, none given twice, and the same result for the same seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedbn_flwr import named, seeding
from fedbn_flwr.data import dataset
from fedbn_flwr.data.augment import random_crop, random_flip
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import Examples, main_input
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import partition
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError, StorageError
from tests.support.disks import files_of_at_most
from tests.support.images import picture, pixels, png, write_split

# --- the embedded digits -----------------------------------------------------


def test_digits_are_those_of_the_uci_test_set() -> None:
    """Alpaydin and Kaynak 1998: scikit-learn's copy, its class counts, and its first image, a zero in 17 shades."""
    from sklearn.datasets import load_digits

    digits, copy, entry = load(Source(name="digits")), load_digits(), CATALOGUE["digits"]
    assert (entry.classes, entry.channels, entry.size, entry.examples) == (10, 1, 8, 1438)
    assert (digits.classes, digits.channels, digits.size, len(digits.train)) == (10, 1, (8, 8), 1438)
    assert (digits.train.inputs.dtype, digits.train.labels.dtype) == (torch.uint8, torch.int64)
    is_test = np.arange(1_797) % 5 == 4
    for part, rows in ((digits.train, ~is_test), (digits.test, is_test)):
        assert part.inputs[:, 0].tolist() == np.rint(copy.images[rows] * 255 / 16).tolist()
        assert part.labels.tolist() == copy.target[rows].tolist()
    counts = torch.bincount(torch.cat([digits.train.labels, digits.test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    zero = [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]
    assert digits.train.labels[0] == 0
    assert digits.train.inputs[0, 0].tolist() == np.rint(np.array(zero) * 255 / 16).tolist()


def test_the_checksum_is_that_of_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load(Source())
    assert digits.checksum == "c69771ba", "on every machine"
    rows, row = torch.arange(len(digits.train)), torch.arange(len(digits.test))
    for changed in (digits.select(rows, row.flip(0)), digits.select(rows[:9], row), with_pixel(digits)):
        assert changed.checksum != digits.checksum
    assert digits.select(rows, row).to(torch.device("cpu")).checksum == digits.checksum
    monkeypatch.setattr(dataset, "_MOST", 2**14)  # of a large array, it reads every n-th example
    assert load(Source()).checksum != digits.checksum


def with_pixel(digits: DataSet) -> DataSet:
    inputs = main_input(digits.train.inputs).clone()
    inputs[700, 0, 3, 3] += 1
    return dataclasses.replace(digits, train=dataclasses.replace(digits.train, inputs=inputs))


def test_arrays_are_not_resized() -> None:
    assert load(Source(name="digits", size=8)).train.inputs.equal(load(Source(name="digits")).train.inputs)
    with pytest.raises(SettingsError, match=r"data\.size is \(16, 12\), but 'digits' has arrays of 8x8 pixels"):
        load(Source(name="digits", size=(16, 12)))


def test_a_channel_without_contrast_has_a_deviation_above_zero() -> None:
    part = Examples(torch.full((2, 1, 4, 4), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    data = DataSet("flat", part, part, ("only",))
    (inputs, _), *_ = TestBatches(part, data.moments, 2)
    assert torch.isfinite(inputs).all()


# --- batches -----------------------------------------------------------------

MOMENTS = ((0.0,), (1 / 255,))  # pixels keep their values from 0 to 255


def numbered(count: int) -> Examples:
    """All pixels of image i have the value i."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 1, 4, 4).contiguous()
    return Examples(images, torch.arange(count))


def client_batches(indices: list[int], batch_size: int = 4, client: int = 0, seed: int = 0, **options: Any) -> Any:
    return ClientBatches(
        numbered(50), torch.tensor(indices), MOMENTS, batch_size=batch_size, client=client, seed=seed, **options
    )


def order_of(batches: ClientBatches, server_round: int = 1, epoch: int = 0) -> list[int]:
    return [int(label) for _, labels in batches.epoch(server_round, epoch) for label in labels]


def test_every_image_comes_once_per_epoch_with_its_label() -> None:
    own = [3, 7, 8, 20, 21, 22, 40, 41, 42, 49]
    batches = client_batches(own)
    assert batches.num_examples == 10
    for epoch in range(3):
        for images, labels in batches.epoch(1, epoch):
            torch.testing.assert_close(images[:, 0, 0, 0], labels.float())
        assert sorted(order_of(batches, epoch=epoch)) == own


def test_order_depends_on_seed_round_client_and_epoch_only() -> None:
    own = list(range(30))
    first = order_of(client_batches(own))
    assert order_of(client_batches(own)) == first
    torch.manual_seed(123)  # the global generator has no effect
    assert order_of(client_batches(own)) == first
    assert order_of(client_batches(own, batch_size=7)) == first
    others = [
        order_of(client_batches(own, seed=1)),
        order_of(client_batches(own, client=1)),
        order_of(client_batches(own), server_round=2),
        order_of(client_batches(own), epoch=1),
    ]
    assert len({tuple(order) for order in [first, *others]}) == 5


def test_which_of_equal_classes_gets_the_last_row_depends_on_the_seed() -> None:
    drawn = [int(dataset.draw(1, [torch.arange(4)], number=seed)) for seed in range(40)]
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize(("count", "batch_size", "sizes"), [(9, 4, [4, 4]), (1, 4, [1]), (6, 1, [1] * 6)])
def test_a_batch_of_one_image_is_left_out_if_it_is_the_last_of_larger_ones(
    count: int, batch_size: int, sizes: list[int]
) -> None:
    """With batch_size 1 a client trains on all its images, not only on the first."""
    batches = [labels.tolist() for _, labels in client_batches(list(range(count)), batch_size).epoch(1, 0)]
    assert list(map(len, batches)) == sizes
    assert len({label for batch in batches for label in batch}) == sum(sizes)


def test_test_batches_are_all_images_in_order_normalised() -> None:
    digits = load(Source(name="digits"))
    batches = list(TestBatches(digits.test, digits.moments, 100))
    assert [len(labels) for _, labels in batches] == [100, 100, 100, 59]
    inputs = torch.cat([images for images, _ in batches])
    mean, deviation = digits.moments[0][0], digits.moments[1][0]
    expected = (digits.test.inputs.double() / 255 - mean) / deviation
    torch.testing.assert_close(inputs.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.cat([labels for _, labels in batches]).equal(digits.test.labels)


def test_normalising_does_not_change_the_images() -> None:
    data = numbered(8)
    before = data.inputs.clone()
    list(TestBatches(data, ((0.5,), (0.5,)), 3))
    assert data.inputs.equal(before)


def test_crop_equals_a_loop_over_images() -> None:
    images = torch.randint(1, 256, (9, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pad = 2
    found, _ = random_crop(images, torch.zeros(len(images)), torch.Generator().manual_seed(4), pad=pad)
    corners = torch.randint(0, 2 * pad + 1, (2, 9, 1), generator=torch.Generator().manual_seed(4))
    assert len(set(corners.flatten().tolist())) == 5, "all places are drawn"
    for number, image in enumerate(images.numpy()):
        padded = np.zeros((3, 6 + 2 * pad, 5 + 2 * pad), np.uint8)
        padded[:, pad:-pad, pad:-pad] = image
        top, left = int(corners[0, number]), int(corners[1, number])
        expected = padded[:, top : top + 6, left : left + 5]
        np.testing.assert_array_equal(found[number].numpy(), expected)


def test_flip_equals_a_loop_over_images() -> None:
    images = torch.randint(0, 256, (20, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, _ = random_flip(images, torch.zeros(len(images)), torch.Generator().manual_seed(2))
    mirrored = (torch.rand(20, generator=torch.Generator().manual_seed(2)) < 0.5).tolist()
    assert 0 < sum(mirrored) < 20
    for number, image in enumerate(images.numpy()):
        expected = image[:, :, ::-1] if mirrored[number] else image
        np.testing.assert_array_equal(found[number].numpy(), expected)


# --- draws -------------------------------------------------------------------


def test_draws_differ_by_seed_purpose_and_place() -> None:
    """A place of zero is not no place."""
    places: list[tuple[Any, ...]] = [
        (seed, name, i, j) for seed in range(3) for name in ("a", "b", "order") for i in range(4) for j in range(4)
    ]
    places += [(0, "a"), (0, "a", 0)]
    assert len({seeding.seed_for(*place) for place in places}) == len(places)


@given(seed=st.integers(0, 2**63), where=st.lists(st.integers(0, 2**32), max_size=4))
def test_draws_fit_a_generator(seed: int, where: list[int]) -> None:
    number = seeding.seed_for(seed, "any", *where)
    assert 0 <= number < 2**63
    torch.Generator().manual_seed(number)


# --- folders of Parquet ------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    return folder


def write_both(folder: Path, images: list[np.ndarray], labels: list[int]) -> None:
    for split in ("train", "test"):
        write_split(folder, split, [png(image) for image in images], labels)


def test_parquet_loads_what_was_written(folder: Path) -> None:
    train, test = pixels(6, (5, 4, 3)), pixels(3, (5, 4, 3), seed=1)
    write_split(folder, "train-00000", [png(image) for image in train[:4]], [0, 1, 2, 0])
    write_split(folder, "train-00001", [png(image) for image in train[4:]], [1, 2])
    write_split(folder, "test", [png(image) for image in test], [2, 1, 0])
    data = load(Source(name=str(folder)))
    np.testing.assert_array_equal(data.train.inputs.numpy(), np.stack(train).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.test.inputs.numpy(), np.stack(test).transpose(0, 3, 1, 2))
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.test.labels.tolist() == [2, 1, 0]
    assert data.class_names == ("kind 0", "kind 1", "kind 2")
    assert (data.channels, data.size) == (3, (5, 4))


def test_a_second_load_comes_from_the_cache(folder: Path) -> None:
    write_both(folder, pixels(3, (4, 4)), [0, 1, 2])
    first = load(Source(name=str(folder)))
    cached = sorted((folder.parent / "cache").glob("*.npy"))
    assert cached
    stamps = [file.stat().st_mtime_ns for file in cached]
    second = load(Source(name=str(folder)))
    assert second.train.inputs.equal(first.train.inputs)
    assert [file.stat().st_mtime_ns for file in cached] == stamps


def test_a_changed_file_is_read_again(folder: Path) -> None:
    write_both(folder, pixels(3, (4, 4)), [0, 1, 2])
    load(Source(name=str(folder)))
    new = pixels(3, (4, 4), seed=9)
    write_both(folder, new, [2, 2, 2])
    data = load(Source(name=str(folder)))
    np.testing.assert_array_equal(data.train.inputs.numpy()[:, 0], np.stack(new))
    assert data.train.labels.tolist() == [2, 2, 2]


def cached(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache").iterdir())


@pytest.mark.parametrize("size", [0, 50, 140])
def test_a_damaged_file_of_the_cache_is_made_again(folder: Path, size: int) -> None:
    write_both(folder, pixels(3, (4, 4)), [0, 1, 2])
    first = load(Source(name=str(folder))).train.inputs.clone()
    for file in cached(folder):
        with file.open("r+b") as opened:
            opened.truncate(size)
    assert load(Source(name=str(folder))).train.inputs.equal(first)
    assert load(Source(name=str(folder))).train.inputs.equal(first)


def test_a_cache_that_cannot_be_written_is_an_error_that_names_its_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_both(folder, pixels(3, (4, 4)), [0, 1, 2])
    (folder.parent / "file").touch()
    monkeypatch.setenv("FEDBN_CACHE", str(folder.parent / "file" / "cache"))
    with pytest.raises(
        StorageError, match=r"file/cache', cannot be written: .*; set FEDBN_CACHE to a folder with more"
    ):
        load(Source(name=str(folder)))


def test_a_full_disk_leaves_no_part_of_a_file(folder: Path) -> None:
    for file in ("train/a/0.png", "test/a/0.png"):
        save(folder / file, pixels(1, (40, 40))[0])
    with (
        files_of_at_most(1_000),
        pytest.raises(StorageError, match="cannot be written: File too large; set FEDBN_CACHE"),
    ):
        load(Source(name=str(folder)))
    assert cached(folder) == []
    assert load(Source(name=str(folder))).size == (40, 40)


def save(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(file)


DEEP = np.array([[0, 255, 256, 511], [4_096, 40_000, 65_279, 65_535]], dtype=np.uint16)


@pytest.mark.parametrize("kind", ["png", "tiff", "tiff, big-endian", "pgm"])
def test_images_of_16_bits_are_scaled_to_8(folder: Path, kind: str) -> None:
    for split in ("train", "test"):
        save(file := folder / split / "a" / f"0.{kind.partition(',')[0]}", DEEP)
        if kind == "pgm":
            file.write_bytes(b"P5 4 2 65535 " + DEEP.astype(">u2").tobytes())
        elif kind == "tiff, big-endian":
            Image.frombytes("I;16B", (4, 2), DEEP.astype(">u2").tobytes()).save(file)
    images = load(Source(name=str(folder))).train.inputs
    assert images.tolist() == [[[[0, 0, 1, 1], [16, 156, 254, 255]]]]


@pytest.mark.parametrize(("kind", "words"), [(np.int32, "whole"), (np.float32, "floating-point")])
def test_images_of_32_bits_are_an_error_that_names_the_file(folder: Path, kind: Any, words: str) -> None:
    for split in ("train", "test"):
        save(folder / split / "a" / "0.tiff", DEEP.astype(kind))
    with pytest.raises(
        DataError, match=rf"in row 0 has {words} numbers of 32 bits .* expected 8 or 16 bits \(.*a/0\.tiff\)"
    ):
        load(Source(name=str(folder)))


def test_an_image_above_pillow_s_limit_is_named_by_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_both(folder, [pixels(1, shape)[0] for shape in ((4, 4), (8, 8))], [0, 1])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match=r"row 1 cannot be read: .* exceeds limit of 40 pixels"):
        load(Source(name=str(folder), size=4))


def test_images_of_several_sizes_are_resized(folder: Path) -> None:
    write_both(folder, [*pixels(1, (4, 4)), *pixels(1, (6, 5))], [0, 1])
    data = load(Source(name=str(folder), size=3))
    assert data.train.inputs.shape == (2, 1, 3, 3)


def test_each_size_is_cached_by_itself(folder: Path) -> None:
    write_both(folder, pixels(2, (8, 8)), [0, 1])
    assert [load(Source(name=str(folder), size=size)).size for size in (4, 3, None, 4)] == [
        (4, 4),
        (3, 3),
        (8, 8),
        (4, 4),
    ]


def test_resizing_equals_that_of_pil(folder: Path) -> None:
    image = pixels(1, (9, 7, 3))[0]
    write_both(folder, [image], [0])
    expected = Image.fromarray(image).resize((4, 4), Image.Resampling.BILINEAR)
    found = load(Source(name=str(folder), size=4)).train.inputs[0]
    np.testing.assert_array_equal(found.numpy(), np.asarray(expected).transpose(2, 0, 1))


def pngs(count: int, *shape: int) -> list[bytes | None]:
    return [png(image) for image in pixels(count, shape)]


WHOLE = png(pixels(1, (32, 32))[0])
COLUMNS = r" is not a column.*picture \(Image\), kind \(ClassLabel\), number \(int64\)"


@pytest.mark.parametrize(
    ("train", "test", "options", "message"),
    [
        (pngs(2, 4, 4), pngs(2, 6, 6), {}, r"examples have the shape \(1, 4, 4\), test examples \(1, 6, 6\)"),
        (pngs(2, 6, 6), pngs(2, 6, 6, 3), {}, r"examples have the shape \(1, 6, 6\), test examples \(3, 6, 6\)"),
        ([*pngs(1, 4, 4), *pngs(1, 6, 5)], pngs(1, 4, 4), {}, r"several sizes \(4x4, 6x5, \.\.\.\); set data\.size"),
        ([WHOLE, b"not an image"], [WHOLE], {}, "the image in row 1 cannot be read"),
        ([WHOLE, WHOLE, WHOLE[: len(WHOLE) // 2]], [WHOLE], {}, "the image in row 2 cannot be read"),
        ([WHOLE, None], [WHOLE], {}, "the image in row 1 cannot be read"),
        *(
            (
                [*[WHOLE] * bad, b"not an image", *[WHOLE] * (39 - bad)],
                [WHOLE],
                {},
                f"image in row {bad} cannot be read",
            )
            for bad in (0, 13, 39)
        ),
        (
            [WHOLE],
            [WHOLE],
            {"test": "validation"},
            r"no validation\*\.parquet \(or \.csv, \.npz\) for data\.test='validation'; .* contains .*train\.parquet",
        ),
        ([WHOLE], [WHOLE], {"label": "kin"}, r"data\.label='kin'" + COLUMNS),
        ([WHOLE], [WHOLE], {"inputs": "photo"}, r"data\.inputs='photo'" + COLUMNS),
    ],
)
def test_what_is_wrong_with_a_folder_of_parquet_is_named(
    train: list[bytes | None], test: list[bytes | None], options: dict[str, str], message: str, folder: Path
) -> None:
    for split, images in (("train", train), ("test", test)):
        write_split(folder, split, images, [row % 3 for row in range(len(images))])
    with pytest.raises(DataError, match=message):
        load(Source(name=str(folder), **options))


NAMED = datasets.ClassLabel(names=["x", "y"])
TEXT, NUMBER = datasets.Value("string"), datasets.Value("int64")


@pytest.mark.parametrize(
    ("column", "kind", "values", "message"),
    [
        (
            "label",
            NAMED,
            [0, 1, None],
            "2 of 6 rows have no value in 'label', the first is row 2 of train; expected one",
        ),
        ("label", TEXT, ["a", None, "b"], "no value in 'label', the first is row 1"),
        ("label", NUMBER, [1, None, 2], "no value in 'label', the first is row 1"),
        (
            "label",
            datasets.Sequence(NUMBER),
            [[1, 2]] * 3,
            r"data\.label='label' of .* expected a number or a text",
        ),
        ("domain", NAMED, [0, None, 1], "2 of 6 rows have no value in 'domain', the first is row 1 of train"),
        (
            "domain",
            NAMED,
            [0, 1, -1],
            "2 of 6 rows have no value in 'domain', the first is row 2 of train",
        ),
    ],
)
def test_a_wrong_value_is_named_by_column_and_row(
    folder: Path, column: str, kind: Any, values: list[Any], message: str
) -> None:
    columns = {"image": [picture(i, (4, 4)) for i in range(3)], "label": [0, 1, 0], column: values}
    features = datasets.Features({"image": datasets.Image(), "label": NAMED, column: kind})
    for split in ("train", "test"):
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")
    with pytest.raises(DataError, match=message):
        load(Source(name=str(folder), label="label"))


def test_a_missing_folder_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder; give a table"):
        load(Source(name=str(tmp_path / "absent")))
    (tmp_path / "heart.csv").write_text("age,y\n")
    with pytest.raises(DataError) as found:
        load(Source(name=str(tmp_path / "hart.csv"), test=0.2))
    assert str(found.value).endswith(f". {str(tmp_path)!r} contains heart.csv")
    assert str(tmp_path) not in found.value.public.replace(f"data.name={str(tmp_path / 'hart.csv')!r}", "")


@pytest.mark.parametrize("given", [{"name": "./pictures"}, {"name": "pictures"}, {"name": "pictures", "root": "."}])
def test_a_relative_folder_begins_where_the_command_was_started(
    given: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        write_split(folder / "pictures", split, [png(pixels(1, (4, 4))[0])], [0])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="there is no such"):
        load(Source(**given))
    monkeypatch.setenv(named.FOLDER, str(folder))  # as in Flower's processes, which run in a folder of their own
    assert len(load(Source(**given)).train.labels) == 1


def test_splits_with_different_classes_are_an_error(folder: Path) -> None:
    write_split(folder, "train", [png(pixels(1, (4, 4))[0])], [0])
    write_split(folder, "test", [png(pixels(1, (4, 4))[0])], [3], classes=4)
    with pytest.raises(DataError, match=r"data\.class_names lacks 1 of the classes in 'kind' .*, such as 'kind 3'"):
        load(Source(name=str(folder)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-user/no-set", r"'no-user/no-set' with data\.train='train' cannot be loaded"),
        ("cifar11", r"'cifar11': there is no such data set; .*OWNER/NAME.*did you mean 'cifar10'"),
    ],
)
def test_only_a_name_with_an_owner_is_asked_of_the_hub(name: str, message: str) -> None:
    """There is no network here."""
    with pytest.raises(DataError, match=message):
        load(Source(name=name))


@pytest.mark.slow
def test_real_mnist_loads(shared_data: Path) -> None:
    """Only its test split, as both splits, to be quick."""
    folder = shared_data / "mnist"
    if not folder.is_dir():
        pytest.skip("no mnist/ among the data sets")
    mnist = load(Source(name=str(folder), train="test"))
    assert mnist.train.inputs.shape == (10_000, 1, 28, 28)
    assert mnist.classes == 10
    # The published counts of MNIST's test digits.
    assert torch.bincount(mnist.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    parts: list[Tensor] = partition(mnist.train.labels, 10, 5, 0, "classes", classes_per_client=2)
    assert sum(map(len, parts)) == 10_000
