"""The strategies by name, and the one that an experiment's `strategy:` section describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.extensions import declared, part

from ._flower import FLOWER, FlowerRule
from ._rule import Rule, Traits
from ._wrapper import Wrapper, as_rule


class Registry(Mapping[str, type[Rule]]):
    """The strategies by name: those of this package, and those of extensions, which are imported when they are used."""

    def __init__(self) -> None:
        self.own: dict[str, type[Rule]] = {}

    def __getitem__(self, name: str) -> type[Rule]:
        rule: type[Rule] = self.own[name] if name in self.own else part("strategies", name)
        return rule

    def __iter__(self) -> Iterator[str]:
        return iter({**self.own, **declared("strategies")})

    def __len__(self) -> int:
        return len(list(iter(self)))


STRATEGIES = Registry()

# An experiment file cannot set these: they are objects or functions, or `**options`, which has no value of its own.
_NOT_IN_FILES = {
    "self", "options", "strategy", "train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "selection_rule",
    "arrayrecord_key", "configrecord_key", "weighted_by_key",  # the clients of experiments use Flower's defaults
}  # fmt: skip


def register(names: Mapping[str, Any]) -> Registry:
    """Fill STRATEGIES with the rules among the names of this package."""
    rules = {name: value for name, value in names.items() if isinstance(value, type) and issubclass(value, Rule)}
    STRATEGIES.own.update({name: rule for name, rule in rules.items() if rule not in (Rule, Wrapper)})
    return STRATEGIES


def arguments(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of strategy `name` that an experiment file may set, inherited ones included."""
    return _arguments_of(STRATEGIES[name] if name in STRATEGIES else FLOWER[name].strategy)


def _arguments_of(strategy: type[Strategy]) -> dict[str, inspect.Parameter]:
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


def check_strategy(spec: Mapping[str, Any], section: str = "strategy") -> Mapping[str, Any]:
    """The section; SettingsError if there is no strategy with its name, or with that of its base."""
    name = spec.get("name")
    if not (isinstance(name, str) and (named.is_name(name) or name in FLOWER or name in STRATEGIES)):
        known = did_you_mean(str(name), {*STRATEGIES, *FLOWER})
        raise SettingsError(f"{section}.name={name!r} is not a strategy; {known}, or module:callable for your own")
    if isinstance(base := spec.get("base"), Mapping) and not named.is_name(name):
        check_strategy(base, f"{section}.base")
    return spec


def build_strategy(spec: Mapping[str, Any], section: str = "strategy", **defaults: Any) -> Strategy:
    """The strategy that a section such as `{name: FixBN, freeze_round: 0.5, base: {name: FedAvg}}` describes.

    A strategy that wraps another one takes it from `base`, by default FedAvg. `defaults` are arguments that the file
    may omit; each strategy, a base included, receives those that it accepts. Errors name the keys below `section`.
    """
    check_strategy(spec, section)
    options = dict(spec)
    name = options.pop("name")
    if named.is_name(name):
        cls = named.load(f"{section}.name", name)
        if not isinstance(cls, type):
            return _own(section, name, cls, options, defaults)
        if not issubclass(cls, Strategy):
            raise SettingsError(
                f"{section}.name={name!r} is the class {cls.__name__}; expected a flwr.serverapp.strategy.Strategy"
            )
    elif name in FLOWER:
        cls = FLOWER[name].strategy
        defaults = {**defaults, **FLOWER[name].defaults}
    else:
        cls = STRATEGIES[name]
    known = _arguments_of(cls)
    positional: list[Strategy] = []
    inside = ""  # the name of the base
    if issubclass(cls, Wrapper) and cls.inner is None:
        base = options.pop("base", {"name": "FedAvg"})
        if not isinstance(base, Mapping):
            raise SettingsError(f"{section}.base is {base!r}; expected a strategy, for instance {{name: FedAvg}}")
        inside = str(base.get("name"))
        positional.append(build_strategy(base, f"{section}.base", **defaults))
    for key in options:
        if key not in known:
            hint = "" if key != "base" else f"{name} wraps no other strategy; "
            if inside in (*STRATEGIES, *FLOWER) and key in arguments(inside):
                hint = f"give it to its base: base: {{name: {inside}, {key}: {options[key]}}}; "
            raise SettingsError(
                f"{section}.{key} (= {options[key]!r}) is not an argument of {name}; {hint}{did_you_mean(key, known)}"
            )
        _check_type(section, name, key, options[key], known[key])
    _check_range(section, name, options)
    options = {key: value for key, value in defaults.items() if key in known} | options
    if name in FLOWER:
        _check_values(section, name, options)
    try:
        made = cls(*positional, **options)
    except SettingsError as error:
        raise SettingsError(_at(section, name, options, error)) from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{section} {name} with {options}: {error}") from None
    return FlowerRule(made, robust=FLOWER[name].robust, seed=defaults.get("seed", 0)) if name in FLOWER else made


def _at(section: str, name: str, options: Mapping[str, Any], error: SettingsError) -> str:
    """An error of a strategy's constructor, most of which begin with the argument."""
    key = re.match(r"\w+", str(error))
    return f"{section}.{error}" if key and key[0] in options else f"{section} {name}: {error}"


def _own(
    section: str, name: str, make: Callable[..., Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Strategy:
    """The strategy that a function of the user makes."""
    given = {key: value for key, value in named.accepted(make, defaults).items() if key not in options}
    made = named.call(f"{section}.name", name, **given, **options)
    if not isinstance(made, Strategy):
        raise SettingsError(
            f"{section}.name={name!r} returned a {type(made).__name__}; expected a flwr.serverapp.strategy.Strategy"
        )
    return made


_POSITIVE = ("eta", "eta_l", "tau", "server_learning_rate")  # arguments of Flower's strategies
_BELOW_ONE = ("beta_1", "beta_2", "server_momentum")


def _check_values(section: str, name: str, options: Mapping[str, Any]) -> None:
    """What Flower's strategies would find only in the first round."""
    if name == "FedTrimmedAvg" and not 0 <= (beta := options.get("beta", 0.2)) < 0.5:
        raise SettingsError(f"{section}.beta of {name} is {beta}; expected a share from 0 to below 0.5 of the clients")
    for key, value in options.items():
        if key in _POSITIVE and value <= 0:
            raise SettingsError(f"{section}.{key} of {name} is {value}; expected more than 0")
        if key in _BELOW_ONE and not 0 <= value < 1:
            raise SettingsError(f"{section}.{key} of {name} is {value}; expected 0 to below 1")
    if (q := options.get("q", 0)) < 0:
        raise SettingsError(f"{section}.q of {name} is {q}; expected 0 or more")
    if (count := options.get("num_nodes_to_select", 1)) < 1:
        raise SettingsError(f"{section}.num_nodes_to_select of {name} is {count}; expected 1 or more")
    if (bad := options.get("num_malicious_nodes", 0)) < 0:
        raise SettingsError(f"{section}.num_malicious_nodes of {name} is {bad}; expected 0 or more")


def _check_range(section: str, name: str, options: Mapping[str, Any]) -> None:
    """Flower accepts any fraction, and with fraction_train 0 it trains nothing."""
    for key in ("fraction_train", "fraction_evaluate"):
        share, least = options.get(key, 1.0), "more than 0" if key == "fraction_train" else "0"
        if share == "auto" or not 0 <= share <= 1 or (key == "fraction_train" and not share):
            raise SettingsError(f"{section}.{key} of {name} is {share}; expected {least} to 1")
    for key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if (count := options.get(key, 1)) < (key != "min_evaluate_nodes"):
            raise SettingsError(f"{section}.{key} of {name} is {count}; expected a number of clients, 1 or more")
    if (seconds := options.get("node_timeout", 1)) <= 0:
        raise SettingsError(f"{section}.node_timeout of {name} is {seconds}; expected seconds, more than 0")


def _check_type(section: str, name: str, key: str, value: Any, parameter: inspect.Parameter) -> None:
    """Flower does not validate its arguments: a string given as a fraction would fail only during the run."""
    expected: tuple[type, ...]
    default = parameter.default
    match default:
        case bool():
            expected = (bool,)
        case int():
            expected = (int, float) if "float" in str(parameter.annotation) else (int,)
        case float():
            expected = (int, float) if value != "auto" else (str,)  # the rule checks whether it supports 'auto'
        case str():
            expected = (str,)
        case _:
            return
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise SettingsError(
            f"{section}.{key} of {name} is {value!r}; expected {' or '.join(t.__name__ for t in expected)}, for "
            f"instance {default!r}"
        )


@dataclass(frozen=True)
class Argument:
    name: str
    default: Any  # inspect.Parameter.empty: it has none
    meaning: str  # the first sentence of its description


@dataclass(frozen=True)
class Description:
    """A strategy in words, from its docstrings, its arguments and the traits that it has by default."""

    does: str
    source: str  # the first line of the module's docstring, which cites the paper
    arguments: tuple[Argument, ...]  # without those of FedAvg
    wraps: bool  # it takes the strategy that it extends from `base`
    traits: Traits


def describe(name: str) -> Description:
    cls = STRATEGIES[name] if name in STRATEGIES else FLOWER[name].strategy
    common = set(arguments("FedAvg"))
    meanings = _documented(getattr(cls, "inner", None) or object) | _documented(cls)
    own = [
        Argument(key, parameter.default, meanings.get(key, ""))
        for key, parameter in arguments(name).items()
        if key not in common or cls is STRATEGIES["FedAvg"]
    ]
    return Description(
        does=f"Flower's own: {FLOWER[name].does}" if name in FLOWER else _first_line(cls),
        source=f"flwr.serverapp.strategy.{cls.__name__}" if name in FLOWER else _first_line(inspect.getmodule(cls)),
        arguments=tuple(own),
        wraps=issubclass(cls, Wrapper) and cls.inner is None,
        traits=as_rule(build_strategy({"name": name}, client_learning_rate=0.1)).traits,
    )


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0].rstrip(".")


def _documented(cls: type) -> dict[str, str]:
    """The parameters in the docstrings of a class and its bases, each with its first sentence."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        doc = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, parameters = doc.partition("Parameters\n----------\n")
        for match in re.finditer(r"^([\w, ]+) : .*\n((?:(?:    .*)?\n?)+)", parameters, re.MULTILINE):
            text = " ".join(match[2].split())
            for name in match[1].split(", "):
                found.setdefault(name, re.split(r"(?<=\.) (?=[A-Z])", text)[0])
    return found
