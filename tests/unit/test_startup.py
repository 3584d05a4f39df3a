"""What `fedbn run` imports up to the end of the first round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import PATIENCE, environment

LIBRARIES = "import torch, flwr.app, flwr.clientapp, flwr.serverapp"
EXPERIMENT = "{clients: 2, rounds: 1, model: {name: resnet20, norm: fixup}, train: {steps: 1}, engine: {workers: 0}}"

# What a first round must not need: each takes a tenth of a second or more.
HEAVY = {
    "PIL", "datasets", "flwr_datasets", "google.cloud", "matplotlib", "pandas", "ray", "scipy", "seaborn",
    "segmentation_models_pytorch", "sklearn", "sympy", "tensorboard", "timm", "torch._dynamo", "torch._inductor",
    "torch.utils.tensorboard", "torchvision", "wandb",
}  # fmt: skip

# Writes the modules at the end of the first round, one per line, without those of PyTorch and Flower.
PROGRAM = f"""
import sys
{LIBRARIES}
libraries = set(sys.modules)

def look(event, arguments):
    if event == "open" and str(arguments[0]).endswith("history.jsonl") and "a" in (arguments[1] or ""):
        with open(sys.argv[1], "w") as file:
            print(*sorted(set(sys.modules)), "", *sorted(libraries), sep="\\n", file=file)

sys.addaudithook(look)
from fedbn_flwr.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_the_first_round_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "modules.txt"
    run = [sys.executable, "-c", PROGRAM, str(file), "run", EXPERIMENT, "--out", str(tmp_path / "runs")]
    done = subprocess.run(run, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    loaded, libraries = (set(part.split()) for part in file.read_text(encoding="utf-8").split("\n\n"))
    assert "fedbn_flwr.experiment.run.loop" in loaded - libraries
    assert not sorted(name for name in HEAVY if name in loaded)
