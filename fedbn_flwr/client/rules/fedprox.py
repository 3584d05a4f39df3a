"""FedProx's proximal term (Li et al. 2020, https://arxiv.org/abs/1812.06127, equation 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedbn_flwr.client.rule import ClientRule, Key

PROXIMAL_MU = "proximal-mu"  # Flower's key


class FedProx(ClientRule):
    """Adds mu/2 ||w - w_t||^2 to the loss by adding its gradient mu (w - w_t), which needs no autograd graph."""

    keys = {PROXIMAL_MU: Key("float", "add mu/2 times the squared distance to the received parameters (Flower's key)")}

    def begin(self) -> None:
        self.received = copies(self.local.parameters.values())  # w_t

    def adjust(self) -> None:
        add_proximal(self.received, float(self.local.config[PROXIMAL_MU]))


def copies(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    return {parameter: parameter.detach().clone() for parameter in parameters}


@torch.no_grad()
def add_proximal(received: Mapping[nn.Parameter, Tensor], mu: float) -> None:
    trained = {parameter: start for parameter, start in received.items() if parameter.grad is not None}
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if gradients:
        torch._foreach_add_(gradients, torch._foreach_sub(list(trained), list(trained.values())), alpha=mu)
