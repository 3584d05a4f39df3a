"""Data that belong to another user than the one who runs the app, as uid 49999 of a container does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, described
from tests.support.images import write_pictures

UID = 49999
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


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
