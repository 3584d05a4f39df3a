"""Runs Python programs in copies of this process, which has imported PyTorch and Flower: command.py's `python`.

These imports take longer than what most programs of tests do. Nothing of this project is imported before a program.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

IMPORTED = (
    "torch",
    "torch.utils.data",
    "flwr.clientapp",
    "flwr.serverapp",
    "pydantic.main",
    "safetensors.torch",
    "yaml",
)


def serve() -> Any:
    """Answer requests, a line of JSON each, with the exit statuses of their programs; return one in its process."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


if __name__ == "__main__":
    sys.path[0] = ""  # as for `python -c`
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # programs share the memory of these modules
    request = serve()
    for number, file in enumerate((os.devnull, request["output"], request["error"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["words"]]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as in undrawn.py
    exec(compile(request["code"], "<string>", "exec"), vars(sys.modules["__main__"]))
