"""The tables of the concept pages: what examples/bias.py computes, and the strategies compared."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from results import Row, Table
from torch import nn

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.registry import STRATEGIES, build_strategy, in_a_line
from fedbn_flwr.norms.convert import convert_norm
from fedbn_flwr.norms.roles import LAST, Role
from fedbn_flwr.strategies import Round, Rule, Traits, Wrapper, as_rule

ROOT = Path(__file__).parents[1]

WORDS = {Role.WEIGHTS: "weights", Role.AFFINE: "gamma, beta", Role.STATISTICS: "statistics", LAST: "the last layer"}
STEPS = {"linear": "SGD without clipping", "momentum": "SGD with momentum", "sgd": "SGD"}
STORED = {"own alpha": "alpha, the learnt mix of batch and running statistics"}
OTHERS = {"FedBS": "the metric `train-loss`", "Secure": "`client_app`"}


@functools.cache
def bias() -> ModuleType:
    sys.path.insert(0, str(ROOT / "examples"))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return importlib.import_module("bias")


def fixed_point() -> Table:
    """By the formula, and trained."""
    rows: list[Row] = []
    for skew in (0, 0.25, 0.5, 0.75, 1):
        found = bias().biases(skew)
        exact = (bias().bias(skew), bias().fixed_point(skew))
        trained = (found[name] for name in ("FedAvg", "FixBN", "FedTAN"))
        rows.append((f"{skew:g}", *(f"{value:z.3f}" for value in (*exact, *trained))))
    return ("skew a", "bias B(a)", "fixed point, formula", "FedAvg, trained", "FixBN, frozen", "FedTAN, trained"), rows


def gradient_error() -> Table:
    names = {
        "FedAvg+BN": "FedAvg", "Algorithm 2": "FedAvg + Algorithm 2", "FedTAN": "FedTAN", "FixBN": "FixBN, frozen",
        "FedAvg+GN": "group norm",
    }  # fmt: skip
    rows: list[Row] = []
    for skew in bias().SKEWS:
        found = bias().errors(skew)
        rows.append((f"{skew:g}", *(f"{100 * found[name]:.0f} %" for name in names)))
    return ("skew a", *names.values()), rows


def page_of(name: str) -> str:
    """The page whose title has the strategy's name."""
    for page in sorted((ROOT / "docs" / "strategies").glob("*.md")):
        if name in page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split(", "):
            return page.stem
    raise LookupError(f"no page in docs/strategies has {name} in its title")


def compared() -> Table:
    """Cells that are None are written on the page."""
    rows: list[Row] = []
    for name in STRATEGIES:
        rule = as_rule(build_strategy({"name": name}, client_learning_rate=0.1))
        takes_base = isinstance(rule, Wrapper) and rule.wraps is None
        stays = "as inside" if takes_base else kept(rule.traits)
        link = f"[{name}](strategies/{page_of(name)}.md)"
        rows.append((link, in_a_line(name), stays, more(rule), needs(rule), None))
    return ("strategy", "what it does", "each client has its own", "extra messages", "needs", "avoid it if"), rows


def kept(traits: Traits) -> str:
    stored = " and ".join(traits.client_memory).removeprefix("their ")
    return local(traits) or STORED.get(stored, stored)


def local(traits: Traits) -> str:
    """What each client has its own values of."""
    return (
        "the model" if not traits.has_global_model else ", ".join(WORDS[role] for role in WORDS if role in traits.local)
    )


def more(rule: Rule) -> str | None:
    """What is sent besides the model."""
    if rule.traits.min_batch:
        leaf: Any = rule.base
        each = "2 exchanges" if leaf.backward else "1 exchange"
        return f"{each} for each batch norm" + (", until the freeze" if len(rule.chain) > 1 else "")
    return ", ".join(f"`{name}`, as large as the parameters" for name in rule.traits.records) or None


def needs(rule: Rule) -> str:
    """What a rule asks of clients in its last round, and which models it accepts."""
    tracking = ArrayRecord(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict())
    plain = ArrayRecord(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)).state_dict())
    hybrid = ArrayRecord(convert_norm(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "hbn").state_dict())
    found = [] if accepts(rule, plain) else ["batch norm"]
    if not accepts(rule, tracking):
        tracking, found = (
            (plain, ["a model without running statistics"]) if not found else (hybrid, ["hybrid batch norm"])
        )
    rule.begin(10, tracking)
    round, traits = Round(10, tracking, ConfigRecord(), cast(Grid, None)), rule.traits
    configs = (each.config(round) for each in rule.chain)
    if traits.local or any(key.startswith("fedbn.") for config in configs for key in config):
        found.append("`BNClient`")
    found += [STEPS[kind] for kind in sorted(traits.steps)]
    found += [f"batches of {traits.min_batch} or more"] if traits.min_batch else []
    found += ["a state"] if traits.client_memory else []
    found += [OTHERS[str(rule)]] if str(rule) in OTHERS else []
    return ", ".join(found)


def accepts(rule: Rule, model: ArrayRecord) -> bool:
    try:
        rule.begin(10, model)
    except SettingsError:
        return False
    return True


TABLES: dict[str, Callable[[], Table]] = {
    "concept fixed point": fixed_point,
    "concept gradient error": gradient_error,
    "compared": compared,
}
