"""FedAP (Lu et al., "Personalized Federated Learning with Adaptive Batchnorm for Healthcare", IEEE Transactions on Big
Data 2022, https://arxiv.org/abs/2112.00734): each client gets a mix of all clients' models, by similarity.

Batch norm stays on the client as in FedBN. Of all other arrays client i receives sum_j w_ij theta_j, where theta_j are
those that client j sent last. The weights follow from the mean mu and variance v of what each batch norm l normalises,
measured once on each client's data under one model:

    W_ij = sum_l sqrt(|mu_il - mu_jl|^2 + |sqrt(v_il) - sqrt(v_jl)|^2)
    w_ii = own_share    w_ij = (1 - own_share) (1 / W_ij) / sum_(k != i) (1 / W_ik)

From the authors' code (microsoft/PersonalizedFL): these equations, with 1 / W = 1e14 where W is 0; 0.5 for w_ii; that
the model is in evaluation mode, and that mean and variance are those of all values of a client. The paper is known here
from descriptions.

Choices where this differs from their code, or where it does not say what to do:

- Their model for the measurement is trained on data that no client has. Here it is the global model after some rounds
  of FedBN; with `warmup_rounds` 0 it is the initial model, which may be a pretrained one.
- Clients are measured when they first connect after the warm-up, whether or not they train in that round.
- All their clients train in each round. Here the models of clients that do not take part are those that they sent last.
- A client that has never sent a model gets the mix of the others, and one without measured statistics the mean of all;
  it is not in the mixes of the others.
- Their batch variance is unbiased; ours is biased.
- The global model, which no client uses, is FedBN's: the mean by numbers of examples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from flwr.app import ArrayRecord

from fedbn_flwr.batch import count, map_tensors
from fedbn_flwr.client.rule import MEASURING, MODEL, ClientRule, Key, LocalRound
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays, cast, pooled_mean, weighted_mean
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.norms.roles import MEAN, VARIANCE, Role, layers, of_roles, split
from fedbn_flwr.norms.statistics import MomentRecorder
from fedbn_flwr.server.traits import Question, Round, Traits

from .fedbn import FedBN

NORM_INPUTS = "fedbn.norm-inputs"
_WHAT = "mean and variance of the inputs of its batch norms"


class FedAP(FedBN):
    """Each client gets a mix of the clients' models, weighted by how similar the inputs of their batch norms are.

    Accepts FedBN's and FedAvg's arguments too; of `bounds` only `plausible`.

    Parameters
    ----------
    own_share : float (default: 0.5)
        w_ii, the share of a client's own model in its mix, between 0 and 1.
    warmup_rounds : int (default: 1)
        Rounds of FedBN before the statistics are measured, under the global model; 0 takes the initial model.
    """

    traits = Traits(measured=(f"{_WHAT}, once",))

    @dataclass
    class Memory(FedBN.Memory):
        measured_with: Arrays = field(default_factory=dict)  # the model, empty before the warm-up has ended
        statistics: dict[int, Arrays] = field(default_factory=dict)  # that clients measured, by client
        models: dict[int, Arrays] = field(default_factory=dict)  # what clients sent last, without batch norm

    memory: Memory

    def __init__(
        self,
        *,
        own_share: Annotated[float, Gt(0), Lt(1), "a share between 0 and 1"] = 0.5,
        warmup_rounds: Annotated[int, Ge(0)] = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.own_share, self.warmup_rounds = own_share, warmup_rounds
        if warmup_rounds and not self.traits.sent_back:
            raise SettingsError(
                f"global_norm is 'initial' and warmup_rounds {warmup_rounds}, but the statistics are measured under "
                "the global model, whose batch norm would not suit its weights; use warmup_rounds=0 or 'average'"
            )

    def question(self, round: Round) -> Question | None:
        """The statistics under the model that the warm-up has ended with."""
        if round.number <= self.warmup_rounds:
            return None
        model = self.memory.measured_with = self.memory.measured_with or dict(unpack(round.arrays))
        return Question(NORM_INPUTS, _WHAT, partial(_problem, model=model), self.memory.statistics, model)

    def sent_to(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """sum_j w_ij theta_j"""
        models = self.memory.models
        weights = mix(client, self.memory.statistics, models, self.own_share)
        return pack(weighted_mean(map(models.__getitem__, weights), [*weights.values()])) if weights else arrays

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        for reply in replies if round.number > self.warmup_rounds else ():
            _, sent = split(reply.arrays, self.traits.local_keys(reply.arrays))
            self.memory.models[self.roster.client(reply.message.metadata.src_node_id)] = sent


def mix(client: int, statistics: Mapping[int, Arrays], models: Iterable[int], own_share: float) -> dict[int, float]:
    """w_ij, up to scale, of the clients that have a model; empty if this client has no statistics."""
    known = sorted({*models} & statistics.keys())
    others = [other for other in known if other != client]
    if client not in statistics or not known:
        return {}
    apart = distances(statistics[client], [statistics[other] for other in others])
    inverse = 1 / np.clip(apart, 1e-14, 1e280)  # of false statistics, a distance may be infinite
    shares = (1 - own_share) * inverse / inverse.sum()
    return dict(zip(others, shares.tolist(), strict=True)) | ({client: own_share} if client in known else {})


def distances(own: Arrays, others: Sequence[Arrays]) -> np.ndarray:
    """W_ij: the sum over the layers of the Wasserstein distance of two normal distributions without covariances."""

    def moments(arrays: Arrays, layer: str) -> np.ndarray:
        return np.concatenate([arrays[layer + MEAN], np.sqrt(arrays[layer + VARIANCE], dtype=np.float64)])

    total = np.zeros(len(others))
    for layer in layers(own):
        here = moments(own, layer)
        with np.errstate(over="ignore"):
            total += [np.linalg.norm(here - moments(other, layer)) for other in others]
    return total


def _problem(arrays: Arrays, model: Arrays) -> str | None:
    """Why these cannot be mean and variance of the inputs of the model's batch norms, or None."""
    return arrays_problem(arrays, model, of_roles(model, {Role.STATISTICS}))


class FedAPClient(ClientRule):
    """Measures what batch norms normalise."""

    keys = {
        NORM_INPUTS: Key("true", f"measure (`query.measure`) {_WHAT}, under the model in the record `{MODEL}`"),
    }

    @classmethod
    @torch.no_grad()
    def measure(cls, local: LocalRound) -> Arrays:
        """Mean and biased variance of all values of each channel; a layer that a batch skips keeps the model's."""
        received, model = local.records[MODEL], copy.deepcopy(local.model).eval()
        model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in received.items()}, strict=False)
        device = next(model.parameters()).device
        batch_statistics, sizes = [], []
        for inputs, _ in local.epoch(MEASURING):
            with MomentRecorder(model) as moments:
                model(map_tensors(lambda tensor: tensor.to(device), inputs))
            batch_statistics.append(copied(moments.statistics()))
            sizes.append(float(count(inputs)))
        used = set.intersection(*map(set, batch_statistics))
        measured = pooled_mean([{key: part[key] for key in used} for part in batch_statistics], sizes)
        statistics = of_roles(received, {Role.STATISTICS})
        return {key: cast(measured.get(key, value), value.dtype) for key, value in statistics.items()}
