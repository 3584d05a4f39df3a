"""No telemetry in the tests of benchmarks."""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
