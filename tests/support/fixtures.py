"""Fixtures of all tests: no telemetry, no network, one thread, and a small federation to train."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Flower and datasets read these when they are imported.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="fedbn-tests-")
os.environ["HF_HOME"] = os.environ["FLWR_HOME"] + "/huggingface"
os.environ["HF_HUB_OFFLINE"] = "1"
# A busy machine may need more than Ray's 60 s to start a process; then Ray starts another one.
os.environ["RAY_worker_register_timeout_seconds"] = "240"  # noqa: SIM112
os.environ["FEDBN_CACHE"] = os.environ["FLWR_HOME"] + "/cache"
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Tests start many processes: without compiled files each would compile torch again.
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "fedbn-pycache"))
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Flower's dependencies about each other's versions
    gc.disable()  # until all tests are collected: it would take seconds and free nothing
    import flwr.serverapp  # noqa: F401

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from fedbn_flwr import BNClient, LocalGrid, Role, client_app
from fedbn_flwr.errors import forget_said
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.results.folder import environment
from fedbn_flwr.results.report import write
from tests.support.command import PATIENCE
from tests.support.packages import clean_environment, wheel  # noqa: F401 (fixtures)

# A node that starts slowly gets as long as other programs. Ray is imported later.
os.environ["RAY_raylet_start_wait_time_s"] = str(PATIENCE)  # noqa: SIM112

# The same examples in every run, so that a failure can be reproduced. No limits of time: the machine may be busy.
settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")


# Fixtures that take long to make: with `pytest -n`, all tests that use one of them run in one process.
SHARED = ("deployment", "real_deployment", "clean_environment", "wheel")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n`, the tests of a file run in one process, which makes the fixtures of its module once."""
    for item in items:
        names = {*getattr(item, "fixturenames", ())}
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            names |= {name for name in item.callspec.params.values() if isinstance(name, str)}
        used = [name for name in SHARED if name in names]
        item.add_marker(pytest.mark.xdist_group(used[0] if used else item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["FLWR_HOME"], ignore_errors=True)
    if sys.pycache_prefix and not hasattr(config, "workerinput"):  # environments that tests made, hundreds of megabytes
        shutil.rmtree(sys.pycache_prefix + tempfile.gettempdir(), ignore_errors=True)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Other processes use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("FEDBN_TEST_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quiet_flower() -> Iterator[None]:
    """Hide Flower's messages about every round; the fixture `flower_log` shows warnings again."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


PICTURES = write._pictures


@pytest.fixture(scope="session", autouse=True)
def _undrawn() -> Iterator[None]:
    """The reports of runs have no pictures: drawing takes four fifths of the processor time of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_pictures", lambda rows, form: ({}, ""))
        yield


@contextmanager
def drawing() -> Iterator[pytest.MonkeyPatch]:
    """Reports have pictures, a dozen each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_pictures", PICTURES)
        yield patch


@pytest.fixture(scope="session", autouse=True)
def _unsynced() -> Iterator[None]:
    """Files are not waited for until they are on the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _asked_once() -> Iterator[None]:
    """Git is asked for the commit once, not twice for each run: no test changes the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_commit", functools.cache(environment._commit))
        yield


@pytest.fixture
def pictures() -> Iterator[None]:
    """The test looks at pictures of a report."""
    with drawing():
        yield


@pytest.fixture
def plots() -> Iterator[None]:
    """The test looks at the files with pictures, and not at those in the page, which are most of them."""
    with drawing() as patch:
        patch.setattr(write, "pictures_of_page", lambda rows, form: ())
        yield


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """What an earlier test has logged once is logged again."""
    forget_said()


@pytest.fixture
def flower_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warnings that strategies log through Flower's logger."""
    caplog.set_level(logging.WARNING, logger="flwr")
    return caplog


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """What a test draws from torch's global generator doesn't depend on the tests before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that this process asked to sleep; the clock shows them as passed at once."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets, of the variable or beside the checkout; most machines have none."""
    given = os.environ.get("FEDBN_TEST_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no data sets here: set FEDBN_TEST_DATA to a folder that holds mnist/ and others")
    return folder


class Batches:
    """One client's data: the same batches in every epoch."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches
        self.num_examples = sum(len(labels) for _, labels in batches)

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def small_net() -> nn.Module:
    """A convolution, a batch norm and a linear layer, drawn from torch's global generator."""
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@dataclass
class Federation:
    """Clients with examples of their own, and the model they begin with."""

    model: nn.Module
    data: list[Batches]
    options: dict[str, Any] = field(default_factory=dict)  # of each BNClient

    def make_client(self, context: Context) -> BNClient:
        data = self.data[int(context.node_config["partition-id"])]
        return BNClient(copy.deepcopy(self.model), data, data, context=context, **self.options)

    def app(self) -> ClientApp:
        return client_app(self.make_client)

    def grid(self, app: ClientApp | None = None, **options: Any) -> LocalGrid:
        return LocalGrid(app or self.app(), len(self.data), **options)

    def arrays(self) -> ArrayRecord:
        """The arrays that our server sends: all except the counters."""
        state, role_of = self.model.state_dict(), roles(self.model)
        return pack({key: value.numpy().copy() for key, value in state.items() if role_of[key] is not Role.COUNTER})


@pytest.fixture
def federation() -> Callable[..., Federation]:
    """Makes a Federation; a client has its number of examples in `sizes`, in `batches` batches."""

    def make(
        sizes: tuple[int, ...] = (8, 12),
        *,
        batches: int = 2,
        model: Callable[[], nn.Module] = small_net,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Federation:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = model().to(dtype)
            data = []
            for client, size in enumerate(sizes):
                # Clients differ in mean and scale, so their statistics do too.
                images = torch.randn(size, 2, 4, 4, dtype=dtype) * (1 + client) + client
                labels = torch.randint(0, 3, (size,))
                cut = -(-size // batches)
                data.append(Batches(list(zip(images.split(cut), labels.split(cut), strict=True))))
        return Federation(net, data, options)

    return make


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for local copies of data sets; nothing is cached from one test to the next."""
    monkeypatch.setenv("FEDBN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDBN_DATA", raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
