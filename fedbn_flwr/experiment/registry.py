"""The strategies that an experiment's `strategy:` section can name, in words and as objects.

Flower's are used inside `MeanStatistics`: a server optimiser must not step along statistics, since a variance could
become negative, a robust rule must not measure distances by them, and counters are not weights. For robust rules the
statistics are the median of the clients' values instead of their mean, which one malicious client could set to any
value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import named
from fedbn_flwr.declared import check, declarations
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.strategies import MeanStatistics, Rule, Wrapper, _names, as_rule
from fedbn_flwr.trees import Draft, Tree


@dataclass(frozen=True)
class OfFlower:
    """A strategy of Flower that an experiment can name."""

    strategy: type[Strategy]
    does: str
    robust: bool = False  # withstands some malicious clients
    needs: Callable[[int], int] | None = None  # the number of clients for so many malicious ones
    defaults: Tree = field(default_factory=dict)  # where Flower's do not suit the clients here


FLOWER: dict[str, OfFlower] = {
    "FedAdam": OfFlower(flower.FedAdam, "Adam on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedYogi": OfFlower(flower.FedYogi, "Yogi on the server, along the clients' mean change (Reddi et al. 2021)"),
    "FedAdagrad": OfFlower(
        flower.FedAdagrad, "Adagrad on the server, along the clients' mean change (Reddi et al. 2021)"
    ),
    "FedAvgM": OfFlower(flower.FedAvgM, "momentum on the server (Hsu et al. 2019)"),
    "QFedAvg": OfFlower(
        flower.QFedAvg,
        "clients with a higher loss count more, by the exponent q (Li et al. 2020)",
        defaults={"train_loss_key": protocol.TRAIN_LOSS},
    ),
    "FedMedian": OfFlower(flower.FedMedian, "the median of the clients' values (Yin et al. 2018)", True),
    "FedTrimmedAvg": OfFlower(
        flower.FedTrimmedAvg, "the mean without the share beta of values at each end (Yin et al. 2018)", True
    ),
    "Krum": OfFlower(
        flower.Krum,
        "the model that is nearest to its neighbours (Blanchard et al. 2017)",
        True,
        lambda bad: 2 * bad + 3,
    ),
    "MultiKrum": OfFlower(
        flower.MultiKrum,
        "the mean of the models that are nearest to their neighbours (Blanchard et al. 2017)",
        True,
        lambda bad: 2 * bad + 3,
    ),
    "Bulyan": OfFlower(
        flower.Bulyan,
        "models chosen by Krum, and the mean of the values around their median (El Mhamdi et al. 2018)",
        True,
        lambda bad: 4 * bad + 3,
    ),
}

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


# The names of the strategies of this package and of its extensions, which are imported when they are used.
STRATEGIES = (
    *(
        name
        for name, value in vars(_names).items()
        if isinstance(value, type) and issubclass(value, Rule) and value not in (Rule, Wrapper)
    ),
    *declared("strategies"),
)

# An experiment file cannot set these: they are objects or functions, or `**options`, which has no value of its own.
_NOT_IN_FILES = {
    "self", "options", "strategy", "needs", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "selection_rule",
    "arrayrecord_key", "configrecord_key", "weighted_by_key",  # the clients of experiments use Flower's defaults
}  # fmt: skip


def class_of(name: str) -> type[Strategy]:
    strategy: type[Strategy] = getattr(_names, name) if name in STRATEGIES else FLOWER[name].strategy
    return strategy


def arguments(strategy: type[Strategy]) -> dict[str, inspect.Parameter]:
    """The arguments that an experiment file may set, inherited ones included, with what `declared` can check."""
    inner = strategy.wraps if issubclass(strategy, Wrapper) else None
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


def _takes_base(cls: type[Strategy]) -> bool:
    return issubclass(cls, Wrapper) and cls.wraps is None


def check_strategy(spec: Tree, section: str = "strategy") -> Tree:
    """Return the section; SettingsError if its name, or the name of its base, is not a strategy."""
    name = spec.get("name")
    if not (isinstance(name, str) and (named.is_name(name) or name in FLOWER or name in STRATEGIES)):
        known = did_you_mean(str(name), {*STRATEGIES, *FLOWER})
        raise SettingsError(f"{section}.name={name!r} is not a strategy; {known}, or module:callable for your own")
    if isinstance(base := spec.get("base"), Mapping) and not named.is_name(name):
        check_strategy(base, f"{section}.base")
    return spec


def build_strategy(spec: Tree, section: str = "strategy", **defaults: object) -> Strategy:
    """The strategy that a section such as `{name: FixBN, freeze_round: 0.5, base: {name: FedAvg}}` describes.

    The settings have checked its names (`check_strategy`). A strategy that wraps another one takes it from `base`, by
    default FedAvg. `defaults` are arguments that the file may omit; each strategy, a base included, receives those that
    it accepts. Errors name the keys below `section`.
    """
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
    known, limits = arguments(cls), _LIMITS | (_OF_FLOWER if of_flower else {})
    positional: list[Strategy] = []
    inside = ""  # the name of the base
    if _takes_base(cls):
        base = options.pop("base", {"name": "FedAvg"})
        if not isinstance(base, Mapping):
            raise SettingsError(f"{section}.base is {base!r}; expected a strategy, for instance {{name: FedAvg}}")
        inside = str(base.get("name"))
        positional.append(build_strategy(base, f"{section}.base", **defaults))
    for key in options:
        if key not in known:
            hint = "" if key != "base" else f"{name} wraps no other strategy; "
            if inside in (*STRATEGIES, *FLOWER) and key in arguments(class_of(inside)):
                hint = f"give it to its base: base: {{name: {inside}, {key}: {options[key]}}}; "
            raise SettingsError(
                f"{section}.{key} (= {options[key]!r}) is not an argument of {name}; "
                f"{hint}{did_you_mean(key, [*known, 'name', *(['base'] if inside else [])])}"
            )
        # The constructor of a rule checks the others itself.
        declared: Any = known[key].annotation
        if declared is not None and (key in limits or not issubclass(cls, Rule)):
            if key in limits:  # in place of the limits that it has in Python
                declared = Annotated[getattr(declared, "__origin__", declared), *limits[key]]
            check(f"{section}.{key} of {name}", options[key], declared)
    options = {key: value for key, value in defaults.items() if key in known} | options
    try:
        made = cls(*positional, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{section}: {error}") from None
    if of_flower is None:
        return made
    statistics: Literal["median", "mean"] = "median" if of_flower.robust else "mean"
    return MeanStatistics(as_rule(made, defaults.get("seed", 0)), statistics=statistics)


def personalises(spec: Tree) -> bool:
    """Whether clients of a strategy keep a part of the model; not if it cannot be made, for which its run has an error.

    A user's strategy may need packages on the server that a node lacks.
    """
    with suppress(Exception):
        return bool(as_rule(build_strategy(spec)).traits.local)
    return False


def in_a_line(name: str) -> str:
    """What a strategy does."""
    return f"Flower's own: {FLOWER[name].does}" if name in FLOWER else _first_line(class_of(name))


def in_words(name: str) -> str:
    """A strategy with its paper, from the docstrings of its module and its class, which describes its arguments."""
    cls = class_of(name)
    about = (inspect.getdoc(cls) or "").partition("\n")[2]
    inside = "\n\nAn experiment names the strategy inside by `base` (FedAvg)." if _takes_base(cls) else ""
    return f"{name}: {in_a_line(name)}\n{_first_line(inspect.getmodule(cls))}\n{about}{inside}"


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0].rstrip(".")
