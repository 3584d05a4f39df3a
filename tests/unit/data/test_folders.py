"""DomainNet and Office-Caltech-10 as folders of images, in the layouts that they are distributed in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, described
from fedbn_flwr.experiment.data import rows_by_domain, shares_of
from fedbn_flwr.experiment.file.layers import parse_yaml, read_experiment
from tests.support.images import png, write_pictures

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
