"""The strategies by name, and the one that an experiment's `strategy:` section describes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError, did_you_mean

from ._rule import Rule
from ._wrapper import Wrapper

STRATEGIES: dict[str, type[Rule]] = {}

# An experiment file cannot set these: they are objects or functions, or `**options`, which has no value of its own.
_NOT_IN_FILES = {"self", "options", "strategy", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"}


def register(names: Mapping[str, Any]) -> dict[str, type[Rule]]:
    """Fill STRATEGIES with the rules among the names of this package."""
    rules = {name: value for name, value in names.items() if isinstance(value, type) and issubclass(value, Rule)}
    STRATEGIES.update({name: rule for name, rule in rules.items() if rule not in (Rule, Wrapper)})
    return STRATEGIES


def arguments(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of strategy `name` that an experiment file may set, inherited ones included."""
    strategy = STRATEGIES[name]
    inner = strategy.inner if issubclass(strategy, Wrapper) else None
    # A rule that creates the strategy it wraps passes its options on to that strategy, not to its own base class.
    classes = strategy.__mro__ if inner is None else (strategy, *inner.__mro__)
    accepted: dict[str, inspect.Parameter] = {}
    for cls in classes:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters
        accepted |= {key: p for key, p in parameters.items() if key not in accepted and key not in _NOT_IN_FILES}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break  # without **options it passes no arguments on
    return accepted


def build_strategy(spec: Mapping[str, Any], **defaults: Any) -> Strategy:
    """The strategy that a section such as `{name: FixBN, freeze_round: 0.5, base: {name: FedAvg}}` describes.

    A strategy that wraps another one takes it from `base`, by default FedAvg. `defaults` are arguments that the file
    may omit; each strategy, a base included, receives those that it accepts.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if name not in STRATEGIES:
        raise SettingsError(f"strategy.name={name!r} is not a strategy; {did_you_mean(str(name), STRATEGIES)}")
    cls = STRATEGIES[name]
    known = arguments(name)
    positional: list[Strategy] = []
    if issubclass(cls, Wrapper) and cls.inner is None:
        base = options.pop("base", {"name": "FedAvg"})
        if not isinstance(base, Mapping):
            raise SettingsError(f"strategy.base is {base!r}; expected a strategy, for instance {{name: FedAvg}}")
        positional.append(build_strategy(base, **defaults))
    for key in options:
        if key not in known:
            hint = "" if key != "base" else f"{name} wraps no other strategy; "
            raise SettingsError(
                f"strategy.{key} (= {options[key]!r}) is not an argument of {name}; {hint}{did_you_mean(key, known)}"
            )
        _check_type(name, key, options[key], known[key].default)
    options = {key: value for key, value in defaults.items() if key in known} | options
    try:
        return cls(*positional, **options)
    except SettingsError as error:
        raise SettingsError(f"strategy {name}: {error}") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"strategy {name} with {options}: {error}") from None


def _check_type(name: str, key: str, value: Any, default: Any) -> None:
    """Flower does not validate its arguments: a string given as a fraction would fail only during the run."""
    expected: tuple[type, ...]
    match default:
        case bool():
            expected = (bool,)
        case int():
            expected = (int,)
        case float():
            expected = (int, float) if value != "auto" else (str,)  # the rule checks whether it supports 'auto'
        case str():
            expected = (str,)
        case _:
            return
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise SettingsError(
            f"strategy.{key} of {name} is {value!r}; expected {' or '.join(t.__name__ for t in expected)}, for "
            f"instance {default!r}"
        )


def describe_strategies() -> dict[str, str]:
    """The first line of each strategy's module docstring, which cites the paper."""
    lines = {}
    for name, cls in STRATEGIES.items():
        module = inspect.getmodule(cls)
        lines[name] = (inspect.getdoc(module) or "").split("\n")[0]
    return lines
