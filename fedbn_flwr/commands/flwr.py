"""`fedbn flwr run`: `flwr run` on a SuperLink of its own."""

from __future__ import annotations

import argparse
import signal
import subprocess
import time
from pathlib import Path

from fedbn_flwr.errors import RunFailed, SettingsError, did_you_mean

from .common import Commands, add_command, continued_by


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "flwr",
        flwr,
        summary="`flwr run` on a temporary SuperLink: fedbn flwr run .",
        description=(
            "Run a Flower app like `flwr run`, on a SuperLink that is started for this run and stopped afterwards. "
            "The app uses the current environment, there is one node per client, logs are streamed, and the exit code "
            "is 0 only if the run succeeded. Options of `flwr run` are passed on."
        ),
        epilog="Example: fedbn flwr run . --run-config \"set='rounds=10'\"",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="run [APP] [OPTION ...]")


def flwr(arguments: argparse.Namespace) -> int:
    from fedbn_flwr.engines.simulation import FlwrRun, federation_config, run_app, tool

    if {"-h", "--help"} & {*arguments.arguments}:
        return subprocess.call([tool("flwr"), "run", "--help"])

    request = FlwrRun.parse(arguments.arguments)
    run_config, federation = request.run_config, request.federation_config
    out, more = None, ""
    if request.project["project"]["name"] == "fedbn-flwr":
        from fedbn_flwr.experiment.find import from_run_config
        from fedbn_flwr.experiment.prepare import prepare
        from fedbn_flwr.experiment.run import open_folders
        from fedbn_flwr.results.folder import default_out

        defaults = request.project["tool"]["flwr"]["app"]["config"]
        for key, value in run_config.items():
            if key not in defaults:
                raise SettingsError(f"--run-config has no key {key!r}; {did_you_mean(key, defaults)}")
            if type(value) is not type(defaults[key]):
                expected = "true or false" if key == "resume" else "text, in quotes"
                raise SettingsError(f"--run-config: {key} is {value!r}; expected {expected}")
        experiment = from_run_config({**defaults, **run_config})
        if run_config.get("resume") and not run_config.get("out"):
            raise SettingsError("resume is true, but out is empty; set it to the folder of the runs to continue")
        out = Path(run_config.get("out") or default_out(experiment.name)).expanduser().resolve()
        prepare(experiment, own_data=True)
        open_folders(experiment, out, resume=bool(run_config.get("resume")))
        more = " ".join(["resume=true"] * ("resume" not in run_config) + [f"out='{out}'"] * ("out" not in run_config))
        run_config["out"] = str(out)  # Flower's processes run in another folder
        federation = federation or federation_config(experiment.runs[0].clients)
    from fedbn_flwr.results.folder import errors_since, mark_interrupted, stopped_by_hand

    began = time.time()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the run's processes are ended, too
    with continued_by(out, "flwr", *arguments.arguments, *["--run-config", more] * bool(more)), stopped_by_hand(out):
        try:
            return run_app(request.app, run_config, federation or "client-resources-num-cpus=1", request.options)
        except RunFailed as error:
            if out is None:
                raise
            mark_interrupted(out)  # runs whose process was killed
            # Flower gives an error of its own instead of the server's if its nodes failed meanwhile.
            lost = [f"{name}: {why}" for name, why in errors_since(out, began).items() if why not in str(error)]
            raise RunFailed("\n".join([str(error), *lost])) from None
