"""The rounds of several clients in one training loop, whose tensors have a leading axis for the clients.

Rounds with equal networks, losses, optimisers and client rules form a group, and a group takes a step in one pass.
Clients may have different numbers and shapes of batches: in each pass, the clients whose next batches have the same
shape take their steps. Clients are independent, so this does not change the results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.client.rule import ClientRule, Memo, Tensors
from fedbn_flwr.client.training import Trained, Training, backpropagate, begun
from fedbn_flwr.exchange.step import LayerwiseStep, check_batch, no_exchange
from fedbn_flwr.models.identity import identity
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import frozen_norm

from .exchanging import CohortExchanges
from .gradients import loss_and_gradient
from .trace import Computation, Network, network_of
from .waiting import AskAll, Waiting, leave_alone

MOMENTUM = "momentum_buffer"
_DRAWS = "a client rule or the loss draws random numbers; set `trains_alone` in such a rule"


@dataclass(eq=False)
class Row(Waiting):
    """A round of a group."""

    network: Network
    tensors: dict[str, Tensor]  # all tensors of the model, by name
    batches: list[tuple[Tensor, Tensor]]
    momentum: dict[str, Tensor] = field(init=False)  # the optimiser's momentum, by the names of parameters
    memos: list[Memo] = field(init=False, default_factory=list)  # what the client rules remember, after `begin`

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
        options = tuple((name, group[name]) for name in ("lr", "momentum", "weight_decay", "nesterov"))
        rules = tuple(
            (type(rule), *((key, str(rule.local.config.get(key))) for key in rule.keys if key not in rule.may_differ))
            for rule in training.rules
        )
        first = next(iter(self.tensors.values()))
        exchanges = (
            (step.fused, step.backward, *(shape[1:] for shape in self.shapes[0]))
            if isinstance(step, LayerwiseStep)
            else ()
        )
        return (
            self.network.description, tuple(training.optimizer.parameters), first.dtype, first.device,
            identity(training.loss), training.frozen, training.optimizer.clip, options, rules, exchanges,
            self.remembered,
        )  # fmt: skip

    @property
    def remembered(self) -> Hashable:
        """The names of what the client rules remember; in a client's first round a rule may remember less."""
        return tuple((number, key, *tensors) for number, memo in enumerate(self.memos) for key, tensors in memo.items())

    def begin(self) -> None:
        """Begin the client rules and the momentum; if the first step exchanges, after its exchanges."""
        training = self.training
        self.memos = [begun(rule, training.optimizer.parameters) for rule in training.rules]
        state, self.momentum = training.optimizer.torch.state, {}
        if training.optimizer.torch.param_groups[0]["momentum"]:
            for name, parameter in training.optimizer.parameters.items():
                before = state.get(parameter, {}).get(MOMENTUM)
                self.momentum[name] = torch.zeros_like(parameter) if before is None else before.clone()

    @torch.no_grad()
    def restore(self) -> None:
        torch._foreach_copy_([*self.network.tensors().values()], [*self.tensors.values()])
        if self.trained is not None and self.momentum:  # else the optimiser is as the rules left it
            for name, parameter in self.training.optimizer.parameters.items():
                self.training.optimizer.torch.state[parameter][MOMENTUM] = self.momentum[name]


@torch.no_grad()
def row_of(training: Training) -> Row | str:
    """The round as a row, with its batches loaded, or why its client must train alone."""
    if isinstance(network := network_for(training), str):
        return network
    with seeding.streams(training.seed, training.device):
        return _loaded(training, network)


def _loaded(training: Training, network: Network) -> Row | str:
    training.batches = batches = list(training.batches)
    kinds = set(map(type, itertools.chain.from_iterable(batches)))
    if not kinds or not all(issubclass(kind, Tensor) for kind in kinds):
        return "it has no batches, or their inputs or targets are several tensors"
    labels = [y for _, y in batches if y.ndim == 1]
    if training.loss is cross_entropy and labels and torch.cat(labels).lt(0).any():
        return "some labels are ignored"  # on a GPU, `loss_and_gradient` would end the process
    if batches[0][0].device != training.device:
        training.batches = batches = [(x.to(training.device), y.to(training.device)) for x, y in batches]
    row = Row(training, network, {name: tensor.clone() for name, tensor in network.tensors().items()}, batches)
    if isinstance(step := training.first_step, LayerwiseStep):
        check_batch(len(batches[0][0]), min_batch=step.min_batch, own_min_batch=step.own_min_batch)
        return row
    before = seeding.drawn(training.device) if training.rules else None  # without rules nothing draws
    row.begin()
    return _DRAWS if training.rules and seeding.drawn(training.device) != before else row


def network_for(training: Training) -> Network | str:
    """The network of a round, or why its client must train alone."""
    gradient, optimizer = training.gradient, training.optimizer.torch
    if isinstance(gradient, functools.partial) and not any(gradient.keywords.values()):
        gradient = gradient.func
    if gradient is not backpropagate:
        return "its passes are compiled, or computed in another precision"
    if training.first_step is not None and not (
        isinstance(training.first_step, LayerwiseStep)
        and training.first_step.exchange is no_exchange
        and training.device.type == "cpu"
    ):
        return "the first step of a round exchanges statistics"
    groups = optimizer.param_groups
    if any(rule.trains_alone for rule in training.rules):
        return "a client rule has a loss of its own, or changes the model"
    if type(optimizer) not in (SGD, torch.optim.SGD) or len(groups) > 1:
        return f"the optimiser is {type(optimizer).__name__}"
    if groups[0]["dampening"] or groups[0]["maximize"]:
        return "the optimiser has dampening or maximize"
    if not training.optimizer.parameters:
        return "no parameter trains"
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


def train_rows_exchanging(rows: Sequence[Row], ask: AskAll) -> None:
    """Train rows whose first steps exchange, all at once; `ask` does an exchange."""
    if len({row.kind for row in rows}) > 1:
        raise ValueError("the clients' networks, losses, optimisers or client rules differ")
    _Group(rows).train(ask)


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

    @torch.no_grad()
    def train(self, ask: AskAll | None = None) -> None:
        """Train the rows, unless random numbers are drawn, which must depend on each client alone."""
        with seeding.preserve_rng():
            before = seeding.drawn(self.training.device)
            self._train(ask)
            if seeding.drawn(self.training.device) != before:
                raise NotImplementedError(_DRAWS)
        for place, (row, total) in enumerate(zip(self.rows, self.total.tolist(), strict=True)):
            row.tensors, row.momentum = _at(place, self.tensors), _at(place, self.momentum)
            memos = [_memo_at(place, memo) for memo in self.memos]
            row.trained = Trained(total / row.examples, row.shapes[0][0][0], len(row.batches), memos)

    def _train(self, ask: AskAll | None) -> None:
        gradients = None if ask is None else self._exchanged(ask)
        self.momentum = _stacked([row.momentum for row in self.rows])
        of_rules = zip(*(row.memos for row in self.rows), strict=True)  # of each rule, the memos of all rows
        self.memos = [{key: _stacked([memo[key] for memo in memos]) for key in memos[0]} for memos in of_rules]
        self.taken = [0 if gradients is None else 1] * len(self.rows)  # each row's number of steps
        if gradients is not None:
            self._step(self.rows, self._trained(self.tensors), gradients, self.momentum, self.memos)
        # Statistics that are frozen are not updated; parameters that are frozen are not the optimiser's.
        frozen = self.training.frozen & {Role.STATISTICS}
        with frozen_norm(self.training.model, frozen) if frozen else nullcontext():
            while steps := self._next():
                self._run(*steps)

    def _next(self) -> tuple[slice, int] | None:
        """The rows to train next (as many as possible with batches of one shape), and the number of steps."""
        # Of each row: the shapes of the batches that it has not trained yet.
        left = [row.shapes[number:] for row, number in zip(self.rows, self.taken, strict=True)]
        first = itertools.groupby(range(len(left)), lambda place: left[place][:1])
        runs = [[*run] for shapes, run in first if shapes]
        if not runs:
            return None
        run = max(runs, key=len)  # the first of the longest
        shape = left[run[0]][0]
        steps = min(sum(1 for _ in itertools.takewhile(shape.__eq__, left[place])) for place in run)
        return slice(run[0], run[-1] + 1), steps

    def _exchanged(self, ask: AskAll) -> dict[str, Tensor]:
        """The gradients of the first step, with its exchanges."""
        training, batches = self.training, [row.batches[0] for row in self.rows]
        steps = [cast(LayerwiseStep, row.training.first_step) for row in self.rows]
        exchanges = CohortExchanges(
            training.model, steps, batches, lambda contributions: ask(dict(zip(self.rows, contributions, strict=True)))
        )
        shaped, names = self.network.shaped(self.tensors), [*training.optimizer.parameters]
        losses, gradients = exchanges.loss_and_gradients(self.network, shaped, names, training.loss)
        self.total.add_(losses * torch.tensor([len(inputs) for inputs, _ in batches]))
        for row in self.rows:
            row.restore()  # clients that share a model may have received different ones
            row.begin()
        if len({row.remembered for row in self.rows}) > 1:
            raise ValueError("the client rules remember different tensors on different clients")
        return {name: gradient.view_as(self.tensors[name]) for name, gradient in gradients.items()}

    def _run(self, place: slice, steps: int) -> None:
        """Take this number of steps of the rows at `place`, whose batches have one shape."""
        rows, tensors, momentum = self.rows[place], _at(place, self.tensors), _at(place, self.momentum)
        w, memos = self._trained(tensors), [_memo_at(place, memo) for memo in self.memos]
        compute = Computation(self.network, self.network.shaped(tensors), [*w])
        losses: list[Tensor] = []
        ahead = (row.batches[taken : taken + steps] for row, taken in zip(rows, self.taken[place], strict=True))
        for batches in zip(*ahead, strict=True):
            inputs, targets = map(torch.stack, zip(*batches, strict=True))
            outputs, gradients = compute(inputs)
            own, of_outputs = loss_and_gradient(self.training.loss, outputs, targets)
            losses.append(own)
            self._step(rows, w, gradients(of_outputs), momentum, memos)
        means = torch.stack(losses).view(steps, len(rows), -1).mean(2, dtype=torch.float64).sum(0)
        self.total[place].add_(means, alpha=inputs.shape[1])
        self.taken[place] = [taken + steps for taken in self.taken[place]]

    def _trained(self, tensors: Tensors) -> Tensors:
        """Those of the tensors that are trained."""
        return {name: tensors[name] for name in self.training.optimizer.parameters}

    def _step(self, rows: Sequence[Row], w: Tensors, g: Tensors, momentum: Tensors, memos: Sequence[Memo]) -> None:
        """A step of rows with these tensors, along the gradients g after the client rules have changed them."""
        optimizer = self.training.optimizer
        for number in self.adjusting:
            rule, memo = self.training.rules[number], memos[number]
            if rule.elementwise:
                rule.adjust(w, g, memo)
            else:
                for place, row in enumerate(rows):
                    row.training.rules[number].adjust(_at(place, w), _at(place, g), _memo_at(place, memo))
        if optimizer.clip is not None:
            _clip([*g.values()], optimizer.clip)
        group = optimizer.torch.param_groups[0]
        _sgd([w[name] for name in g], [*g.values()], [momentum[name] for name in g if name in momentum], group)


def _stacked(rows: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


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


def _sgd(w: list[Tensor], g: list[Tensor], momentum: list[Tensor], group: dict[str, Any]) -> None:
    """A step of SGD, computed as in torch.optim.SGD; a buffer of zeros becomes the first gradient."""
    if group["weight_decay"]:
        torch._foreach_add_(g, w, alpha=group["weight_decay"])
    if momentum:
        torch._foreach_mul_(momentum, group["momentum"])
        torch._foreach_add_(momentum, g)
        if group["nesterov"]:
            torch._foreach_add_(g, momentum, alpha=group["momentum"])
        else:
            g = momentum
    torch._foreach_add_(w, g, alpha=-group["lr"])
