"""Commit, versions, hardware and command, with which others can repeat a run."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fedbn_flwr import __version__
from fedbn_flwr.cores import cores
from fedbn_flwr.internals import APP_DIR
from fedbn_flwr.trees import Tree

_PACKAGES = ("flwr", "torch", "torchvision", "ray", "numpy")
_SECRET = re.compile(r"token|secret|passw|api.?key|credential", re.IGNORECASE)  # in the name of an option
_HIDDEN = "***"


def environment() -> Tree:
    import torch  # here: commands that only read folders do not need it

    versions = {"fedbn-flwr": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": [Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])],
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "versions": versions,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command; folders of runs are shared, and Flower starts a ServerApp with the token of its task.

    A secret is the value of an option or setting with such a name, `--token X` or `--token=X`, or the password in an
    address.
    """
    shown: list[str] = []
    for word, before in zip(words, ("", *words), strict=False):
        name, equals, _ = word.partition("=")
        if before.startswith("-") and "=" not in before and _SECRET.search(before):
            word = _HIDDEN
        elif equals and _SECRET.search(name):
            word = f"{name}={_HIDDEN}"
        shown.append(re.sub(r"(?<=://)[^/@\s]+(?=@)", _HIDDEN, word))
    return shown


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, followed by -changed if its files have changed since.

    In a deployment, the name of the app bundle that Flower unpacked, which ends with the first digits of its hash.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10, check=True)
        words = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-changed"]
        return subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # installed, not a checkout
        bundle = Path(__file__).parents[3]
        return bundle.name if bundle.parent.name == APP_DIR else None


def _processor() -> str:
    """Name, family and model: a virtual machine may give the same name to processors whose rounding differs."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
        return f"{found['model name']}, family {found.get('cpu family')}, model {found.get('model')}"
    except (OSError, KeyError):
        return platform.processor()
