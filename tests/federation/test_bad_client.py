"""One hostile client of five: the run is, bit for bit, that of an absent client, and the log names the client.

Half of the attacks are tried on one rule each; nightly, every attack is tried on every rule, by the strategy's own
`start` and as `fedbn run` does it. docs/results/robustness.md#wrong-replies-and-long-runs has the counts.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import outputs
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedbn_flwr import LocalGrid
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, metrics_in, pack, unpack
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.strategies import FedAvg, FixBN, MeanStatistics
from tests.support.attacks import BAD, Attack, Hostile, Spoil, all_attacks
from tests.support.federations import Arrays, Federations, same
from tests.support.hostile import RULES, cases, judge, kept_log, train
from tests.support.marks import slow_except
from tests.support.smallbatches import FedTAN

Case = tuple[str, str, Attack]  # rule, kind of message, attack
ATTACKS = {attack.name: attack for attack in all_attacks()}
NIGHTLY = pytest.mark.nightly
# A lie of 1e30 overflows in the second moments of Flower's optimisers.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


# One rule for each way in which a reply is read.
SOME = (
    "FedAvg", "Scaffold", "FedBN", "FedBS", "FixBN, frozen from the start", "FedTAN", "HeteroBN",
    "GlobalMomentum of FedTAN", "Flower's FedAdam", "Flower's Krum",
)  # fmt: skip


@functools.cache
def shares() -> dict[str, list[Case]]:
    """Half of the attacks, each on one rule and in one kind of message."""
    able: dict[str, list[Case]] = {}
    for case in cases(SOME):
        able.setdefault(case[2].name, []).append(case)
    found: dict[str, list[Case]] = {rule: [] for rule in SOME}
    for number, those in enumerate(list(able.values())[::2]):
        chosen = those[number % len(those)]
        found[chosen[0]].append(chosen)
    return found


def faults(tried: list[Case], whole: bool = False) -> list[str]:
    found = []
    for rule, kind, attack in tried:
        fate, wrong = judge(rule, kind, attack, whole)
        found += [f"{rule}, {kind}, {attack.name}: {fate}: {each}" for each in wrong]
    return found


@pytest.mark.parametrize("rule", slow_except({"FedAvg", "FixBN, frozen from the start"}, SOME))
def test_a_hostile_client_is_as_good_as_absent(rule: str) -> None:
    assert faults(shares()[rule]) == []


def test_the_counts_of_attacks_are_of_today_s_attacks() -> None:
    """docs/results/robustness.md#wrong-replies-and-long-runs: `python -m tests.support.hostile` counts again."""
    assert {strategy: sum(fates.values()) for strategy, fates in outputs.attacks().items()} == Counter(
        rule for rule, *_ in cases()
    )


@NIGHTLY
@pytest.mark.parametrize("rule", RULES)
def test_every_attack_on_every_rule(rule: str) -> None:
    assert faults(list(cases([rule]))) == []


IN_FILES = [
    ("FedAvg", "train", "first: bytes, npz"),
    ("FedBN", "train", "first: declared, shape 1e30"),
    ("FedAvg", "train", "partition in the config, 10**18"),
    ("FixBN", "evaluate", "accuracy, NaN"),
    ("Flower's FedAdam", "evaluate", "loss, inf"),
    ("FedTAN", protocol.EXCHANGE_QUERY, "first: array, all NaN"),
]


@pytest.mark.parametrize(("rule", "kind", "name"), IN_FILES)
def test_the_files_of_a_run_are_those_of_an_absent_client(rule: str, kind: str, name: str) -> None:
    """History, values of clients and model; the history is valid JSON without NaN."""
    assert faults([(rule, kind, ATTACKS[name])], whole=True) == []


@NIGHTLY
@pytest.mark.parametrize("rule", RULES)
def test_every_attack_on_every_rule_with_files(rule: str) -> None:
    assert faults(list(cases([rule])), whole=True) == []


def of_parts(part: str, value: float) -> Spoil:
    """This value in all arrays of a part of the model, or in the record of a strategy."""

    def spoil(content: RecordDict) -> None:
        name = next(name for name in arrays_in(content) if (name == "arrays") != (part == "record"))
        values, role_of = dict(unpack(content[name])), roles(unpack(content["arrays"]))  # type: ignore[arg-type]
        keys = [key for key in values if part in ("record", role_of[key], key.rpartition(".")[2])]
        assert keys
        content[name] = pack(values | {key: np.full_like(values[key], value) for key in keys})

    return spoil


ABSURD = [("weights", 1e18), ("affine", -1e18), ("running_mean", 1e18), ("running_var", 1e37), ("record", 1e18)]


@pytest.mark.parametrize("rule", ["FedAvg", "FixBN", "Scaffold", "GlobalMomentum", "FedTAN", "Flower's FedAdam"])
@pytest.mark.parametrize(("part", "value"), ABSURD)
def test_an_absurd_reply_is_left_out_without_bounds(rule: str, part: str, value: float) -> None:
    """Finite values with which no client can train in the next round; only the comparison with others shows them."""
    if part == "record" and rule not in ("Scaffold", "GlobalMomentum"):
        pytest.skip("it has no record")
    assert faults([(rule, "train", Attack(f"{part} {value:g}", of_parts(part, value)))]) == []


def test_the_reason_has_the_key_and_the_other_clients_change() -> None:
    found = train("FedAvg", "train", of_parts("running_var", 1e37), whole=False)
    line = found.naming([BAD + 1])[0]
    assert re.search(
        r"left out client 2 \(node 3\): '.*running_var' changed by up to 1e\+37, and by "
        r"0\.\d+ in the median of the other clients; expected at most 1,000 times the median for values this large",
        line,
    ), line


def test_the_error_of_a_round_names_the_largest_value_of_the_model(federation: Federations) -> None:
    """Otherwise each client would seem to have diverged by itself."""
    fed = federation((4, 5), batches=1)
    arrays = dict(unpack(fed.arrays()))
    key = next(iter(arrays))
    arrays[key] = np.full_like(arrays[key], -1e18)
    match = rf"round 1: 0 of 2 .* received a model with values of up to 1e\+18 \('{re.escape(key)}'\): it diverged"
    with LocalGrid(fed.app(), 2) as grid, pytest.raises(RunFailed, match=match):
        FedAvg().start(grid, pack(arrays), num_rounds=1)


def answered(**metrics: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        ((name, record),) = metrics_in(content).items()
        content[name] = MetricRecord({**record, **{key.replace("_", "-"): v for key, v in metrics.items()}})

    return spoil


def without_metrics(content: RecordDict) -> None:
    for name in metrics_in(content):
        del content[name]


PARTITION_ANSWERS: dict[str, Spoil] = {
    "a list": answered(partition_id=[2]),
    "NaN": answered(partition_id=float("nan")),
    "a fraction": answered(partition_id=2.5),
    "10**18": answered(partition_id=10**18),
    "another client's": answered(partition_id=1),
    "a state of a list of rounds": answered(state_round=[1]),
    "a state of round NaN": answered(state_round=float("nan")),
    "no metrics": without_metrics,
}


@pytest.mark.parametrize("name", PARTITION_ANSWERS)
def test_a_run_does_not_begin_with_a_wrong_partition(name: str) -> None:
    """The error names the node; before the first round no client is given up."""
    found = train("FedAvg", protocol.PARTITION_QUERY, PARTITION_ANSWERS[name], whole=True, rounds=(0,))
    assert found.sent
    assert isinstance(found.error, RunFailed), repr(found.error)
    assert f"node {BAD + 1}" in str(found.error) or str([2, BAD + 1]) in str(found.error)


def test_dynamics_are_of_the_arrays_that_the_strategy_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's arrays are those of the only record beside the ones that the strategy requested."""

    def spoil(content: RecordDict) -> None:
        content["other"] = content.pop("arrays")

    monkeypatch.setitem(RULES, "Scaffold, dynamics", ["strategy={name: Scaffold}", "evaluate.dynamics=true"])
    found = train("Scaffold, dynamics", "train", spoil, whole=True)
    assert (found.sent, found.error) == (2, None)
    assert found.model == train("Scaffold, dynamics", "train", None, whole=True, honest=True).model


def test_a_negative_number_of_validation_examples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make the sum of all clients' numbers zero."""
    monkeypatch.setitem(RULES, "validation", ["strategy={name: FedAvg}", "evaluate.validation=0.2"])
    honest = train("validation", "evaluate", None, whole=True, honest=True)
    of_others = [each["validation_examples"] for n, each in honest.lines[-1]["clients"].items() if int(n) != BAD]

    def spoil(content: RecordDict) -> None:
        (metrics,) = metrics_in(content).values()
        del metrics["validation-num-examples"]
        metrics["validation-num_examples"] = -sum(of_others)

    found = train("validation", "evaluate", spoil, whole=True)
    assert found.error is None
    assert len(found.naming([BAD + 1])) == found.sent == 2


# --- strategies that are called without `start` ---


def own_loop(fed: Any, strategy: Any, kind: str, spoil: Spoil | None) -> tuple[Arrays, list[str]]:
    """The model after three rounds of a loop that knows nothing of this library's grids, and the log."""
    app, arrays = Hostile(fed.app(), kind, (1, 3), spoil), fed.arrays()
    with kept_log() as log:
        grid = fed.grid(app)
        for number in (1, 2, 3):
            replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
            arrays, _ = strategy.aggregate_train(number, replies)
    return dict(unpack(arrays)), log


LOOPED: dict[str, tuple[Callable[[], Any], str]] = {
    "FedAvg": (FedAvg, "train"),
    "FedTAN": (FedTAN, "train"),
    "FedTAN's exchange": (FedTAN, protocol.EXCHANGE_QUERY),
    "FedMedian in FixBN": (lambda: FixBN(flower.FedMedian(), freeze_round=1), "train"),
    "FedAdam in MeanStatistics": (lambda: MeanStatistics(flower.FedAdam(eta=0.01)), "train"),
}


@pytest.mark.parametrize("case", LOOPED)
@pytest.mark.parametrize("name", ["first: bytes, npz", "variance: array, one NaN", "num-examples, a list"])
def test_strategies_that_another_loop_calls_have_the_gate(federation: Federations, case: str, name: str) -> None:
    make, kind = LOOPED[case]
    fed = federation((4, 5, 6, 4, 5), batches=1)
    absent, _ = own_loop(fed, make(), kind, None)
    found, log = own_loop(fed, make(), kind, ATTACKS[name].spoil)
    assert same(found, absent)
    assert len([line for line in log if f"node {BAD + 1}" in line]) == 2, log


# The wrapped strategy refuses a reply of which MeanStatistics has the statistics; squares overflow in optimisers.
INSIDE = [
    ("FixBN of FedMedian", "train", "records, more arrays"),
    ("Flower's FedAvgM", "train", "records, arrays under the name config"),
    ("Flower's FedYogi", "train", "first: array, 1e30"),
    ("Flower's QFedAvg", "train", "keys, another order"),
    ("Flower's QFedAvg", "train", "train-loss, missing"),
]


@pytest.mark.parametrize(("rule", "kind", "name"), INSIDE)
def test_what_a_strategy_of_flower_refuses_is_refused_whole(rule: str, kind: str, name: str) -> None:
    assert faults([(rule, kind, ATTACKS[name])]) == []


class MakesNaN(flower.FedAvg):
    def aggregate_train(self, *given: Any) -> Any:
        arrays, metrics = super().aggregate_train(*given)
        assert arrays is not None
        values = {key: value * np.nan if value.ndim == 2 else value for key, value in unpack(arrays).items()}
        return pack(values), metrics


def test_a_model_that_is_not_finite_ends_the_run(federation: Federations) -> None:
    fed = federation((4, 5, 6, 4, 5), batches=1)
    with pytest.raises(
        RunFailed, match=r"round 1: MeanStatistics\(MakesNaN\) made a model that cannot be used: '.*' has .* not finite"
    ):
        own_loop(fed, MeanStatistics(MakesNaN()), "train", None)
