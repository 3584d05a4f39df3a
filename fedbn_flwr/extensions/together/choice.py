"""How many clients train at once (`engine.together`), and whether that is faster on this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from rich.filesize import decimal

from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.training import Training, backpropagate
from fedbn_flwr.exchange.step import LayerwiseStep, no_exchange
from fedbn_flwr.experiment.parts import Parts, plain_loss
from fedbn_flwr.experiment.prepare import workers_of

from .groups import network_for

_BEST = 10  # clients with small networks; fifty take longer, since their values leave the processor's cache
_WORKERS = 3  # worker processes that are about as fast as ten clients at once


def clients_at_once(parts: Parts) -> int:
    """The number of clients that train at once."""
    asked, best = parts.run.engine.together, best_at_once(parts)
    if asked not in (1, "auto"):
        return best
    return best if asked == "auto" and best > 1 and why_one(parts) is None else 1


def hint_of(prepared: Iterable[Parts], jobs: int) -> str:
    """How the first run whose clients may train at once would be faster, if it would."""
    parts = next((parts for parts in prepared if best_at_once(parts, jobs) > 1), None)
    if parts is None or parts.run.engine.together != 1 or why_one(parts) is not None:
        return ""
    count = best_at_once(parts, jobs)
    return f"hint:  {count} clients at once would be faster: engine.together=auto (the last bits of the results change)"


def best_at_once(parts: Parts, jobs: int = 1) -> int:
    """The number that the run sets or, by default and for "auto", the fastest one if clients can train at once.

    `jobs`: of several runs side by side none has workers.
    """
    engine = parts.run.engine
    if engine.together != "auto" and engine.together > 1:
        return engine.together
    workers = workers_of(parts.run) if jobs == 1 else 0
    workers_are_faster = engine.name != "local" or engine.workers not in (0, "auto") or workers > _WORKERS
    return 1 if workers_are_faster or parts.device.type != "cpu" else min(_BEST, parts.run.clients)


def why_one(parts: Parts) -> str | None:
    """Why the clients of a run cannot train at once, or None if they can."""
    run, train = parts.run, parts.run.train
    special = train.compile or train.precision != "float32"
    gradient = functools.partial(backpropagate, precision=torch.bfloat16 if special else None)
    exchanges = LayerwiseStep(no_exchange) if parts.rule.traits.min_batch else None
    optimizer = make_optimizer(train.optimizer, dict(parts.model.named_parameters()), 0.1, momentum=train.momentum)
    loss = plain_loss(run, parts.task)
    training = Training(parts.model, tuple, optimizer, loss, parts.device, gradient=gradient, first_step=exchanges)
    try:
        network_for(training)
    except NotImplementedError as error:
        return str(error)
    return None


def in_words(prepared: Parts) -> str:
    """How many clients train at once, or why only one does."""
    if (problem := why_one(prepared)) is not None:
        return f"clients train one after the other: {problem}"
    if (clients := min(best_at_once(prepared), prepared.run.clients)) == 1:
        return "each process trains one client at a time"
    copies = 3 if prepared.run.train.momentum else 2  # values, gradients and momentum
    size = copies * clients * sum(value.nbytes for value in prepared.model.parameters())
    return f"{clients} clients train at once, with {decimal(size)} for their models"
