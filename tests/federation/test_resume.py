"""A stopped run loses nothing: files, strategies' states, and whole runs against uninterrupted ones."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import strategy as flower

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import RunFailed, SettingsError, UserError
from fedbn_flwr.experiment.data import forget_data
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.gate import Gated
from fedbn_flwr.results.folder.checkpoint import CheckpointFile
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.strategies import (
    FedBS,
    FixBN,
    GlobalMomentum,
    MeanStatistics,
    Rule,
    as_rule,
    restore,
    state_of,
)
from tests.support.command import FEDBN, ROOT, signalled
from tests.support.marks import slow_except
from tests.support.records import content
from tests.support.runs import saved_round
from tests.support.sessions import (
    BASE,
    CASES,
    Elsewhere,
    outcome,
    overrides,
    session,
    summary_of,
)

# --- the state of Flower's own strategies ------------------------------------


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (
            lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAdam(), 0.1, 3),
            {"clipping_norm": np.float64(0.1) * 3},
        ),
        (flower.FedAvgM, {"momentum_vector": [np.array(1.5), np.ones(2, np.float32)]}),
        (flower.FedXgbCyclic, {"registered_nodes": {2**63 + 5: 0, 3: 1}}),
    ],
)
def test_attributes_of_flower_s_strategies_are_restored(make: Callable[[], Any], values: dict[str, Any]) -> None:
    before, after = make(), make()
    vars(before).update(values)
    restore(as_rule(after), state_of(as_rule(before)))
    assert state_of(as_rule(after)) == state_of(as_rule(before))
    assert {key: type(getattr(after, key)) for key in values} == {key: type(value) for key, value in values.items()}


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"FedAvg\.generator is a Generator, which cannot be saved; expected numbers"):
        state_of(FixBN(unsaved(), freeze_round=1))


def test_a_nested_rule_keeps_its_own_state() -> None:
    make = lambda: FixBN(GlobalMomentum(FedBS(patience=3)))  # noqa: E731
    before, after = make(), make()
    for each in (before, after):
        each.begin(9, pack({"n.running_mean": np.zeros(1), "n.running_var": np.ones(1)}))
    inner: Any = before.strategy
    inner.memory.momentum = unpack(pack({"w": np.array([0.25])}))
    before.memory.switch_round = 5
    inner.strategy.memory.alike = 2
    inner.strategy.memory.partitions = {7: 0}
    restore(as_rule(after), state_of(as_rule(before)))
    assert state_of(as_rule(after)) == state_of(as_rule(before))
    other: Any = after.strategy
    assert after.memory.switch_round == 5
    assert other.strategy.memory == inner.strategy.memory
    assert other.memory.momentum["w"] == 0.25


# --- whole runs --------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def run(case: str) -> Path:
        if case not in found:
            found[case] = tmp_path_factory.mktemp("straight") / "run"
            session(case, found[case])
        return found[case]

    return run


def states_of(out: Path) -> tuple[Any, ...]:
    """The last checkpoint: the states of strategy and clients."""
    found = CheckpointFile(out / "checkpoint")
    read = found.read()
    assert read.strategy is not None
    clients = []
    for node, records in found.clients():
        records["fedbn.run"] = ConfigRecord()  # has the run's token
        clients.append((node, content(records)))
    return read.round, dict(read.trained), content(read.model), read.strategy, clients


# One case for each kind of state: of the strategy, the clients, the optimiser, and what is inside another strategy.
QUICK = (
    "FedAvg", "FedBN", "Scaffold", "FedTAN", "FedBS", "QFedAvg", "keep_momentum", "FixBN of FedBN",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "workers"),
    slow_except(
        [(case, 0) for case in QUICK],
        [*((case, 0) for case in CASES), ("FedTAN", 2), ("Scaffold", 2)],
    ),
)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    case: str, workers: int, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    session(case, tmp_path / "run", 3 if workers else 2, workers=workers)
    assert summary_of(tmp_path / "run").status == "interrupted"
    session(case, tmp_path / "run", workers=workers)
    assert outcome(tmp_path / "run") == outcome(straight(case))
    assert states_of(tmp_path / "run") == states_of(straight(case))


@pytest.mark.slow
def test_the_cases_reach_the_rules_switches(straight: Callable[[str], Path]) -> None:
    """Rules that switch during a run do so in these runs, after the first stop and before the end."""
    assert summary_of(straight("FedBS")).notes["switch_round"] == 4
    assert summary_of(straight("FixBN, settled")).notes["freeze_round"] == 3
    assert summary_of(straight("FedAdam")).notes["norm_statistics"] == "mean"
    assert summary_of(straight("Krum")).notes["norm_statistics"] == "median"
    for case in ("FedAdam", "FedAvgM", "Scaffold", "GlobalMomentum"):
        read = CheckpointFile(straight(case) / "checkpoint").read()
        assert read.strategy is not None
        assert any(map(np.any, safetensors.numpy.load(read.strategy).values()))


SERVERS = ["FedBS", "FixBN, settled", "FedAdam", "GlobalMomentum"]  # their state is the server's


@pytest.mark.parametrize("case", slow_except(QUICK, ["FedBN", "Scaffold", "keep_momentum", "adamw", "brn", *SERVERS]))
def test_a_lost_state_changes_the_numbers(
    case: str, straight: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(case, tmp_path / "run", 3)
    if case in SERVERS:
        for kind in (Rule, type(as_rule(flower.FedAvg()))):
            monkeypatch.setattr(kind, "_load_state", lambda rule, values: None)
    else:
        monkeypatch.setattr(CheckpointFile, "clients", lambda *_: ((node, RecordDict()) for node in (1, 2, 3)))
    session(case, tmp_path / "run")
    assert outcome(tmp_path / "run") != outcome(straight(case))


def test_the_second_ctrl_c_in_a_round_goes_back_to_the_last_checkpoint(
    straight: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then some clients have trained in round 3; their states of this incomplete round are not kept."""

    def make(context: Context, config: Mapping[str, Any]) -> Any:
        if (config.get("server-round"), context.node_config["partition-id"]) == (3, 2):
            raise KeyboardInterrupt
        return make_client(context, config)

    monkeypatch.setitem(CASES, "FedBN", CASES["FedBN"] + "\nengine: {checkpoint_every: 2}")
    run_config = {"experiment": BASE, "set": " ".join(f"'{word}'" for word in overrides("FedBN"))}
    session("FedBN", tmp_path / "run", grid=LocalGrid(client_app(make), 3, run_config=run_config), interrupted=True)
    run = RunFolder(tmp_path / "run")
    assert (summary_of(run.path).status, saved_round(run.path), len(run.history())) == ("interrupted", 2, 2)
    session("FedBN", tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(straight("FedBN"))


def unsaved() -> MeanStatistics:
    inner = flower.FedAvg()
    inner.generator = np.random.default_rng(0)  # type: ignore[attr-defined]
    return MeanStatistics(inner)


def test_a_strategy_that_cannot_be_saved_trains_and_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "FedAdam", f"strategy: {{name: '{__name__}:unsaved'}}")
    session("FedAdam", tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    run.checkpoint.write(dataclasses.replace(run.checkpoint.read(), round=2), ())  # as if round 3 had been interrupted
    before = (run.path / "history.jsonl").read_text()
    with pytest.raises(SettingsError, match=r"cannot be resumed: FedAvg\.generator is a Generator"):
        session("FedAdam", tmp_path / "run")
    assert (run.path / "history.jsonl").read_text() == before
    (found,) = find_runs([tmp_path])
    assert found.summary.rounds == len(found.lines) == 3


def test_a_folder_can_be_read_if_a_resume_fails_before_its_first_round(tmp_path: Path) -> None:
    session("FedAvg", tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    first_two = b"".join((run.path / "history.jsonl").read_bytes().splitlines(keepends=True)[:2])
    digest = hashlib.sha256(first_two).hexdigest()
    run.write_checkpoint(dataclasses.replace(run.checkpoint.read(), round=2, history=digest), ())
    run.begin(run.config())
    (found,) = find_runs([tmp_path])
    assert found.summary.rounds == len(found.lines) == 2


def test_only_settings_without_effect_may_change_before_a_resume(tmp_path: Path) -> None:
    session("FedAvg", tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    config = run.config()
    run.check({**config, "engine": {**config["engine"], "workers": 2, "timeout": 9.0}}, resume=True)
    with pytest.raises(SettingsError, match=r"engine\.threads was 1 and is 2"):
        run.check({**config, "engine": {**config["engine"], "threads": 2}}, resume=True)
    history = tmp_path / "run" / "history.jsonl"
    whole = history.read_text()
    history.write_text(whole + '{"round": 4, "accu')  # cut off by a crash
    assert [line["round"] for line in run.history()] == [1, 2, 3]
    history.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"history\.jsonl': it has 2 of the 3 rounds before the checkpoint, or other"):
        session("FedAvg", tmp_path / "run")


def test_a_run_that_was_killed_after_its_last_round_finishes(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """HeteroBN's model file has statistics that are in no checkpoint."""
    shutil.copytree(straight("HeteroBN"), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.write_summary(dataclasses.replace(summary_of(run.path), status="running"))
    session("HeteroBN", tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(straight("HeteroBN"))


@pytest.mark.parametrize("more", ["", "seeds=[0,1]"])
def test_a_run_is_not_resumed_with_other_data(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle, or finished and to be joined by another seed."""
    monkeypatch.chdir(write_table(tmp_path / "first", 40))
    words = ["run", "e.yaml", "seeds=[0]", *filter(None, [more])]
    assert cli.main([*words[:3], "--out", "out"]) == 0
    run = RunFolder(Path("out/FedAvg-seed0"))
    if not more:
        run.write_summary(dataclasses.replace(summary_of(run.path), status="interrupted"))
        (run.path / "checkpoint").unlink()
    text = Path("data/train.csv").read_text()
    capsys.readouterr()
    Path("data/train.csv").write_text(text.replace("7,", "7.5,", 1))
    forget_data()  # as a new process
    assert cli.main([*words, "--out", "out", "--resume"]) == 2
    error = capsys.readouterr().err
    assert "out/FedAvg-seed0' cannot be resumed with other data: environment.json has data_checksum" in error
    assert re.search(r"\w{8}, and the examples of data\.name now have \w{8}; restore its files", error)
    Path("data/train.csv").write_text(text)
    forget_data()
    monkeypatch.chdir((tmp_path / "first").rename(tmp_path / "moved"))
    assert cli.main([*words, "--out", "out", "--resume"]) == 0


def test_a_run_that_has_not_begun_starts_beside_resumed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_table(tmp_path, 40))
    assert cli.main(["run", "e.yaml", "seeds=[0]", "--out", "out"]) == 0
    assert cli.main(["run", "e.yaml", "seeds=[1]", "--out", "out", "--resume"]) == 0
    assert summary_of(Path("out/FedAvg-seed1")).status == "finished"


def write_table(folder: Path, rows: int) -> Path:
    (folder / "data").mkdir(parents=True)
    for part in ("train", "test"):
        lines = "".join(f"{number},{number % 7},{'xy'[number % 2]}\n" for number in range(rows))
        (folder / "data" / f"{part}.csv").write_text(f"a,b,label\n{lines}")
    (folder / "e.yaml").write_text(
        "{rounds: 1, clients: 2, data: {name: ./data, label: label}, model: mlp, engine: {workers: 0, device: cpu}}"
    )
    return folder


# --- nodes that keep their states on their own disks -------------------------


NEED_CLIENTS = [
    "FedBN", "SiloBN", "Standalone", "Scaffold", "keep_momentum", "brn", "FixBN of FedBN", "some clients",
]  # fmt: skip


@pytest.mark.parametrize("case", slow_except(QUICK, [*NEED_CLIENTS, "FedTAN", "FedBS"]))
def test_clients_continue_from_their_own_disks(case: str, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """In each session the nodes have new ids, and nothing in memory."""
    for stop, nodes in ((2, (1, 2, 3)), (3, (71, 5, 33)), (0, (8, 9, 4))):
        session(case, tmp_path / "run", stop, grid=Elsewhere(case, tmp_path / "state", nodes))
    assert outcome(tmp_path / "run")[0] == outcome(straight(case))[0]
    kept = ("other_messages", "other_bytes")  # each session asks which node holds which partition
    lines = [[{k: v for k, v in line.items() if k not in kept} for line in outcome(out)[1]]
             for out in (tmp_path / "run", straight(case))]  # fmt: skip
    assert lines[0] == lines[1]


@pytest.mark.parametrize("case", slow_except(QUICK, NEED_CLIENTS))
def test_a_rule_whose_clients_lost_their_states_is_refused(case: str, tmp_path: Path) -> None:
    session(case, tmp_path / "run", 2, grid=Elsewhere(case, None))
    with pytest.raises(SettingsError, match=r"needs its clients' state \(their .*client \d has none"):
        session(case, tmp_path / "run", grid=Elsewhere(case, None))
    with pytest.raises(SettingsError, match=r"client \d has the state of round 0, but last trained in round 2"):
        session(case, tmp_path / "run", grid=Elsewhere(case, tmp_path / "empty"))
    with pytest.raises(SettingsError, match="has none"):  # on the local engine: the checkpoint has no states either
        session(case, tmp_path / "run")


@pytest.mark.parametrize(
    "case", slow_except(QUICK, ["FedAvg", "FixBN", "FedTAN", "GlobalMomentum", "HeteroBN", "FedAdam"])
)
def test_other_rules_are_resumed_on_any_engine(case: str, straight: Callable[[str], Path], tmp_path: Path) -> None:
    session(case, tmp_path / "run", 2, grid=Elsewhere(case, None))
    session(case, tmp_path / "run", 3)
    session(case, tmp_path / "run", grid=Elsewhere(case, None, (9, 8, 7)))
    assert outcome(tmp_path / "run")[0] == outcome(straight(case))[0]


@pytest.mark.slow
def test_a_server_that_lost_rounds_gets_the_same_numbers(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """The server's disk is restored from an older copy; nodes are ahead, and drop their later states."""
    session("FedBN", tmp_path / "run", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    # A node keeps the rounds that the server may return to; from now on the server reports round 2.
    session("FedBN", tmp_path / "run", 4, grid=Elsewhere("FedBN", tmp_path / "state"))
    rounds = {file.name for file in (tmp_path / "state").rglob("round-*")}
    assert rounds == {"round-2", "round-3", "round-4"}
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    last = Elsewhere("FedBN", tmp_path / "state", workers=2)
    with last.local:
        session("FedBN", tmp_path / "run", grid=last)
    assert outcome(tmp_path / "run")[0] == outcome(straight("FedBN"))[0]


@pytest.mark.slow
def test_a_node_that_restarts_during_a_run_continues(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Its context is empty at every message, in training and in evaluation."""

    class Forgetful(Elsewhere):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Gated:
            for node in (1, 2, 3):
                self.local.contexts()[node].state = RecordDict()
            return super().send_and_receive(messages, timeout=timeout)

    grid = Forgetful("FedBN", tmp_path / "state")
    session("FedBN", tmp_path / "run", grid=grid)
    assert outcome(tmp_path / "run") == outcome(straight("FedBN"))
    assert len(list((tmp_path / "state").iterdir())) == 1
    # Another run of the same name in the same folder starts without states, although the first left its own there.
    session("FedBN", tmp_path / "again", grid=Forgetful("FedBN", tmp_path / "state"))
    assert outcome(tmp_path / "again") == outcome(straight("FedBN"))
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_a_folder_that_cannot_be_used_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    grid = Elsewhere("FedBN", tmp_path / "file" / "state")
    with pytest.raises(RunFailed, match=r"cannot begin:(.|\n)*client 0 .*state='.*file/state' is not a folder that"):
        session("FedBN", tmp_path / "run", grid=grid)


def test_a_damaged_node_state_is_named(tmp_path: Path) -> None:
    session("FedBN", tmp_path / "run", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    for file in (tmp_path / "state").rglob("round-2"):
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(RunFailed, match=r"client 0 .*could not train: .*round-2' is damaged: not a complete"):
        session("FedBN", tmp_path / "run", grid=Elsewhere("FedBN", tmp_path / "state"))


# --- the same through `serve` and the command --------------------------------


@pytest.mark.slow
def test_a_flower_run_is_resumed_by_its_run_config(straight: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    session("FedBN", out / "FedBN", 2, grid=Elsewhere("FedBN", tmp_path / "state"))
    words = " ".join(f"'{word}'" for word in overrides("FedBN"))
    config = {"experiment": BASE, "set": words, "out": str(out)}
    with pytest.raises(SettingsError, match="holds a run already"):
        serve(Elsewhere("FedBN", tmp_path / "state"), config)
    serve(Elsewhere("FedBN", tmp_path / "state"), config | {"resume": True})
    assert outcome(out / "FedBN")[0] == outcome(straight("FedBN"))[0]
    with pytest.raises(SettingsError, match="to resume runs, give their folder"):
        serve(Elsewhere("FedBN", None), {"experiment": BASE, "resume": True})
    with pytest.raises(SettingsError, match="mistyped' has no run to resume"):
        serve(Elsewhere("FedBN", None), config | {"resume": True, "out": str(tmp_path / "mistyped")})


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The command of a run that takes seconds, with worker processes; and the folder of its undisturbed run."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "e.yaml").write_text(BASE.replace("rounds: 5", "rounds: 8").replace("workers: 0", "workers: 2"))
    words = ["run", str(folder / "e.yaml"), "strategy={name: FedBN}", "engine.checkpoint_every=1"]
    assert cli.main([*words, "--out", str(folder / "straight")]) == 0
    return words, folder / "straight" / "FedBN"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_command_leaves_a_folder_that_resumes(
    sent: signal.Signals, command: tuple[list[str], Path], tmp_path: Path
) -> None:
    """The moment of the signal is arbitrary."""
    words, straight = command
    stopped = tmp_path / "stopped"
    run = RunFolder(stopped / "FedBN")
    given = [*words, "--out", stopped]
    done = signalled(sent, lambda: saved_round(run.path) >= 2, FEDBN, *given, cwd=tmp_path, PAUSE="0.2")
    assert done.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130), done.stderr
    assert "Traceback" not in done.stderr
    assert summary_of(run.path).status == "interrupted"
    last = len(run.history())
    assert 2 <= saved_round(run.path) < 8
    if sent == signal.SIGTERM:  # as Ctrl-C: the round is finished, and in the checkpoint
        assert saved_round(run.path) == last
        assert shlex.join(["fedbn", *map(str, given), "--resume"]) in done.stderr
    assert cli.main([*words, "--out", str(stopped), "--resume"]) == 0
    assert outcome(stopped / "FedBN") == outcome(straight)


@pytest.mark.parametrize(
    ("source", "label"), slow_except({"FedAvg"}, [("FixBN", "BN"), ("FixBN", "Affine"), ("FedAvg", "FixBN")])
)
def test_a_branch_made_by_the_script_of_a_result_equals_the_whole_run(
    source: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that branches is another one up to round 2, in which FixBN freezes."""
    (tmp_path / "e.yaml").write_text(
        f"{BASE}runs:\n  BN: {{}}\n  FixBN: {{strategy: {{name: FixBN, freeze_round: 2}}}}\n"
        "  Affine: {strategy: {name: FixBN, freeze_round: 2, freeze: [affine]}}\n"
    )
    words = [str(tmp_path / "e.yaml"), f"only={label}"]
    session(source, tmp_path / "source", 2)
    script = ROOT / "benchmarks" / "branch.py"
    arguments = [tmp_path / "source", words[0], label, tmp_path / "branch", words[1]]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    runpy.run_path(str(script))
    assert saved_round(tmp_path / "branch" / label) == 2
    assert cli.main(["run", *words, "--out", str(tmp_path / "branch"), "--resume"]) == 0
    assert cli.main(["run", *words, "--out", str(tmp_path / "whole")]) == 0
    assert outcome(tmp_path / "branch" / label) == outcome(tmp_path / "whole" / label)
