"""Flower's simulation of an app, in a process of its own: `fedbn flwr run`.

`flwr run` uses a SuperLink on this machine that it starts once and leaves running: it keeps the environment and the
working folder of its first start, installs each app's dependencies again, and reports a failed run with exit code 0.
Here a process for this run does what that SuperLink starts for a run, in an empty folder (Ray imports from there
first) and without installing anything. It ends Ray's processes when the run ends, is interrupted, or lost its parent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from fedbn_flwr import named
from fedbn_flwr.cores import cores
from fedbn_flwr.errors import RunFailed, SettingsError, did_you_mean, needs
from fedbn_flwr.experiment.ray_settings import set_ray_defaults
from fedbn_flwr.storage import temporary_folder
from fedbn_flwr.trees import Draft, Tree

_DEATH_SIGNAL = 1  # of Linux's prctl
_STOP_TIMEOUT = 20  # seconds until an interrupted run has ended its processes


def run_app(app: Path, run_config: Tree, federation: Tree) -> None:
    """Simulate a Flower app; raises RunFailed if the run did not complete."""
    with needs("run", "Flower's simulation"):
        if importlib.util.find_spec("ray") is None:  # importing it takes a second
            raise ModuleNotFoundError(name="ray")
    environment = {"FLWR_TELEMETRY_ENABLED": "0", named.FOLDER: os.getcwd(), **os.environ, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("RAY_ADDRESS", "local")  # otherwise Ray uses a cluster that was last started here
    set_ray_defaults(environment)
    # The app's own modules first, as in its bundle; then this package, also in a checkout that is not installed.
    paths = [str(app), *([] if "site-packages" in __file__ else [str(Path(__file__).parents[2])])]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    with temporary_folder("flwr") as home:
        folder, problem = Path(home, "empty"), Path(home, "problem.txt")
        folder.mkdir()
        words = [sys.executable, "-m", __name__, str(app), json.dumps([run_config, federation]), str(problem)]
        process = subprocess.Popen(words, env=environment, cwd=folder, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait()
        finally:
            process.send_signal(signal.SIGINT)  # if this process was interrupted
            with ExitStack() as stack:
                stack.callback(process.kill)  # Linux ends Ray's processes with it
                with suppress(subprocess.TimeoutExpired):  # on a busy machine
                    process.wait(_STOP_TIMEOUT)
        # The app's working folder is deleted: copy the files that it wrote (a template saves final_model.pt there).
        if written := sorted(file.name for file in folder.iterdir()):
            shutil.copytree(folder, Path.cwd(), dirs_exist_ok=True)
            print(f"written here by the app: {', '.join(written)}")
        if code:
            raise RunFailed(
                f"the Flower run failed: {problem.read_text() if problem.exists() else f'exit code {code}'}"
            )


def check_federation(config: Tree, least: int = 1) -> None:
    """Raise SettingsError if Flower cannot simulate this federation, or if it has fewer than `least` nodes."""
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG

    fields = {field.name.replace("_", "-") for field in DEFAULT_SIMULATION_CONFIG.DESCRIPTOR.fields}
    for key in config:
        if key not in fields:
            raise SettingsError(f"--federation-config has no key {key!r}; {did_you_mean(key, fields)}")
    nodes = config.get("num-supernodes", least)
    if type(nodes) is not int or nodes < least:
        raise SettingsError(f"--federation-config: num-supernodes is {nodes!r}; expected a number from {least} on")


def number_of_nodes(config: Tree) -> int:
    """The nodes that a federation config asks for; Flower's default is printed."""
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG

    if "num-supernodes" not in config:
        default = DEFAULT_SIMULATION_CONFIG.num_supernodes
        print(
            f"{default} nodes, Flower's default; for another number: --federation-config num-supernodes=N", flush=True
        )
        return int(default)
    return int(config["num-supernodes"])


def federation_config(clients: int) -> Draft:
    """One node per client, one core each, and as many at a time as there are cores, here or on the Ray cluster."""
    nodes = {"num-supernodes": clients, "client-resources-num-cpus": 1, "init-args-log-to-driver": False}
    # Ray raises an error for a number of cores if its cluster is running already.
    own = os.environ.get("RAY_ADDRESS", "local") == "local"
    return nodes | ({"init-args-num-cpus": min(clients, cores())} if own else {})


def _simulate(app: str, configs: str, problem: str) -> None:
    """In the new process: what the process does that a SuperLink starts for a run."""
    from flwr.app import Context, RecordDict
    from flwr.common.config import get_fused_config_from_dir, get_project_config
    from flwr.simulation.app import _run_simulation_settings
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG, NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType
    from flwr.supercore.utils import simulation_config_from_json

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGINT)  # if the parent is killed
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # the server's node
    run_config, federation = json.loads(configs)
    try:
        given = {key.replace("-", "_"): value for key, value in federation.items()}
        DEFAULT_SIMULATION_CONFIG.MergeFrom(simulation_config_from_json(given))
        _, backend, resources, verbose, _ = _run_simulation_settings(DEFAULT_SIMULATION_CONFIG)
        run = replace(
            Run.create_empty(1),
            override_config=run_config,
            primary_task_id=1,
            federation_id=NOOP_FEDERATION_ID,
        )
        components = get_project_config(app)["tool"]["flwr"]["app"]["components"]
        _run_simulation(
            number_of_nodes(federation),
            EventType.FLWR_SIMULATION_RUN_LEAVE,
            client_app_attr=components["clientapp"],
            server_app_attr=components["serverapp"],
            backend_name=backend,
            backend_config=resources,
            server_app_context=Context(
                1, 0, {}, RecordDict(), get_fused_config_from_dir(Path(app), run.override_config)
            ),
            app_dir=app,
            run=run,
            verbose_logging=verbose,
            is_app=True,
        )
    except KeyboardInterrupt:
        os._exit(130)  # the server's thread may still wait for replies
    except Exception as error:
        Path(problem).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


if __name__ == "__main__":
    _simulate(*sys.argv[1:])
