"""A user's strategy whose clients train and are tested on inputs from which they subtract their own mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.client.rule import MEASURING, Batch, ClientRule, Key, LocalRound
from fedbn_flwr.strategies import FedAvg, Traits

CENTRE = "fedbn.centre"


class Centred(FedAvg):
    traits = Traits(client_memory=("the mean of their inputs",), own_inputs=(CENTRE,))

    def config(self, round: Any) -> dict[str, Any]:
        return {CENTRE: True}


class CentredClient(ClientRule):
    keys = {CENTRE: Key("true", "subtract the mean of the client's inputs")}

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        centred = self.own_inputs(self.local)
        return ((centred(inputs), targets) for inputs, targets in batches)

    @classmethod
    def own_inputs(cls, local: LocalRound) -> Callable[[Tensor], Tensor]:
        if not (found := local.state.load("centre")):
            found = {"mean": torch.cat([inputs for inputs, _ in local.epoch(MEASURING)]).mean(0).cpu().numpy()}
            local.state.save("centre", found)
        return lambda inputs: inputs - torch.from_numpy(found["mean"].copy()).to(inputs)
