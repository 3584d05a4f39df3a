"""Training passes on a GPU, recorded: one call launches all kernels of a step, as a CUDA graph.

Without it, Python takes several times as long to launch the kernels of a small network as the GPU takes to compute
them. The kernels are the same as in plain training, and so are the results. There is one recording for each shape of
batches and each combination of the layers' modes. The first takes a second, later ones less, and each needs memory for
the activations of a pass.

Later steps do not run the network's Python code. So a network is not recorded if its code has an effect in each pass:
if it changes an attribute, assigns a buffer, draws random numbers on the CPU, or has hooks with a state.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from types import FunctionType
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value, map_tensors, tensors
from fedbn_flwr.client.rule import Gradient, Loss
from fedbn_flwr.extensions.identity import drawn, hooks_of, identity, plain_attributes
from fedbn_flwr.models.layout import hook_places

Made = TypeVar("Made")

_MOST = 8  # recordings per model, since each needs its own memory
_recordings: WeakKeyDictionary[nn.Module, dict[Hashable, Recording | str]] = WeakKeyDictionary()
_lock = threading.Lock()  # a process records one graph at a time; FedTAN's clients train in threads


def recorded(
    plain: functools.partial[Tensor], model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss
) -> Recording:
    """The recording of `plain` for batches of this shape. Clients that share a model share its recordings."""
    batch = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in [*tensors(inputs), *tensors(targets)])
    with _lock:
        recordings = _recordings.setdefault(model, {})
        key = identity(plain), identity(loss_fn), batch, state_of(model)
        if key not in recordings and len(recordings) == _MOST:
            del recordings[next(iter(recordings))]
        return made_once(recordings, key, lambda: Recording(plain, model, inputs, targets, loss_fn))


def made_once(results: dict[Hashable, Made | str], key: Hashable, make: Callable[[], Made]) -> Made:
    """Call `make` once for this key, and return its result. If it failed, raise a RuntimeError with its text each time.

    Only the text is kept, since the exception's traceback would keep the model and its tensors alive.
    """
    if key not in results:
        try:
            results[key] = make()
        except Exception as error:
            results[key] = str(error)
    if isinstance(found := results[key], str):
        raise RuntimeError(found)
    return found


def state_of(model: nn.Module) -> Hashable:
    """All that a pass's kernels depend on: the tensors' addresses, and the modules' plain attributes and hooks."""
    places = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in chain(model.parameters(), model.buffers()))
    return places, plain_attributes(model), tuple(map(ref, _hooks(model)))


def check_recordable(model: nn.Module) -> None:
    """Raise NotImplementedError if the model has a hook with a state."""
    for hook in _hooks(model):
        if not isinstance(hook, FunctionType) or hook.__closure__:
            raise NotImplementedError(f"it has a hook with a state, {hook!r}, which would not be called in each step")


def _hooks(model: nn.Module) -> Iterator[object]:
    yield from (hook for place in hook_places(model) for hook in place.values())
    yield from chain.from_iterable(map(hooks_of, model.parameters()))


def run_twice(gradient: Gradient, model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> None:
    """Check on a copy of the model that two passes change only the values of buffers; else NotImplementedError."""
    model = copy.deepcopy(model)
    state, before = state_of(model), drawn()
    for _ in range(2):
        gradient(model, inputs, targets, loss)
        if state_of(model) != state:
            raise NotImplementedError("a pass changes an attribute of a module, or assigns a buffer")
    if drawn() != before:
        raise NotImplementedError("a pass draws random numbers on the CPU")


class Recording:
    """A gradient for batches of one shape."""

    def __init__(self, gradient: Gradient, model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> None:
        check_recordable(model)
        batch = map_tensors(torch.clone, inputs), map_tensors(torch.clone, targets)
        # A stream has its own workspace for matrix products; clients that train at once must not share it.
        current, self._graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
        try:
            with seeding.preserve_rng():  # libraries allocate memory in their first calls, which cannot be recorded
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    run_twice(gradient, model, *batch, loss)
                current.wait_stream(side)
                with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                    self._loss = gradient(model, *batch, loss)
        except Exception:
            # PyTorch's generator would stay in its recorded state, and draw the same numbers in each step.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        self._values = [*tensors(batch[0]), *tensors(batch[1])]
        self._gradients = [(value, value.grad) for value in model.parameters() if value.grad is not None]

    def __call__(self, model: nn.Module, inputs: Value, targets: Value, loss: Loss) -> Tensor:
        for recorded_value, new in zip(self._values, [*tensors(inputs), *tensors(targets)], strict=True):
            recorded_value.copy_(new)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss.clone()
