"""FedRDN (Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR 2025).

Clients share the mean and standard deviation of each channel of their inputs, once. In training an image is normalised
with the pair of a client that is drawn from all; a client is tested with its own pair.

From the authors' code (IAMJackYan/FedRDN): a client's mean is the mean over its images of each image's mean, and its
deviation the mean of each image's (unbiased) deviation, both after augmentation. It draws once for a batch: a mean, and
a deviation independently of it. We know the paper only from descriptions of it, in which each image draws its own pair;
`drawn` offers both variants.

Choices where neither says what to do, or where this differs:

- Pairs are measured on inputs after `data.normalise` or the user's loader. If that is the same for all clients,
  normalising again gives the same inputs as from pixels.
- Inputs without pixels (tables) have no deviation of an image; a client's is then that over its examples.
- A channel that is constant in all images of a client has the deviation 1.
- Clients that join later share their pairs then, and draw from all that are known.
- The server evaluates the global model on its own inputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import MEASURING, Batch, ClientRule, Key, LocalRound
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.server.traits import Question, Round, Traits
from fedbn_flwr.server.wrapper import Wrapper

DRAWN = "fedbn.inputs-drawn"
MEAN = "fedbn.inputs-mean"
DEVIATION = "fedbn.inputs-deviation"
OWN = "fedbn.inputs-own"
_MOST_DEVIATIONS = 10**6  # between a mean and zero: further away, float32 hardly tells inputs apart


class FedRDN(Wrapper):
    """Normalise inputs with the statistics of random clients, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`.
    drawn : "image" | "batch" (default: "image")
        Each image draws a client, and takes its mean and deviation ("image"), or each batch draws a mean and, from
        another draw, a deviation ("batch"), as in the authors' code.
    """

    traits = Traits(
        client_memory=("mean and deviation of their inputs",),
        own_inputs=(OWN,),
        measured=("mean and deviation of its inputs, once, for all clients",),
    )
    breaks = {"mean": "sends the statistics of each client's inputs to all clients"}

    @dataclass
    class Memory(Wrapper.Memory):
        pairs: dict[int, Arrays] = field(default_factory=dict)  # mean and scale of each channel, by client

    memory: Memory

    def __init__(self, strategy: Strategy, *, drawn: Literal["image", "batch"] = "image") -> None:
        super().__init__(strategy)
        self.drawn = drawn

    def question(self, round: Round) -> Question:
        pairs = self.memory.pairs
        problem = partial(_problem, known=next(iter(pairs.values()), {}))
        return Question(OWN, "mean and deviation of its inputs", problem, pairs)

    def config(self, round: Round) -> Config:
        """The pairs of all clients."""
        pairs = [self.memory.pairs[client] for client in sorted(self.memory.pairs)]
        means, scales = (np.concatenate([pair[key] for pair in pairs]) for key in ("mean", "scale"))
        return {DRAWN: self.drawn, MEAN: means.tolist(), DEVIATION: (1 / scales).tolist()}


def _problem(arrays: Arrays, known: Arrays) -> str | None:
    """Why these cannot be mean and scale of a client's inputs, or None."""
    forms = {(value.ndim, value.dtype.kind) for value in arrays.values()}
    if arrays.keys() != {"mean", "scale"} or forms != {(1, "f")}:
        return f"it sent {sorted(arrays)}; expected mean and scale (1 / deviation) of each channel of its inputs"
    if problem := arrays_problem(arrays, known or dict.fromkeys(arrays, arrays["mean"])):
        return problem
    if not (np.abs(arrays["mean"] * arrays["scale"], dtype=np.float64) <= _MOST_DEVIATIONS).all():
        return f"the mean of its inputs is more than {_MOST_DEVIATIONS:,} deviations from zero"
    too_small = "it sent a scale of its inputs that is not above zero, or too small for float32"
    return None if (arrays["scale"] > np.finfo(np.float32).tiny).all() else too_small


class FedRDNClient(ClientRule):
    """Normalises the inputs of training with pairs that it draws, and those of tests with the client's own pair."""

    keys = {
        DRAWN: Key(
            "`image` or `batch`", "normalise each image, or each batch, with the statistics of a randomly drawn client"
        ),
        MEAN: Key("floats", "the input channels' means, one client after another"),
        DEVIATION: Key("floats", f"the standard deviations for `{MEAN}`"),
        OWN: Key(
            "true",
            "measure the inputs' own mean and deviation (`query.measure`, which is answered with arrays `mean` and "
            "`scale`, 1 / deviation), and normalise tests with them",
        ),
    }
    order = 1  # around the batches of other rules, such as those that FedRep adds
    stored = "fedbn.inputs"  # the name of the pair in the client's state

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        config = self.local.config
        flat = torch.tensor([config[MEAN], config[DEVIATION]], dtype=torch.float64)
        for step, (inputs, targets) in enumerate(batches):
            pairs = flat.view(2, -1, _numbers(inputs).shape[1])  # [2, clients, channels]
            generator = seeding.generator(self.local.seed, "inputs", step)
            if config[DRAWN] == "image":
                pair = pairs[:, torch.randint(pairs.shape[1], (len(inputs),), generator=generator)]
            else:
                pair = pairs[torch.arange(2), torch.randint(pairs.shape[1], (2,), generator=generator)][:, None]
            yield _normalised(inputs, pair), targets

    @classmethod
    def measure(cls, local: LocalRound) -> Arrays:
        """Mean and 1 / deviation: inputs are multiplied by it, so the server can tell a value that is too large."""
        if OWN not in local.config:
            return {}
        pair = cls.pair(local)
        return {"mean": pair["mean"], "scale": 1 / pair["deviation"]}

    @classmethod
    def own_inputs(cls, local: LocalRound) -> Callable[[Tensor], Tensor]:
        own = cls.pair(local)
        return partial(_normalised, pair=torch.from_numpy(np.stack([own["mean"], own["deviation"]]))[:, None])

    @classmethod
    def pair(cls, local: LocalRound) -> Arrays:
        """Mean and deviation of the client's inputs, which it measures once."""
        if not (pair := local.state.load(cls.stored)):
            means, deviations = list[Tensor](), list[Tensor]()
            for inputs, _ in local.epoch(MEASURING):
                images = _numbers(inputs).double().flatten(2)
                means.append(images.mean(2))
                if images.shape[2] > 1:
                    deviations.append(images.std(2))
            mean = torch.cat(means)
            deviation = torch.cat(deviations).mean(0) if deviations else mean.std(0)
            measured = {"mean": mean.mean(0), "deviation": deviation.where(deviation > 0, 1.0)}
            pair = {key: value.cpu().numpy() for key, value in measured.items()}
            local.state.save(cls.stored, pair)
        return pair


def _numbers(inputs: object) -> Tensor:
    """Inputs [N, C, ...]; those without pixels get one."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 2:
        found = (
            f"{list(inputs.shape)} of {inputs.dtype}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        )
        raise MessageError(f"FedRDN normalises inputs [N, C, ...] of numbers, and found {found}; use another strategy")
    return inputs if inputs.ndim > 2 else inputs[:, :, None]


def _normalised(inputs: Tensor, pair: Tensor) -> Tensor:
    """Inputs [N, C, ...] with a pair [2, N or 1, C] of mean and deviation."""
    mean, deviation = pair.to(inputs).view(*pair.shape, *[1] * (inputs.ndim - 2))
    normalised: Tensor = (inputs - mean) / deviation
    return normalised
