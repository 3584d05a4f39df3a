"""Workers that are started as new interpreters, as for GPUs: the same numbers, and errors that say what to do."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.multiprocessing import reductions

from fedbn_flwr import BNClient, LocalGrid, client_app, run
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.extensions.gpu.spawned import environment, packed
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from tests.support import places
from tests.support.command import PATIENCE, ROOT, python_blocks
from tests.support.records import content

CLIENTS = 3


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model("cnn", 3, "bn", in_channels=1, image_size=8)


def batches(client: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(client)
    return [
        (torch.randn(6 + client, 1, 8, 8, generator=random) + client, torch.arange(6 + client) % 3) for _ in range(2)
    ]


def make_client(context: Context) -> BNClient:
    data = batches(int(context.node_config["partition-id"]))
    return BNClient(model(), data, data, lr=0.1, momentum=0.9, epochs=1, context=context)


app = client_app(make_client)


def rounds(grid: LocalGrid) -> list[Any]:
    """The models after two rounds of each strategy and the clients' states, which FedBN and momentum need."""
    found: list[Any] = []
    for make in (FedAvg, FedBN, lambda **options: FedTAN(min_batch=1, **options)):
        strategy = make(min_available_nodes=CLIENTS, fraction_evaluate=0.0)
        trained = unpack(strategy.start(grid, pack(initial_arrays(model())), num_rounds=2).arrays)
        found.append({key: value.tobytes() for key, value in trained.items()})
    return found + [content(grid.read_state(node)) for node in grid.get_node_ids()]


def test_they_train_what_one_process_trains() -> None:
    with LocalGrid(app, CLIENTS, threads=1) as here, LocalGrid(app, CLIENTS, workers=2) as forked:
        expected = rounds(here)
        assert rounds(forked) == expected
    with LocalGrid(app, CLIENTS, workers=2, start="spawn") as grid:
        assert rounds(grid) == expected


# --- processes ----------------------------------------------------------------


def ask(grid: LocalGrid, *kinds: str) -> list[Message]:
    return list(grid.send_and_receive([Message(RecordDict(), i, f"query.{kind}") for i, kind in enumerate(kinds, 1)]))


def both_serve(grid: LocalGrid, done: int) -> int:
    """Ask two clients until both workers are ready, one of which could answer both; returns the number of rounds."""
    for number in range(1, 10_000):
        found = [reply.content["metrics"] for reply in ask(grid, "place", "place")]
        assert [metrics["count"] for metrics in found] == [done + number, done + number + (done > 0)]
        if {metrics["gpu"] for metrics in found} == {0, 1}:
            return number
        time.sleep(0.01)
    raise AssertionError("one worker only")


def test_each_worker_sees_one_gpu_and_a_killed_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with LocalGrid(places.app, 3, workers=2, gpus=2) as grid:
        rounds = both_serve(grid, 0)
        lost, kept = ask(grid, "die", "place")
        assert "signal 9" in lost.error.reason
        assert kept.content["metrics"]["count"] == rounds + 1
        both_serve(grid, rounds)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_workers_share_the_gpus_that_are_visible_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8932f937,8")
    seen = []
    for gpu in (0, 1, None):
        with environment(gpu):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["5", "GPU-8932f937", "5, GPU-8932f937,8"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5, GPU-8932f937,8"


# --- an experiment --------------------------------------------------------------


def images() -> dict[str, Any]:
    """A data set that only the main process can load."""
    assert multiprocessing.parent_process() is None, "a worker loads the data"
    pixels = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    return {part: (pixels, torch.arange(60) % 3) for part in ("train", "test")}


def test_workers_for_gpus_train_on_the_images_of_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: only the number of GPUs is not the real one."""
    results = []
    for gpus in (0, 1):
        monkeypatch.setattr("fedbn_flwr.experiment.run.loop.gpus_of", lambda run, gpus=gpus: gpus)
        results.append(
            run(
                {"rounds": 2, "clients": 2, "train": {"steps": 2, "batch_size": 8}, "strategy": {"name": "FedBN"}},
                data={"name": "fedbn_flwr.extensions.gpu.tests.test_spawned:images"},
                engine={"device": "cpu", "workers": gpus},
                mods=["message_size_mod"],
                out=tmp_path / str(gpus),
                progress=False,
            )
        )
    one, other = (result.model(client=0).state_dict() for result in results)
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert results[0].summary.accuracy == results[1].summary.accuracy is not None


def test_a_model_that_the_app_holds_is_copied() -> None:
    """Each worker trains its own; tensors that belong together stay together."""
    held = ModelTensors(model())
    first = {key: value.clone() for key, value in held.model.state_dict().items()}
    copy = pickle.loads(packed(held, None, {}))
    assert isinstance(copy, ModelTensors)
    for key, value in copy.model.state_dict().items():
        assert torch.equal(value, first[key])
        value += 1
    assert all(torch.equal(held.model.state_dict()[key], value) for key, value in first.items())
    assert torch.equal(next(copy.model.parameters()), next(model().parameters()) + 1)


def test_pytorch_has_the_argument_by_which_a_worker_finds_shared_memory_on_its_gpu() -> None:
    assert "storage_device" in inspect.signature(reductions.rebuild_cuda_tensor).parameters


# --- what cannot be sent or imported ------------------------------------------


def test_an_app_inside_a_function_is_refused_before_a_process_starts() -> None:
    def make_client(context: Context) -> BNClient:
        raise AssertionError

    plain = ClientApp()
    for inside, found in ((client_app(make_client), "make_client"), (plain, "no module")):
        with (
            LocalGrid(inside, 1, workers=1, start="spawn") as grid,
            pytest.raises(RunFailed, match=f"{found}.*at the top of a module"),
        ):
            grid.start()


def test_an_app_whose_module_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_notebook")
    module.app = ClientApp()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    with (
        LocalGrid(module.app, 1, workers=1, start="spawn") as grid,
        pytest.raises(RunFailed, match=r"No module named 'a_notebook'.*at the top of a module"),
    ):
        grid.start()
    assert multiprocessing.active_children() == []


SCRIPT = """
import functools
from flwr.app import Message, RecordDict
from flwr.client import NumPyClient
from fedbn_flwr import LocalGrid, client_app

def make_client(text, context):
    return NumPyClient()

{guard}
    app = client_app(functools.partial(make_client, "more than the buffer of a socket" * 30_000))
    with LocalGrid(app, 2, workers={workers}, start="spawn") as grid:
        replies = list(grid.send_and_receive([Message(RecordDict(), node, "query.partition") for node in (1, 2)]))
        print(len(replies), "replies", all(reply.has_content() for reply in replies))
"""


def test_a_script_without_a_guard_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard="if True:", workers=1))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert 'put what trains below if __name__ == "__main__"' in ended.stderr
    assert ended.stderr.count("Traceback") == 1, "that of the script itself, none of a worker"


def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    (code,) = [code for code in python_blocks((ROOT / "docs" / "python.md").read_text()) if "__main__" in code]
    script = tmp_path / "script.py"
    script.write_text(code.replace("workers=2, start", "workers=1, start"))  # each imports PyTorch
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(" arrays of 2 rounds\n")


TOGETHER = """
import multiprocessing, pathlib, sys, time

if multiprocessing.parent_process() is not None:
    here = pathlib.Path(__file__).parent
    (here / f"worker-{multiprocessing.current_process().name}").touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(here.glob("worker-*"))) < 2:
        if time.monotonic() > deadline:
            sys.exit("the other worker does not start")
        time.sleep(0.01)
"""


def test_workers_start_at_the_same_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TOGETHER + SCRIPT.format(guard='if __name__ == "__main__":', workers=2))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout) == (0, "2 replies True\n"), ended.stderr


def test_ctrl_c_while_workers_start_ends_them_without_tracebacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":\n    print("starts", flush=True)', workers=1))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "starts\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to all processes
    _, errors = process.communicate(timeout=PATIENCE)  # until the last process of them has closed its output
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") <= 1, "that of the script itself, none of a worker"
