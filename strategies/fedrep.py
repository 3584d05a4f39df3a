"""FedRep (Collins et al. 2021, ICML, https://arxiv.org/abs/2102.07078): clients share a body and keep their heads.

Algorithm 1 of the paper: in each round a client first takes steps on its head with the received body fixed, then steps
on the body with this head fixed; the server averages the bodies. FedPer (Arivazhagan et al. 2019) trains both at the
same time: FedAvg with `kept`.

Choices that the paper leaves open:

- Body and head train by the client's optimiser, whose momentum and weight decay leave alone what is fixed. The authors'
  code (lgcollins/FedRep) fixes parameters in the same way.
- Batch norm of the body normalises with batch statistics in both parts and tracks running statistics in both. Gamma and
  beta belong to the body, which is fixed at first.
- Bodies are weighted by numbers of examples, as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge
from torch import nn

from fedbn_flwr.client.rule import Batch, ClientRule, Key
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.norms.roles import LAST, roles, split
from fedbn_flwr.server.traits import Round

from .fedavg import FedAvg, Names

HEAD_EPOCHS = "fedbn.fedrep-head-epochs"


class FedRep(FedAvg):
    """The body is averaged; each client keeps its head, and trains it before the body.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    kept : sequence of str (default: ["last"])
        The head: named as in FedAvg's `kept`, by default the last layer.
    head_epochs : int (default: 10)
        Passes over a client's data that train the head, before the epochs or steps of the round, which train the body.
    """

    def __init__(
        self,
        *,
        kept: Names = (LAST,),
        head_epochs: Annotated[int, Ge(1), "a number of epochs, 1 or more"] = 10,
        **options: Any,
    ) -> None:
        super().__init__(kept=kept, **options)
        self.head_epochs = head_epochs

    def config(self, round: Round) -> Config:
        return {HEAD_EPOCHS: self.head_epochs}


class FedRepClient(ClientRule):
    """Lines 7 to 12: first the head trains, then the body."""

    keys = {HEAD_EPOCHS: Key("int", "train what stays on the client for so many epochs first, then only the rest")}
    trains_alone = True

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        local, own = self.local, protocol.kept_keys(self.local.config, roles(self.local.model))
        trained = {name: parameter for name, parameter in local.model.named_parameters() if parameter.requires_grad}
        head, body = split(trained, own)
        if not head or not body:
            raise MessageError(f"{HEAD_EPOCHS!r} needs a head and a body with parameters that train; found one of them")
        local.resources.callback(_train_only, trained, trained)
        _train_only(head, trained)
        for number in range(local.config[HEAD_EPOCHS]):
            # The round's own epochs are 0, 1, ...; negative numbers draw other orders.
            yield from local.epoch(~number)
        _train_only(body, trained)
        yield from batches


def _train_only(some: Collection[str], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in some)
