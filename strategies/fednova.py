"""FedNova (Wang et al. 2020, "Tackling the Objective Inconsistency Problem", https://arxiv.org/abs/2007.07481).

Clients that take different numbers of steps pull FedAvg's mean towards the data of those that take more. FedNova
divides each client's change by the norm of its vector a_i, which has the coefficients of the client's gradients in its
change, and multiplies the mean by tau_eff, the mean of these norms.

From the paper: the update, tau_eff = sum_i p_i ||a_i||_1, and ||a_i||_1 for tau_i steps of SGD, of SGD with momentum
that begins at zero, and of SGD with a proximal term. With that term the authors' code (JYWa/FedNova) has tau_eff =
sum_i p_i tau_i; here it stays as above, so that with equal steps the result is that of FedProx.

Choices that the paper leaves open:

- Statistics of batch norm are not sums of gradients: they are averaged by p_i. The server cannot tell a model's other
  float buffers from parameters, so it treats them alike.
- Momentum with a proximal term, Nesterov's momentum and dampening have other a_i, and are errors. So are other
  optimisers, momentum kept from an earlier round, and learning rates that change within a round.
- Weight decay belongs to the client's loss. The server's own momentum is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge

from fedbn_flwr.client.rule import ClientRule, Key, Memo, Tensors, elementwise
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.messages.aggregate import Arrays, cast
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.limits import MOST_TIMES
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply, number_problem
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.server.traits import Round, Traits

from .fedavg import FedAvg
from .fedprox import PROXIMAL_MU

NORMALISED = "fedbn.fednova"
EFFECTIVE_STEPS = "effective-steps"  # the metric ||a_i||_1
TRAINED = frozenset({Role.WEIGHTS, Role.AFFINE})


class FedNova(FedAvg):
    """FedAvg of each client's change per step.

    Accepts FedAvg's arguments too, except `bounds`.

    Parameters
    ----------
    proximal_mu : float (default: 0.0)
        mu of FedProx's term in the clients' loss, for clients without momentum; with 0 there is none.
    """

    traits = Traits(steps=frozenset({"sgd"}))
    breaks = {
        "mean": "divides the change of each client by its own number of steps",
        "weights": "divides the change of each client by its own number of steps",
    }

    def __init__(self, *, proximal_mu: Annotated[float, Ge(0)] = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.proximal_mu = proximal_mu
        if self.bounds is not None:
            raise SettingsError(
                "FedNova multiplies by the clients' numbers of steps, which bounds don't limit; leave bounds out"
            )

    def config(self, round: Round) -> Config:
        return {NORMALISED: True, **({PROXIMAL_MU: float(self.proximal_mu)} if self.proximal_mu else {})}

    def problem(self, round: Round, reply: Reply) -> str | None:
        if problem := number_problem(reply.metrics, EFFECTIVE_STEPS):
            return problem
        a = reply.metrics[EFFECTIVE_STEPS]
        return None if a >= 1 - 1e-9 else f"its {EFFECTIVE_STEPS} is {a:g}; expected 1 or more"

    def compare(self, replies: Mapping[int, Reply], sent: Arrays, records: Iterable[str]) -> dict[int, str]:
        """And numbers of steps that are far from the others', since each multiplies all changes."""
        problems = super().compare(replies, sent, records)
        a = {node: float(reply.metrics[EFFECTIVE_STEPS]) for node, reply in replies.items()}
        for node in a if len(a) > 2 else ():
            middle = float(np.median([each for other, each in a.items() if other != node]))
            if a[node] > MOST_TIMES * middle:
                problems[node] = (
                    f"its {EFFECTIVE_STEPS} is {a[node]:g}, and {middle:g} in the median of the other clients; "
                    f"expected at most {MOST_TIMES:,} times the median"
                )
        return problems

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """x + tau_eff sum_i p_i (x_i - x) / ||a_i||_1"""
        a = [float(reply.metrics[EFFECTIVE_STEPS]) for reply in replies]
        tau = float(np.average(a, weights=weights))
        of_steps = [weight * tau / a_i for weight, a_i in zip(weights, a, strict=True)]  # w_i
        scale = math.fsum(of_steps) / math.fsum(weights)
        model, x = dict(super().combine(round, replies, weights)), unpack(round.arrays)
        mean = super().combine(round, replies, of_steps)  # sum_i w_i x_i / sum_i w_i
        own = self.traits.local_keys(x)  # each client's own arrays: they are not changes of x
        for key, role in roles(model).items():
            if role in TRAINED and key not in own and model[key].dtype.kind == "f":
                before = x[key].astype(np.float64)
                model[key] = cast(before + scale * (mean[key] - before), model[key].dtype)
        return model


class FedNovaClient(ClientRule):
    """Reports ||a_i||_1."""

    keys = {
        NORMALISED: Key("true", f"report `{EFFECTIVE_STEPS}`, the sum of its gradients' coefficients in its change")
    }
    order = 2  # begins after the rules that load momentum

    def begin(self, w: Tensors) -> Memo:
        optimizer = self.local.optimizer
        self.rates = rates_of(optimizer.torch)
        mu, groups = float(self.local.config.get(PROXIMAL_MU, 0.0)), optimizer.torch.param_groups
        lr, self.momentum = self.rates[0]
        self.alpha = lr * mu
        is_covered = (
            isinstance(optimizer.torch, torch.optim.SGD)
            and {*self.rates} == {self.rates[0]}
            and not any(group["nesterov"] or group["dampening"] for group in groups)
            and not (self.momentum and (mu or optimizer.state()))
            and max(self.momentum, self.alpha) < 1
        )
        if not is_covered:
            kept = " kept from an earlier round" if optimizer.state() else ""
            options = [{key: group.get(key) for key in ("lr", "momentum", "nesterov", "dampening")} for group in groups]
            raise MessageError(
                "FedNova needs SGD with one learning rate, without nesterov and dampening, and with a momentum below 1 "
                f"that begins at zero in each round or a {PROXIMAL_MU} below 1 / lr, not both; found "
                f"{type(optimizer.torch).__name__} with {options}{kept} and {PROXIMAL_MU} {mu:g}"
            )
        return {}

    @elementwise
    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        if (rates := rates_of(self.local.optimizer.torch)) != self.rates:
            raise MessageError(
                f"learning rate and momentum change within a round, from {self.rates[0]} to {rates[0]}; expected "
                f"constant ones, which {NORMALISED!r} needs"
            )

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        metrics[EFFECTIVE_STEPS] = effective_steps(steps, momentum=self.momentum, alpha=self.alpha)


def rates_of(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(float(group["lr"]), float(group.get("momentum", 0.0))) for group in optimizer.param_groups]


def effective_steps(tau: int, *, momentum: float = 0.0, alpha: float = 0.0) -> float:
    """||a_i||_1 of tau steps of SGD with momentum rho, or with a proximal term, where alpha is eta mu.

    a_i = [1 - rho^tau, ..., 1 - rho] / (1 - rho), or [(1 - alpha)^(tau - 1), ..., 1 - alpha, 1]
    """
    if momentum:
        return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
    return -math.expm1(tau * math.log1p(-alpha)) / alpha if alpha else float(tau)
