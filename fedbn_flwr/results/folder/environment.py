"""Commit, versions, hardware and command, with which others can repeat a run."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fedbn_flwr import __version__
from fedbn_flwr.cores import cores

_PACKAGES = ("flwr", "torch", "torchvision", "ray", "numpy")


def environment() -> dict[str, Any]:
    """Commit, versions, hardware and command, with which others can repeat a run."""
    versions = {"fedbn-flwr": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    found: dict[str, Any] = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "versions": versions,
    }
    if "torch" in sys.modules:
        import torch

        found["threads"] = torch.get_num_threads()
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
        found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, with the ending -changed if files were changed since."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        if tracked.returncode:
            return None  # installed, not a checkout
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("-changed" if status.stdout.strip() else "")


def _processor() -> str:
    """Name, family and model: a virtual machine may give the same name to processors whose rounding differs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.processor()
    return f"{found['model name']}, family {found.get('cpu family')}, model {found.get('model')}"
