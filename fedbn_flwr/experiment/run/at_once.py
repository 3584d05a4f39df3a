"""How many clients a process trains at once (`engine.together`)."""

from __future__ import annotations

from functools import partial

import torch

from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.training import Training, backpropagate
from fedbn_flwr.errors import log_once
from fedbn_flwr.exchange.step import LayerwiseStep, no_exchange
from fedbn_flwr.extensions import part

from ..parts import Parts, plain_loss
from .side_by_side import workers_of

_BEST = 10  # clients with small networks; fifty take longer, since their values leave the processor's cache
_WORKERS = 3  # worker processes that are about as fast as ten clients at once


def clients_at_once(parts: Parts) -> int:
    """The number of clients that train at once; the log says if it could be larger."""
    asked, best = parts.run.engine.together, best_at_once(parts)
    if asked not in (1, "auto"):
        return best
    if best == 1 or why_one(parts) is not None:
        return 1
    if asked == "auto":
        return best
    log_once(
        f"the clients' network is small, so {best} of them would train faster at once: set engine.together=auto, which "
        "changes the last bits of the results"
    )
    return 1


def best_at_once(parts: Parts) -> int:
    """The number that the run sets or, by default and for "auto", the fastest one if clients can train at once."""
    engine = parts.run.engine
    if engine.together != "auto" and engine.together > 1:
        return engine.together
    workers_are_faster = engine.name != "local" or engine.workers not in (0, "auto") or workers_of(parts.run) > _WORKERS
    return 1 if workers_are_faster or parts.device.type != "cpu" else min(_BEST, parts.run.clients)


def why_one(parts: Parts) -> str | None:
    """Why the clients of a run cannot train at once, or None if they can."""
    run, train = parts.run, parts.run.train
    special = train.compile or train.precision != "float32"
    gradient = partial(backpropagate, precision=torch.bfloat16 if special else None)
    exchanges = LayerwiseStep(no_exchange) if parts.rule.traits.min_batch else None
    optimizer = make_optimizer(train.optimizer, dict(parts.model.named_parameters()), 0.1, momentum=train.momentum)
    loss = plain_loss(run, parts.task)
    training = Training(parts.model, (), optimizer, loss, parts.device, gradient=gradient, first_step=exchanges)
    problem: str | None = part("pools", "problem")(training)
    return problem
