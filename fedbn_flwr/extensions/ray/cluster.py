"""Connects to a Ray cluster, or starts one on this machine, and sends it the code that the actors import.

The code consists of this package and of the modules that the caller names, with the loaded modules beside them. Ray
sends it to each machine once, and puts its folder first on the actors' path. So the machines need Python and the
dependencies only, and every actor has the code of this process.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from fedbn_flwr import __version__
from fedbn_flwr.errors import RunFailed, UserError
from fedbn_flwr.experiment.ray_settings import START, set_ray_defaults
from fedbn_flwr.named import in_a_line
from fedbn_flwr.storage import temporary_folder

_PACKAGE = Path(__file__).resolve().parents[2]
_NOT_CODE = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")


@contextmanager
def connected(address: str | None = None, modules: Iterable[str] = (), cores: int | None = None) -> Iterator[None]:
    """A connection of this process to a Ray cluster, with the code for its actors.

    Parameters
    ----------
    address
        The address of a running cluster; None: that in $RAY_ADDRESS, else a cluster of this machine that ends with the
        connection.
    modules
        Names of modules that the actors need.
    cores
        The cores that a cluster of this machine offers; None: all.
    """
    if ray.is_initialized():  # the caller's own connection, with its runtime environment
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    set_ray_defaults(os.environ)
    own: dict[str, Any] = {}
    if address == "local":
        own = {"num_cpus": cores, "include_dashboard": False}
    with temporary_folder("code") as folder:
        stage(Path(folder), modules)
        before = signal.getsignal(signal.SIGTERM)
        try:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and "://" not in address:  # otherwise Ray tries for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(
                address,
                runtime_env={"working_dir": folder},
                logging_level=logging.ERROR,
                log_to_driver=False,
                **own,
            )
        except (OSError, ValueError) as error:
            raise UserError(  # not SettingsError, after which the next run would be tried
                f"no Ray cluster answers at engine.address={address!r} ({in_a_line(error)}); start one with "
                "`ray start --head`, or leave the address out and unset RAY_ADDRESS to use this machine"
            ) from None
        except Exception as error:  # as plain Exception, if Ray's processes have not started in time
            if own:
                raise RunFailed(
                    f"Ray did not start on this machine: {in_a_line(error)} If its processes start slowly, because "
                    f"other programs use the machine, set a longer engine.node_timeout ({os.environ[START]} s)"
                ) from None
            raise RunFailed(f"the Ray cluster at {address!r} cannot be used: {in_a_line(error)}") from None
        with suppress(ValueError):  # not the main thread, whose handler Ray replaces by one that prints a trace
            signal.signal(signal.SIGTERM, before)
        try:
            yield
        finally:
            ray.shutdown()


def stage(folder: Path, modules: Iterable[str]) -> None:
    """Copy this package, and `modules` that are not installed with the loaded modules beside them, into `folder`."""
    roots = {source.parent for name in modules if (source := _source(name.partition(".")[0])) is not None}
    loaded = [_source(name) for name in list(sys.modules) if "." not in name and name != "__main__"]
    for source in {_PACKAGE, *(each for each in loaded if each is not None and each.parent in roots)}:
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=_NOT_CODE)
        else:
            shutil.copy(source, folder)
    # As in a wheel; in a checkout this folder is beside the package.
    strategies = _PACKAGE.parent / "strategies"
    if strategies.is_dir() and not _is_installed(strategies):
        shutil.copytree(strategies, folder / _PACKAGE.name / "strategies", ignore=_NOT_CODE)
    # Otherwise the version is that of an installation.
    (folder / "pyproject.toml").write_text(f'[project]\nname = "fedbn-flwr"\nversion = "{__version__}"\n')


def _source(name: str) -> Path | None:
    """The file or folder of a loaded module or package; None for a part of Python, and for an installed one."""
    module = sys.modules.get(name)
    paths = [*getattr(module, "__path__", []), getattr(module, "__file__", None)]
    source = Path(paths[0] or "").resolve()
    return None if paths[0] is None or _is_installed(source) else source


def _is_installed(source: Path) -> bool:
    paths = sysconfig.get_paths()
    return any(source.is_relative_to(Path(paths[key]).resolve()) for key in ("stdlib", "purelib", "platlib"))
