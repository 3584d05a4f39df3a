"""Writes a model that loads without this project: normalisation of the inputs, network and names in one file."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import fusion

from fedbn_flwr.data.batches import Standardiser
from fedbn_flwr.errors import UserError, needs
from fedbn_flwr.named import in_a_line
from fedbn_flwr.results.units import InUnits
from fedbn_flwr.storage import replacing
from fedbn_flwr.trees import Draft

from ..folder.description import Build
from ..folder.reader import RunReader

Format = Literal["torch", "onnx", "safetensors"]

_ABOUT = "fedbn.json"  # the name of what the file says about the model
_TOLERANCE = 1e-4  # of the largest output: what rounding may change


def export(folder: RunReader, network: nn.Module, out: Path, form: Format, *, fold: bool = False) -> list[str]:
    """Write the network, and return what it is and how far its outputs are from those of training, in words."""
    described = folder.model_description()
    units = {} if described.units is None else {"units": InUnits(described.units)}
    whole = nn.Sequential(OrderedDict(normalise=normaliser(folder), network=network, **units)).eval()
    inputs, said = _examples(described.build), list[str]()
    with torch.no_grad():
        expected = whole(inputs)
    if not isinstance(expected, Tensor):
        raise UserError(f"the network returns a {type(expected).__name__}; expected a tensor, to write it to a file")
    if fold:
        whole.network, number, of_all = folded(network)
        said.append(f"{number} of {of_all} batch norms folded into the layers before them")
    about = described.model_dump(exclude={"build", "label", "local", "sent_back"}, exclude_defaults=True)
    with replacing(out) as file:
        found = _WRITE[form](whole, inputs, file, about)(inputs).detach()
        difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
        if not difference <= _TOLERANCE * max(1.0, largest):
            raise UserError(f"the outputs of the file differ by {difference:g} from the network's; it is not kept")
    shape = ", ".join(map(str, described.build.input_shape))
    of_site = (folder.config().get("data") or {}).get("normalise") == "own"
    of_inputs = "in units of the site's own mean and deviation" if of_site else "with bytes of images divided by 255"
    said.append(f"inputs [N, {shape}]" + (f", {of_inputs}" if of_site or len(inputs.shape) == 4 else ""))
    if described.classes:
        of = "in the targets' units: " if units else "a score for each of "
        said.append(f"outputs: {of}{', '.join(described.classes)}")
    said.append(f"largest difference from the run's network: {difference:g} (outputs up to {largest:.3g})")
    return said


def normaliser(folder: RunReader) -> nn.Module:
    """The normalisation of the model's inputs, a module of its own for the caller to move or change."""
    return Standardiser(folder.model_description().normalise.moments, torch.device("cpu"))


def _examples(build: Build) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if build.num_tokens is not None:
        return torch.randint(build.num_tokens, (2, *build.input_shape), generator=generator)
    return torch.rand(2, *build.input_shape, generator=generator)


def folded(network: nn.Module) -> tuple[nn.Module, int, int]:
    """A copy whose batch norms are part of the convolution or linear layer before them; how many, and of how many."""
    network = copy.deepcopy(network)
    try:
        nodes = fx.symbolic_trace(network).graph.nodes
    except Exception as error:  # the network may be the user's
        raise UserError(f"batch norms cannot be folded: the network cannot be traced ({in_a_line(error)})") from None
    modules, uses = dict(network.named_modules()), Counter(str(node.target) for node in nodes)
    norms = [node for node in nodes if isinstance(modules.get(str(node.target)), _NORMS)]
    count = 0
    for node in norms:
        before, norm = node.all_input_nodes[0], modules[str(node.target)]
        layer: Any = modules.get(str(before.target)) if before.op == "call_module" else None
        is_alone = len(before.users) == 1 and uses[str(before.target)] == uses[str(node.target)] == 1
        fuse, outputs = _FUSE.get(type(layer), (None, 0))
        if fuse and is_alone and norm.running_mean is not None and layer.weight.shape[outputs] == norm.num_features:
            network.set_submodule(str(before.target), fuse(layer, norm))
            network.set_submodule(str(node.target), nn.Identity())
            count += 1
    return network, count, len(norms)


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# For a layer: how it takes over a batch norm, and the dimension of its weights that is one of outputs.
_FUSE: dict[type[object], tuple[Callable[..., nn.Module], int]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), (fusion.fuse_conv_bn_eval, 0)),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        (functools.partial(fusion.fuse_conv_bn_eval, transpose=True), 1),
    ),
    nn.Linear: (fusion.fuse_linear_bn_eval, 0),
}


# --- formats: each function writes a file, and returns what the file computes ---

Computes = Callable[[Tensor], Tensor]


def _as_program(whole: nn.Module, inputs: Tensor, file: Path, about: Draft) -> Computes:
    program = torch.export.export(whole, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with file.open("wb") as stream:  # by its name it would have to end with .pt2
        torch.export.save(program, stream, extra_files={_ABOUT: json.dumps(about)})
    with file.open("rb") as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # a matter of torch.export.load
        loaded: Computes = torch.export.load(stream).module()
    return loaded


def _as_onnx(whole: nn.Module, inputs: Tensor, file: Path, about: Draft) -> Computes:
    with needs("onnx", "export to ONNX"):
        import onnx
        import onnx.reference
        import onnxscript  # noqa: F401  # the exporter needs it
    names = {"input_names": ["inputs"], "output_names": ["outputs"]}
    dynamic = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # PyTorch's own use
        program = torch.onnx.export(whole, (inputs,), dynamo=True, dynamic_shapes=dynamic, verbose=False, **names)
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in about.items()})
    file.write_bytes(model.SerializeToString())
    run: Any = onnx.reference.ReferenceEvaluator(onnx.load_from_string(file.read_bytes()))
    return lambda given: torch.from_numpy(run.run(None, {"inputs": given.numpy()})[0])


def _as_weights(whole: nn.Module, inputs: Tensor, file: Path, about: Draft) -> Computes:
    from safetensors.torch import load_file, save

    state = {key: value.contiguous() for key, value in whole.state_dict().items()}
    file.write_bytes(save(state, {key: json.dumps(value) for key, value in about.items()}))
    whole.load_state_dict(load_file(file))
    return whole


_WRITE: dict[Format, Callable[[nn.Module, Tensor, Path, Draft], Computes]] = {
    "torch": _as_program,
    "onnx": _as_onnx,
    "safetensors": _as_weights,
}
