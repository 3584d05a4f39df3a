"""Image files: decoded once, of any size, and cropped."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from fedbn_flwr.data import decoding
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.load import load
from fedbn_flwr.data.moments import sums_of
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
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


def test_a_folder_without_classes_says_what_it_should_hold(folder: Path) -> None:
    (folder / "train").mkdir()
    (folder / "train" / "1.JPEG").write_bytes(jpeg((5, 5), 0))
    with pytest.raises(DataError, match=r"'train' contains no images in folders of classes; expected .*train/CLASS/"):
        load(Source(name=str(folder)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{memory: 0}", r"data\.memory is 0: expected a number above 0"),
        ("{size: [32]}", r"data\.size: found \[32\]; expected pixels per side, or \[height, width\]"),
        ("{fit: middle}", r"data\.fit is 'middle': expected 'stretch' or 'crop'"),
        ("{crop: 7}", r"data\.crop is 7, but 'digits' has one label per example"),
    ],
)
def test_bad_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(load_experiment(f"{{data: {text}}}"))
