"""The strategies that an experiment's `strategy:` section can name, in words and as objects.

Neither Flower nor PyTorch is imported until a strategy is made.

Flower's are used inside `MeanStatistics`: a server optimiser must not step along statistics, since a variance could
become negative, a robust rule must not measure distances by them, and counters are not weights. For robust rules the
statistics are the median of the clients' values instead of their mean, which one malicious client could set to any
value.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedbn_flwr import named, strategies
from fedbn_flwr.declared import check, declarations
from fedbn_flwr.errors import FedbnError, SettingsError, did_you_mean
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages.protocol import TRAIN_LOSS
from fedbn_flwr.trees import Draft, Tree

from . import sources

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy


# The strategies of this package by what they are for; those of extensions are around another one.
FAMILIES: dict[str, list[str]] = {
    "To compare with": ["FedAvg"],
    "One model for all": ["FixBN", "FedTAN", "FedTANII", "FedAvgGlobalStats", "HBN", "FedWon", "HeteroBN"],
    "A model for each client": ["FedBN", "SiloBN", "FedRep", "Standalone"],
    "Local training and weights": ["FedProx", "FedNova", "Scaffold", "GlobalMomentum", "FedBS"],
    "Around another strategy": ["MeanStatistics", *declared("strategies")],
}
_NAMES = "fedbn_flwr.strategies._names"  # registers them: from .fedavg import FedAvg as FedAvg
_PLACES = declared("strategies") | {
    name.name: f"fedbn_flwr.strategies.{line.module}:{name.name}"
    for line in sources.tree(_NAMES).body
    if isinstance(line, ast.ImportFrom) and line.level
    for name in line.names
    if name.name[0].isupper()
}
FAMILIES["Others"] = sorted(_PLACES.keys() - {*chain(*FAMILIES.values())})
STRATEGIES = (*chain(*FAMILIES.values()),)


@dataclass(frozen=True)
class OfFlower:
    """A strategy of Flower that an experiment can name."""

    does: str
    robust: bool = False  # withstands some malicious clients
    needs: Callable[[int], int] | None = None  # the number of clients for so many malicious ones
    defaults: Tree = field(default_factory=dict)  # where Flower's do not suit the clients here


FLOWER: dict[str, OfFlower] = {
    "FedAdam": OfFlower("Adam on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedYogi": OfFlower("Yogi on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedAdagrad": OfFlower("Adagrad on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedAvgM": OfFlower("momentum on the server (Hsu et al. 2019)"),
    "QFedAvg": OfFlower(
        "clients with a higher loss count more, by the exponent q (Li et al. 2020)",
        defaults={"train_loss_key": TRAIN_LOSS},
    ),
    "FedMedian": OfFlower("the median of the clients' values (Yin et al. 2018)", True),
    "FedTrimmedAvg": OfFlower("the mean without the share beta of values at each end (Yin et al. 2018)", True),
    "Krum": OfFlower(
        "the model that is nearest to its neighbours (Blanchard et al. 2017)", True, lambda bad: 2 * bad + 3
    ),
    "MultiKrum": OfFlower(
        "the mean of the models that are nearest to their neighbours (Blanchard et al. 2017)",
        True,
        lambda bad: 2 * bad + 3,
    ),
    "Bulyan": OfFlower(
        "models chosen by Krum, and the mean of the values around their median (El Mhamdi et al. 2018)",
        True,
        lambda bad: 4 * bad + 3,
    ),
}

FAMILIES["Flower's own"] = [*FLOWER]

# Flower accepts any value of these, and with fraction_train 0 it trains nothing.
_LIMITS: dict[str, tuple[object, ...]] = {
    "fraction_train": (Gt(0), Le(1)),
    "fraction_evaluate": (Ge(0), Le(1)),
    "min_train_nodes": (Ge(1),),
    "min_evaluate_nodes": (Ge(0),),
    "min_available_nodes": (Ge(1),),
    "node_timeout": (Gt(0), "a number of seconds > 0"),
}
_OF_FLOWER: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("eta", "eta_l", "tau", "server_learning_rate"), (Gt(0),)),
    **dict.fromkeys(("beta_1", "beta_2", "server_momentum"), (Ge(0), Lt(1))),
    **dict.fromkeys(("q", "num_malicious_nodes"), (Ge(0),)),
    "num_nodes_to_select": (Ge(1),),
    "beta": (Ge(0), Lt(0.5)),
}


# An experiment file cannot set these: they are objects or functions, or `**options`, which has no value of its own.
_NOT_IN_FILES = {
    "self", "options", "strategy", "needs", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "selection_rule",
    "arrayrecord_key", "configrecord_key", "weighted_by_key",  # the clients of experiments use Flower's defaults
}  # fmt: skip


def class_of(name: str) -> type[Strategy]:
    place = _PLACES.get(name, f"flwr.serverapp.strategy:{name}")
    return pkgutil.resolve_name(place)  # type: ignore[no-any-return]


def arguments(strategy: type[Strategy]) -> dict[str, inspect.Parameter]:
    """The arguments that an experiment file may set, inherited ones included, with what `declared` can check."""
    inner = strategy.wraps if issubclass(strategy, strategies.Wrapper) else None
    # A rule that creates the strategy it wraps passes its options on to that strategy, not to its own base class.
    classes = strategy.__mro__ if inner is None else (strategy, *inner.__mro__)
    accepted: dict[str, inspect.Parameter] = {}
    for init in [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]:
        parameters, hints = inspect.signature(init).parameters, declarations(init)
        new = parameters.keys() - accepted.keys() - _NOT_IN_FILES
        accepted |= {key: p.replace(annotation=hints.get(key)) for key, p in parameters.items() if key in new}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break  # without **options it passes no arguments on
    return accepted


def check_strategy(spec: Tree, section: str = "strategy") -> Tree:
    """Return the section; SettingsError if its name or an argument, or one of its base, is unknown."""
    name, base = str(spec.get("name", "")), spec.get("base")
    named.check_name(f"{section}.name", name, {*STRATEGIES, *FLOWER}, "a strategy")
    if named.is_name(name):
        return spec
    if isinstance(base, Mapping):
        check_strategy(base, f"{section}.base")
    declared, inside = _declared(name), str(base.get("name")) if isinstance(base, Mapping) else "FedAvg"
    known = [*(declared.keys() - _NOT_IN_FILES), "name", *(["base"] if "strategy" in declared else [])]
    for key in (key for key in spec if key not in known):
        hint = "" if key != "base" else f"{name} wraps no other strategy; "
        if "base" in known and inside in {*STRATEGIES, *FLOWER} and key in _declared(inside):
            hint = f"give it to its base: base: {{name: {inside}, {key}: {spec[key]}}}; "
        raise SettingsError(
            f"{section}.{key} (= {spec[key]!r}) is not an argument of {name}; {hint}{did_you_mean(str(key), known)}"
        )
    _check_values(name, spec, section, declared)
    return spec


def _declared(name: str) -> Tree:
    """The arguments of a strategy with their annotations, of this library's from their source: nothing is imported."""
    if name in _PLACES:
        return sources.arguments(_PLACES[name])
    return {key: parameter.annotation for key, parameter in arguments(class_of(name)).items()}


def _check_values(name: str, options: Tree, section: str, declared: Tree) -> None:
    limits = _LIMITS | (_OF_FLOWER if name in FLOWER else {})
    for key in options:
        hint: Any = declared.get(key)
        if hint is not None and key in limits:  # in place of the limits that it has in Python
            hint = Annotated[getattr(hint, "__origin__", hint), *limits[key]]
        if hint is not None:
            check(f"{section}.{key} of {name}", options[key], hint)


def build_strategy(spec: Tree, section: str = "strategy", **defaults: object) -> Strategy:
    """The strategy that a section such as `{name: FixBN, freeze_round: 0.5, base: {name: FedAvg}}` describes.

    The settings have checked its names (`check_strategy`). A strategy that wraps another one takes it from `base`, by
    default FedAvg. `defaults` are arguments that the file may omit; each strategy, a base included, receives those that
    it accepts. Errors name the keys below `section`.
    """
    from flwr.serverapp.strategy import Strategy

    options = dict(spec)
    name = options.pop("name")
    made: Any = named.load(f"{section}.name", name) if named.is_name(name) else class_of(name)
    if isinstance(made, type):
        made = _built(made, name, options, section, defaults)
    else:
        given = {key: value for key, value in named.accepted(made, defaults).items() if key not in options}
        made = named.call(f"{section}.name", name, **given, **options)
    if not isinstance(made, Strategy):
        raise SettingsError(
            f"{section}.name={name!r} returned a {type(made).__name__}; expected a flwr.serverapp.strategy.Strategy"
        )
    return made


def _built(cls: type[Strategy], name: str, options: Draft, section: str, defaults: Draft) -> Strategy:
    of_flower = FLOWER.get(name)
    defaults |= of_flower.defaults if of_flower else {}
    positional: list[Strategy] = []
    if issubclass(cls, strategies.Wrapper) and cls.wraps is None:
        base = options.pop("base", {"name": "FedAvg"})
        if not isinstance(base, Mapping):
            raise SettingsError(f"{section}.base is {base!r}; expected a strategy, for instance {{name: FedAvg}}")
        positional.append(build_strategy(base, f"{section}.base", **defaults))
    known = arguments(cls)
    if named.is_name(name):
        _check_values(name, options, section, {key: parameter.annotation for key, parameter in known.items()})
    options = {key: value for key, value in defaults.items() if key in known} | options
    try:
        made = cls(*positional, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{section}: {error}") from None
    if of_flower is None:
        return made
    statistics: Literal["median", "mean"] = "median" if of_flower.robust else "mean"
    return strategies.MeanStatistics(strategies.as_rule(made, defaults.get("seed", 0)), statistics=statistics)


def personalises(spec: Tree) -> bool:
    """Whether clients of a strategy keep a part of the model, as its class declares by `traits`, or `kept` says.

    If a strategy of the user cannot be imported, its run has an error; a node may lack packages that it needs.
    """
    name, base = str(spec["name"]), spec.get("base")
    is_known = name in FAMILIES["A model for each client"]
    if is_known or spec.get("kept") or (isinstance(base, Mapping) and personalises({"name": "FedAvg", **base})):
        return True
    made: object = None
    with suppress(FedbnError):
        made = named.load("strategy.name", name) if named.is_name(name) else None
    return bool(getattr(getattr(getattr(made, "func", made), "traits", None), "local", ()))


def in_a_line(name: str) -> str:
    """What a strategy does."""
    return FLOWER[name].does if name in FLOWER else _lines(_PLACES[name])[0].rstrip(".")


def in_words(name: str) -> str:
    """A strategy with its paper, from the docstrings of its module and its class, which describes its arguments."""
    if name in FLOWER:
        return f"{name}: {in_a_line(name)}\n{inspect.getdoc(class_of(name))}"
    place = _PLACES[name]
    first, *about = _lines(place)
    inside = ["\nAn experiment names the strategy inside by `base` (FedAvg)."] if "strategy : Strategy" in about else []
    return "\n".join([f"{name}: {first.rstrip('.')}", _lines(place.partition(":")[0])[0].rstrip("."), *about, *inside])


def _lines(place: str) -> list[str]:
    return sources.docstring(place).split("\n")
