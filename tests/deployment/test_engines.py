"""The same experiment gives the same arrays on the local engine, on a Ray cluster and on real nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedbn_flwr import Result
from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.registry import STRATEGIES
from tests.support.command import PATIENCE, ROOT, fedbn
from tests.support.network import Deployment, copy_app, wait_for
from tests.support.runs import is_finished
from tests.support.sessions import BASE, Elsewhere, outcome, overrides, session

EXPERIMENT = ROOT / "apps" / "experiments" / "quick.yaml"  # three clients, three rounds, FixBN from round 2 on


def arrays(out: Path) -> bytes:
    (file,) = out.glob("*/model.safetensors")
    return file.read_bytes()


def results(run: Path) -> dict[str, object]:
    """The models of a run, and what clients measured with them."""
    models = {file.name: file.read_bytes() for file in run.glob("*.safetensors")}
    return {**models, "clients": [json.loads(line) for line in contents(run / "clients.jsonl").splitlines()]}


def run_here(*words: str | Path) -> None:
    """The command `fedbn run` in this process."""
    assert cli.main(["run", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("local") / "out"
    run_here(EXPERIMENT, "--engine", "local", "--device", "cpu", "--out", out)
    return out


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app without the environment that may be beside it in the checkout: Flower looks at all of its files."""
    folder = tmp_path_factory.mktemp("app")
    copy_app(folder)
    return folder


@pytest.mark.slow
def test_one_process_and_several_give_the_same_arrays(local: Path, tmp_path: Path) -> None:
    run_here(EXPERIMENT, "engine.workers=0", "--device", "cpu", "--out", tmp_path / "out")
    assert arrays(tmp_path / "out") == arrays(local)


@pytest.mark.slow
def test_strategies_give_the_same_arrays_on_ray(tmp_path: Path) -> None:
    """Node state, records along with arrays and layer-wise sessions survive Ray, where any actor serves any node.

    So do statistics that clients measure, and what newcomers get.
    """
    special = {
        "HeteroBN": "strategy: {name: HeteroBN, statistics: query}, model: {norm: sbn}",
        "HBN": "strategy: {name: HBN}, model: {norm: hbn}",
        "FedWon": "strategy: {name: FedWon}, model: {norm: won}",
        "FixBN": "strategy: {name: FixBN, freeze_round: 1}",
        "FBN": "strategy: {name: FixBN, freeze_round: 0, refresh: 0.1}",
        "FedRep": "strategy: {name: FedRep, head_epochs: 1}",
        "newcomers": "strategy: {name: FedBN}, evaluate: {unseen: {clients: [2], statistics: [mean, batch, own]}}",
        "FedTANII": "strategy: {name: FedTANII, fedtan_rounds: 1, exchange: paper}",
        "Secure": "strategy: {name: Secure, base: {name: Scaffold}}",
        "Private": "strategy: {name: Private, noise_seed: 0}",
    }
    names = sorted({*STRATEGIES, *special})
    runs = "".join(f"  {name}: {{{special.get(name, f'strategy: {{name: {name}}}')}}}\n" for name in names)
    experiment = tmp_path / "every.yaml"
    experiment.write_text(
        "rounds: 2\nclients: 3\ndata: {name: digits, partition: {kind: dirichlet, alpha: 1.0}}\nmodel: {name: cnn}\n"
        f"train: {{lr: 0.05, momentum: 0.9, batch_size: 32, steps: 3}}\nruns:\n{runs}"
        f"engine: {{device: cpu, node_timeout: {PATIENCE}}}\n"
    )
    run_here(experiment, "--engine", "local", "--out", tmp_path / "local")
    done = fedbn("run", experiment, "--engine", "ray", "--out", tmp_path / "ray", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "communication rounds" in done.stdout
    assert [name for name in names if results(tmp_path / "local" / name) != results(tmp_path / "ray" / name)] == []
    found = [Result.read(tmp_path / engine / "newcomers").summary.values for engine in ("local", "ray")]
    ways = [f"unseen_{way}_accuracy" for way in ("mean", "batch", "own")]
    assert [found[1][way] for way in ways] == [found[0][way] for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize(  # SIGTERM as Ctrl-C; SIGHUP as SIGTERM
    "sent", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly), signal.SIGKILL]
)
def test_a_stopped_flwr_run_is_interrupted_and_leaves_no_process(sent: int, app: Path, tmp_path: Path) -> None:
    home = tmp_path / ("temporary" + 60 * "x")  # too long for the paths of Ray's sockets
    home.mkdir()
    run_config = f"experiment='quick' set='rounds=10000 engine.device=cpu' out='{tmp_path / 'out'}'"
    command = ["flwr", "run", str(app), "--engine", "ray", "--run-config", run_config]
    words = [sys.executable, "-m", "fedbn_flwr.commands.cli", *command]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "TMPDIR": str(home)}
    history, output = tmp_path / "out" / "FixBN" / "history.jsonl", tmp_path / "output.txt"
    with (
        output.open("wb") as written,
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        ) as process,
    ):
        try:
            wait_for("a round, or the end", lambda: size(history) > 0 or process.poll() is not None)
            assert process.poll() is None, output.read_text()
            assert len(living(home)) > 1  # also Ray's
            process.send_signal(sent)
            assert process.wait(PATIENCE) == (-sent if sent == signal.SIGKILL else 130)
        finally:
            process.kill()
    wait_for("the end of Ray's processes", lambda: not living(home))
    if sent == signal.SIGKILL:  # nothing could be written
        return
    summary = Result.read(tmp_path / "out" / "FixBN").summary
    assert (summary.status, summary.error) == ("interrupted", None)
    words = ["fedbn", *command[:-1], f"{run_config} resume=true"]
    assert f"FixBN stopped after round {summary.rounds} of 10000; continue with: {shlex.join(words)}\n" in (
        output.read_text()
    )
    assert (tmp_path / "out" / "report.html").exists()


def living(temporary: Path) -> list[str]:
    """The processes with this folder for temporary files."""
    marked = f"TMPDIR={temporary}\0".encode()
    return [file.parent.name for file in Path("/proc").glob("[0-9]*/environ") if marked in contents(file)]


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # another user's process, or it has ended
        return b""


@pytest.mark.slow
def test_superlink_and_supernodes_give_the_same_arrays(local: Path, deployment: Deployment) -> None:
    folder = deployment.run_app({"experiment": EXPERIMENT.read_text(), "set": "engine.device=cpu"})
    assert (folder / "model.safetensors").read_bytes() == arrays(local)
    assert is_finished(folder)
    newest = json.loads(deployment.flwr("ls", "remote", "--format", "json"))["runs"][0]["run-id"]
    nodes = json.loads(deployment.flwr("supernode", "list", "remote", "--format", "json"))["nodes"]
    said = re.findall(r"client (\d) is node (\d+)", deployment.log(str(newest)))
    assert [client for client, _ in said] == ["0", "1", "2"]
    assert {node for _, node in said} == {str(node["node-id"]) for node in nodes}


@pytest.mark.slow
def test_what_clients_keep_stays_on_real_nodes(deployment: Deployment, tmp_path: Path) -> None:
    """FedRep's keep their heads."""
    file = tmp_path / "kept.yaml"
    file.write_text(
        "rounds: 2\nclients: 3\ndata: {name: digits, partition: {kind: dirichlet, alpha: 1.0}}\nmodel: {name: mlp}\n"
        "train: {lr: 0.05, momentum: 0.9, batch_size: 32, steps: 2}\nengine: {device: cpu}\n"
        "evaluate: {every: 2}\nruns:\n  FedRep: {strategy: {name: FedRep, head_epochs: 1}}\n"
    )
    run_here(file, "--engine", "local", "--out", tmp_path / "local")
    run_id = deployment.submit({"experiment": file.read_text(), "out": str(tmp_path / "out")})
    assert deployment.wait_for_end(run_id) == "finished:completed", deployment.log(run_id)
    found, expected = (results(tmp_path / folder / "FedRep") for folder in ("out", "local"))
    assert found == expected
    assert found["clients"]


def test_bad_input_to_flwr_run_ends_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flwr", "run", str(ROOT), "--run-config", "set='rouns=3'"]) == 2
    printed = capsys.readouterr()
    assert "'rouns'" in printed.err
    assert printed.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("rouns=3", "unknown key 'rouns' (= 3); did you mean 'rounds'?"),
        (
            "strategy='{name: FedTN, exchange: paper}'",
            "strategy.name='FedTN' is not a strategy; did you mean 'FedTAN'?",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_of_flower_s_log(deployment: Deployment, changes: str, line: str) -> None:
    run_id = deployment.submit({"experiment": "quick", "set": changes})
    assert deployment.wait_for_end(run_id) == "finished:failed"
    log = deployment.log(run_id)
    assert log.count(line) == 1
    assert "Traceback" not in log
    assert "Exit Code" not in log


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_flwr_run_gives_the_same_arrays_also_resumed_and_names_a_failure(
    engine: str, app: Path, tmp_path: Path
) -> None:
    """FedBN needs its clients' states, which are in the run folder."""
    out, experiment = tmp_path / "out", tmp_path / "experiment.yaml"
    session("FedBN", out / "FedBN", 2)
    runs = "runs:\n  Diverging: {train: {lr: 1.0e+30}}\n  FedBN: {strategy: {name: FedBN}}\n"
    experiment.write_text(f"{BASE}{runs}  FixBN: {{strategy: {{name: FixBN, freeze_round: 2}}}}")
    run_config = f"experiment='{experiment}' out='{out}' resume=true"
    done = fedbn("flwr", "run", app, "--engine", engine, "--run-config", run_config, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [f"client {client}" in done.stderr for client in range(3)] == [True] * 3
    assert "the client diverged?" in done.stderr
    assert json.loads((out / "Diverging" / "summary.json").read_text())["status"] == "failed"
    for rule in ("FedBN", "FixBN"):
        session(rule, tmp_path / rule)
        assert outcome(out / rule)[0] == outcome(tmp_path / rule)[0]


@pytest.mark.slow
def test_supernodes_continue_from_their_state_folders(deployment: Deployment, tmp_path: Path) -> None:
    """FedBN's last round runs in other processes than its first two, for the nodes and for the server."""
    out = tmp_path / "out"
    folders = [deployment.mounts(f"superexec-clientapp-{site}")["/state"] for site in range(3)]
    session("short FedBN", out / "FedBN", 2, grid=Elsewhere("short FedBN", folders))
    words = " ".join(f"'{word}'" for word in overrides("short FedBN"))
    run_id = deployment.submit({"experiment": BASE, "set": words, "out": str(out), "resume": True})
    assert deployment.wait_for_end(run_id) == "finished:completed", deployment.log(run_id)
    session("short FedBN", tmp_path / "straight")
    assert outcome(out / "FedBN")[0] == outcome(tmp_path / "straight")[0]
