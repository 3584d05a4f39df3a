"""Image files: decoded once, of any size, and cropped."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from fedbn_flwr.commands import cli
from fedbn_flwr.data import decoding
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.load import load
from fedbn_flwr.data.moments import sums_of
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment.data import shares_of
from fedbn_flwr.experiment.file.layers import load_experiment, read_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.settings import Experiment, Settings
from tests.support.images import pixels, png, write_pictures, write_split


@pytest.fixture
def folder(root: Path) -> Path:
    (root / "pictures").mkdir()
    return root / "pictures"


def fill(folder: Path, shapes: list[tuple[int, ...]]) -> None:
    """Training images of these shapes, and the first four for testing, of three classes."""
    images = [pixels(1, shape, seed)[0] for seed, shape in enumerate(shapes)]
    write_split(folder, "train", [png(image) for image in images], [i % 3 for i in range(len(images))])
    write_split(folder, "test", [png(image) for image in images[:4]], [0, 1, 2, 0])


@pytest.mark.parametrize("shape", [(100, 80), (80, 100), (257, 300), (30, 40), (56, 56), (301, 40)])
def test_a_centre_crop_is_that_of_torchvision(folder: Path, shape: tuple[int, int]) -> None:
    """Resize(64) and CenterCrop(56), the proportion of ImageNet's 256 and 224; an image of 56x56 is unchanged."""
    fill(folder, [(*shape, 3)] * 4)
    split = load(Source(name=str(folder), size=56, fit="crop")).train
    picture = Image.fromarray(pixels(1, (*shape, 3), 0)[0])
    expected = picture if shape == (56, 56) else tv.center_crop(tv.resize(picture, [64]), [56, 56])
    np.testing.assert_array_equal(split.inputs[0].numpy(), np.asarray(expected).transpose(2, 0, 1))


@pytest.mark.parametrize("ahead", [1, 3, 64])
def test_images_are_decoded_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """The first with colour comes after greyscale ones."""
    monkeypatch.setattr(decoding, "_AHEAD", ahead)
    shapes: list[tuple[int, ...]] = [(4, 5)] * 5 + [(4, 5, 3)] * 3
    fill(folder, shapes)
    write_split(folder, "test", [png(pixels(1, shape, 9)[0]) for shape in ((4, 5), (4, 5, 3))], [0, 1])
    data = load(Source(name=str(folder)))
    originals = [pixels(1, shape, seed)[0] for seed, shape in enumerate(shapes)]
    expected = [image.transpose(2, 0, 1) if image.ndim == 3 else np.stack([image] * 3) for image in originals]
    np.testing.assert_array_equal(data.train.inputs.numpy(), expected)
    assert data.test.inputs.shape == (2, 3, 4, 5)


def test_only_the_images_in_use_are_decoded(folder: Path) -> None:
    fill(folder, [(6, 6)] * 40)
    load(Source(name=str(folder), examples=6, test_examples=2))
    cached = [np.load(file, mmap_mode="r").shape for file in Path(os.environ["FEDBN_CACHE"]).iterdir()]
    assert sorted(cached) == [(2, 1, 6, 6), (6, 1, 6, 6)]


def test_the_cache_keeps_the_images_used_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 128 bytes and 36 for each image: there is room for the newest training images, not for two of them."""
    fill(folder, [(6, 6)] * 40)
    cache = Path(os.environ["FEDBN_CACHE"])

    def sizes() -> dict[str, int]:
        return {file.name: file.stat().st_size for file in cache.glob("*.npy")}

    monkeypatch.setenv("FEDBN_CACHE_GB", "2e-6")
    for name, age in (("decoding-killed", 2 * decoding._OLD), ("decoding-now", 0), ("other", 2 * decoding._OLD)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    for count in (30, 31, 32):
        load(Source(name=str(folder), examples=count, test_examples=2))
        assert sum(sizes().values()) <= 2_000
        assert max(sizes().values()) == 128 + count * 36
    assert sorted(path.name for path in cache.glob("*/")) == ["decoding-now", "other"]
    kept, before = load(Source(name=str(folder), examples=32, test_examples=2)), sizes()
    load(Source(name=str(folder), examples=40, test_examples=2))
    assert before.items() <= sizes().items(), "what is in use stays, whatever its size"
    del kept
    load(Source(name=str(folder), examples=31, test_examples=2))
    assert not before.items() <= sizes().items()


def test_an_image_file_that_has_changed_is_decoded_again(folder: Path) -> None:
    write_pictures(folder, pixels(2, (6, 6)), "train/a", "test/a")
    load(Source(name=str(folder)))
    (file, (new,)) = folder / "train" / "a" / "0.png", pixels(1, (6, 6), seed=1)
    file.write_bytes(png(new))
    os.utime(file, (1, 1))  # two writes may have the same time
    np.testing.assert_array_equal(load(Source(name=str(folder))).train.inputs[0, 0], new)


def test_moments_are_those_of_all_pixels_however_many_are_read_at_once(folder: Path) -> None:
    fill(folder, [(5, 5, 3)] * 1_030)
    data = load(Source(name=str(folder)))
    values = data.train.inputs.double() / 255
    assert data.moments[0] == pytest.approx(values.mean((0, 2, 3)).tolist(), rel=1e-13)
    assert data.moments[1] == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), rel=1e-13)
    np.testing.assert_array_equal(sums_of(data.train.inputs), sums_of(data.train.inputs.flip(0)))


@pytest.mark.parametrize("fits", [False, True])
def test_a_large_set_is_sent_to_the_device_batch_by_batch(folder: Path, fits: bool) -> None:
    fill(folder, [(8, 8, 3)] * 12)
    data = load(Source(name=str(folder)))
    device = torch.device("meta")
    moved = data.to(device, data.nbytes - (not fits))
    assert moved.train.inputs.device.type == ("meta" if fits else "cpu")
    assert data.to(torch.device("cpu"), 0).train.sent_to is None
    moments = (0.5,) * 3, (0.5,) * 3
    batches = ClientBatches(moved.train, torch.arange(8), moments, batch_size=4, client=0, seed=0, augment=("flip",))
    for some in (batches.epoch(1, 0), TestBatches(moved.test, moments, 2)):
        assert {part.device.type for batch in some for part in batch} == {"meta"}


# --- ImageNet as a folder ----------------------------------------------------


def jpeg(shape: tuple[int, int], seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(1, (*shape, 3), seed)[0]).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.slow
def test_imagenet_is_a_folder_of_its_thousand_classes(folder: Path) -> None:
    """train/n01440764/*.JPEG and val/n01440764/*.JPEG, images of any size, seen at 224x224."""
    shapes = [(300, 400), (250, 200), (224, 224), (333, 225)]
    for part in ("train", "val"):
        for i in range(1_000):
            (place := folder / "imagenet" / part / f"n{i:08}").mkdir(parents=True)
            (place / f"n{i:08}_{i}.JPEG").write_bytes(jpeg(shapes[i % 4] if i < 8 or i % 60 == 0 else (8, 8), i))
    experiment = load_experiment(
        "quick",
        [
            f"data={{name: imagenet, root: {folder}, partition: {{kind: iid}}}}",
            "model={name: resnet18}",
            "clients=2",
            "strategy={name: FedAvg}",
        ],
    )
    (prepared,) = prepare(experiment)
    data = prepared.dataset
    assert (data.classes, data.channels, data.size) == (1_000, 3, (224, 224))
    assert data.train.labels.equal(torch.arange(1_000))
    ((images, labels), *_) = TestBatches(data.test, ((0.0,) * 3, (1.0,) * 3), 4)
    assert labels.tolist() == [0, 1, 2, 3]
    for i, shape in enumerate(shapes):
        picture = Image.open(io.BytesIO(jpeg(shape, i)))
        if shape != (224, 224):
            picture = tv.center_crop(tv.resize(picture, [256]), [224, 224])
        torch.testing.assert_close(images[i], tv.pil_to_tensor(picture) / 255)


# --- Segmentation data: Cityscapes in its own layout, and columns of masks.


# Label id -> train id, as Cityscapes defines them; all other ids are 255.
TRAIN_IDS = {7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10, 24: 11, 25: 12, 26: 13}
TRAIN_IDS |= {27: 14, 28: 15, 31: 16, 32: 17, 33: 18}

CITIES = {"train": {"aachen": 3, "bochum": 5}, "val": {"frankfurt": 2, "lindau": 1}}
HEIGHT, WIDTH = 32, 64


def label_ids(seed: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """All of 0 to 33, in blocks of 4x4 pixels."""
    blocks = np.random.default_rng(seed).integers(0, 34, (height // 4, width // 4), dtype=np.uint8)
    return blocks.repeat(4, 0).repeat(4, 1)


def street(seed: int) -> np.ndarray:
    """An image with the label id of each pixel in red, its row in green and its column in blue."""
    ids = label_ids(seed)
    rows, columns = np.indices(ids.shape)
    return np.stack([7 * ids, rows, columns], 2).astype(np.uint8)


def write_cityscapes(streets: Path) -> Path:
    folder = streets / "cityscapes"
    seed = 0
    for split, cities in CITIES.items():
        for city, count in cities.items():
            for kind in ("leftImg8bit", "gtFine"):
                (folder / kind / split / city).mkdir(parents=True)
            for number in range(count):
                name = f"{city}_{number:06}_000019"
                image = folder / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png"
                image.write_bytes(png(street(seed)))
                mask = folder / "gtFine" / split / city / f"{name}_gtFine_labelIds.png"
                mask.write_bytes(png(label_ids(seed)))
                # Other files of the data set must be ignored.
                mask.with_name(f"{name}_gtFine_color.png").write_bytes(png(street(seed)))
                seed += 1
    return folder


@pytest.fixture
def streets(root: Path) -> Path:
    write_cityscapes(root)
    return root


def experiment_of(streets: Path, text: str = "", *overrides: str) -> Experiment:
    base = f"{{clients: 2, data: {{name: cityscapes, root: {streets}, crop: 16{', ' + text if text else ''}}}}}"
    return load_experiment(base, overrides)


def run_of(streets: Path, text: str = "", *overrides: str) -> Settings:
    (run,) = experiment_of(streets, text, *overrides).runs
    return run


def expected_mask(seed: int) -> torch.Tensor:
    ids = label_ids(seed)
    return torch.tensor([[TRAIN_IDS.get(value, 255) for value in line] for line in ids.tolist()])


# --- the layout --------------------------------------------------------------


def test_images_masks_and_cities_are_those_of_the_folder(streets: Path) -> None:
    data = load(Source(name="cityscapes", root=str(streets), group="city"))
    assert data.dense
    assert (data.channels, data.size, data.classes) == (3, (HEIGHT, WIDTH), 19)
    assert [data.class_names[i] for i in (0, 10, 11, 13, 18)] == ["road", "sky", "person", "car", "bicycle"]
    assert [data.groups.names[i] for i in data.groups.train] == ["aachen"] * 3 + ["bochum"] * 5
    assert [data.groups.names[i] for i in data.groups.test] == ["frankfurt"] * 2 + ["lindau"]
    whole = list(TestBatches(data.test, ((0.0,) * 3, (1 / 255,) * 3), 2))
    assert [tuple(images.shape) for images, _ in whole] == [(3, 3, HEIGHT, WIDTH)]
    images, masks = (torch.cat(parts) for parts in zip(*whole, strict=True))
    for number in range(3):
        assert masks[number].equal(expected_mask(8 + number))
        np.testing.assert_array_equal(images[number].round().numpy(), street(8 + number).transpose(2, 0, 1))


def test_every_label_id_becomes_its_train_id(streets: Path) -> None:
    ids = np.arange(256, dtype=np.uint8).reshape(16, 16).repeat(2, 0).repeat(4, 1)
    (mask,) = (streets / "cityscapes" / "gtFine" / "val" / "lindau").glob("*_labelIds.png")
    mask.write_bytes(png(ids))
    test = load(Source(name="cityscapes", root=str(streets))).test
    found = test.targets[2, ::2, ::4].flatten().tolist()
    assert found == [TRAIN_IDS.get(i, 255) for i in range(256)]


def test_image_and_labels_are_cut_and_mirrored_together(streets: Path) -> None:
    data, unit = load(Source(name="cityscapes", root=str(streets))).train, ((0.0,) * 3, (1 / 255,) * 3)
    client = ClientBatches(data, torch.arange(8), unit, batch_size=3, client=0, seed=0, augment=("flip",), cut=16)
    places, mirrored = set(), 0
    for images, masks in (batch for epoch in range(4) for batch in client.epoch(1, epoch)):
        assert images.shape[1:] == (3, 16, 16)
        assert masks.shape[1:] == (16, 16)
        assert masks.dtype == torch.int64
        for image, mask in zip(images.round().int(), masks, strict=True):
            red, row, column = image
            assert mask.equal(torch.tensor([[TRAIN_IDS.get(v // 7, 255) for v in line] for line in red.tolist()]))
            assert (row - row[0, 0]).equal(torch.arange(16, dtype=torch.int32)[:, None].expand(16, 16))
            step = int(column[0, 1] - column[0, 0])
            assert (column - column[0, 0]).equal(step * torch.arange(16, dtype=torch.int32).expand(16, 16))
            mirrored += step == -1
            places.add((int(row.min()), int(column.min())))
    assert len(places) > 25
    assert 8 < mirrored < 24


def test_another_size_takes_the_nearest_label(streets: Path) -> None:
    """Blocks of 4x4 at a quarter of the size are one pixel each: labels are not interpolated."""
    data = load(Source(name="cityscapes", root=str(streets), size=(HEIGHT // 4, WIDTH // 4)))
    ((images, masks), *_) = TestBatches(data.test, ((0.0,) * 3, (1.0,) * 3), 3)
    assert images.shape == (3, 3, HEIGHT // 4, WIDTH // 4)
    assert masks[0].equal(expected_mask(8)[::4, ::4])


# --- partitions --------------------------------------------------------------


def test_by_city_each_client_is_one(streets: Path) -> None:
    run = run_of(streets, "group: city, partition: {kind: natural}")
    parts, own = shares_of(run.data, 2, 0, "cpu")
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert sorted(torch.cat(own).tolist()) == [0, 1, 2], "test cities differ, so images follow the clients' sizes"
    assert [len(rows) for rows in own] == [1, 2]


@pytest.mark.parametrize(
    ("text", "clients", "sizes"),
    [
        ("partition: {kind: iid}", 4, [2, 2, 2, 2]),
        ("domain: city, partition: {kind: domain}", 2, [3, 5]),
        ("domain: city, partition: {kind: domain, clients_per_domain: 2}", 4, [2, 1, 3, 2]),
    ],
)
def test_other_partitions_that_need_no_class(streets: Path, text: str, clients: int, sizes: list[int]) -> None:
    run = run_of(streets, text)
    assert [len(part) for part in shares_of(run.data, clients, 0, "cpu")[0]] == sizes


def test_fedbn_partition_counts_the_images_of_each_city(
    streets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data.root={streets}", "clients=2", "data.crop=16"]
    assert cli.main(["partition", "fixbn/table3", *words, "--out", str(tmp_path / "bars.png")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["client", "examples"] in lines
    assert ["0", "aachen", "3"] in lines
    assert ["1", "bochum", "5"] in lines
    assert ["all", "8"] in lines
    assert Image.open(tmp_path / "bars.png").width > 100


# --- refusals before training ------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        *(
            (
                f"partition: {{kind: {kind}, {option}}}",
                ["model.name=resnet20"],
                f"kind is '{kind}', which splits examples by class, but 'cityscapes'",
            )
            for kind, option in (
                ("dirichlet", "alpha: 1.0"),
                ("classes", "classes_per_client: 2"),
                ("shards", "shards_per_client: 2"),
            )
        ),
        (
            "",
            ["model.name=resnet20"],
            r"'resnet20' returns shape \[2, 19\] .* shape \[2, 19, .* has 19 classes and one label per pixel$",
        ),
        (
            "augment: [flip, rotate]",
            [],
            r"data\.augment: 'rotate' would not transform the masks of .* \('cityscapes'\)",
        ),
        ("augment: [flip, 'mine:blur']", [], r"data\.augment: 'mine:blur' would not transform the masks"),
        ("augment: [resized_crop]", [], r"data\.augment: 'resized_crop' would not transform the masks"),
        ("", ["data.crop=33"], r"data\.crop is 33, but the images of 'cityscapes' have 32x64 pixels"),
        ("test: test", [], r"no leftImg8bit/test/CITY/.*; leftImg8bit/ contains train, val"),
        ("classes: 20", [], r"data\.classes is 20, but 'cityscapes' has 19 classes"),
        ("group: city, partition: {kind: natural}", ["clients=3"], r"data.group has 2 values .* set clients=2"),
        (
            "group: city, partition: {kind: natural}, size: [32, 64]",
            ["data.random=true"],
            r"random examples have no column for a natural partition; .* data\.group=null too$",
        ),
    ],
)
def test_bad_input_is_one_message(streets: Path, text: str, words: list[str], message: str) -> None:
    with pytest.raises((DataError, SettingsError), match=message) as caught:
        prepare(experiment_of(streets, text, *words))
    assert "\n" not in str(caught.value)


def test_a_model_of_pixels_is_refused_for_labels_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pixels_model.py").write_text(
        "from torch import nn\n\ndef make(num_classes):\n    return nn.Conv2d(1, num_classes, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = read_experiment({"model": {"name": "pixels_model:make"}})
    with pytest.raises(
        SettingsError, match=r"make' returns .* shape \[2, 10\], as 'digits' has 10 classes and one label per example$"
    ):
        prepare(experiment)


def test_a_side_that_the_network_does_not_take_is_named(streets: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch", reason="the extra `segmentation` is not installed")
    experiment = experiment_of(streets, "", "data.crop=20", "model.name=deeplabv3plus_mobilenet_v2")
    with pytest.raises(SettingsError, match=r"does not take the 3x20x20 examples of 'cityscapes'.*divisible by 16"):
        prepare(experiment)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, r"an image has no mask: bochum_000001_.*_leftImg8bit\.png; there is no gtFine/tr"),
        (b"nothing", "the mask in row 4 cannot be read .*000001_000019_gtFine_labelIds.png"),
        (png(street(0)), r"the mask in row 4 has several values per pixel \(mode RGB\)"),
        (png(label_ids(0, 16, 64)), r"16x64|sizes"),
    ],
)
def test_a_missing_or_bad_mask_is_named(streets: Path, mask: bytes | None, message: str) -> None:
    file = streets / "cityscapes" / "gtFine" / "train" / "bochum" / "bochum_000001_000019_gtFine_labelIds.png"
    file.unlink() if mask is None else file.write_bytes(mask)
    with pytest.raises(DataError, match=message):
        load(Source(name="cityscapes", root=str(streets)))


# --- the user's own masks ----------------------------------------------------


def write_masks(folder: Path, highest: int = 2) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        masks = [rng.integers(0, 3, (8, 12), dtype=np.uint8) for _ in range(count)]
        masks[-1][0, :2] = highest, 255
        images = [np.stack([100 * np.minimum(mask, 2)] * 3, 2) for mask in masks]
        columns = {
            "photo": [{"bytes": png(image), "path": None} for image in images],
            "annotation": [{"bytes": png(mask), "path": None} for mask in masks],
        }
        features = datasets.Features({"photo": datasets.Image(), "annotation": datasets.Image()})
        folder.mkdir(exist_ok=True)
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")


def test_a_column_of_masks_is_segmentation_data(streets: Path) -> None:
    write_masks(streets / "mine")
    data = load(Source(name=str(streets / "mine"), label="annotation", classes=3))
    assert data.dense
    assert data.class_names == ("0", "1", "2")
    ((images, masks),) = TestBatches(data.test, ((0.0,) * 3, (1 / 255,) * 3), 5)
    counts = masks != 255
    assert masks[1, 0, :2].tolist() == [2, 255]
    assert (images[:, 0].round()[counts] == 100 * masks[counts]).all()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (None, r"is a segmentation data set; give its number of classes with data\.classes"),
        (3, r"the mask in row 5 has other values than 0 to 2, and 255 .*data\.classes is 3\): 7"),
    ],
)
def test_how_many_classes_pixels_have_must_be_said_and_other_values_are_named(
    classes: int | None, message: str, streets: Path
) -> None:
    write_masks(streets / "mine", highest=7)
    with pytest.raises(DataError, match=message):
        load(Source(name=str(streets / "mine"), label="annotation", classes=classes))


# --- two rounds from end to end ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_two_rounds_of_fedavg_with_deeplab(streets: Path, tmp_path: Path, norm: str) -> None:
    """The shipped experiment, small: by city, crops, mean IoU in the history and the summary."""
    pytest.importorskip("segmentation_models_pytorch", reason="the extra `segmentation` is not installed")
    words = [f"data.root={streets}", "clients=2", "rounds=2", "data.crop=32", "train.batch_size=2", "evaluate.every=1"]
    words += [f"only=['MobileNetV2, {norm.upper()}']", "evaluate.clients=true", "label=one"]
    experiment = load_experiment("fixbn/table3", words)
    assert {run.data.partition.kind for run in experiment.runs} == {"natural"}
    file = tmp_path / "one.yaml"
    text = json.dumps(experiment.runs[0].model_dump(mode="json", exclude={"label"}))
    file.write_text(text)
    assert cli.main(["run", str(file), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    (history,) = (tmp_path / "out").rglob("history.jsonl")
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    summary = json.loads((history.parent / "summary.json").read_text())
    assert len(lines) == 2
    for line in lines:
        assert 0 <= line["mean_iou"] <= 1
        assert 0 <= line["accuracy"] <= 1
        assert np.isfinite(line["train_loss"])
        assert line["clients_mean_iou"] == pytest.approx(line["mean_iou"], abs=1e-6), "they evaluate the global model"
    assert summary["mean_iou"] == lines[-1]["mean_iou"]
    assert summary["status"] == "finished"


def test_a_folder_is_known_by_its_layout_and_a_share_needs_no_test_images(streets: Path) -> None:
    """As on a site that has only its own cities."""
    shutil.rmtree(streets / "cityscapes" / "leftImg8bit" / "val")
    data = load(Source(name=str(streets / "cityscapes"), test=0.25))
    assert (len(data.train), len(data.test), data.class_names[13]) == (6, 2, "car")
