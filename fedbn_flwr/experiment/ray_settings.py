"""The environment variables that Ray reads."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping

START = "RAY_raylet_start_wait_time_s"  # which Ray reads when it is imported
_LONGEST = 107 - len("/ray/session_2026-01-31_12-59-59_123456_1234567/sockets/plasma_store")


def set_ray_defaults(environment: MutableMapping[str, str], start_timeout: float = 120) -> None:
    """Set what the caller has not set. `start_timeout` is in seconds, for the node that Ray starts on this machine."""
    environment.setdefault(START, str(math.ceil(start_timeout)))  # Ray's default is 30
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns
    # Ray's sockets are below $TMPDIR, and a socket's path has 107 bytes at most.
    if len(os.fsencode(environment.get("TMPDIR", ""))) > _LONGEST:
        environment.setdefault("RAY_TMPDIR", "/tmp")  # noqa: S108  # Ray's own default
