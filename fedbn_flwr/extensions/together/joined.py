"""Rounds whose first steps, with exchanges, are computed in one pass (`UnionExchanges`).

A model may compute anything, and an example's output may depend on other examples. So before the first such pass, a
trial compares each client's exchanges, loss and gradients with those of the client alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.client.rule import ClientRule, Loss
from fedbn_flwr.client.training import Trained, Training
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import (
    LayerwiseStep,
    Moments,
    check_batch,
    exchanged_layers,
    no_exchange,
    update_running,
)
from fedbn_flwr.messages.aggregate import is_finite
from fedbn_flwr.models.identity import hook_places, hooks_of, identity, plain_attributes

from .exchanging import Ask
from .union import Gradients, UnionExchanges, is_known
from .waiting import AskAll, Waiting, fill, tensors_of


@dataclass(eq=False)
class Joined(Waiting):
    """A round whose first step is computed with those of others."""

    batch: tuple[Tensor, Tensor]  # the first one
    step: LayerwiseStep
    received: list[Tensor] = field(init=False)  # the values of the network that the round begins with
    rest: Waiting | None = field(default=None, init=False)  # the whole round, if its later steps are taken in turn

    def __post_init__(self) -> None:
        self.received = [tensor.detach().clone() for tensor in tensors_of(self.training.model)]

    @property
    def weights(self) -> Tensor:
        """The values of all parameters, in one tensor: comparing each would make the host wait for the device."""
        count = sum(1 for _ in self.training.model.parameters())
        return torch.cat([tensor.flatten() for tensor in self.received[:count]])

    @property
    def kind(self) -> Hashable:
        """What rounds must have in common; a trial shows whether the models differ in anything else."""
        inputs, step = self.batch[0], self.step
        return (
            plain_attributes(self.training.model), inputs.shape[1:], inputs.dtype, inputs.device,
            identity(self.training.loss), step.fused, step.backward,
        )  # fmt: skip

    def forget(self) -> None:
        self.training.first_step = self.step
        if self.rest is not None:
            self.rest.forget()

    def finished(self) -> Trained:
        return super().finished() if self.rest is None else self.rest.finished()

    def restore(self) -> None:
        fill(self.training.model, self.received)


def joined_of(training: Training) -> Joined | str:
    """The round, whose first step may be computed with those of others, or why it cannot be."""
    if (problem := not_joined(training)) is not None:
        return problem
    with seeding.streams(training.seed, training.device):
        before = seeding.drawn(training.device)
        training.batches = batches = list(training.batches)
        if seeding.drawn(training.device) != before and _may_draw(training):
            return "its batches are drawn at random, and its client rules or optimiser may draw too"
    inputs, targets = batches[0] if batches else (None, None)
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point() and isinstance(targets, Tensor)):
        return "it has no batches, or their inputs are no tensor of floats"
    step = cast(LayerwiseStep, training.first_step)
    check_batch(len(inputs), min_batch=step.min_batch, own_min_batch=step.own_min_batch)
    return Joined(training, (inputs.to(training.device), targets.to(training.device)), step)


def _may_draw(training: Training) -> bool:
    """Whether a step may draw random numbers, which then come after those of the batches before it."""
    plain = ClientRule.adjust, ClientRule.begin
    own_rules = any((type(rule).adjust, type(rule).begin) != plain for rule in training.rules)
    return own_rules or type(training.optimizer.torch) not in (SGD, torch.optim.SGD)


# The models whose first steps could not be computed in one pass, with the reason.
_unfit: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def not_joined(training: Training) -> str | None:
    """Why the first step cannot be computed with those of other clients, as far as it is known without batches."""
    step, model = training.first_step, training.model
    if model in _unfit:
        return _unfit[model]
    if not (isinstance(step, LayerwiseStep) and step.exchange is no_exchange):
        return "the first step of a round exchanges statistics"
    if any(rule.trains_alone for rule in training.rules):
        return "a client rule has a loss of its own, or changes the model"
    if any(hook_places(model)) or any(map(hooks_of, model.parameters())):
        return "a module or a parameter has hooks"
    norms = exchanged_layers(model)
    for name, module in model.named_modules():
        own = itertools.chain(module._parameters.values(), module._buffers.values())
        if name not in norms and any(each is not None for each in own) and not is_known(module):
            return f"{name or 'the model'!r} is {str(module).partition(chr(10))[0]}"
    return None


def take_first_steps(rounds: Sequence[Joined], ask: AskAll) -> None:
    """Compute the first steps, which the rounds then take; `ask` does an exchange.

    NotImplementedError says why their models cannot, now and in later rounds.
    """
    first, *others = rounds
    if len({each.kind for each in rounds}) > 1:
        raise ValueError("the clients' networks, losses or batches differ")
    weights, device = first.weights, first.training.device
    if not all(each.weights.equal(weights) for each in others):  # statistics do not matter, and each updates its own
        raise ValueError("the clients' weights differ")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), seeding.preserve_rng():
        try:
            _try(rounds)
            union, losses = _in_one_pass(
                first.training.model, rounds, lambda given: ask(dict(zip(rounds, given, strict=True)))
            )
        except NotImplementedError as error:
            _unfit.update((each.training.model, str(error)) for each in rounds)
            raise
    for each, loss, gradients in zip(rounds, losses, union.found, strict=True):
        each.training.first_step = KnownStep(loss, gradients, union.agreed)


def _in_one_pass(model: nn.Module, rounds: Sequence[Joined], ask: Ask) -> tuple[UnionExchanges, Tensor]:
    """The exchanges, with the gradients that were found, and the losses."""
    rounds[0].restore()  # clients that share a model may have received different statistics
    union = UnionExchanges(model, [each.step for each in rounds], [each.batch for each in rounds], ask)
    return union, union.losses(model, rounds[0].training.loss)


@dataclass(frozen=True)
class KnownStep:
    """A first step that has been computed."""

    loss: Tensor
    gradients: Gradients
    agreed: Sequence[tuple[str, Moments]]  # of each call of a batch norm: the layer's name and the moments

    @torch.no_grad()
    def __call__(self, model: nn.Module, inputs: Any, targets: Any, loss_fn: Loss) -> Tensor:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name in self.gradients:
                parameter.grad = self.gradients[name].clone()  # a step may change it, and be taken again
        layers = exchanged_layers(model)
        for name, moments in self.agreed:
            update_running(layers[name], moments)
        return self.loss


# --- the trial ---

# The models with which a trial went well, and what decided it.
_fit: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


def _try(rounds: Sequence[Joined]) -> None:
    """NotImplementedError if the result of the pass is not that of each client alone; tried once for each model."""
    case = rounds[0].kind, len(rounds) > 1
    models = dict.fromkeys(each.training.model for each in rounds)
    if all(_fit.get(model) == case for model in models):
        return
    model, device = rounds[0].training.model, rounds[0].training.device
    before, attributes = seeding.drawn(device), plain_attributes(model)
    with _copied_attributes(model):
        for _ in range(2):  # if forward leaves traces, the second pass differs
            exchanged: list[tuple[Sequence[Contribution], Agreement]] = []
            union, losses = _in_one_pass(model, rounds, functools.partial(_agree, exchanged))
        if seeding.drawn(device) != before:
            raise NotImplementedError("the model or the loss draws random numbers")
        if plain_attributes(model) != attributes:
            raise NotImplementedError("the model's forward changes the model")
    for place, each in enumerate(rounds):
        own = [(contributions[place], agreement) for contributions, agreement in exchanged]
        with _copied_attributes(each.training.model):
            if not _is_alone(each, own, losses[place], union.found[place]):
                raise NotImplementedError("one pass for all clients has another result than a pass for each")
    _fit.update(dict.fromkeys(models, case))


def _is_alone(
    each: Joined, exchanged: Sequence[tuple[Contribution, Agreement]], loss: Tensor, gradients: Gradients
) -> bool:
    """Whether this is what the client exchanges and computes alone, if the others agree on the same."""
    model, rest = each.training.model, iter(exchanged)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def compare(own: Contribution) -> Agreement:
        found, agreement = next(rest)
        same = replace(found, tensors={}) == replace(own, tensors={})
        pairs.setdefault(own.kind if same else "other", []).extend(
            (torch.from_numpy(found.tensors[name]), torch.from_numpy(own.tensors[name])) for name in own.tensors
        )
        return agreement

    each.restore()
    model.zero_grad()
    alone = replace(each.step, exchange=compare)(model, *each.batch, each.training.loss)
    known = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    each.restore()
    if "other" in pairs or not known.keys() <= gradients.keys():
        return False
    of_weights = [(gradients[key], gradient) for key, gradient in known.items()]
    return all(map(_close, (*pairs.values(), of_weights, [(loss, alone)])))


# The attributes that each module has.
_OF_MODULES = vars(nn.Module()).keys()


@contextmanager
def _copied_attributes(model: nn.Module) -> Iterator[None]:
    """In this block, the modules have copies of their other attributes, so what `forward` leaves there is lost."""
    modules = [*model.modules()]
    before = [dict(vars(module)) for module in modules]
    memo: dict[int, Any] = {id(each): each for each in (*modules, *tensors_of(model))}
    try:
        for module, attributes in zip(modules, before, strict=True):
            others = {name: value for name, value in attributes.items() if name not in _OF_MODULES}
            vars(module).update(copy.deepcopy(others, memo))
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def _agree(exchanged: list[tuple[Sequence[Contribution], Agreement]], given: Sequence[Contribution]) -> Agreement:
    exchanged.append((given, agreement := _mean(given)))
    return agreement


def _mean(contributions: Sequence[Contribution]) -> Agreement:
    """An agreement in place of the server's: the means over the clients without NaN."""
    usable = [each for each in contributions if all(map(is_finite, each.tensors.values()))]
    if len(usable) < min(2, len(contributions)):
        raise ValueError("fewer than two clients have finite values")
    tensors = {name: np.mean([each.tensors[name] for each in usable], axis=0) for name in usable[0].tensors}
    values = sum(each.values for each in contributions)
    return Agreement(tensors, values, values / sum(each.batch for each in contributions))


def _close(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether values are equal up to rounding, in relation to their norm or to a hundredth of the norm of all."""
    norms = [[float(torch.linalg.vector_norm(tensor.double())) for tensor in pair] for pair in pairs]
    whole = sum(norm**2 for _, norm in norms) ** 0.5
    if not np.isfinite(whole):
        return not np.isfinite(sum(norm for norm, _ in norms))  # a client whose data have NaN
    for (found, expected), (_, norm) in zip(pairs, norms, strict=True):
        most = 10 * torch.finfo(expected.dtype).eps ** 0.5 * max(norm, whole / 100)
        if not float(torch.linalg.vector_norm(found.double() - expected.double())) <= most:
            return False
    return True
