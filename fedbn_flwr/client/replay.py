"""A training step recorded once and replayed, client after client: on a GPU as a CUDA graph.

A small network's step is some hundred kernels, each of which takes longer to launch than to run; a recorded step is
launched as one. What is recorded are addresses, so a replay works on tensors at fixed places: the model's own, which
every client's weights are loaded into, and those of the step that was recorded, into which and out of which go the
batch and what a round remembers (momentum, control variates, the loss so far).

What cannot be recorded, and whatever is different when replayed, is computed step by step as without a recording.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from logging import WARNING

import torch
from flwr.common import log
from torch import Tensor

from fedbn_flwr import seeding

from .training import Step

Action = Callable[[], None]
Record = Callable[[Action], Action]  # from an action to what does the same again

_MOST = 8  # recordings of a model that are kept: each holds the memory of a step


def cuda_graph(action: Action) -> Action:
    """Recorded on the current device; `action` has run before, so that nothing is set up for the first time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    replay: Action = graph.replay
    return replay


class Replays:
    """The recorded steps of one model, whose `tensors` are these.

    A step is recorded when the second batch of its kind and shape comes: many last batches are the only ones of their
    size. First it is rehearsed, on copies of everything it changes.
    """

    def __init__(self, tensors: Sequence[Tensor], record: Record = cuda_graph) -> None:
        self._tensors = list(tensors)
        self._record = record
        self._recorded: OrderedDict[Hashable, _Recorded | None] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._warned = False

    def around(self, step: Step) -> Replayed:
        return Replayed(self, step)

    def find(self, step: Step, kind: Hashable, inputs: Tensor, targets: Tensor) -> _Recorded | None:
        """The recording of a step of this kind, which may now be made; None: not yet, or not possible."""
        kind = (kind, *((each.shape, each.stride(), each.dtype) for each in (inputs, targets)))
        if kind in self._recorded:
            self._recorded.move_to_end(kind)
            return self._recorded[kind]
        if kind not in self._seen:
            self._seen[kind] = None
            if len(self._seen) > 64:
                self._seen.popitem(last=False)
            return None
        del self._seen[kind]
        self._recorded[kind] = self._make(step, inputs, targets)
        if len(self._recorded) > _MOST:
            self._recorded.popitem(last=False)
        return self._recorded[kind]

    def _make(self, step: Step, inputs: Tensor, targets: Tensor) -> _Recorded | None:
        """Recorded and compared with the step itself; leaves everything as it was."""
        changed = [*self._tensors, *step.tensors()]
        before = [tensor.clone() for tensor in changed]
        drawn = seeding.states()
        try:
            recorded = _Recorded(step, inputs.clone(), targets.clone(), self._record, before, changed)
            outcomes = []
            for action in (recorded.action, recorded.replay):
                _restore(changed, before)
                seeding.set_states(drawn)
                action()
                outcomes.append([tensor.clone() for tensor in changed])
            problem = _difference(outcomes[0], outcomes[1], before)
        except RuntimeError as error:  # an operation that waits for the host, for instance
            problem = str(error).splitlines()[0]
        finally:
            _restore(changed, before)
            seeding.set_states(drawn)
        if problem is None:
            return recorded
        if not self._warned:
            log(WARNING, "engine.cuda_graphs: a step is not replayed but computed anew each time: %s", problem)
            self._warned = True
        return None


class _Recorded:
    def __init__(
        self,
        step: Step,
        inputs: Tensor,
        targets: Tensor,
        record: Record,
        before: list[Tensor],
        changed: list[Tensor],
    ) -> None:
        self.step, self.inputs, self.targets = step, inputs, targets
        # On a stream of its own, as PyTorch asks for: what is set up for the first time must not be recorded.
        with _aside(step.device):
            for _ in range(3):
                self.action()
        _restore(changed, before)
        self.step.optimizer.zero_grad()  # gradients are to lie in the recording's own memory
        self.replay = record(self.action)

    def action(self) -> None:
        self.step(self.inputs, self.targets)


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On another stream, which begins where the current one stands and which that then waits for."""
    if device.type != "cuda":
        yield
        return
    aside, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        yield
    here.wait_stream(aside)


class Replayed:
    """The steps of one round, by replays where there are some."""

    def __init__(self, replays: Replays, step: Step) -> None:
        self._replays = replays
        self._step = step
        self._kind = step.kind()
        self._holder = step  # in whose tensors the round stands

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        recorded = self._replays.find(self._holder, self._kind, inputs, targets)
        if recorded is None:
            self._holder(inputs, targets)
            return
        self._hand_over(recorded.step)
        recorded.inputs.copy_(inputs)
        recorded.targets.copy_(targets)
        recorded.replay()

    def finish(self) -> None:
        self._hand_over(self._step)

    def _hand_over(self, step: Step) -> None:
        if step is not self._holder:
            _restore(step.tensors(), self._holder.tensors())
            self._holder = step


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(tensors), list(values))


def _difference(one: list[Tensor], other: list[Tensor], before: list[Tensor]) -> str | None:
    """Whether two outcomes of a step are further apart than sums in another order explain; None if not."""
    for mine, theirs, start in zip(one, other, before, strict=True):
        if not mine.numel():
            continue
        apart = (mine.double() - theirs.double()).abs().max()
        moved = (mine.double() - start.double()).abs().max()
        if not apart <= 0.05 * moved + 1e-5 * mine.double().abs().max():
            return f"a replay and the step itself are {float(apart):g} apart in a tensor of shape {tuple(mine.shape)}"
    return None
