"""Forward and backward passes by PyTorch's compiler, which fuses the operations between convolutions.

Compiling takes from seconds to a minute for each model and mode of its layers; PyTorch keeps the result on disk, so
that a later process needs less. Numbers differ from uncompiled passes in their last bits.
"""

from __future__ import annotations

import logging
from logging import WARNING
from typing import Any

import torch
import torch._inductor.config as inductor
from flwr.common import log
from torch import Tensor, nn

from fedbn_flwr import seeding


class CompiledModel:
    """Calls a compiled `model` for batches of `size`, and the model itself for others.

    Without a size, batches of every size are compiled, also a smaller last one for its one step in a round. If PyTorch
    cannot compile the model, a warning is logged once and the model itself is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inductor.compile_threads = 1  # others would be processes beside the workers, one per core
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no CUDA
        self._compiled: Any = torch.compile(model, dynamic=False)
        self._works: bool | None = None  # None: not tried yet

    def passes(self, size: int | None) -> Any:
        def forward(inputs: Tensor) -> Tensor:
            if size is not None and len(inputs) != size:
                return self.model(inputs)  # type: ignore[no-any-return]
            if self._works is None:
                self._works = self._try(inputs)
            return self._compiled(inputs) if self._works else self.model(inputs)  # type: ignore[no-any-return]

        return forward

    def _try(self, inputs: Tensor) -> bool:
        """Compile both passes; whether it succeeds. The model and the random generators stay as they were."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        streams = seeding.states()
        try:
            self._compiled(inputs).float().sum().backward()
        except Exception as error:  # of the compiler, of the machine's C++ compiler or of the model
            log(
                WARNING,
                "PyTorch cannot compile the model %s, so it is trained without: %s",
                type(self.model).__name__,
                str(error).strip().partition("\n")[0][:500],
            )
            return False
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])
            seeding.set_states(streams)
        return True
