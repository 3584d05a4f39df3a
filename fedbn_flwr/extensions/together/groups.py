"""The rounds of several clients in one training loop, whose tensors have a leading axis for the clients.

Rounds with equal networks, losses, optimisers and client rules form a group, and a group takes a step in one pass.
Clients may have different numbers and shapes of batches: in each pass, the clients whose next batches have the same
shape take their steps. Clients are independent, so this changes their results by rounding only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.client.rule import ClientRule, Memo, Tensors
from fedbn_flwr.client.training import Trained, Training, backpropagate, begun, train
from fedbn_flwr.errors import log_once
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep, check_batch, no_exchange
from fedbn_flwr.extensions.identity import drawn, identity
from fedbn_flwr.named import in_a_line
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import frozen_norm

from .exchanging import CohortExchanges
from .stacked import losses_of
from .trace import Network, network_of

MOMENTUM = "momentum_buffer"
_OPTIONS = ("lr", "momentum", "weight_decay", "nesterov")
_DRAWS = "a client rule or the loss draws random numbers; set `trains_alone` in such a rule"
Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Row:
    """A loaded round, with a copy of the values of its network, which other clients may use meanwhile."""

    training: Training
    network: Network
    tensors: dict[str, Tensor]  # all tensors of the model, by name
    batches: Batches
    momentum: dict[str, Tensor] = field(init=False)  # the optimiser's momentum, by the names of parameters
    memos: list[Memo] = field(init=False)  # what the client rules remember
    trained: Trained | None = field(default=None, init=False)  # along with others; None if it must train alone

    def __post_init__(self) -> None:
        self._rules = [dict(vars(rule)) for rule in self.training.rules]

    @functools.cached_property
    def shapes(self) -> Sequence[tuple[torch.Size, torch.Size]]:
        """The shapes of the inputs and targets of each batch."""
        return [(x.shape, y.shape) for x, y in self.batches]

    @functools.cached_property
    def examples(self) -> int:
        return sum(inputs[0] for inputs, _ in self.shapes)

    @property
    def kind(self) -> Hashable:
        """What rows must have in common to train in one group."""
        training, step = self.training, self.training.first_step
        group = training.optimizer.torch.param_groups[0]
        options = tuple((name, group[name]) for name in _OPTIONS)
        rules = tuple(map(type, training.rules))
        first = next(iter(self.tensors.values()))
        exchanges = (
            (step.fused, step.backward, *(shape[1:] for shape in self.shapes[0]))
            if isinstance(step, LayerwiseStep)
            else ()
        )
        return (
            self.network.description, tuple(training.optimizer.parameters), first.dtype, first.device,
            identity(training.loss), training.frozen, training.optimizer.clip, options, rules, exchanges,
        )  # fmt: skip

    def begin(self, tensors: Tensors, gradients: Tensors) -> None:
        """Begin the client rules and the momentum, with the model after the first batch's gradients."""
        optimizer = self.training.optimizer
        if self.training.rules:
            self._load(tensors)
            for name, parameter in optimizer.parameters.items():
                parameter.grad = gradients.get(name)
        self.memos = [begun(rule, optimizer.parameters) for rule in self.training.rules]
        optimizer.zero_grad()
        self.momentum = {}
        if optimizer.torch.param_groups[0]["momentum"]:
            for name, parameter in optimizer.parameters.items():
                before = optimizer.torch.state.get(parameter, {}).get(MOMENTUM)
                self.momentum[name] = torch.zeros_like(parameter) if before is None else before.clone()

    @torch.no_grad()
    def _load(self, tensors: Tensors) -> None:
        """Give the network, which other clients may have used, these values."""
        torch._foreach_copy_([*self.network.tensors().values()], [*tensors.values()])

    def forget(self) -> None:
        """Let the round train alone, from its beginning."""
        self.trained = None
        for rule, attributes in zip(self.training.rules, self._rules, strict=True):
            vars(rule).clear()
            vars(rule).update(attributes)

    def finished(self) -> Trained:
        """The result, with its values in the network."""
        self._load(self.tensors)
        if self.trained is None:
            return train(self.training)
        optimizer = self.training.optimizer
        for name, momentum in self.momentum.items():
            optimizer.torch.state[optimizer.parameters[name]][MOMENTUM] = momentum
        return self.trained


@torch.no_grad()
def row_of(training: Training) -> Row:
    """The round as a row, with its batches loaded; NotImplementedError says why its client must train alone."""
    network = network_for(training)
    with seeding.streams(training.seed, training.device):
        batches = [*training.batches()]
    kinds = set(map(type, itertools.chain.from_iterable(batches)))
    if not kinds or not all(issubclass(kind, Tensor) for kind in kinds):
        raise NotImplementedError("it has no batches, or their inputs or targets are several tensors")
    if batches[0][0].device != training.device:
        batches = [(x.to(training.device), y.to(training.device)) for x, y in batches]
    if isinstance(step := training.first_step, LayerwiseStep):
        check_batch(len(batches[0][0]), min_batch=step.min_batch, own_min_batch=step.own_min_batch)
    return Row(training, network, {name: tensor.clone() for name, tensor in network.tensors().items()}, batches)


def network_for(training: Training) -> Network:
    """The network of a round; NotImplementedError says why its client must train alone, as far as it shows now."""
    gradient, optimizer = training.gradient, training.optimizer.torch
    if isinstance(gradient, functools.partial) and not any(gradient.keywords.values()):
        gradient = gradient.func
    if gradient is not backpropagate:
        raise NotImplementedError("its passes are compiled, or computed in another precision")
    if training.first_step is not None and not (
        isinstance(training.first_step, LayerwiseStep)
        and training.first_step.exchange is no_exchange
        and training.device.type == "cpu"
    ):
        raise NotImplementedError("the first step of a round exchanges statistics")
    groups = optimizer.param_groups
    if any(rule.trains_alone for rule in training.rules):
        raise NotImplementedError("a client rule has a loss of its own, or changes the model")
    if type(optimizer) not in (SGD, torch.optim.SGD) or len(groups) > 1:
        raise NotImplementedError(f"the optimiser is {type(optimizer).__name__}")
    if groups[0]["dampening"] or groups[0]["maximize"]:
        raise NotImplementedError("the optimiser has dampening or maximize")
    if not training.optimizer.parameters:
        raise NotImplementedError("no parameter trains")
    return network_of(training.model)


def train_rows(rows: Sequence[Row]) -> None:
    """Train the rows, all of one kind at once; the only row of a kind trains in `finished`."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    for group in groups.values():
        if len(group) > 1 and group[0].training.first_step is None:
            try:
                _Group(group).train()
            except Exception as error:
                leave_alone(group, error)


AskAll = Callable[[Mapping[Row, Contribution]], Agreement]  # exchanges the contributions of all rows


def train_exchanging(rows: Sequence[Row], ask: AskAll) -> None:
    """Train rows whose first steps exchange, all at once; `ask` does an exchange."""
    if len({row.kind for row in rows}) > 1:
        raise ValueError("the clients' networks, losses, optimisers or client rules differ")
    _Group(rows).train(ask)


def leave_alone(rows: Sequence[Row], error: Exception) -> None:
    """Let these train alone. One client's data may be the cause of the error: then only that client fails."""
    log_once(f"training several clients at once has failed, so each trains alone: {in_a_line(error)}")
    for row in rows:
        row.forget()


class _Group:
    """Rows of one kind, with the most examples first, so that clients with equal batches are neighbours."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: -row.examples)
        self.training, self.network = self.rows[0].training, self.rows[0].network
        # The numbers of the client rules that change gradients.
        self.adjusting = [
            number for number, rule in enumerate(self.training.rules) if type(rule).adjust is not ClientRule.adjust
        ]
        self.tensors = _stacked([row.tensors for row in self.rows])
        self.total = torch.zeros(len(rows), dtype=torch.float64, device=self.training.device)
        self.taken = [0] * len(rows)  # of each row, the number of batches whose gradients have been computed

    @torch.no_grad()
    def train(self, ask: AskAll | None = None) -> None:
        """Train the rows, unless random numbers are drawn, which must depend on each client alone."""
        # Statistics that are frozen are not updated; parameters that are frozen are not the optimiser's.
        frozen = self.training.frozen & {Role.STATISTICS}
        with seeding.preserve_rng(), frozen_norm(self.training.model, frozen) if frozen else nullcontext():
            before = drawn(self.training.device)
            self._first_step(ask)
            while runs := self._runs():
                self._run(max(runs, key=lambda run: run.stop - run.start))  # the first of the longest
            if drawn(self.training.device) != before:
                raise NotImplementedError(_DRAWS)
        for place, (row, total) in enumerate(zip(self.rows, self.total.tolist(), strict=True)):
            row.tensors, row.momentum = _at(place, self.tensors), _at(place, self.momentum)
            memos = [_memo_at(place, memo) for memo in self.memos]
            row.trained = Trained(total / row.examples, row.shapes[0][0][0], len(row.batches), memos)

    def _first_step(self, ask: AskAll | None) -> None:
        everyone = slice(len(self.rows))
        w = self._leaves(everyone)
        if ask is None:
            with torch.enable_grad():
                for run in self._runs():
                    self._compute_gradients(run, self._computation(run, _at(run, w)))
        else:
            self._exchange(w, ask)
        for place, row in enumerate(self.rows):
            g = {name: value.grad[place] for name, value in w.items() if value.grad is not None}
            row.begin(_at(place, self.tensors), g)
        self.momentum = _stacked([row.momentum for row in self.rows])
        self.memos = [_stacked_memo(memos) for memos in zip(*(row.memos for row in self.rows), strict=True)]
        self._step(everyone, w, self._optimizer(everyone, w), self.memos)

    def _exchange(self, w: Tensors, ask: AskAll) -> None:
        """Compute the gradients of the first batches, with exchanges."""
        steps = [cast(LayerwiseStep, row.training.first_step) for row in self.rows]
        exchanges = CohortExchanges(
            steps,
            [row.batches[0] for row in self.rows],
            lambda contributions: ask(dict(zip(self.rows, contributions, strict=True))),
        )
        losses = exchanges.losses(self.network, {**self.tensors, **w}, self.training.loss)
        self.total.add_(losses * torch.tensor(exchanges.sizes))
        self.taken = [1] * len(self.rows)

    def _runs(self) -> list[slice]:
        """Neighbours whose next batches have the same shape."""
        shapes = [row.shapes[taken : taken + 1] for row, taken in zip(self.rows, self.taken, strict=True)]
        runs = [[*run] for shape, run in itertools.groupby(range(len(shapes)), shapes.__getitem__) if shape]
        return [slice(run[0], run[-1] + 1) for run in runs]

    def _run(self, place: slice) -> None:
        """Take the steps of these rows until one of them has no more batches of this shape."""
        left = [row.shapes[taken:] for row, taken in zip(self.rows[place], self.taken[place], strict=True)]
        steps = min(sum(1 for _ in itertools.takewhile(left[0][0].__eq__, shapes)) for shapes in left)
        w, memos = self._leaves(place), [_memo_at(place, memo) for memo in self.memos]
        optimizer, compute = self._optimizer(place, w), self._computation(place, w)
        for _ in range(steps):
            self._compute_gradients(place, compute)
            self._step(place, w, optimizer, memos)

    def _leaves(self, place: slice) -> dict[str, Tensor]:
        """The tensors of these rows that train; they share memory with `self.tensors`."""
        names = self.training.optimizer.parameters
        return {name: self.tensors[name][place].detach().requires_grad_() for name in names}

    def _optimizer(self, place: slice, w: Tensors) -> SGD:
        group = self.training.optimizer.torch.param_groups[0]
        optimizer = SGD([*w.values()], **{name: group[name] for name in _OPTIONS})
        for name, momentum in _at(place, self.momentum).items():
            optimizer.state[w[name]][MOMENTUM] = momentum
        return optimizer

    def _computation(self, place: slice, w: Tensors) -> Callable[[Tensor], Tensor]:
        """What the network of these rows computes; w are their tensors that train."""
        return self.network.computation({**_at(place, self.tensors), **w})

    @torch.enable_grad()
    def _compute_gradients(self, place: slice, compute: Callable[[Tensor], Tensor]) -> None:
        """Compute the gradients of these rows for their next batches."""
        taken = self.taken[place]
        batches = [row.batches[number] for row, number in zip(self.rows[place], taken, strict=True)]
        inputs, targets = map(torch.stack, zip(*batches, strict=True))
        losses = losses_of(self.training.loss, compute(inputs), targets)
        losses.sum().backward()
        self.total[place].add_(losses.detach(), alpha=inputs.shape[1])
        self.taken[place] = [number + 1 for number in taken]

    def _step(self, place: slice, w: Tensors, optimizer: SGD, memos: Sequence[Memo]) -> None:
        """A step of these rows, after the client rules have changed their gradients."""
        g = {name: value.grad for name, value in w.items() if value.grad is not None}
        for number in self.adjusting:
            rule, memo = self.training.rules[number], memos[number]
            if hasattr(rule.adjust, "elementwise"):
                rule.adjust(w, g, memo)
            else:
                for own, row in enumerate(self.rows[place]):
                    row.training.rules[number].adjust(_at(own, w), _at(own, g), _memo_at(own, memo))
        if (most := self.training.optimizer.clip) is not None:
            _clip([*g.values()], most)
        optimizer.step()
        optimizer.zero_grad()


def _stacked(rows: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _stacked_memo(memos: Sequence[Memo]) -> Memo:
    """What a rule remembers of all rows; in a client's first round it may remember less."""
    if len({tuple((key, *tensors) for key, tensors in memo.items()) for memo in memos}) > 1:
        raise ValueError("the client rules remember different tensors on different clients")
    return {key: _stacked([memo[key] for memo in memos]) for key in memos[0]}


def _at(place: int | slice, stacked: Tensors) -> dict[str, Tensor]:
    """The tensors of one or several rows."""
    return {name: tensor[place] for name, tensor in stacked.items()}


def _memo_at(place: int | slice, stacked: Memo) -> Memo:
    return {key: _at(place, tensors) for key, tensors in stacked.items()}


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_norm_`, with a norm for each client."""
    norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients])
    factors = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.ndim - 1)))
