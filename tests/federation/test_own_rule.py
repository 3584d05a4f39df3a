"""The strategies of docs/write-a-strategy.md, from the page's own code; and how many modules a round executes."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, MetricRecord
from flwr.serverapp.strategy import FedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr import BNClient, LocalGrid, Role, client_app, roles, run
from fedbn_flwr.client.rule import BY_KEY, ClientRule, Key, rule_of, rules_for
from fedbn_flwr.errors import RoundSkipped, RunFailed, SettingsError
from fedbn_flwr.experiment.registry import class_of
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import with_config
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.server.base import Base
from fedbn_flwr.server.round import Rule
from fedbn_flwr.strategies import (
    HBN,
    FedAvg,
    FedBN,
    FedProx,
    FixBN,
    GlobalMomentum,
    MeanStatistics,
    Scaffold,
    Traits,
    Wrapper,
    broken_guarantees,
    mean_is_enough,
    restore,
    state_of,
)
from tests.support.command import FEDBN, ROOT, python, python_blocks
from tests.support.federations import Federations, failing, near, same

PAGE, TEST = "# perstep.py", "# test_perstep.py"  # the first lines of their code
GUIDE = (ROOT / "docs" / "write-a-strategy.md").read_text()
REFERENCE = (ROOT / "docs" / "strategy-reference.md").read_text()
BLOCKS = python_blocks(GUIDE + REFERENCE)


def code(first_line: str) -> str:
    (found,) = [block for block in BLOCKS if block.startswith(first_line)]
    return found


@pytest.fixture
def per_step() -> Iterator[Any]:
    """The documented strategy, its client rule registered during a test."""
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(code(PAGE), PAGE, "exec", dont_inherit=True), scope)
    yield scope["PerStep"]
    BY_KEY.pop("fedbn.steps", None)


def test_the_page_s_other_code_runs(federation: Federations) -> None:
    """In the order of the pages."""
    page: dict[str, Any] = {"ClientRule": ClientRule, "Key": Key}
    others = [block for block in BLOCKS if not block.startswith((PAGE, TEST))]
    assert len(others) == 4
    for block in others:
        exec(block, page)
    fed = federation((8, 12), steps=2)
    assert same(after(fed, page["Proximal"](mu=0.5), 2), after(fed, FedProx(proximal_mu=0.5), 2))
    assert same(after(fed, page["Proximal"](mu=0), 2), after(fed, FedAvg(), 2))
    for key in ("fedbn.mu", "fedbn.smooth"):
        BY_KEY.pop(key)


@pytest.mark.slow
def test_the_page_s_test_passes_and_finds_a_strategy_that_is_wrong(tmp_path: Path) -> None:
    run_it = (
        "from pathlib import Path; import test_perstep as page; page.test_with_equal_steps_it_is_fedavg(Path('out'))"
    )
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder, text in (
        (right, code(PAGE)),
        (wrong, code(PAGE).replace("self.memory.tau * mean", "2 * self.memory.tau * mean")),
    ):
        folder.mkdir()
        (folder / "perstep.py").write_text(text)
        (folder / "test_perstep.py").write_text(code(TEST))
    done = python(run_it, cwd=right)
    assert done.returncode == 0, done.stderr
    assert "AssertionError" in python(run_it, cwd=wrong).stderr


def test_the_page_s_first_strategy_counts_all_clients_equally(federation: Federations) -> None:
    page: dict[str, Any] = {}
    exec(code("# equal.py"), page)
    fed = federation((8, 24), steps=2)
    before = unpack(fed.arrays())
    clients = (BNClient(copy.deepcopy(fed.model), data, lr=0.1, steps=2) for data in fed.data)
    ends = [client.train_round(before, {}).arrays for client in clients]
    near(after(fed, page["Equal"]()), {key: (ends[0][key] + ends[1][key]) / 2 for key in before}, rtol=1e-6, atol=1e-7)


class WithState(FedAvg):
    traits = Traits(client_memory=("their own step sizes",))


class WithRecord(FedAvg):
    traits = Traits(records={"control": "weighted"})


class OwnWrapper(Wrapper):
    traits = Traits(client_memory=("their own step sizes",))


def test_a_strategy_with_traits_of_its_own_trains_and_its_records_must_come_back(federation: Federations) -> None:
    fed = federation((8, 12), steps=2)
    for rule in (WithState(), OwnWrapper(FedAvg())):
        rule.start(fed.grid(), fed.arrays(), num_rounds=2)
    with pytest.raises(RunFailed, match="'control'"):
        WithRecord().start(fed.grid(), fed.arrays(), num_rounds=1)


def test_with_unequal_steps_it_is_the_formula(federation: Federations, per_step: Any) -> None:
    """p = (8, 16) / 24, tau_i = 1 and 4: tau = 3; w + 3 * sum_i p_i (w_i - w) / tau_i."""
    fed = federation((8, 16), dtype=torch.float64)

    def make(context: Context) -> BNClient:
        partition = int(context.node_config["partition-id"])
        return BNClient(copy.deepcopy(fed.model), fed.data[partition], lr=0.1, steps=(1, 4)[partition], context=context)

    rule = per_step(fraction_evaluate=0.0)
    found = unpack(rule.start(LocalGrid(client_app(make), 2), fed.arrays(), num_rounds=1).arrays)
    assert rule.notes() == {"tau": pytest.approx(3.0, rel=1e-15)}
    before = unpack(fed.arrays())
    ends = [
        BNClient(copy.deepcopy(fed.model), fed.data[i], lr=0.1, steps=(1, 4)[i]).train_round(before, {}).arrays
        for i in (0, 1)
    ]
    for key, role in roles(before).items():
        one, two = (end[key] - before[key] for end in ends)
        move = one / 3 + two * 2 / 3 if role is Role.STATISTICS else 3 * (one / 3 / 1 + two * 2 / 3 / 4)
        np.testing.assert_allclose(found[key], before[key] + move, rtol=1e-12, atol=1e-14, err_msg=key)


def test_it_composes_and_is_saved(federation: Federations, per_step: Any) -> None:
    fed = federation((8, 12), steps=2, momentum=0.9)
    rule = GlobalMomentum(FixBN(per_step(), freeze_round=1))
    models: list[Any] = []
    rule.start(fed.grid(), fed.arrays(), num_rounds=2, evaluate_fn=lambda _, arrays: models.append(unpack(arrays)))
    assert models[1]["1.running_mean"].tobytes() == models[2]["1.running_mean"].tobytes()
    other = GlobalMomentum(FixBN(per_step(), freeze_round=1))
    other.begin(2, fed.arrays())
    restore(other, state_of(rule))
    assert other.notes() == rule.notes() == {"freeze_round": 1, "frozen": ["statistics"], "tau": 2.0}


def test_a_client_without_the_client_rule_refuses_the_message(federation: Federations, per_step: Any) -> None:
    BY_KEY.pop("fedbn.steps")
    fed = federation()
    with pytest.raises(RunFailed, match=r"asks for 'fedbn\.steps' .* Import the module of its client rule"):
        per_step().start(fed.grid(), fed.arrays(), num_rounds=1)


def rules_of(text: str, folder: Path, *configs: str) -> subprocess.CompletedProcess[str]:
    """The client rules that messages select in a new process, one message after the other."""
    script = (
        "from flwr.app import Context, RecordDict\nfrom fedbn_flwr.client.rule import rules_for\n"
        "from fedbn_flwr.experiment.node import make_client\n"
        f"context = Context(0, 1, {{'partition-id': 0}}, RecordDict(), {{'experiment': {text!r}, 'set': ''}})\n"
        f"for config in ({', '.join(configs)},):\n"
        "    make_client(context, config)\n    print([rule.__name__ for rule in rules_for(config)])\n"
    )
    return python(script, cwd=folder)


@pytest.mark.slow
def test_the_page_s_commands_print_what_it_shows(tmp_path: Path) -> None:
    for name in ("equal", "perstep"):
        (tmp_path / f"{name}.py").write_text(code(f"# {name}.py"))
    found, figures = "", r"\] (\w+-\w+): 3 rounds in \S+ s  accuracy ([\d.]+)"
    for number, command in enumerate(commands := re.findall(r"^fedbn (run .*)$", GUIDE, re.MULTILINE)):
        done = python(FEDBN, *shlex.split(command), "--out", f"out{number}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found += done.stdout + done.stderr
    ran, shown = (dict(re.findall(figures, text)) for text in (found, GUIDE))
    assert len(commands) == 3
    assert [*shown] == ["equal-Equal", "perstep-PerStep"]
    for label, accuracy in shown.items():
        assert float(ran[label]) == pytest.approx(float(accuracy), abs=0.02)


@pytest.mark.slow
def test_a_file_and_a_line_extend_the_package_by_both_halves(tmp_path: Path) -> None:
    for folder in ("strategies", "fedbn_flwr"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    own = code(PAGE).replace("from fedbn_flwr.strategies import", "from .fedavg import")
    (tmp_path / "strategies" / "perstep.py").write_text(own)
    names, last = tmp_path / "strategies" / "_names.py", "from .standalone import Standalone as Standalone\n"
    names.write_text(names.read_text().replace(last, f"{last}from .perstep import PerStep as PerStep\n"))

    def stdout(code: str, *words: str) -> str:
        done = python(code, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = "from fedbn_flwr.commands.cli import main; main()"
    assert "FedAvg of each client's change per local step" in stdout(command, "list", "strategies", "PerStep")
    client = "from fedbn_flwr.client.rule import rules_for; print(rules_for({'fedbn.steps': True}))"
    assert stdout(client) == "[<class 'fedbn_flwr.strategies.perstep.PerStepClient'>]\n"


# --- what goes wrong without a word in a rule of one's own ---


def after(fed: Any, rule: Any, rounds: int = 1, **options: Any) -> dict[str, np.ndarray]:
    arrays = rule.start(fed.grid(**options), fed.arrays(), num_rounds=rounds).arrays
    return {key: value.astype(np.float64) for key, value in unpack(arrays).items()}


def test_bounds_apply_to_a_combine_of_its_own(federation: Federations, per_step: Any) -> None:
    fed, bounds = federation((8, 12), steps=3, lr=50.0), {"clip_norm": 0.01}
    rule = per_step(bounds=bounds)
    found, before = after(fed, rule), unpack(fed.arrays())
    trained = [key for key, role in roles(before).items() if role in (Role.WEIGHTS, Role.AFFINE)]
    moved = sum(float(np.square(found[key] - before[key]).sum()) for key in trained)
    assert 0 < moved <= 0.01**2 * (1 + 1e-4)
    assert rule.notes() == {"bounds": bounds, "tau": 3.0}


class Equal(FedAvg):
    """All clients count equally."""

    @mean_is_enough  # a mistake: a mean is weighted already
    def weights(self, round: Any, replies: Any) -> list[float]:
        return [1.0] * len(replies)


class FirstOnly(Wrapper):
    def weights(self, round: Any, replies: Any) -> list[float]:
        return [1.0] + [0.0] * (len(replies) - 1)


class Largest:
    """A hook in a class that is no rule."""

    def combine(self, round: Any, replies: Any, weights: Any) -> Any:
        return replies[-1].arrays


class Marked(FedAvg):
    @mean_is_enough
    def after_round(self, round: Any, replies: Any, weights: Any) -> None:
        pass


class Harmless(FedAvg):
    @mean_is_enough
    def combine(self, round: Any, replies: Any, weights: Any) -> Any:
        return super().combine(round, replies, weights)


def own(name: str, *bases: type, **hooks: Any) -> Any:
    """A rule of this name, with functions for hooks."""
    return type(name, bases, hooks)()


# Rules, and the hook for which they need the replies of single clients, if any: a mark holds for its hook alone.
SINGLE: dict[str, tuple[Callable[[], Any], str | None]] = {
    "a marked hook": (Harmless, None),
    "a marked hook that is inherited": (lambda: own("Inherits", Marked), None),
    "another hook": (lambda: own("AddsHook", Harmless, after_round=lambda *given: None), "AddsHook has after_round"),
    "a marked one again": (lambda: own("Own", Harmless, combine=lambda *a: Harmless.combine(*a)), "Own has combine"),
    "incoming": (lambda: own("Reads", FedAvg, incoming=lambda self, round, messages: messages), "Reads has incoming"),
    "a mixin's": (lambda: own("FromMixin", Largest, FedAvg), "FromMixin has combine"),
    "a mixin's, beside a marked one": (lambda: own("InheritsMixin", Largest, Marked), "InheritsMixin has combine"),
    "a mixin's, in a rule that breaks": (
        lambda: own("BreaksMore", Largest, FedAvg, breaks={"colour": "fades"}), "BreaksMore has combine"
    ),
    "weights, though marked": (Equal, "Equal has weights"),
    "weights, inside": (lambda: FixBN(own("Inherits", Equal), freeze_round=1), "Inherits has weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", declared("strategies"))
def test_uses_of_single_replies_are_refused_where_there_is_only_their_mean(name: str, per_step: Any) -> None:
    around: Any = class_of(name)
    inside = (lambda: FixBN(per_step(), freeze_round=1), "PerStep has problem")
    for make, says in (*SINGLE.values(), (per_step, "PerStep has problem"), inside):
        with nullcontext() if says is None else pytest.raises(SettingsError, match=rf"{says}\(\) of its own"):
            around(make())


@pytest.mark.parametrize("inside", [FlowerFedAvg, lambda: MeanStatistics(FedAdam())])
def test_weights_of_its_own_are_refused_around_what_does_not_use_them(inside: Callable[[], Any]) -> None:
    FirstOnly(FedAvg())
    with pytest.raises(SettingsError, match="does not report the weights of its mean, and FirstOnly has others"):
        FirstOnly(inside())


# --- mistakes of a strategy's author ---


def test_traits_must_be_traits() -> None:
    with pytest.raises(TypeError, match=r"^Bad.traits is a dict; expected Traits\(\.\.\.\)$"):
        type("Bad", (FedAvg,), {"traits": {"kept": "last"}})


@pytest.mark.parametrize(
    "given", [[1.0], {1: 1.0, 2: 1.0}, [1.0, -1.0], [1.0, np.nan], [0.0, 0.0], ["1", "2"], None, 1.0]
)
def test_what_weights_returns_is_checked(given: Any, federation: Federations) -> None:
    rule = type("PerStep", (FedAvg,), {"weights": lambda self, round, replies: given})
    words = "for 2 replies; expected a number for each, zero or more, and one above zero"
    with pytest.raises(RunFailed, match=rf"^PerStep\.weights returned {re.escape(shown(given))} {words}$"):
        after(federation((8, 12)), FixBN(rule(), freeze_round=1))


def test_a_key_that_combine_leaves_out_keeps_its_value_with_a_warning(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    class WithoutBias(FedAvg):
        def combine(self, round: Any, replies: Any, weights: Any) -> Any:
            return {key: value for key, value in super().combine(round, replies, weights).items() if key != "1.bias"}

    fed = federation((8, 12))
    found = after(fed, WithoutBias(), 2)
    np.testing.assert_array_equal(found["1.bias"], unpack(fed.arrays())["1.bias"])
    text = "WithoutBias.combine doesn't return 1.bias: what was sent stays"
    assert [each.message for each in flower_log.records].count(text) == 1


class SaysMore(ClientRule):
    keys: ClassVar[Any] = {"says-more": Key("true", "reply with what the strategy does not expect")}

    def finish(self, memo: Any, steps: int, metrics: Any, records: Any) -> None:
        metrics |= {"tau": 3, "optimizer": "sgd"}
        records["forgotten"] = {"0.bias": np.zeros(3)}


def test_a_metric_that_is_no_number_and_a_record_that_is_not_declared_are_dropped_with_a_warning(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    rule = type("AsksForMore", (FedAvg,), {"config": lambda self, round: {"says-more": True}})()
    result = rule.start((fed := federation((8, 12))).grid(), fed.arrays(), num_rounds=2)
    assert result.train_metrics_clientapp[2]["tau"] == 3
    lines = [each.message for each in flower_log.records]
    assert lines.count("the metric 'optimizer' is a str and isn't sent; expected a number or a list of them") == 1
    dropped = "the clients' record 'forgotten' is dropped: the strategy's traits.records don't declare it"
    assert lines.count(dropped) == 1


class Fades(FedAvg):
    breaks = {"colour": "fades"}


class Dyes(Wrapper):
    restores = frozenset({"colour"})


class NeedsColour(Wrapper):
    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, {"colour": "{outer} needs its colour; wrap it: {outer}(Dyes({inside}()))"})


def test_a_guarantee_of_its_own_is_broken_and_restored() -> None:
    NeedsColour(FedAvg())
    NeedsColour(FixBN(Dyes(FixBN(Fades(), freeze=["affine"]))))
    words = "Fades fades, and NeedsColour needs its colour; wrap it: NeedsColour(Dyes(Fades()))"
    with pytest.raises(SettingsError, match=f"^{re.escape(words)}$"):
        NeedsColour(FixBN(Fades()))


class PaleMedian(MeanStatistics):
    breaks = {"colour": "fades"}


def test_what_an_argument_breaks_adds_to_what_the_class_declares() -> None:
    rule = PaleMedian(FedAvg(), statistics="median")
    assert broken_guarantees(rule).keys() >= {"colour", "mean"}
    with pytest.raises(SettingsError, match="fades, and NeedsColour needs its colour"):
        NeedsColour(rule)


def test_messages_pass_from_the_inside_out_and_replies_from_the_outside_in(federation: Federations) -> None:
    """The records are added last: in the second round the momentum is in no message that a hook sees."""
    seen: list[str] = []

    class Noting(Wrapper):
        def __init__(self, strategy: Any, name: str) -> None:
            super().__init__(strategy)
            self.name = name

        def config(self, round: Any) -> dict[str, Any]:
            seen.append(f"config {self.name} {'outer' in round.config}")
            return {self.name: True, "nearest": self.name}

        def outgoing(self, round: Any, messages: Any) -> Any:
            assert not any("momentum" in message.content for message in messages)
            seen.append(f"outgoing {self.name} {round.config['nearest']}")
            return [with_config(message, {"last": self.name}) for message in messages]

        def incoming(self, round: Any, messages: Any) -> Any:
            seen.append(f"incoming {self.name}")
            return messages

        def accepted(self, round: Any, replies: Any) -> Any:
            seen.append(f"accepted {self.name} {len(replies)}")
            return replies

    fed = federation((8, 12), momentum=0.9)
    rule = Noting(GlobalMomentum(Noting(FedAvg(), "inner")), "outer")
    grid, arrays = fed.grid(), fed.arrays()
    rule.begin(2, arrays)
    for number in (1, 2):
        seen.clear()
        messages = rule.configure_train(number, arrays, ConfigRecord(), grid)
        assert [("momentum" in each.content, each.content["config"]["last"]) for each in messages] == [
            (number == 2, "outer")
        ] * 2
        arrays, _ = rule.aggregate_train(number, grid.send_and_receive(messages))
        assert arrays is not None
    assert seen == [
        *("config outer False", "config inner True", "outgoing inner inner", "outgoing outer inner"),
        *("incoming outer", "incoming inner", "accepted inner 2", "accepted outer 2"),
    ]


def test_evaluation_leaves_the_attendance_of_training_as_it_is(federation: Federations) -> None:
    """Client 1 does not train, and client 0 is not evaluated."""
    fed, bad = federation((8, 12, 6)), 1

    app = failing(fed, lambda client, config: client == bad, OSError("its memory is full"))
    rule, grid, arrays = FixBN(FedAvg(), freeze_round=1), fed.grid(app), fed.arrays()
    rule.begin(1, arrays)
    rule.aggregate_train(1, grid.send_and_receive(rule.configure_train(1, arrays, ConfigRecord(), grid)))
    bad = 0
    rule.aggregate_evaluate(1, grid.send_and_receive(rule.configure_evaluate(1, arrays, ConfigRecord(), grid)))
    assert (rule.base.training.left, rule.base.evaluation.left) == ([1, 3], [2, 3])
    left_out = rule.base.training.left_out, rule.base.evaluation.left_out
    assert [[text[:17] for text in each] for each in left_out] == [["node 2: client 1 "], ["client 0 (node 1)"]]


class EverySecond(Wrapper):
    """Skips the rounds with odd numbers."""

    def incoming(self, round: Any, messages: Any) -> Any:
        if round.number % 2:
            raise RoundSkipped("its number is odd")
        return messages


def test_a_skipped_round_keeps_the_model_and_the_run_goes_on(federation: Federations) -> None:
    fed = federation((8, 12))
    start = fed.arrays()
    rule = EverySecond(FedAvg())
    result = rule.start(fed.grid(), start, num_rounds=3)
    assert [dict(each).get("skipped") for each in result.train_metrics_clientapp.values()] == [1, None, 1]
    assert not rule.base.training.left, "the last round used no reply"
    # Nothing is drawn, so the second round trains as the first one of another run.
    assert same(unpack(result.arrays), unpack(FedAvg().start(fed.grid(), start, num_rounds=1).arrays))


class Passes(FedAvg):
    def configure_train(self, *given: Any) -> Any:
        return super().configure_train(*given)


class PassesAround(Wrapper):
    def configure_train(self, *given: Any) -> Any:
        return super().configure_train(*given)


@pytest.mark.parametrize(
    "make", [lambda: FixBN(Passes(), freeze_round=2), lambda: MeanStatistics(PassesAround(FedAdam()))]
)
def test_a_configure_train_of_its_own_inside_another_is_refused(make: Callable[[], Any]) -> None:
    """The rounds of a chain are made by its outermost rule, which calls hooks of the others only."""
    with pytest.raises(SettingsError, match=r"has configure_train\(\) of its own, .* config keys from config\(\)"):
        make()


def test_the_traits_of_a_strategy_add_to_those_of_the_strategy_inside() -> None:
    inside = FedBN(kept=["last"], global_norm="initial")
    traits = OwnWrapper(GlobalMomentum(inside)).traits
    assert traits.client_memory == ("their own batch norm", "their own arrays", "their own step sizes")
    assert (traits.local, traits.sent_back) == (inside.traits.local, False)
    assert (traits.steps, traits.records) == ({"momentum"}, {"momentum": "weighted"})
    assert HBN(kept=["last"]).traits.client_memory == ("their own alpha", "their own arrays")
    assert FixBN(Scaffold(), freeze_round=1).traits.client_memory == ("their control variates",)


class Both(FedBN, Scaffold):
    """Two strategies in one."""


def test_a_strategy_with_two_bases_has_the_traits_of_both(federation: Federations) -> None:
    assert Both.traits.client_memory == ("their control variates", "their own batch norm")
    assert (Both.traits.local, Both.traits.records) == (FedBN.traits.local, Scaffold.traits.records)
    after(federation((8, 12)), Both(), 2)


def test_traits_that_are_added_twice_count_once() -> None:
    own = Traits(client_memory=("their step sizes",))
    again = type("Again", (FedBN,), {"traits": FedBN.traits | own}).traits
    assert again == FedBN.traits | own
    assert again.client_memory == ("their own batch norm", "their step sizes")
    assert again | again == again


@pytest.mark.parametrize("options", [{"kept": ["1"]}, {"statistics": "pooled"}, {}])
def test_traits_that_a_constructor_replaces_are_an_error(options: Any, federation: Federations) -> None:
    class Replaces(FedAvg if options else FedBN):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(**options)
            self.traits = Traits(client_memory=("their step sizes",))

    with pytest.raises(SettingsError, match=r"^Replaces.__init__ replaces self.traits; extend them: self.traits \|="):
        after(federation((8, 12)), Replaces())


MADE = "^round 1: Broken made a model that cannot be used: "


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: None, r"^Broken\.combine returned None; expected the new model, a dict of arrays$"),
        (
            lambda model: {"0.weight": model["0.weight"] * np.nan},
            f"{MADE}'0.weight' has .* values that are not finite; bound the replies",
        ),
        (
            lambda model: {"0.weight": model["0.weight"].astype(np.float64)},
            f"{MADE}'0.weight' is float64; the server sent float32",
        ),
        (
            lambda model: {"0.weight": model["0.weight"].tolist()},
            rf"{MADE}'0.weight' is list of shape \(4, .*\); expected an array of shape \(4, ",
        ),
        (
            lambda model: {"0.weight": model["0.weight"][:1]},
            rf"{MADE}'0.weight' is ndarray of shape \(1, .*\); expected an array of shape \(4, ",
        ),
        (lambda model: {"0.wieght": np.zeros(1)}, rf"{MADE}it has '0\.wieght', which the clients' model lacks"),
    ],
)
def test_a_model_that_no_client_could_load_ends_the_run_by_the_rule_s_name(
    change: Callable[[Any], Any], words: str, federation: Federations
) -> None:
    def combine(self: Any, *given: Any) -> Any:
        model = FedAvg.combine(self, *given)
        changed = change(model)
        return changed if changed is None else {**model, **changed}

    with pytest.raises(RunFailed, match=words):
        after(federation((8, 12)), type("Broken", (FedAvg,), {"combine": combine})())


def test_a_memory_without_the_state_of_its_base_is_an_error() -> None:
    own = {"Memory": type("Memory", (), {"x": 0})}
    with pytest.raises(TypeError, match=r"^Mine.Memory lacks .* of FedAvg; write `class Memory\(FedAvg.Memory\):`$"):
        type("Mine", (FedAvg,), own)
    with pytest.raises(TypeError, match=r"^Mine.Memory lacks the state of Scaffold; write"):
        type("Mine", (FedBN, Scaffold), {"Memory": dataclass(type("Memory", (FedAvg.Memory,), {}))})


def test_a_memory_that_cannot_be_saved_is_an_error_before_training(federation: Federations) -> None:
    class Locked(FedAvg):
        @dataclass
        class Memory(FedAvg.Memory):
            lock: Any = field(default_factory=Lock)

    with pytest.raises(SettingsError, match=r"^Locked\.Memory cannot be saved: .*lock"):
        after(federation((8, 12)), Locked())


class Late(FedAvg):
    class Memory(FedAvg.Memory):
        seen: Any = None

    memory: Any

    def after_round(self, round: Any, replies: Any, weights: Any) -> None:
        self.memory.seen = Lock()


def test_a_memory_that_cannot_be_saved_after_a_round_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"round 1: the state of the strategy cannot be saved: .*seen is a lock"):
        run("quick", strategy=Late, rounds=2, out=tmp_path)


def test_an_attribute_that_a_memory_does_not_declare_is_named(federation: Federations) -> None:
    class Mistyped(FedAvg):
        def after_round(self, round: Any, replies: Any, weights: Any) -> None:
            self.memory.swich_round = 2  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match=r"^Base\.Memory doesn't declare 'swich_round'; it has switch_round, "):
        after(federation((8, 12)), Mistyped())


def test_a_memory_needs_no_decorator(federation: Federations) -> None:
    class Counting(FedAvg):
        class Memory(FedAvg.Memory):
            rounds: int = 0

        memory: Any

        def after_round(self, round: Any, replies: Any, weights: Any) -> None:
            self.memory.rounds += 1

    fed = federation((8, 12))
    rule, other = Counting(), Counting()
    after(fed, rule, 2)
    other.begin(2, fed.arrays())
    restore(other, state_of(rule))
    assert other.memory.rounds == 2


class Noted(ClientRule):
    """Keeps arrays under names that rules of the library would choose, draws at the end, and reports."""

    keys = {"noted": Key("true", "for this test")}

    def finish(self, memo: Any, steps: int, metrics: dict[str, Any], records: Any) -> None:
        for name in ("momentum", "control", "local"):
            self.local.state.save(name, {"w": np.ones(2)})
        metrics |= {"drawn": torch.rand(2), "loss": 0.5, "accuracy": np.float32(0.25), "many": [1, True], "auc": 0.75}
        metrics |= {"text": "no number", "ragged": [[1], [1, 2]], "none": None}
        metrics["free"] = torch.ones((), dtype=torch.bfloat16, requires_grad=True)


class Notes(FedAvg):
    def config(self, round: Any) -> dict[str, Any]:
        return {"noted": True}

    def after_round(self, round: Any, replies: Any, weights: Any) -> None:
        self.seen = [dict(reply.metrics) for reply in replies]


@pytest.mark.parametrize("rule", [FedAvg, Scaffold])
def test_arrays_that_it_keeps_on_a_client_are_apart_from_the_library_s(rule: Any, federation: Federations) -> None:
    fed = federation((8, 12), steps=2, momentum=0.9, keep_momentum=rule is FedAvg)
    plain = after(fed, rule(), 3)

    class Own(rule):  # type: ignore[misc]
        def config(self, round: Any) -> dict[str, Any]:
            return {**super().config(round), "noted": True}

    assert same(after(fed, Own(), 3), plain)


def test_draws_at_the_end_of_a_round_are_functions_of_seed_round_and_client(federation: Federations) -> None:
    fed, drawn = federation((8, 12)), []
    for _ in range(2):
        rule = Notes()
        after(fed, rule, 2)
        drawn.append([each["drawn"] for each in rule.seen])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    assert [(each["many"], each["free"]) for each in rule.seen] == [([1, 1], 1.0)] * 2
    assert rule.seen[0].keys().isdisjoint({"text", "ragged", "none"})


def test_its_metrics_do_not_take_the_names_of_the_library_s(tmp_path: Path) -> None:
    base = {"clients": 2, "rounds": 1, "data": {"name": "digits"}, "engine": {"device": "cpu"}}
    base["evaluate"] = {"metrics": ["auc"]}
    plain = run(base, out=tmp_path / "plain", progress=False)
    own = run(base, strategy={"name": f"{__name__}:Notes"}, out=tmp_path / "own", progress=False)
    (one,), (other,) = ([*RunFolder(each.folder).history()] for each in (plain, own))
    assert other["train_loss"] == one["train_loss"]
    assert [other[name] for name in ("accuracy", "auc")] == [one[name] for name in ("accuracy", "auc")]
    assert [other[f"train_{name}"] for name in ("accuracy", "auc")] == [0.25, 0.75]
    (line,), (own_line,) = ([*RunFolder(each.folder).lines("clients.jsonl")] for each in (plain, own))
    for number, values in line["clients"].items():
        found = own_line["clients"][number]
        assert values == {key: found[key] for key in values}
        assert found["train_accuracy"] == 0.25


OWN_HALF = """
from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.strategies import FedAvg

class Mine(FedAvg):
    def config(self, round):
        return {"my-mu": 0.5}

class MineClient(ClientRule):
    keys = {"my-mu": Key("a number", "for this test")}
"""


@pytest.mark.slow
def test_a_node_finds_a_client_rule_whose_key_has_no_prefix(tmp_path: Path) -> None:
    """In a process that has not made the strategy: an actor of Ray, or at a site."""
    (tmp_path / "own_half.py").write_text(OWN_HALF)
    text = "clients: 2\nstrategy: {name: FixBN, freeze_round: 1, base: {name: own_half:Mine}}"
    done = rules_of(text, tmp_path, "{'my-mu': 0.5}")
    assert done.stdout == "['MineClient']\n", done.stderr


@pytest.mark.slow
def test_a_node_without_the_strategy_s_module_trains_unless_its_half_is_needed(tmp_path: Path) -> None:
    done = rules_of("clients: 2\nstrategy: {name: absent_half:Mine}", tmp_path, "{}", "{'fedbn.steps': True}")
    assert done.stdout == "[]\n"
    assert "SettingsError: strategy.name='absent_half:Mine': cannot import" in done.stderr


class ArrayNote(FedAvg):
    def notes(self) -> Any:
        return {**super().notes(), "mean": np.float32(0.5), "all": np.arange(2)}


class TakenNote(FedAvg):
    def notes(self) -> Any:
        return {"seed": 3}


def test_a_note_may_be_an_array_and_has_no_name_of_the_summary(tmp_path: Path) -> None:
    base = {"clients": 2, "rounds": 1, "data": {"name": "digits"}, "engine": {"device": "cpu"}}
    found = run(base, strategy={"name": f"{__name__}:ArrayNote"}, out=tmp_path, progress=False)
    notes = json.loads((found.folder / "summary.json").read_text())
    assert (notes["mean"], notes["all"]) == (0.5, [0, 1])
    with pytest.raises(SettingsError, match=r"the strategy's notes\(\) have 'seed', a name that the run itself uses"):
        run(base, strategy={"name": f"{__name__}:TakenNote"}, out=tmp_path / "taken", progress=False)


@pytest.mark.parametrize("base", [ClientRule, *rules_for({"proximal-mu": 1.0})])
def test_a_client_rule_does_not_take_over_a_key_of_the_library(base: type) -> None:
    with pytest.raises(TypeError, match=r"Mine has the key 'proximal-mu' of .*fedprox; give it a key of"):
        type("Mine", (base,), {"keys": {"proximal-mu": Key("a number", "for this test")}})
    assert [rule.__name__ for rule in rules_for({"proximal-mu": 1.0})] == ["FedProxClient"]


def test_two_client_rules_have_no_key_in_common() -> None:
    own = {"keys": {"test.common": Key("a number", "for this test")}}
    first = type("First", (ClientRule,), own)
    with pytest.raises(TypeError, match=r"Second has the key 'test.common' of First; give it a key of its own"):
        type("Second", (ClientRule,), own)
    assert rule_of("test.common") is first
    again = type("First", (ClientRule,), own)  # as if its module was imported anew
    assert rule_of("test.common") is again


class ForgetsACombine(Rule, Base):
    def train_messages(self, round: Any) -> Any:
        return []

    def evaluate_messages(self, round: Any) -> Any:
        return []

    def summary(self) -> None:
        pass


def test_a_base_without_a_method_that_it_must_have_cannot_be_made() -> None:
    base: Any = ForgetsACombine
    with pytest.raises(TypeError, match=r"abstract .*combine"):
        base()
    whole: Any = type("Whole", (base,), {"combine": lambda *given: {}})
    assert whole().notes() == {}


class Rounded(FedAvg):
    def accepted(self, round: Any, replies: Any) -> Any:
        return [replace(reply, metrics={**reply.metrics, "train-loss": 0.5}) for reply in replies]


def test_metrics_that_a_hook_replaces_are_the_ones_of_the_report(federation: Federations) -> None:
    contents: list[Any] = []

    def mean(given: list[Any], key: str) -> MetricRecord:
        contents.extend(given)
        return FedAvg().train_metrics_aggr_fn(given, key)

    fed = federation((8, 12))
    result = Rounded(train_metrics_aggr_fn=mean).start(fed.grid(), fed.arrays(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["train-loss"] == 0.5
    assert all({"arrays", "metrics"} <= content.keys() for content in contents)
