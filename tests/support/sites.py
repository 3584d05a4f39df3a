"""Runs whose nodes have data of their own, as a ServerApp carries them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve


def served(
    experiment: Mapping[str, Any],
    out: Path,
    nodes: Sequence[Mapping[str, Any]] | None = None,
    app: ClientApp | None = None,
    *,
    resume: bool = False,
) -> Path:
    """The folder of an experiment's only run; `nodes` are the configs of its three nodes."""
    run_config = {"experiment": json.dumps(experiment), "out": str(out), "resume": resume}
    with LocalGrid(app or client_app(make_client), 3, run_config=run_config, node_config=nodes) as grid:
        serve(grid, run_config).announce()
    (file,) = out.rglob("model.json")
    return file.parent
