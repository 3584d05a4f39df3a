"""Steps recorded and replayed against the same steps computed one by one.

A CUDA graph needs a GPU. What it does to a step is done here by a tape: all operations of PyTorch are written down
while the step runs once, and a replay carries out these, with these tensors, and no line of the step itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedbn_flwr import BNClient, Role
from fedbn_flwr.client.model_tensors import ModelTensors, initial_arrays
from fedbn_flwr.client.optimizer import SGD
from fedbn_flwr.client.replay import Action, Record, Replays
from fedbn_flwr.client.training import AdaptiveClip, Adjust, Correction, Proximal, Step, train
from fedbn_flwr.norms.convert import frozen_norm

CPU = torch.device("cpu")
Data = list[tuple[Tensor, Tensor]]


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self.operations:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else in place, or a view
                    old.copy_(new)


class Tapes:
    """Records on tapes, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Tape] = []

    def __call__(self, action: Action) -> Action:
        tape = Tape()
        with tape:
            action()
        self.made.append(tape)
        return tape.replay


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).double()


def batches(*sizes: int, seed: int = 1) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (n,), generator=generator),
        )
        for n in sizes
    ]


def drawn(model: nn.Module, seed: int) -> dict[nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator, dtype=p.dtype) / 10 for p in model.parameters()}


ADJUSTS: dict[str, Callable[[nn.Module, int], list[Adjust]]] = {
    "plain": lambda model, client: [],
    "proximal": lambda model, client: [Proximal(model.parameters(), 0.5)],
    "correction": lambda model, client: [Correction(drawn(model, client))],
    "clip": lambda model, client: [AdaptiveClip(list(model.parameters())[:4], 0.01)],
    "all": lambda model, client: [
        Correction(drawn(model, client)),
        Proximal(model.parameters(), 0.1),
        AdaptiveClip(model.parameters(), 0.5),
    ],
}


def rounds(
    model: nn.Module,
    rule: Callable[[nn.Module, int], list[Adjust]],
    replays: Replays | None,
    *,
    momentum: float = 0.9,
    what: frozenset[Role] = frozenset(),
    lrs: Iterable[float] = (0.1, 0.1),
) -> Iterator[dict[str, Any]]:
    """Two rounds of three clients with one model, each from its own weights; what each ends with."""
    for number, lr in enumerate(lrs):
        for client in range(3):
            model.load_state_dict(network(client).state_dict())
            with frozen_norm(model, what):
                named = {name: p for name, p in model.named_parameters() if p.requires_grad}
                optimizer = SGD(named, lr, momentum, 0.01)
                adjust = rule(model, client)
                told = train(
                    model,
                    batches(6, 6, 6, 4, 6, 4, seed=10 * number + client),
                    optimizer,
                    F.cross_entropy,
                    device=CPU,
                    adjust=adjust,
                    around=None if replays is None else replays.around,
                )
            state = {key: value.clone() for key, value in model.state_dict().items()}
            state |= {f"momentum of {name}": value.clone() for name, value in optimizer.buffers.items()}
            for change in adjust:
                if isinstance(change, Correction):
                    state |= {f"mean {i}": change.mean(p).clone() for i, p in enumerate(model.parameters())}
            yield {"told": told, **state}


def same(expected: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    other[key], value, rtol=1e-12, atol=1e-13, msg=lambda text, k=key: f"{k}: {text}"
                )
            else:
                assert other[key] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", ADJUSTS)
def test_replays_end_where_the_steps_do(rule: str, momentum: float) -> None:
    model, twin, tapes = network(), network(), Tapes()
    replays = Replays(list(model.state_dict().values()), tapes)
    expected = list(rounds(twin, ADJUSTS[rule], None, momentum=momentum))
    found = list(rounds(model, ADJUSTS[rule], replays, momentum=momentum))
    same(expected, found)
    # Batches of 6 and of 4, for all clients and rounds; the first of each, and the rehearsal, are computed.
    assert len(tapes.made) == 2
    assert [tape.replays for tape in tapes.made] == [6 * 4 - 1 + 1, 6 * 2 - 1 + 1]


@pytest.mark.parametrize("what", [{Role.STATISTICS}, {Role.AFFINE}, {Role.STATISTICS, Role.AFFINE}])
def test_replays_freeze_what_is_frozen(what: set[Role]) -> None:
    model, twin, tapes = network(), network(), Tapes()
    replays = Replays(list(model.state_dict().values()), tapes)
    same(rounds(twin, ADJUSTS["plain"], None), rounds(model, ADJUSTS["plain"], replays))
    free = len(tapes.made)
    frozen = frozenset(what)
    same(rounds(twin, ADJUSTS["plain"], None, what=frozen), rounds(model, ADJUSTS["plain"], replays, what=frozen))
    assert len(tapes.made) == 2 * free, "a frozen step is another step"


def test_another_learning_rate_is_another_step() -> None:
    model, twin, tapes = network(), network(), Tapes()
    replays = Replays(list(model.state_dict().values()), tapes)
    lrs = [0.1, 0.05, 0.1, 0.02]
    same(rounds(twin, ADJUSTS["plain"], None, lrs=lrs), rounds(model, ADJUSTS["plain"], replays, lrs=lrs))
    assert len(tapes.made) == 2 * 3
    lrs = [0.1 / (k + 1) for k in range(12)]
    same(rounds(twin, ADJUSTS["plain"], None, lrs=lrs), rounds(model, ADJUSTS["plain"], replays, lrs=lrs))
    assert len(replays._recorded) == 8, "each holds memory"


def test_a_rehearsal_leaves_no_trace() -> None:
    """Not in the model, the momentum or the draws of dropout."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5)
        ).double()

    def run(model: nn.Module, replays: Replays | None) -> list[Tensor]:
        torch.manual_seed(5)
        optimizer = SGD(dict(model.named_parameters()), 0.1, 0.9)
        around = None if replays is None else replays.around
        train(model, batches(6, 6, 6, 6), optimizer, F.cross_entropy, device=CPU, around=around)
        return [*model.state_dict().values(), *optimizer.buffers.values(), torch.rand(3)]

    model, tapes = net(), Tapes()
    for one, other in zip(run(net(), None), run(model, Replays(list(model.state_dict().values()), tapes)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
    assert tapes.made[0].replays == 4


def failing(action: Action) -> Action:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def idle(action: Action) -> Action:
    return lambda: None


def twice(action: Action) -> Action:
    return lambda: (action(), action())[0]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (failing, "operation not permitted when stream is capturing"),
        (idle, "apart in a tensor of shape"),
        (twice, "apart in a tensor of shape"),
    ],
)
def test_what_cannot_be_replayed_is_computed(record: Record, words: str, flower_log: pytest.LogCaptureFixture) -> None:
    model, twin = network(), network()
    replays = Replays(list(model.state_dict().values()), record)
    same(rounds(twin, ADJUSTS["all"], None), rounds(model, ADJUSTS["all"], replays))
    told = [entry.getMessage() for entry in flower_log.records if entry.levelno == logging.WARNING]
    assert len(told) == 1, "said once"
    assert words in told[0]
    assert "engine.cuda_graphs" in told[0]


def test_a_step_with_something_unknown_in_it_is_refused() -> None:
    model = network()
    step = Step(model, SGD(dict(model.named_parameters()), 0.1), F.cross_entropy, device=CPU, adjust=[lambda: None])
    with pytest.raises(TypeError, match="cannot be recorded"):
        step.kind()
    with pytest.raises(TypeError, match="SGD"):
        Step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, device=CPU).tensors()


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}


def test_a_client_whose_model_is_shared_replays() -> None:
    """What the server asks for in a message, through BNClient: momentum, control variates and clipping among it."""

    def trained(graphs: bool) -> tuple[list[Any], Tapes]:
        model, tapes = network().float(), Tapes()
        parts = ModelTensors(model)
        assert parts.replays is None, "there is no GPU here"
        parts.replays = Replays(list(parts.tensors.values()), tapes)
        data = [(x.float(), y) for x, y in batches(6, 6, 6, 6, 3)]
        arrays, found = initial_arrays(network(4).float()), []
        configs: list[dict[str, Any]] = [
            {"server-round": 1, "proximal-mu": 0.1},
            {"server-round": 2, "fedbn.control": True, "fedbn.clip": 0.1},
            {"server-round": 3, "fedbn.momentum": True},
            {"server-round": 4, "fedbn.freeze": "statistics"},
        ]
        for config in configs:
            client = BNClient(parts, data, lr=0.1, momentum=0.9, epochs=2, cuda_graphs=graphs)
            update = client.train_round(arrays, config)
            found.append([_tensors(each) for each in (update.arrays, *update.extras.values())] + [update.metrics])
        return found, tapes

    expected, none = trained(False)
    found, tapes = trained(True)
    assert not none.made
    assert len(tapes.made) == 2 * 4, "each kind of step, for batches of 6 and of 3"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_step_is_replayed_too() -> None:
    data = [(x.float(), y) for x, y in batches(6, 6, 6, 6)]
    results = []
    for record in (None, Tapes()):
        model = network().float()
        replays = None if record is None else Replays(list(model.state_dict().values()), record)
        optimizer = SGD(dict(model.named_parameters()), 0.1, 0.9)
        around = None if replays is None else replays.around
        train(model, data, optimizer, F.cross_entropy, device=CPU, precision=torch.bfloat16, around=around)
        results.append(copy.deepcopy(model.state_dict()))
    assert record is not None
    assert len(record.made) == 1
    torch.testing.assert_close(results[1], results[0])
