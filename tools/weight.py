"""Counts statements by folder, the modules and calls of a round, and the names for the author of a strategy.

Statements are all `ast.stmt` of the modules, so denser lines do not change them; tests are left out. The way of a round
is what `sys.setprofile` reports from `configure_train` to `aggregate_train` of the second round, on the local engine
without workers, with three clients of one batch each: modules, functions and calls of this project. Calls of an
exchange of FedTAN are those of one further layer: the difference between a model with two batch norms and one with one.
The names are the public ones of the classes that docs/strategy-reference.md describes.

    python tools/weight.py
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("fedbn_flwr", "strategies")
CORE = (
    "strategies",
    *(f"fedbn_flwr/{name}" for name in ("server", "client", "exchange", "messages", "engines", "norms", "models")),
)


def files() -> Iterator[tuple[str, Path]]:
    """The room of each module, and its file."""
    for top in OURS:
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).parts
            if "tests" not in parts:
                deep = 3 if parts[1] == "extensions" else 1 if top == "strategies" else 2
                yield "/".join(parts[: min(deep, len(parts) - 1)]), file


def statements() -> Counter[str]:
    found: Counter[str] = Counter()
    for room, file in files():
        found[room] += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    return found


def in_core(room: str) -> bool:
    return room in (*CORE, "fedbn_flwr")


def names() -> dict[str, list[str]]:
    """The names that concern the author of a strategy with both halves, by class."""
    from flwr.serverapp.strategy import Strategy

    from fedbn_flwr.client.rule import ClientRule, LocalRound
    from fedbn_flwr.messages.reply import Reply
    from fedbn_flwr.server.hooks import Hooks
    from fedbn_flwr.strategies import Round, Rule, Traits

    def of(kind: type, base: type = object) -> list[str]:
        own: dict[str, Any] = {**getattr(kind, "__annotations__", {}), **vars(kind)}
        return [name for name in own if not name.startswith("_") and not hasattr(base, name)]

    fields = {each.__name__: fields_of(each) for each in (Traits, Round)}
    rest = {each.__name__: of(each) for each in (Reply, ClientRule, LocalRound)}
    return {"Rule": of(Hooks, Strategy) + of(Rule, Hooks), "Memory": fields_of(Rule.Memory), **fields, **rest}


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]


Way = tuple[set[str], list[str], int]


def way(run: Callable[[], object]) -> Way:
    """Modules and functions of this project that a call enters, the latter in their order, and the number of calls."""
    modules, functions, calls = set[str](), dict[str, None](), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            modules.add(module)
            functions[f"{module}:{frame.f_code.co_qualname}"] = None
            calls += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return modules, [*functions], calls


def way_of_a_round(strategy: Any, layers: int = 1) -> Way:
    import torch
    from flwr.app import ConfigRecord, Context
    from torch import nn

    from fedbn_flwr import BNClient, LocalGrid, client_app
    from fedbn_flwr.messages.arrays import pack
    from fedbn_flwr.models.tensors import ModelTensors, initial_arrays

    norms = [nn.BatchNorm1d(4) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(4, 4), *norms, nn.Linear(4, 2))
    data = [(torch.randn(8, 4), torch.arange(8) % 2)]
    tensors: dict[int, ModelTensors] = {}

    def make(context: Context) -> BNClient:
        if context.node_id not in tensors:
            tensors[context.node_id] = ModelTensors(copy.deepcopy(model))
        return BNClient(tensors[context.node_id], data, lr=0.1, context=context)

    grid, arrays = LocalGrid(client_app(make), 3), pack(initial_arrays(model))
    strategy.begin(2, arrays)

    def one_round(number: int) -> None:
        messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        strategy.aggregate_train(number, grid.send_and_receive(messages))

    one_round(1)
    return way(lambda: one_round(2))


def main() -> None:
    found = statements()
    for room, count in sorted(found.items()):
        print(f"{count:6,} {room}")
    core = sum(count for room, count in found.items() if in_core(room))
    extensions = sum(count for room, count in found.items() if "extensions/" in room)
    print(f"core {core:,}, extensions {extensions:,}, all {sum(found.values()):,}")
    of_authors = names()
    print(f"names for an author: {sum(map(len, of_authors.values()))}")
    for kind, each in of_authors.items():
        print(f"  {kind} ({len(each)}): {', '.join(each)}")

    from fedbn_flwr.strategies import FedAvg, FedTAN, FixBN

    rounds = {"FedAvg": FedAvg(), "FixBN(FedAvg)": FixBN(FedAvg(), freeze_round=1), "FedTAN": FedTAN(min_batch=2)}
    for name, strategy in rounds.items():
        modules, functions, calls = way_of_a_round(strategy)
        print(f"a round of {name}: {len(modules)} modules, {len(functions)} functions, {calls:,} calls")
        print(f"  {', '.join(sorted(modules))}")
    one, two = (way_of_a_round(FedTAN(min_batch=2), layers) for layers in (1, 2))
    print(f"a further batch norm of FedTAN: {two[2] - one[2]} calls")


if __name__ == "__main__":
    main()
