"""FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithm 3).

In the first local step every batch norm averages over the clients: the batch mean and variance in the forward pass, and
the gradients with respect to both in the backward pass. The weighted mean of the clients' gradients then equals the
gradient of ordinary batch norm on the union of the clients' batches. The other E - 1 local steps are ordinary ones.

A model with L batch norms needs 2L exchanges (3L as in the paper) and the messages with the model. A client that does
not answer an exchange is left out of the rest of the round, and the weights of the others are normalised again.
`fedbn_flwr.exchange.step` computes a layer on the client. `fedbn_flwr.exchange.carriers` sends the exchanges in several
ways, all with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from flwr.app import ArrayRecord, Message
from torch.optim import SGD

from fedbn_flwr.client.rule import ClientRule, Gradient
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.carriers import (
    ByMessages,
    Carrier,
    Cohort,
    Exchanges,
    ExchangesDone,
    MakeExchanges,
    run_exchanges,
    service,
)
from fedbn_flwr.exchange.codec import TIME_LIMIT, Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep, exchanged_layers
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import total_weight, weighted_mean
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.server.hooks import require_norm
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough

from .fedavg import FedAvg
from .fixbn import FixBN, LastFree, frozen_roles


class FedTAN(FedAvg):
    """FedAvg whose first local step uses the gradient of the union of the clients' batches.

    Accepts FedAvg's arguments too, except for `weighted_by_key`: exchanges and models need the same p_i.

    Parameters
    ----------
    exchange : "fused" | "paper" (default: "fused")
        "fused" exchanges mean and variance together, in 2L + 1 communication rounds; "paper" exchanges one after the
        other, in 3L + 1. The gradient is the same.
    weights : "data" | "batch" (default: "data")
        p_i is proportional to the size of the client's data set ("data", as in the paper) or of its batch ("batch").
        With batches of unequal size only "batch" gives the gradient of the union.
    min_batch : int (default: 32)
        Clients refuse to exchange the statistics of a batch of fewer examples, because these reveal the examples.
        Each site can set a higher limit, `min-batch`; `docs/privacy.md` has measurements.
    exchange_timeout : float (default: 600)
        The time limit of one exchange in seconds, at most 3600. With an exchange service it is also at most half of the
        time that is left of the round's own limit, so that the other clients can finish without one that hangs.
    direct : bool (default: True)
        Send exchanges as calls to the exchange service if the server has one (`FEDBN_EXCHANGE_ADDRESS`), which takes
        milliseconds between real nodes; without a service, and with False, as messages.
    """

    backward = True  # the backward pass exchanges gradients

    def __init__(
        self,
        *,
        exchange: Literal["fused", "paper"] = "fused",
        weights: Literal["data", "batch"] = "data",
        min_batch: Annotated[int, Ge(1), "a number of examples, 1 or more"] = protocol.MIN_BATCH,
        exchange_timeout: Annotated[float, Gt(0), Le(TIME_LIMIT), f"seconds, above zero and up to {TIME_LIMIT}"] = 600,
        direct: bool = True,
        **options: Any,
    ) -> None:
        key = protocol.BATCH_EXAMPLES if weights == "batch" else protocol.NUM_EXAMPLES
        super().__init__(**{"weighted_by_key": key, **options})
        if self.weighted_by_key != key:  # a client knows its other metrics only at the end of its round
            raise SettingsError(
                f"weighted_by_key is {self.weighted_by_key!r}, but the exchanges of {self} weight clients by {key!r}, "
                "and the mean of the models needs the same weights. Leave out weighted_by_key, and set weights "
                "to 'data' or 'batch'"
            )
        self.traits |= Traits(min_batch=min_batch, steps=frozenset({"linear"} if self.backward else ()))
        self.exchange, self.weights_by = exchange, weights
        self.exchange_timeout, self.direct = exchange_timeout, direct
        self.service: MakeExchanges = service() if direct else ByMessages
        self._running: Exchanges | None = None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        require_norm(self, {Role.STATISTICS}, arrays, "exchanges batch norm's statistics")

    def config(self, round: Round) -> Config:
        asked = {protocol.REPORT_BATCH: True} if self.weights_by == "batch" else {}
        if Role.STATISTICS in frozen_roles(round.config):  # frozen batch norms compute no batch statistics
            return asked
        return {
            protocol.EXCHANGE: self.exchange,
            protocol.EXCHANGE_BACKWARD: self.backward,
            protocol.EXCHANGE_MIN_BATCH: self.traits.min_batch,
            **asked,
        }

    def with_exchanges(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        """The train messages: the exchanges come before them or, over streams, while clients handle them."""
        self._running = None  # in a skipped round, `incoming` was not called
        if not messages or Role.STATISTICS in frozen_roles(round.config):
            return messages
        timeout = min(self.exchange_timeout, self.reply_timeout)
        cohort = Cohort(round.grid, messages, timeout, self.reply_timeout, self.roster.name)
        self._running = self.service(cohort, partial(self.run_exchanges, round))
        return self._running.messages

    def run_exchanges(self, round: Round, carrier: Carrier) -> ExchangesDone:
        """Run all exchanges of a round. A client without a usable contribution is left out of the rest of the round."""
        poll = self.training
        return run_exchanges(carrier, f"round {round.number}", poll.left, poll.admit, self.agree, self.outliers)

    def agree(self, what: str, contributions: Sequence[Contribution]) -> Agreement:
        """The server's answer to one exchange; `what` names the exchange in the log."""
        p = [
            contribution.examples if self.weights_by == "data" else contribution.batch for contribution in contributions
        ]
        return algorithm_3(contributions, p, partial(self.bound_weights, what))

    @mean_is_enough
    def incoming(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        running, self._running = self._running, None
        return messages if running is None else running.finish(messages)


def algorithm_3(
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    bounded: Callable[[list[float]], Sequence[float]] = list,
) -> Agreement:
    """One exchange of Algorithm 3 on the server: means over the clients i, whose `weights` are p_i up to scale.

        mu = sum_i q_i mu_i                  var = sum_i q_i (var_i + (mu_i - mu)^2)
        dF/dmu = sum_i p_i dF_i/dmu          dF/dvar = sum_i p_i dF_i/dvar

    q_i is client i's share of the values in the union (see `fedbn_flwr.exchange.step`). It equals p_i if all examples
    have the same number of values. With "paper", clients have received mu before and compute var_i around it, so that
    var = sum_i q_i var_i. `bounded` limits the influence of single clients.
    """
    kind, tensors = contributions[0].kind, [contribution.tensors for contribution in contributions]
    sizes = [contribution.values / contribution.batch for contribution in contributions]  # v_i / B_i
    # Relative to the first client's: sums and quotients of ones are exact.
    relative = [size / sizes[0] for size in sizes]
    p = bounded([*weights])
    q = bounded([weight * size for weight, size in zip(weights, relative, strict=True)])
    total = total_weight(q)
    r = sizes[0] * (total / math.fsum(p))
    numbers = sum(contribution.values for contribution in contributions), r
    if kind != "moments":
        return Agreement(weighted_mean(tensors, p if kind == "gradients" else q), *numbers)
    mus, variances = ([arrays[name].astype(np.float64) for arrays in tensors] for name in ("mean", "var"))
    shares = [weight / total for weight in q]
    mu = sum(q_i * mu_i for q_i, mu_i in zip(shares, mus, strict=True))
    var = sum(q_i * (var_i + (mu_i - mu) ** 2) for q_i, mu_i, var_i in zip(shares, mus, variances, strict=True))
    agreed = {"mean": np.asarray(mu), "var": np.asarray(var)}
    return Agreement({name: value.astype(tensors[0][name].dtype) for name, value in agreed.items()}, *numbers)


class FedTANClient(ClientRule):
    """The client's part: in the first local step, batch norm normalises over the batches of all clients."""

    keys = protocol.EXCHANGE_KEYS

    def first_gradient(self) -> Gradient | None:
        local, config = self.local, self.local.config
        if protocol.EXCHANGE not in config:
            return None
        step = self.exchanged()
        if step.backward and not (isinstance(local.optimizer.torch, SGD) and local.optimizer.clip is None):
            raise MessageError(
                f"{protocol.EXCHANGE_BACKWARD!r} needs a first step whose mean over the clients is the step on the "
                "union of their batches, which only SGD without clipping takes; expected optimizer sgd and no clip"
            )
        return step

    def exchanged(self) -> LayerwiseStep:
        """The gradient with exchanges; MessageError for a model that has none."""
        local, config = self.local, self.local.config
        if Role.STATISTICS in frozen_roles(config) or not exchanged_layers(local.model):
            raise MessageError(
                "FedTAN needs a layer that normalises with the statistics of its batch, and this client's model has "
                "none (instance norms and frozen batch norms do not count); use FedAvg, or a model with batch norm"
            )
        return local.layerwise(
            fused=config[protocol.EXCHANGE] == "fused",
            backward=bool(config.get(protocol.EXCHANGE_BACKWARD, True)),
            min_batch=int(config.get(protocol.EXCHANGE_MIN_BATCH, protocol.MIN_BATCH)),
        )


class FedAvgGlobalStats(FedTAN):
    """FedAvg whose clients use the statistics of the union of their batches in the first step, forward pass only.

    This is FedTAN's forward exchange: the papers' "FedAvg + Algorithm 2", and their substitute for FedDNA.
    Clients normalise batches with the statistics of all clients. In the backward pass, which the papers do not specify,
    each client uses its own gradients with respect to them instead of the clients' mean. That is Algorithm 3 without
    its communication, and exact for one client.
    """

    backward = False


class FedTANII(FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics frozen (FedTAN paper, Section 5).

    Accepts FedTAN's arguments too.

    Parameters
    ----------
    fedtan_rounds : int | float (default: 0.1)
        M, a number of rounds as an int or a fraction of all rounds as a float.
    lr_factor : float | None (default: None)
        As in FixBN.
    """

    wraps = FedTAN
    argument = "fedtan_rounds"

    def __init__(
        self, *, fedtan_rounds: LastFree = 0.1, lr_factor: Annotated[float, Gt(0)] | None = None, **options: Any
    ) -> None:
        super().__init__(self.wraps(**options), freeze_round=fedtan_rounds, lr_factor=lr_factor)
