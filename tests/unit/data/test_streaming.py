"""InMemory that stay on disk: the same batches as from memory, few of them decoded at a time, and none lost "
"silently."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as tv

from fedbn_flwr import cli
from fedbn_flwr.data.augment import Window
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.decoding import Files, Stream
from fedbn_flwr.data.examples import InMemory
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from fedbn_flwr.experiment.file.layers import load_experiment, read_experiment
from fedbn_flwr.experiment.prepare import prepare
from tests.support.images import pixels, png, write_split

EVERYTHING = ("resized_crop", "crop", "flip", "rotate")


@pytest.fixture
def folder(root: Path) -> Path:
    (root / "pictures").mkdir()
    return root / "pictures"


def fill(folder: Path, shapes: list[tuple[int, ...]]) -> None:
    """Training images of these shapes, and the first four for testing, of three classes."""
    images = [pixels(1, shape, seed)[0] for seed, shape in enumerate(shapes)]
    write_split(folder, "train", [png(image) for image in images], [i % 3 for i in range(len(images))])
    write_split(folder, "test", [png(image) for image in images[:4]], [0, 1, 2, 0])


def epochs(data: DataSet, augment: tuple[str, ...] = EVERYTHING, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    client = ClientBatches(
        data.train,
        torch.arange(1, len(data.train.labels)),
        ((0.4,) * data.channels, (0.2,) * data.channels),
        batch_size=4,
        client=3,
        seed=5,
        augment=augment,
    )
    return [batch for epoch in range(count) for batch in client.epoch(2, epoch)]


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    assert len(one) == len(other) > 1
    return all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(one, other, strict=True))


# --- the same as from memory -------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [[(12, 12, 3)] * 11, [(9, 14)] * 11, [(12, 12, 3), (12, 12)] * 5],
    ids=["colour", "grey, not square", "both"],
)
@pytest.mark.parametrize("augment", [(), ("flip",), EVERYTHING], ids=str)
def test_batches_are_those_of_images_in_memory(
    folder: Path, shapes: list[tuple[int, ...]], augment: tuple[str, ...]
) -> None:
    """Bit for bit."""
    fill(folder, shapes)
    memory, stream = load(Source(name=str(folder), stream=False)), load(Source(name=str(folder), stream=True))
    assert isinstance(memory.train, InMemory)
    assert isinstance(stream.train, Stream)
    assert (stream.channels, stream.size, stream.class_names) == (memory.channels, memory.size, memory.class_names)
    assert same(epochs(stream, augment), epochs(memory, augment))
    assert not same(epochs(stream, augment), epochs(stream, ("crop",)))
    moments = memory.moments
    assert stream.moments == moments, "the set has fewer images than the sample"
    for rows in (None, torch.tensor([2, 0, 3, 1])):
        expected = list(TestBatches(memory.test, moments, 2, rows))
        assert same(list(TestBatches(stream.test, moments, 2, rows)), expected)


def test_images_of_several_sizes_equal_memory_except_resized_crops(folder: Path) -> None:
    fill(folder, [(20 + i, 30 - i, 3) for i in range(10)])
    for fit in ("stretch", "crop"):
        memory, stream = (load(Source(name=str(folder), size=12, fit=fit, stream=how)) for how in (False, True))
        assert same(epochs(stream, ("flip",)), epochs(memory, ("flip",)))
        assert same(
            list(TestBatches(stream.test, stream.moments, 2)), list(TestBatches(memory.test, stream.moments, 2))
        )
        assert not same(epochs(stream, ("resized_crop",)), epochs(memory, ("resized_crop",)))


@pytest.mark.parametrize("readers", [1, 5])
def test_the_number_of_readers_changes_nothing(folder: Path, readers: int) -> None:
    fill(folder, [(20 + i, 30 - i, 3) for i in range(10)])
    few, many = (load(Source(name=str(folder), size=12, stream=True, readers=n)) for n in (2, readers))
    assert same(epochs(few), epochs(many))


def test_a_resized_crop_is_cut_from_the_image_in_its_own_size(folder: Path) -> None:
    """As torchvision does it with a PIL image: crop first, then resize; enlarged pixels may differ by one."""
    fill(folder, [(40, 60, 3)] * 4)
    (original,) = pixels(1, (40, 60, 3), 0)
    split = load(Source(name=str(folder), size=16, stream=True)).train
    assert isinstance(split, Stream)
    window = Window.drawn(200, None, torch.Generator().manual_seed(0))
    shrunk = 0
    for number in range(200):
        top, left, tall, wide = window.box(number, 40, 60)
        found = split.files.window(0, window, number, (16, 16))
        expected = tv.resized_crop(Image.fromarray(original), top, left, tall, wide, [16, 16])
        wrong = np.abs(found.astype(int) - np.asarray(expected).transpose(2, 0, 1))
        smooth = tall > 16 or wide > 16
        shrunk += smooth
        assert wrong.max() <= (0 if smooth else 1)
    assert 50 < shrunk < 200, "both kinds occurred"


@pytest.mark.parametrize("shape", [(100, 80), (80, 100), (257, 300), (30, 40), (56, 56), (301, 40)])
def test_a_centre_crop_is_that_of_torchvision(folder: Path, shape: tuple[int, int]) -> None:
    """Resize(64) and CenterCrop(56), the proportion of ImageNet's 256 and 224; an image of 56x56 is unchanged."""
    fill(folder, [(*shape, 3)] * 4)
    split = load(Source(name=str(folder), size=56, fit="crop", stream=True)).train
    assert isinstance(split, Stream)
    picture = Image.fromarray(pixels(1, (*shape, 3), 0)[0])
    expected = picture if shape == (56, 56) else tv.center_crop(tv.resize(picture, [64]), [56, 56])
    np.testing.assert_array_equal(split.files.example(0)[0], np.asarray(expected).transpose(2, 0, 1))


# --- how much is in memory ---------------------------------------------------


class Counting(Files):
    """Counts how many images were read, from several threads."""

    def example(self, row: int) -> tuple[np.ndarray, None]:
        with LOCK:
            READ.append(row)
        return np.full((1, 4, 4), row % 251, dtype=np.uint8), None


LOCK, READ = threading.Lock(), list[int]()


@pytest.mark.parametrize(("batch", "readers", "most"), [(10, 2, 20), (1, 4, 8), (3, 1, 6)])
def test_few_images_are_decoded_ahead_whatever_the_size_of_the_set(batch: int, readers: int, most: int) -> None:
    READ.clear()
    count = 1_000
    files = Counting(range(count), "image", "set")
    source = Stream(files, torch.arange(count), (1, 4, 4), readers)
    taken = 0
    for images, labels in TestBatches(source, ((0.0,), (1 / 255,)), batch):
        assert (labels % 251).tolist() == images[:, 0, 0, 0].round().int().tolist()
        taken += len(labels)
        with LOCK:
            assert len(READ) - taken <= most
    assert sorted(READ) == list(range(count))


def test_an_epoch_that_ends_early_leaves_no_threads_behind() -> None:
    READ.clear()
    source = Stream(Counting(range(100), "image", "set"), torch.zeros(100, dtype=torch.int64), (1, 4, 4), 3)
    batches = iter(TestBatches(source, ((0.0,), (1.0,)), 5))
    next(batches)
    assert any(thread.name.startswith("reader") for thread in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())
    assert len(READ) <= 15


def test_sets_larger_than_the_budget_stay_on_disk(folder: Path) -> None:
    fill(folder, [(16, 16, 3)] * 20)
    needed = 24 * 16 * 16 * 3 / 2**30
    assert isinstance(load(Source(name=str(folder))).train, InMemory)
    assert isinstance(load(Source(name=str(folder), memory=1.01 * needed)).train, InMemory)
    assert isinstance(load(Source(name=str(folder), memory=0.99 * needed)).train, Stream)
    assert isinstance(load(Source(name=str(folder), size=32, memory=1.01 * needed)).train, Stream)
    assert isinstance(load(Source(name=str(folder), size=8, memory=0.99 * needed)).train, InMemory)
    assert isinstance(load(Source(name=str(folder), memory=1e-9, stream=False)).train, InMemory)


def test_moments_of_a_stream_are_those_of_512_images(folder: Path) -> None:
    """Evenly spread: of 1,023 images these are numbers 0, 2, ..., 1,022."""
    fill(folder, [(5, 5, 3)] * 1_023)
    memory, stream = load(Source(name=str(folder), stream=False)), load(Source(name=str(folder), stream=True))
    assert isinstance(memory.train, InMemory)
    some = memory.train.inputs[::2].double() / 255
    assert stream.moments[0] == pytest.approx(some.mean((0, 2, 3)).tolist())
    assert stream.moments[1] == pytest.approx(some.std((0, 2, 3), correction=0).tolist())
    assert stream.moments != memory.moments


# --- broken images -----------------------------------------------------------


def breaking(folder: Path, bad: int, image: bytes = b"not an image", count: int = 40) -> None:
    images: list[Any] = [png(array) for array in pixels(count, (6, 6, 3))]
    images[bad] = image
    write_split(folder, "train", images, [i % 3 for i in range(count)])
    write_split(folder, "test", images[:1], [0])


@pytest.mark.parametrize("bad", [0, 39, 13])
def test_an_unreadable_image_among_those_tried_is_found_before_training(folder: Path, bad: int) -> None:
    breaking(folder, bad)
    with pytest.raises(DataError, match=f"the image in row {bad} cannot be read"):
        load(Source(name=str(folder), stream=True))


OTHER = {
    "cannot be read": b"not an image",
    "has 5x7 pixels, others 6x6; set data.size": png(pixels(1, (5, 7, 3))[0]),
}


@pytest.mark.parametrize("message", OTHER)
def test_an_unfit_image_that_was_not_tried_is_named_when_it_is_read(folder: Path, message: str) -> None:
    breaking(folder, 12, OTHER[message])
    data = load(Source(name=str(folder), stream=True))
    with pytest.raises(DataError, match=f"the image in row 12 {message}"):
        epochs(data, ())


def test_colour_among_grey_is_named(folder: Path) -> None:
    images = [png(array) for array in pixels(40, (6, 6))]
    images[12] = png(pixels(1, (6, 6, 3))[0])
    write_split(folder, "train", images, [0] * 40)
    write_split(folder, "test", images[:1], [0])
    data = load(Source(name=str(folder), stream=True))
    assert data.channels == 1
    with pytest.raises(DataError, match=r"the image in row 12 has colour.*data\.stream to false"):
        epochs(data, ())


def test_images_of_several_sizes_need_a_size(folder: Path) -> None:
    fill(folder, [(6, 6), (6, 6), (7, 6), (6, 6)])
    with pytest.raises(DataError, match=r"images of 2 sizes \(6x6, 7x6, \.\.\.\); set data\.size"):
        load(Source(name=str(folder), stream=True))


def test_training_on_a_broken_image_ends_with_its_row(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking(folder, 12)
    words = ["rounds=1", "clients=2", f"data.name={folder}", "data.stream=true", "engine.workers=0"]
    words += ["data.partition={kind: iid}", "train.batch_size=8", "data.normalise=unit", "strategy={name: FedAvg}"]
    assert cli.main(["run", "quick", *words, "--out", str(tmp_path / "out")]) == 1
    assert "the image in row 12 cannot be read" in capsys.readouterr().err


def test_the_embedded_digits_do_not_stream() -> None:
    with pytest.raises(
        DataError, match=r"data\.stream is true, which is for files, but the examples of 'digits' are arrays"
    ):
        load(Source(name="digits", stream=True))


# --- runs --------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_a_stream_gives_the_model_of_a_run_in_memory(folder: Path, tmp_path: Path, workers: int) -> None:
    """Also in forked workers, which have their own reader threads."""
    from safetensors.numpy import load_file

    fill(folder, [(8, 8, 3)] * 24)
    words = ["rounds=2", "clients=2", f"data.name={folder}", "data.partition={kind: iid}", "train.batch_size=4"]
    words += [f"data.augment=[{', '.join(EVERYTHING)}]", "strategy={name: FedTAN, min_batch: 4}"]
    found = []
    for stream, processes in (("false", 0), ("true", workers)):
        out = tmp_path / stream
        more = [f"data.stream={stream}", f"engine.workers={processes}"]
        assert cli.main(["run", "quick", *words, *more, "--device", "cpu", "--out", str(out)]) == 0
        (file,) = out.rglob("summary.json")
        found.append(load_file(file.with_name("model.safetensors")))
    memory, stream = found
    assert memory.keys() == stream.keys()
    for key, value in memory.items():
        np.testing.assert_array_equal(stream[key], value, err_msg=key)


# --- ImageNet as a folder ----------------------------------------------------


def jpeg(shape: tuple[int, int], seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(1, (*shape, 3), seed)[0]).save(buffer, "JPEG")
    return buffer.getvalue()


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
            f"data={{name: imagenet, root: {folder}, memory: 0.1, partition: {{kind: iid}}}}",
            "model={name: resnet18}",
            "clients=2",
            "strategy={name: FedAvg}",
        ],
    )
    (prepared,) = prepare(experiment)
    data = prepared.dataset
    assert isinstance(data.train, Stream)
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
    with pytest.raises(DataError, match=r"train/ contains 1 images outside of class folders; expected .*train/CLASS/"):
        load(Source(name=str(folder)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{stream: sometimes}", r"data\.stream is 'sometimes': expected True, False or 'auto'"),
        ("{readers: 0}", r"data\.readers is 0: expected greater than or equal to 1"),
        ("{memory: 0}", r"data\.memory is 0: expected greater than 0"),
        ("{size: [32]}", r"data\.size: found \[32\]; expected pixels per side, or \[height, width\]"),
        ("{fit: middle}", r"data\.fit is 'middle': expected 'stretch' or 'crop'"),
        ("{crop: 7}", r"data\.crop is 7, but 'digits' has one label per example"),
    ],
)
def test_bad_settings_are_named(text: str, message: str) -> None:
    import yaml

    with pytest.raises(ValueError, match=message):
        prepare(read_experiment({"data": yaml.safe_load(text)}))
