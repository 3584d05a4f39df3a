"""Loss and gradients by PyTorch's compiler, which fuses the operations between convolutions, and the loss.

Compiling takes from seconds to a minute for each kind of model and mode of its layers; PyTorch keeps the result on
disk, so that a later process needs less. Numbers differ from uncompiled training in their last bits. What follows the
gradients (corrections, clipping, the optimiser) is not compiled: it is about two percent of a step.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value, count, each
from fedbn_flwr.client.training import Loss
from fedbn_flwr.errors import LOG
from fedbn_flwr.norms.variants import MaskedBatchNorm1d

# The graphs of a process: models of an experiment file, with and without frozen layers. PyTorch's limit is 8, for all
# models together, since they share the function below; it trains further ones without compiling them.
_MOST_GRAPHS = 64

_TOOLS = "; install g++ and Python's headers (Debian: g++ python3-dev)"


def compiled_loss(model: nn.Module, loss_fn: Loss, size: int | None) -> Callable[[Value, Value], Tensor]:
    """A compiled function of inputs and targets, for one round of `model`: the loss of a batch of `size` examples.

    Batches of other sizes are not compiled, for instance a smaller last one, which has one step in an epoch; without a
    size, that of the first batch counts. Nor are examples of another length than the first ones. If PyTorch cannot
    compile the model, a warning is logged once and nothing is compiled. Models of one kind share the compiled code.
    """
    compiled, works = compiler(next(model.parameters(), torch.empty(0)).is_cuda)
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters())
    kind = type(model), parameters, tuple(module.training for module in model.modules())

    compiled_shapes: Any = None

    def loss(inputs: Value, targets: Value) -> Tensor:
        nonlocal size, compiled_shapes
        size, shapes = size or count(inputs), each(lambda tensor: tensor.shape, inputs)
        if count(inputs) == size:
            compiled_shapes = compiled_shapes or shapes
            if kind not in works:
                works[kind] = _works(compiled, model, inputs, targets, loss_fn)
        if shapes != compiled_shapes or not works[kind]:
            return loss_fn(model(inputs), targets)
        torch.compiler.cudagraph_mark_step_begin()  # outputs of the last step are no longer needed
        return compiled(model, inputs, targets, loss_fn)

    return loss


@functools.cache
def compiler(cuda: bool) -> tuple[Callable[[nn.Module, Value, Value, Loss], Tensor], dict[Hashable, bool]]:
    """PyTorch's compiler, which a process has once, and whether it could compile a kind of model."""
    if inductor.cpp.vec_isa_ok is None:
        # The compiler is assumed to know the processor's instructions. To check it, each process would compile
        # programs and start a Python process that imports torch for each: longer than loading from the disk.
        inductor.cpp.vec_isa_ok = True
    inductor.fallback_random = True  # dropout draws what it draws without compilation
    if not cuda:
        inductor.compile_threads = 1  # others would be processes beside the workers, one per core
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
    # On a GPU, launching the kernels of a small model takes as long as a step: this mode records CUDA graphs.
    return torch.compile(_loss, dynamic=False, mode="reduce-overhead" if cuda else None), {}


def _loss(model: nn.Module, inputs: Value, targets: Value, loss_fn: Loss) -> Tensor:
    return loss_fn(model(inputs), targets)


def _works(
    compiled: Callable[[nn.Module, Value, Value, Loss], Tensor],
    model: nn.Module,
    inputs: Value,
    targets: Value,
    loss_fn: Loss,
) -> bool:
    """Whether PyTorch can compile loss and gradients: tried with a copy, and with the same random draws as the step."""
    try:
        if any(isinstance(layer, MaskedBatchNorm1d) for layer in model.modules()):
            raise NotImplementedError("MaskedBatchNorm1d has another number of values in each batch")
        with seeding.kept():
            compiled(copy.deepcopy(model), inputs, targets, loss_fn).backward()
    except Exception as error:  # of the compiler, of the machine's C++ compiler, of the model or of the loss
        LOG.warning(
            "PyTorch cannot compile the model %s, so it is trained without: %s%s",
            type(model).__name__,
            str(error).strip().partition("\n")[0][:500],
            _TOOLS if any(name in str(error) for name in ("CppCompileError", "InvalidCxxCompiler")) else "",
        )
        return False
    return True
