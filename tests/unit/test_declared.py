"""Arguments are checked by their annotations, and by nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

from fedbn_flwr.declared import checked, declarations
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.registry import STRATEGIES, class_of
from fedbn_flwr.strategies import FedAvg, FedBN, FedProx, FedTAN

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]

Part = Annotated[Sequence[Literal["head", "body"]], MinLen(1), "one or both of 'head' and 'body'"]


@checked
def train(
    lr: Annotated[float, Gt(0)],
    epochs: Annotated[int, Ge(1)] | Literal["auto"] = 1,
    *,
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0,
    clip: Annotated[float, Gt(0)] | None = None,
    share: Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)] = 0,
    mode: Literal["fast", "exact", "slow"] = "fast",
    what: Part = ("head",),
    quiet: bool = False,
    data: Sequence[int] = (),
) -> tuple[Any, ...]:
    """Trains."""
    return lr, epochs, momentum, clip, share, mode, what, quiet, data


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0}, "lr is 0; expected a number > 0"),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number > 0"),
        ({"lr": True}, "lr is True; expected a number > 0"),
        ({"lr": float("nan")}, "lr is nan; expected a number > 0"),
        ({"epochs": 0}, "epochs is 0; expected an integer >= 1 or 'auto'"),
        ({"epochs": 2.0}, "epochs is 2.0; expected an integer >= 1 or 'auto'"),
        ({"epochs": "all"}, "epochs is 'all'; expected an integer >= 1 or 'auto'"),
        ({"momentum": 1}, "momentum is 1; expected a number >= 0 and < 1"),
        ({"clip": 0.0}, "clip is 0.0; expected a number > 0 or None"),
        ({"share": 5.0}, "share is 5.0; expected an integer >= 0 or a number >= 0 and <= 1"),
        ({"mode": "Fast"}, "mode is 'Fast'; expected 'fast', 'exact' or 'slow'"),
        ({"what": []}, "what is []; expected one or both of 'head' and 'body'"),
        ({"what": "head"}, "what is 'head'; expected one or both of 'head' and 'body'"),
        ({"quiet": 1}, "quiet is 1; expected true or false"),
    ],
)
def test_the_error_has_the_argument_its_value_and_what_is_right(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        train(**{"lr": 0.1} | given)
    assert str(error.value) == message


def test_nothing_is_converted() -> None:
    what, data = ["body"], {"not": "checked"}
    found = train(np.float32(0.5), 3, momentum=0, clip=float("inf"), share=7, what=what, data=data)  # type: ignore[arg-type]
    assert found == (np.float32(0.5), 3, 0, float("inf"), 7, "fast", what, False, data)
    assert type(found[0]) is np.float32
    assert found[6] is what
    assert found[8] is data


def test_the_function_itself_refuses_unknown_arguments_and_keeps_its_signature() -> None:
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'rate'"):
        train(rate=1)  # type: ignore[call-arg]
    assert list(inspect.signature(train).parameters)[:2] == ["lr", "epochs"]
    assert train.__doc__ == "Trains."


def test_a_name_that_only_type_checkers_import_ends_no_call() -> None:
    @checked
    def build(kind: Unknown, size: Annotated[int, Ge(0)]) -> int:
        return size

    assert build(None, -1) == -1


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_annotations_of_every_strategy_can_be_read(name: str) -> None:
    for cls in class_of(name).__mro__:
        init = vars(cls).get("__init__")
        if cls.__module__.startswith("fedbn_flwr.") and init is not None:
            others = {"self", "strategy", "options"}
            assert declarations(init) or set(inspect.signature(init).parameters) <= others, cls


def test_a_rule_of_the_user_is_checked_too() -> None:
    class Own(FedAvg):
        def __init__(self, *, share: Annotated[float, Ge(0), Le(1)] = 0.5, **options: Any) -> None:
            super().__init__(**options)

    Own(share=1)
    with pytest.raises(SettingsError, match="share is 2; expected a number >= 0 and <= 1"):
        Own(share=2)
    with pytest.raises(SettingsError, match="min_train_nodes is 'two'; expected a number of nodes"):
        Own(min_train_nodes="two")


@pytest.mark.parametrize("strategy", [FedBN, FedTAN, FedProx])
def test_a_strategy_that_wraps_no_other_says_so(strategy: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=f"{strategy.__name__} takes its arguments by name, such as .*found FedAvg"):
        strategy(FedAvg())
