"""Imports Ray, after setting the environment variables that it reads then, unless the caller has set them."""

from __future__ import annotations

import os

_LONGEST = 107 - len("/ray/session_2026-01-31_12-59-59_123456_1234567/sockets/plasma_store")

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray's 30 are few on a busy machine
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns
# Ray's sockets are below $TMPDIR, and a socket's path has 107 bytes at most.
if len(os.fsencode(os.environ.get("TMPDIR", ""))) > _LONGEST:
    os.environ.setdefault("RAY_TMPDIR", "/tmp")  # noqa: S108  # Ray's own default

from . import cluster as cluster  # noqa: E402
