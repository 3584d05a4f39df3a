"""The notebooks in `examples/`, executed in a real kernel; and what a kernel does with a run that is interrupted.

The site shows their stored outputs. `FEDBN_REWRITE=1 pytest -m slow ...` stores what they print now.
"""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from fedbn_flwr import Result
from tests.support.command import PATIENCE, ROOT
from tests.support.pages import REWRITE, differences

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Else debugpy warns about modules that are part of the interpreter.
QUIET = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "FLWR_TELEMETRY_ENABLED": "0"}


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.data["text/plain"] for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_prints_what_is_stored(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in QUIET.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))  # as in a kernel that is started there
    stored, notebook = (nbformat.read(file, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook, timeout=PATIENCE, resources=resources, record_timing=False, coalesce_streams=True
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    if REWRITE:
        notebook.metadata = stored.metadata
        for output in outputs:
            output.get("data", {}).pop("text/html", None)
        nbformat.write(notebook, file)
    else:
        assert differences(printed(stored), printed(notebook)) == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_as_it_was_executed_from_the_top(file: Path) -> None:
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)


RUN = """
from fedbn_flwr import run
result = run("quick", rounds=500, strategy="FedAvg", clients=2, train={"steps": 1, "epochs": None},
             engine={"workers": 2}, out="stopped")
"""


@pytest.mark.slow
def test_a_kernel_s_interrupt_stops_after_a_round_and_leaves_a_run_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in QUIET.items():
        monkeypatch.setenv(key, value)
    history = tmp_path / "stopped" / "FedAvg" / "history.jsonl"
    manager, client = start_new_kernel(startup_timeout=PATIENCE, cwd=str(tmp_path))
    try:
        request = client.execute(RUN)
        deadline = time.monotonic() + PATIENCE
        while not (history.exists() and history.stat().st_size):
            assert time.monotonic() < deadline, "no round"
            time.sleep(0.05)
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=PATIENCE))["parent_header"]["msg_id"] != request:
            pass  # the reply to a question of start_new_kernel
        messages = []
        while (message := client.get_iopub_msg(timeout=PATIENCE))["msg_type"] != "error":
            messages.append(message)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    printed = "".join(message["content"].get("text", "") for message in messages)
    assert "stopping after this round" in printed
    assert f"resume with out={str(tmp_path / 'stopped')!r}" in printed
    assert "1 run, in " in printed
    summary = Result.read(history.parent).summary
    assert summary.status == "interrupted"
    assert 0 < summary.rounds < 500
    assert (history.parent / "checkpoint").exists()
