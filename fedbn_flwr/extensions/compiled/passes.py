"""Compiles loss and gradients with PyTorch's compiler on a CPU. On a GPU they are recorded as a CUDA graph (`graphs`).

The compiler fuses the loss and the operations between convolutions. It takes from seconds to a minute for each kind of
model and mode of its layers; PyTorch keeps the result on disk, so that later processes are faster. Results differ from
uncompiled training in their last bits. The work after the gradients (corrections, clipping, the optimiser) is not
compiled: it is about two percent of a step.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value, count, first, tensors
from fedbn_flwr.client.rule import Gradient, Loss
from fedbn_flwr.client.training import Forward, compute_loss
from fedbn_flwr.errors import LOG
from fedbn_flwr.norms.variants import HybridBatchNorm, MaskedBatchNorm1d

from .graphs import made_once, recorded

# Graphs per process: each model of an experiment file needs one with frozen layers, and one without. PyTorch's limit of
# 8 counts all models, since they share the function below. Above the limit it trains models without compiling them.
_MOST_GRAPHS = 64

uncompiled: set[tuple[str, str]] = set()  # networks that cannot be compiled, and why
_TOOLS = "; install g++ and Python's headers (Debian: g++ python3-dev)"


def compiled_gradient(plain: functools.partial[Tensor], size: int | None) -> Gradient:
    """`plain` (`backpropagate` with its options), compiled for one round and for batches of `size` examples.

    Without a size, the first batch sets it. Batches of another size run uncompiled, such as a smaller last batch, with
    its single step per epoch. So do examples of another length than the first. If the model cannot be compiled, one
    warning is logged and nothing is compiled.
    """
    compiled: Gradient | None = None
    shapes: list[torch.Size] = []
    compiled_for: nn.Module | None = None  # the model that `compiled` is for

    def gradient(model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss) -> Tensor:
        nonlocal compiled, shapes, size, compiled_for
        size, now = size or count(inputs), [tensor.shape for tensor in [*tensors(inputs), *tensors(targets)]]
        if compiled_for is not model and count(inputs) == size:
            compiled_for, shapes, compiled = model, now, None
            try:
                compiled = (recorded if first(inputs).is_cuda else fused)(plain, model, inputs, targets, loss_fn)
            except Exception as error:  # from PyTorch's or the machine's C++ compiler, the model or the loss
                _warn(type(model).__name__, str(error))
        return (compiled if compiled and now == shapes else plain)(model, inputs, targets, loss_fn)

    return gradient


def _warn(model: str, error: str) -> None:
    if (model, error) not in uncompiled:
        uncompiled.add((model, error))
        LOG.warning(
            "PyTorch cannot compile the model %s, so it is trained without: %s%s",
            model,
            error.strip().partition("\n")[0][:500],
            _TOOLS if "CppCompileError" in error or "InvalidCxxCompiler" in error else "",
        )


def fused(
    plain: functools.partial[Tensor], model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss
) -> functools.partial[Tensor]:
    """`plain`, compiled by PyTorch. Models of one kind share the compiled code."""
    _set_up()
    forward, tried = compiler()
    by_compiler = functools.partial(plain, forward=forward)
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters())
    kind = type(model), parameters, tuple(module.training for module in model.modules())

    def trial() -> None:
        """Compile with a copy of the model, and with the same random draws as the step."""
        layers = {type(layer) for layer in model.modules()}
        if any(issubclass(layer, MaskedBatchNorm1d) for layer in layers):
            raise NotImplementedError("MaskedBatchNorm1d has another number of values in each batch")
        if any(issubclass(layer, HybridBatchNorm) for layer in layers):
            # It would copy the running statistics again in the backward pass, when they have changed.
            raise NotImplementedError("hybrid batch norm needs the statistics from before its step in the gradient")
        with seeding.preserve_rng():
            by_compiler(copy.deepcopy(model), inputs, targets, loss_fn)

    made_once(tried, kind, trial)
    return by_compiler


@functools.cache
def compiler() -> tuple[Forward, dict[Hashable, str | None]]:
    """PyTorch's compiler, one per process, and the reasons why it could not compile some kinds of models."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
    return torch.compile(compute_loss, dynamic=False), {}


def _set_up() -> None:
    """Set the compiler's options, which each thread has for itself: a layer-wise round trains in its own thread."""
    # Importing them takes seconds, and recording does not need them.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    if inductor.cpp.vec_isa_ok is None:
        # The compiler is assumed to know the processor's instructions. To check it, each process would compile
        # programs and start a Python process that imports torch for each: longer than loading from the disk.
        inductor.cpp.vec_isa_ok = True
    inductor.fallback_random = True  # dropout draws what it draws without compilation
    inductor.compile_threads = 1  # otherwise it starts its own processes in addition to one worker per core
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
