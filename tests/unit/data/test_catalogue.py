"""Data sets by name, from local copies, with the papers' defaults; and the user's own folders of images.

Sets that are not among the shared data sets are generated, with the columns and splits of their source.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.data.catalogue import CATALOGUE, describe_datasets
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError, described
from fedbn_flwr.experiment.data import normalisation_of, rows_by_domain, shares_of
from fedbn_flwr.experiment.file.layers import load_experiment, parse_overrides, parse_yaml, read_experiment
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.prepare import make_rule, prepare, prepare_run
from fedbn_flwr.experiment.settings import Settings
from tests.support.images import numbered, png, write_parquet, write_pictures, write_splits

AUGMENTS = {"crop", "flip", "resized_crop", "rotate"}


def run_of(text: str, *overrides: str) -> Settings:
    (run,) = read_experiment(parse_yaml(text), parse_overrides(overrides)).runs
    return run


# --- the table ---------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_is_complete_in_itself(name: str) -> None:
    entry = CATALOGUE[name]
    assert set(entry.augment) <= AUGMENTS
    if entry.moments is not None:
        mean, deviation = entry.moments
        assert len(mean) == len(deviation) == entry.channels
        assert all(0 < value < 1 for value in (*mean, *deviation))
    assert bool(entry.domain) == bool(entry.domains)
    assert not entry.keep or len(entry.keep) == entry.classes
    assert entry.title in describe_datasets()[name]


# --- true layouts ------------------------------------------------------------

# As the hub has them: the folder within the data set's, the names of the splits, columns and their classes.
LAYOUTS: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any], dict[str, list[str]], str]] = {
    "cifar10": ("plain_text/", "test", (32, 32, 3), {"label": [0, 9, 4]}, {"label": numbered(10)}, "img"),
    "cifar100": (
        "cifar100/",
        "test",
        (32, 32, 3),
        {"fine_label": [0, 99, 40], "coarse_label": [0, 19, 4]},
        {"fine_label": numbered(100), "coarse_label": numbered(20)},
        "img",
    ),
    "mnist": ("mnist/", "test", (28, 28), {"label": [0, 9, 4]}, {"label": numbered(10)}, "image"),
    "tiny_imagenet": ("data/", "valid", (64, 64, 3), {"label": [0, 199, 4]}, {"label": numbered(200)}, "image"),
    "imagenet": ("data/", "validation", (50, 40, 3), {"label": [0, 999, 4]}, {"label": numbered(1000)}, "image"),
}


def write_clone(root: Path, name: str) -> None:
    folder, test, shape, rows, names, image = LAYOUTS[name]
    files = [f"{folder}{split}-00000-of-00001.parquet" for split in ("train", test)]
    write_splits(root / name, shape, rows, names, image, files)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_clone_of_the_hub_loads_by_name(name: str, root: Path) -> None:
    write_clone(root, name)
    data, entry = load(Source(name=name, root=str(root))), CATALOGUE[name]
    assert data.train.inputs.shape == (3, entry.channels, entry.size, entry.size)
    assert data.train.labels.tolist() == data.test.labels.tolist() == LAYOUTS[name][3][entry.label]
    assert data.classes == entry.classes
    assert data.domains is None


def test_a_revision_of_the_hub_is_read_for_both_splits_and_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub itself cannot be reached here: its library's function returns local files with the hub's checksums."""
    folder, _, shape, rows, names, image = LAYOUTS["mnist"]
    asked = []

    def load_dataset(hub: str, *, split: str, revision: str | None) -> Any:
        asked.append((hub, split, revision))
        found = datasets.Dataset.from_parquet(str(root / "mnist.parquet"))
        found.info.download_checksums = {f"hf://datasets/{hub}@{'c' * 40}/{folder}{split}.parquet": {"num_bytes": 1}}
        return found

    write_parquet(root / "mnist.parquet", shape, rows, names, image)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load(Source(name="mnist", revision="v1")).commit == "c" * 40
    assert load(Source(name="owner/mnist")).commit == "c" * 40
    assert asked == [
        ("ylecun/mnist", "train", "v1"),
        ("ylecun/mnist", "test", "c" * 40),
        ("owner/mnist", "train", None),
        ("owner/mnist", "test", "c" * 40),
    ]


def test_a_revision_of_data_that_are_not_of_the_hub_is_refused(root: Path) -> None:
    write_clone(root, "mnist")
    assert load(Source(name="mnist", root=str(root))).commit is None
    for name, at in (("mnist", str(root)), (str(root / "mnist"), None), ("digits", None), ("module:own", None)):
        with pytest.raises(DataError, match=r"data\.revision is 'v1', which is for data sets of the hub"):
            load(Source(name=name, root=at, revision="v1"))


def write_reduced(root: Path) -> list[str]:
    kept = list(CATALOGUE.get("domainnet10").keep)  # type: ignore[union-attr]
    classes = sorted([*kept, "airplane", "zigzag"])
    domains = ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
    rows = {
        "domain": [0, 5, 5, 3, 0],
        "label": [classes.index(c) for c in ("airplane", "bird", "zigzag", "zebra", "tiger")],
    }
    files = [f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
    write_splits(root / "domainnet10" / "data", (20, 30, 3), rows, {"domain": domains, "label": classes}, files=files)
    return kept


def test_domainnet_is_reduced_to_its_ten_classes(root: Path) -> None:
    kept = write_reduced(root)
    data = load(Source(name="domainnet10", root=str(root), size=8))
    assert data.class_names == tuple(kept)
    assert [kept[i] for i in data.train.labels] == ["bird", "zebra", "tiger"]
    assert [data.domains.names[i] for i in data.domains.train] == ["sketch", "quickdraw", "clipart"]
    whole = load(Source(name=str(root / "domainnet10"), size=8))
    assert whole.classes == 12
    assert data.train.inputs.equal(whole.train.inputs[[1, 3, 4]]), "each image kept its label"


# --- where a name is looked for ----------------------------------------------


def test_the_variable_names_a_root_where_the_file_names_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_splits(root / "mnist", (28, 28), {"label": [1]}, {"label": numbered(10)})
    monkeypatch.setenv("FEDBN_DATA", str(root))
    assert load(Source(name="mnist")).train.labels.tolist() == [1]


def test_other_names_are_found_under_the_root_too(root: Path) -> None:
    write_splits(root / "mine", (5, 5), {"kind": [1]}, {"kind": ["a", "b"]}, "photo")
    assert load(Source(name="mine", root=str(root))).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{name: cifar10, root: /no/such/place}",
            r"data\.root has no folder 'cifar10'; put .* data\.root='/no/such/place' contains none",
        ),
        ("{name: cifar10, root: ROOT}", r"has no folder 'cifar10'; .*leave out data\.root to load.* contains mnist"),
        ("{name: office_caltech10}", r"'office_caltech10' .* is not on the Hugging Face hub; give data\.root"),
        (
            "{name: mnist, root: ROOT, label: kind}",
            r"data\.label='kind' is not a column of 'mnist'.*label \(ClassLabel\)",
        ),
        ("{name: mnist, root: ROOT, domain: city}", r"data\.domain='city' is not a column of 'mnist'"),
        (
            "{name: mnist, root: ROOT, domains: [real]}",
            r"data\.domain='domain' is not a column of 'mnist'; its columns: image",
        ),
        (
            "{name: mnist, root: ROOT, group: city}",
            r"data\.group is 'city'; expected the column .* The columns of 'mnist': image, label",
        ),
        ("{name: mnist, root: ROOT, partition: {kind: domain}}", r"the data has no domains"),
        ("{name: mnist_, root: ROOT}", r"'mnist_': there is no such data set; .*did you mean 'mnist'"),
        ("{name: digits, normalise: official}", r"'official', but 'digits' has no official mean.*known for cifar10"),
        ("{name: digits, domains: [a]}", r"data\.domain='domain' is not a column of 'digits'"),
    ],
)
def test_bad_input_is_one_message_before_training(text: str, message: str, root: Path) -> None:
    write_splits(root / "mnist", (28, 28), {"label": list(range(10))}, {"label": numbered(10)})
    with pytest.raises((DataError, SettingsError), match=message) as caught:
        prepare(load_experiment(f"clients: 2\ndata: {text.replace('ROOT', str(root))}"))
    assert "\n" not in str(caught.value)


def test_a_named_set_with_another_number_of_classes_is_refused(root: Path) -> None:
    write_splits(root / "cifar10", (8, 8, 3), {"label": [1]}, {"label": numbered(7)}, "img")
    with pytest.raises(DataError, match=r"CIFAR-10\) has 10 classes, the data 7 in 'label'"):
        load(Source(name="cifar10", root=str(root)))


def test_domains_are_those_asked_for_in_that_order_and_an_unknown_one_is_answered_with_the_nearest(root: Path) -> None:
    write_reduced(root)
    data = load(Source(name="domainnet10", root=str(root), size=8, domains=["sketch", "clipart"]))
    assert data.domains.names == ("sketch", "clipart")
    assert data.domains.train.tolist() == [0, 1]
    assert [data.class_names[i] for i in data.train.labels] == ["bird", "tiger"]
    with pytest.raises(DataError, match=r"'sketsh' is not a domain of 'domainnet10'; did you mean 'sketch'\?"):
        load(Source(name="domainnet10", root=str(root), size=8, domains=["sketsh"]))


# --- defaults ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cifar10", {"size": 32, "normalise": "official", "augment": ("crop", "flip"), "pad": 2}),
        ("tiny_imagenet", {"size": 64, "augment": ("resized_crop", "flip")}),
        ("office_caltech10", {"size": 256, "normalise": "moments"}),  # it has no official moments
        ("cifar10, size: 16, normalise: unit, augment: []", {"size": 16, "normalise": "unit", "augment": ()}),
        *(
            (name, {"size": None, "normalise": "moments", "augment": ()})
            for name in ("digits", "./cifar10", "uoft-cs/cifar10")
        ),
    ],
)
def test_the_catalogue_fills_in_what_the_file_leaves_open_of_the_data_sets_it_names(
    text: str, expected: dict[str, Any]
) -> None:
    data = run_of(f"data: {{name: {text}}}").data
    assert {key: getattr(data, key) for key in expected} == expected


def test_official_images_have_the_published_mean_and_deviation(root: Path) -> None:
    write_splits(root / "cifar10", (32, 32, 3), {"label": [1, 2]}, {"label": numbered(10)}, "img")
    run = run_of(f"data: {{name: cifar10, root: {root}}}")
    data = load(Source(name="cifar10", root=str(root)))
    assert normalisation_of(run, data) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    own: dict[str, Any] = {"data-path": str(root / "cifar10"), "partition-id": 0, "num-partitions": run.clients}
    context = Context(run_id=0, node_id=0, node_config=own, state=RecordDict(), run_config={})
    site = ClientParts.of(run, context)
    assert site.normalise(None) == normalisation_of(run, data), "a site's own files are of the experiment's data set"
    assert len(ClientParts.of(run_of("data: {name: cifar10, revision: v1}"), context).dataset.train) == 2
    measured = run_of(f"data: {{name: cifar10, root: {root}, normalise: moments}}")
    assert normalisation_of(measured, data) == data.moments


def test_official_of_one_channel_is_refused_for_images_of_three(root: Path) -> None:
    write_splits(root / "mnist", (28, 28, 3), {"label": list(range(10))}, {"label": numbered(10)})
    with pytest.raises(SettingsError, match=r"'official' with 1 channels for 'MNIST', but these examples have 3"):
        prepare(load_experiment(f"clients: 2\ndata: {{name: mnist, root: {root}}}"))


def test_the_shipped_mnist_runs_on_a_local_copy(root: Path) -> None:
    write_splits(root / "mnist", (28, 28), {"label": [i % 10 for i in range(20)]}, {"label": numbered(10)})
    run = load_experiment("fedtan/mnist", ["seed=0", f"data.root={root}"]).runs[1]
    assert prepare_run(run, "run", make_rule(run)).dataset.train.inputs.shape == (20, 1, 28, 28)


# --- the real ones -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "domains", "counts"),
    [
        ("office_caltech10", 16, ("amazon", "caltech", "dslr", "webcam"), [180, 220, 27, 56]),
        ("digits_five", 28, ("mnist", "mnist_m", "usps"), [2000, 2000, 1860]),
    ],
)
def test_real_domains_load(
    name: str, size: int, domains: tuple[str, ...], counts: list[int], shared_data: Path
) -> None:
    """Only test splits, as both splits, to be quick; sizes and modes are mixed in the files."""
    if not (shared_data / name).is_dir():
        pytest.skip(f"no {name}/ among the data sets")
    data = load(Source(name=name, root=str(shared_data), train="test", size=size))
    assert data.train.inputs.shape == (sum(counts), 3, size, size)
    assert data.domains.names == domains
    assert torch.bincount(data.domains.train).tolist() == counts
    assert data.classes == 10


@pytest.mark.slow
def test_official_moments_are_those_of_the_real_test_images(shared_data: Path) -> None:
    """Within 0.01 of what 10,000 test images of Fashion-MNIST give."""
    if not (shared_data / "fashion_mnist").is_dir():
        pytest.skip("no fashion_mnist/ among the data sets")
    found = load(Source(name="fashion_mnist", root=str(shared_data), train="test")).moments
    official = CATALOGUE["fashion_mnist"].moments
    assert found[0] == pytest.approx(official[0], abs=0.01)
    assert found[1] == pytest.approx(official[1], abs=0.01)


# --- DomainNet and Office-Caltech-10 as folders of images, in the layouts that they are distributed in.


KEPT = CATALOGUE["domainnet10"].keep
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
# As its lists number them, among 345: in the order of the alphabet.
NUMBERS = {name: i for i, name in enumerate(sorted([*KEPT, "aircraft_carrier", "zigzag"]))}


def picture(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(np.full((6, 9, 3), value, dtype=np.uint8)))


def write_domainnet(root: Path, domains: tuple[str, ...] = DOMAINS) -> Path:
    """DOMAIN/CLASS/DOMAIN_000_000001.jpg; of each class two images to train and one to test, its number the colour."""
    folder = root / "domainnet10"
    for domain in domains:
        lists: dict[str, list[str]] = {"train": [], "test": []}
        for name, number in NUMBERS.items():
            for i in range(3):
                path = f"{domain}/{name}/{domain}_{number:03}_{i:06}.jpg"
                lists["test" if i == 1 else "train"].append(f"{path} {number}")
                # Examples of the other classes may be missing.
                if name in KEPT:
                    picture(folder / path, 10 * number + i)
        for part, lines in lists.items():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_domainnet_s_own_lists_make_its_splits(root: Path) -> None:
    write_domainnet(root)
    data = load(Source(name="domainnet10", root=str(root), size=4))
    assert data.class_names == KEPT
    assert (len(data.train.labels), len(data.test.labels)) == (6 * 10 * 2, 6 * 10)
    assert data.domains.names == DOMAINS
    assert torch.bincount(data.domains.train).tolist() == [20] * 6
    values = data.train.inputs[:, 0, 0, 0].tolist()
    expected = [10 * NUMBERS[KEPT[label]] + i for label, i in zip(data.train.labels, [0, 2] * 60, strict=True)]
    assert values == expected, "each image has its own label, and those of the list are there"


def test_a_copy_may_have_some_domains_only(root: Path) -> None:
    write_domainnet(root, ("real", "clipart"))
    data = load(Source(name="domainnet10", root=str(root), size=4))
    assert data.domains.names == ("clipart", "real")
    assert set(rows_by_domain(data)) == {"clipart", "real"}


def test_a_folder_of_any_name_with_such_lists_has_all_its_classes(root: Path) -> None:
    folder = write_domainnet(root, ("sketch",))
    for name in ("aircraft_carrier", "zigzag"):
        for i in range(3):
            picture(folder / f"sketch/{name}/sketch_{NUMBERS[name]:03}_{i:06}.jpg", 0)
    assert load(Source(name=str(folder), size=4)).classes == 12


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("train", "real/bird/none.jpg 1", r"the image in row 20 cannot be read \(.*real/bird/none\.jpg\)"),
        ("train", "real/bird", r"real_train\.txt'.*line 25, 'real/bird', is not of the form DOMAIN/CLASS/FILE NUMBER"),
        ("test", None, r"cannot read .*real_test\.txt.*No such file"),
    ],
)
def test_a_missing_list_or_a_bad_line_of_one_is_named(root: Path, file: str, line: str | None, message: str) -> None:
    path = write_domainnet(root, ("real",)) / f"real_{file}.txt"
    path.write_text(f"{path.read_text()}{line}\n") if line else path.unlink()
    with pytest.raises(DataError, match=message):
        load(Source(name="domainnet10", root=str(root)))


def write_office(root: Path) -> dict[str, int]:
    counts = {"amazon": 12, "caltech": 11, "dslr": 5, "webcam": 6}
    for domain, count in counts.items():
        for k in range(10):
            for i in range(count):
                picture(root / "office_caltech10" / domain / f"class_{k}" / f"frame_{i:04}.jpg", 20 * k + i)
    return counts


def test_office_caltech_without_lists_tests_on_every_fifth_image_and_each_domain_is_a_client(root: Path) -> None:
    counts = write_office(root)
    text = f"{{clients: 4, data: {{name: office_caltech10, root: {root}, size: 4, partition: {{kind: domain}}}}}}"
    (run,) = read_experiment(parse_yaml(text)).runs
    assert run.data.augment == ("flip", "rotate")
    data = load(Source(name="office_caltech10", root=str(root), size=4))
    assert data.domains.names == tuple(counts)
    assert torch.bincount(data.domains.test).tolist() == [10 * (count // 5) for count in counts.values()]
    trained = [10 * (count - count // 5) for count in counts.values()]
    assert torch.bincount(data.domains.train).tolist() == trained
    assert [len(part) for part in shares_of(run.data, 4, 0, "cpu")[0]] == trained, "each domain is a client"
    first = data.test.inputs[:, 0, 0, 0][:4].tolist()
    assert first == [4, 9, 24, 29], "of class 0 of amazon the fifth and tenth, then those of class 1"


def test_without_a_copy_the_layouts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDBN_DATA", raising=False)
    with pytest.raises(DataError, match=r"not on the Hugging Face hub; give data\.root .* leftImg8bit/ and gtFine/"):
        load(Source(name="cityscapes"))
    with pytest.raises(DataError, match=r"office_caltech10/ with train\*\.parquet and test\*\.parquet, or DOMAIN/"):
        load(Source(name="office_caltech10"))


def test_a_share_is_held_out_of_all_images_of_domains(root: Path) -> None:
    counts = write_office(root)
    data = load(Source(name="office_caltech10", root=str(root), size=4, test=0.25))
    assert len(data.train) + len(data.test) == 10 * sum(counts.values()), "no fifth image is left out"
    folder = write_domainnet(root, ("real",))
    (folder / "real_test.txt").unlink()
    listed = load(Source(name="domainnet10", root=str(root), size=4, test=0.25))
    assert (len(listed.train), len(listed.test)) == (15, 5), "the list of test images is not needed"


# --- Data that belong to another user than the one who runs the app, as uid 49999 of a container does.


UID = 49999
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def user() -> Iterator[None]:
    os.seteuid(UID)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A table in a folder that other users can enter, unlike pytest's."""
    parent = Path(tempfile.mkdtemp(prefix="fedbn-rights-"))
    parent.chmod(0o755)
    site = parent / "site"
    site.mkdir(mode=0o755)
    for split in ("train", "test"):
        (site / f"{split}.csv").write_text("age,label\n1,a\n2,b\n")
        (site / f"{split}.csv").chmod(0o644)
    load(Source(name=str(site), label="label"))  # imports what reads files: another user may not read this Python
    yield site
    shutil.rmtree(parent)


@as_root
def test_readable_data_are_loaded(folder: Path) -> None:
    with user():
        assert len(load(Source(name=str(folder), label="label")).train) == 2


CLOSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("the folder", lambda site: site.chmod(0o700), "drwx------"),
    ("its list", lambda site: site.chmod(0o711), "drwx--x--x"),
    ("its files", lambda site: site.chmod(0o744), "drwxr--r--"),
    ("a parent", lambda site: site.parent.chmod(0o700), "drwx------"),
    ("a file", lambda site: (site / "train.csv").chmod(0o600), "-rw-------"),
]


@as_root
@pytest.mark.parametrize(
    ("close", "rights"), [each[1:] for each in CLOSED], ids=[each[0].replace(" ", "-") for each in CLOSED]
)
def test_an_unreadable_folder_is_named_with_its_rights(
    close: Callable[[Path], object], rights: str, folder: Path
) -> None:
    close(folder)
    with user(), pytest.raises(DataError, match=f"cannot be read by the user of this process, uid {UID}") as caught:
        load(Source(name=str(folder)))
    assert f"has the rights {rights} and belongs to uid 0" in str(caught.value)
    assert "leftImg8bit" not in str(caught.value)
    seen = described(caught.value, to_server=True, own_data=True)
    assert f"uid {UID}" in seen
    assert "train.csv" not in seen


@as_root
def test_a_folder_of_images_that_cannot_be_listed_is_no_missing_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / f"{split}.csv").unlink()
        write_pictures(folder / split, [np.zeros((8, 8, 3), np.uint8)], "cat", "dog")
    assert load(Source(name=str(folder))).class_names == ("cat", "dog")
    (folder / "train" / "cat").chmod(0o700)
    with user(), pytest.raises(DataError, match="may not list") as caught:
        load(Source(name=str(folder)))
    assert "cat" in str(caught.value)
    assert "cat" not in described(caught.value, to_server=True, own_data=True)
