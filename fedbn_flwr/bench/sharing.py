"""How evenly the local engine shares out the clients of a round among its workers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.engines.local import LocalGrid

from .common import Figure, Options, figure, seconds

_MEAN = 0.05  # seconds of a client
_REGISTERED = 100
_EACH = 5  # clients of a round per worker


def sharing(options: Options) -> Iterator[Figure]:
    """The time of a round of sleeping clients over its lower bound: the work of a worker, or the longest client."""
    random = np.random.default_rng(0)
    sizes = {
        "equal clients": np.ones(_REGISTERED),
        "Dirichlet 0.1": random.dirichlet([0.1] * 10, 10).reshape(-1) + 0.01,
        "unbalanced shards": random.permutation(np.repeat([1.0, 3.0, 9.0, 20.0], _REGISTERED // 4)),
    }
    for name, relative in sizes.items():
        durations = _MEAN * relative / relative.mean()
        for workers in (2, 4, 8, 16):
            values = []
            with LocalGrid(_sleepers(durations), _REGISTERED, workers=workers, work=durations.tolist()) as grid:
                grid.start()
                for _ in range(options.repeats):
                    chosen = random.choice(_REGISTERED, size=_EACH * workers, replace=False)
                    lower = max(durations[chosen].sum() / workers, durations[chosen].max())
                    messages = [Message(RecordDict(), int(node) + 1, "train") for node in chosen]
                    values.append(seconds(lambda: grid.send_and_receive(messages)) / lower)  # noqa: B023
            yield figure(f"round / lower bound, {name}, {workers} workers", values, "x", most=1.05)


def _sleepers(durations: np.ndarray) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(durations[int(context.node_config["partition-id"])])
        return Message(RecordDict({"metrics": MetricRecord({"done": 1})}), reply_to=message)

    return app
