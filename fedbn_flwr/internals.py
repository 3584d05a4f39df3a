"""All that this project uses of Flower's internals, which any release of Flower may move or change.

Flower's public names are those in `__all__` of the packages in its API reference, such as `flwr.app`. All others come
from here: add a name to both lists. It is imported when a module asks for it, since the older versions of Flower, with
which strategies and clients work, have fewer of them.
"""
# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from .errors import MissingPackage, install

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod
    from flwr.common.config import get_fused_config_from_dir, get_project_config, parse_config_args
    from flwr.common.constant import (
        APP_DIR,
        SUPERLINK_NODE_ID,
        SYSTEM_TIME_TOLERANCE,
        TIMESTAMP_TOLERANCE,
        ErrorCode,
        SType,
    )
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.server import server
    from flwr.supercore.object_ref import load_app
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity

# The minor versions of Flower 1 that the nightly tests try.
FOR_CLIENTS = range(26, 43)  # strategies, BNClient, client_app
FOR_EXPERIMENTS = range(41, 43)  # LocalGrid and the command `fedbn`

_MODULES = {
    "APP_DIR": "flwr.common.constant",
    "ErrorCode": "flwr.common.constant",
    "SType": "flwr.common.constant",
    "SUPERLINK_NODE_ID": "flwr.common.constant",
    "SYSTEM_TIME_TOLERANCE": "flwr.common.constant",
    "TIMESTAMP_TOLERANCE": "flwr.common.constant",
    "Mod": "flwr.clientapp.typing",
    "NodeInfo": "flwr.proto.node_pb2",
    "PullObjectRequest": "flwr.proto.message_pb2",
    "PullObjectResponse": "flwr.proto.message_pb2",
    # Of the local engine
    "Run": "flwr.supercore.run",
    "TaskIdentity": "flwr.supercore.task_identity",
    # Of `fedbn flwr run`
    "get_fused_config_from_dir": "flwr.common.config",
    "get_project_config": "flwr.common.config",
    "load_app": "flwr.supercore.object_ref",
    "parse_config_args": "flwr.common.config",
    "server": "flwr.server",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_MODULES[name]), name)
        except (ImportError, AttributeError) as error:
            found, first, last = importlib.metadata.version("flwr"), FOR_EXPERIMENTS[0], FOR_EXPERIMENTS[-1]
            raise MissingPackage(
                f"Flower {found} has no {_MODULES[name]}.{name} ({error}), a name internal to Flower. LocalGrid and "
                f"the command fedbn were tested with Flower 1.{first} to 1.{last}, strategies and clients with "
                f"1.{FOR_CLIENTS[0]} to 1.{FOR_CLIENTS[-1]}. To install a version that works: {install('run')}"
            ) from error
