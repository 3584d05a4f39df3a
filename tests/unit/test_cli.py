"""The command line: what it prints, what it refuses, what it leaves behind when it is stopped."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import flwr.serverapp.strategy
import pytest

from fedbn_flwr.client import optimizers
from fedbn_flwr.commands import cli
from fedbn_flwr.experiment import registry, sources
from fedbn_flwr.experiment.registry import STRATEGIES, class_of
from fedbn_flwr.models import MODELS
from tests.support.command import FEDBN, ROOT, environment, python
from tests.support.runs import write_run

QUICK = str(ROOT / "apps" / "experiments" / "quick.yaml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rouns=3"], ["'rouns'", "3", "'rounds'"]),
        (["train.lrr=3"], ["'train.lrr'", "'lr'"]),
        (["data.partition.alph=1"], ["'data.partition.alph'", "'alpha'"]),
        (["rounds=three"], ["rounds", "'three'", "whole number"]),
        (["train.lr=fast"], ["train.lr", "'fast'", "number"]),
        (["rounds=-1"], ["rounds", "-1"]),
        (["rounds"], ["'rounds'", "key=value"]),
        (["data.name=/no/such/folder"], ["data.name", "/no/such/folder"]),
        (["data.name=cifr10"], ["'cifr10': there is no such data set; ", "did you mean 'cifar10'? known: "]),
        (["data.name=digits", "data.classes=7"], ["data.classes is 7", "10 classes"]),
        (["model.name=resnet21"], ["resnet21", "'resnet20'"]),
        (["model.norm=batchnorm"], ["batchnorm", "bn"]),
        (["model.norm=gn", "model.groups=5"], ["16 channels", "into 5 equal groups"]),
        (["clients=2000"], ["clients is 2000", "1438"]),
        (["clients=40", "data.partition={kind: dirichlet, alpha: 0.01}"], ["alpha=0.01", "min_size=1"]),
        (["data.partition={kind: classes, classes_per_client: 11}"], ["classes_per_client=11", "10 classes"]),
        (["data.partition={kind: classes, classes_per_client: 1}"], ["to no client", "classes"]),
        (["data.partition={kind: sharks}"], ["sharks", "did you mean 'shards'"]),
        (["strategy.freeze_round=4"], ["freeze_round is 4", "3 rounds"]),
        (["strategy.freeze_round=1.5"], ["strategy.freeze_round of FixBN is 1.5", "0.0 to 1.0"]),
        (["strategy.freeze_round=-1"], ["strategy.freeze_round of FixBN is -1"]),
        (["strategy.freeze_rond=1"], ["freeze_rond", "'freeze_round'"]),
        (["strategy.freeze_round={window:3,below:0.05}"], ["a blank after a colon: window: 3"]),
        (["strategy={name: FedAvgg}"], ["FedAvgg", "'FedAvg'"]),
        (["strategy={name: FedAvg, fraction_train: much}"], ["fraction_train", "'much'"]),
        (["engine.device=tpu"], ["engine.device", "'tpu'"]),
        (["engine.workers=-1"], ["engine.workers: found -1"]),
        (["train.epochs=1", "train.steps=1"], ["epochs (1) and steps (1)"]),
    ],
)
def test_bad_input_ends_before_training_with_one_message(
    words: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["run", QUICK, *words, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.err.startswith("fedbn: error: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    for text in says:
        assert text in printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_resuming_where_there_is_no_run_is_an_error(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if engine == "ray":
        pytest.importorskip("fedbn_flwr.extensions.ray")
    out = tmp_path / "mistyped"
    assert cli.main(["run", QUICK, "--engine", engine, "--out", str(out), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "mistyped' has no run to resume; expected one of the folders FixBN" in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_runs_of_another_experiment_do_not_get_into_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "FedTAN", "FedTAN", config={"name": "demo"})
    for more in ([], ["--resume"]):
        assert cli.main(["run", QUICK, "--out", str(tmp_path), *more]) == 2
        assert "has runs of the experiment 'demo', and these are of 'quick'; give another" in capsys.readouterr().err
    assert [folder.name for folder in tmp_path.iterdir()] == ["FedTAN"]


def test_an_error_about_many_runs_names_the_first_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, seeds = str(tmp_path / "mistyped"), list(range(120))
    assert cli.main(["run", QUICK, f"seeds={seeds}", "--out", out, "--resume"]) == 2
    assert "one of the folders FixBN-seed0, FixBN-seed1, FixBN-seed2 and 117 more in it;" in capsys.readouterr().err


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_what_the_design_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["run", QUICK, "engine.workers=0", "--out", str(out)]) == 0
    folder = out / "FixBN"
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == [1, 2, 3]
    for key in ("accuracy", "loss", "train_loss", "bytes_down", "bytes_up", "messages_down", "messages_up", "seconds"):
        assert key in history[0]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["rounds"], summary["freeze_round"]) == (3, 2)
    assert (folder / "model.safetensors").exists()
    assert (folder / "config.yaml").read_text().startswith("name: quick")
    environment_file = json.loads((folder / "environment.json").read_text())
    assert {"commit", "versions", "processor", "instructions", "command"} <= set(environment_file)
    printed = capsys.readouterr().out
    assert "communication rounds" in printed
    assert str(out / "report.png") in printed
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    (figures,) = json.loads((out / "report.json").read_text())
    assert figures["summary"] == summary
    assert figures["settings"]["rounds"] == 3
    assert [point["accuracy"] for point in figures["curve"]] == [line["accuracy"] for line in history]
    assert figures["curve"][-1]["bytes_up"] == summary["bytes_up"]


def test_a_run_that_failed_otherwise_may_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "def loss(outputs, targets):", "    if len(targets) > 2:", "        raise OSError('the disk is gone')"
    (tmp_path / "broken.py").write_text("\n".join((*lines, "    return outputs.mean()\n")))
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        words = ["train.loss=broken:loss", "engine.workers=0", "--out", str(out)]
        assert cli.main(["run", QUICK, *words]) == 1
    assert "diverged_in" not in json.loads((out / "FixBN" / "summary.json").read_text())
    assert "stopped after round 0 of 3; continue with: fedbn run" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["model.name", "data.name", "train.loss", "train.optimizer", "train.schedule.kind"])
@pytest.mark.parametrize("name", ["os:Net()", "http://127.0.0.1:1/x"])
def test_a_setting_that_names_no_object_is_named(key: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", QUICK, f'{key}="{name}"']) == 2
    error = capsys.readouterr().err
    assert f"{key}={name!r}: expected module:callable, for instance my_parts:" in error
    assert error.count("\n") == 1


ENDING = """
import os, sys
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
        os.chdir("/")

    def forward(self, images):
        if WHEN:
            sys.exit(0)
        return self.net(images)
"""


@pytest.mark.parametrize(
    ("when", "code", "message"),
    [
        ("len(images) == 2", 2, "model.name='ending:Net' does not take the 1x8x8 examples of 'digits': SystemExit: 0"),
        ("len(images) > 50", 1, "a part of the experiment ended the process: SystemExit: 0 (ending.py, line 14)"),
        ("False", 0, ""),
    ],
)
def test_code_of_the_user_that_ends_the_process_or_leaves_the_folder(
    when: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "ending.py").write_text(ENDING.replace("WHEN", when))
    text = "{rounds: 1, clients: 2, data: {examples: 40}, train: {steps: 1}, engine: {workers: 0, device: cpu}}"
    done = python(FEDBN, "run", text, "model.name=ending:Net", "--out", "out", cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert [file.parent.name for file in tmp_path.glob("out/*/model.safetensors")] == ["FedAvg"] * (code == 0)


@pytest.mark.slow
def test_a_locale_without_the_characters_of_a_label_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("{rounds: 1, label: Z\u00fcrich, data: {examples: 40}}", encoding="utf-8")
    changes = ("label=Z\u00fcrich", "runs={Z\u00fcrich: {}}", "name=Z\u00fcrich")
    commands = [["run", "e.yaml", "--out", "out"], *(["run", QUICK, change, "--out", "out"] for change in changes)]
    code = "import sys; from fedbn_flwr.commands import cli\n"
    code += "for words in ' '.join(sys.argv[1:]).split(' ; '): assert cli.main(words.split(' ', 4)) == 2"
    done = subprocess.run(
        [sys.executable, "-c", code, *itertools.chain(*([*words, ";"] for words in commands))][:-1],
        cwd=tmp_path, env=environment(LC_ALL="POSIX", PYTHONUTF8="0"), capture_output=True, text=True,
    )  # fmt: skip
    errors = done.stderr.splitlines()
    assert (done.returncode, len(errors)) == (0, 4), done.stderr
    for error in errors:
        assert "that the encoding of this locale, ascii, does not have; set PYTHONUTF8=1" in error


@pytest.mark.parametrize("what", ["strategies", "models", "norms", "datasets", "partitions", "experiments"])
def test_list_prints_names_and_what_they_are(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", what, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert cli.main(["list", what]) == 0
    pairs = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    lines = {name: text for name, text in pairs if name in listed}  # not the title of a group
    assert list(lines) == list(listed)
    assert len(set(lines.values())) == len(lines), "two names have the same description"
    assert all(len(line) > 10 for line in lines.values())
    first, *_ = listed
    assert cli.main(["list", what, first]) == 0
    assert first in capsys.readouterr().out
    assert cli.main(["list", what, "nosuch"]) == 2
    assert "known: " in capsys.readouterr().err


def test_a_strategy_is_listed_with_its_paper_and_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "strategies", "FedTAN", "FixBN"]) == 0
    fedtan, fixbn = capsys.readouterr().out.split("\n\nFixBN: ")
    assert fedtan.startswith("FedTAN: FedAvg whose first local step")
    assert "Why Batch Normalization Damage Federated Learning" in fedtan
    assert 'exchange : "fused" | "paper" (default: "fused")' in fedtan
    assert "names the strategy inside by `base`" in fixbn
    assert "`base`" not in fedtan


def test_the_arguments_of_every_strategy_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    """In its own text, or in that of another strategy which this names."""
    of_flower = inspect.signature(flwr.serverapp.strategy.FedAvg).parameters
    for name in STRATEGIES:
        assert cli.main(["list", "strategies", name]) == 0
        text = capsys.readouterr().out
        others = [other for other in STRATEGIES if re.search(rf"\b{other}\b", text)]
        assert cli.main(["list", "strategies", name, *others]) == 0
        text = capsys.readouterr().out
        for argument in inspect.signature(class_of(name)).parameters.keys() - {*of_flower, "options", "strategy"}:
            assert re.search(rf"\b{argument}\b.* : ", text), (name, argument)


def test_the_arguments_of_a_strategy_by_its_source_are_those_of_its_class() -> None:
    for name in STRATEGIES:
        imported = {key: argument.annotation for key, argument in registry.arguments(class_of(name)).items()}
        by_source = sources.arguments(registry._PLACES[name])
        assert {key: by_source[key] for key in by_source.keys() - registry._NOT_IN_FILES} == imported


def test_the_arguments_of_a_network_by_its_source_are_those_of_its_signature() -> None:
    for place in (f"fedbn_flwr.models.{each}" for each in MODELS.values()):
        assert [*sources.arguments(place)] == [*inspect.signature(resolve_name(place)).parameters]


def test_the_optimizers_by_pytorch_s_source_are_those_that_it_has() -> None:
    assert {*sources.optimizers()} == {*optimizers._optimizers()}


WITHOUT_TORCH = """
import sys
from contextlib import suppress
from fedbn_flwr.commands import cli

for line in sys.stdin:
    with suppress(SystemExit):
        cli.main(line.split())
    if loaded := {"torch", "flwr"} & sys.modules.keys():
        sys.exit(f"{line.strip()} imports {loaded}")
"""


EARLY = """--help
list
list strategies
list strategies FixBN
list models
list norms
list datasets
list partitions
list experiments
run quick rouns=3
run quick rounds=x
run quick rounds=-1
run quick model.name=resnet21
run quick model.norm=x
run quick strategy=FedAvgg
run quick strategy.freeze_roud=3
run quick strategy.freeze_round=-3
run quick strategy=FedAvg strategy.fraction_train=7
run quick model.options.foo=1
run quick train.optimizer=foo
run quick data.partition=x
run quick data.name=digit
run quick data.name=./nothing
run nosuch
explain demo rounds=x
new quick --from nosuch
new mine --from demo
status .
report .
"""


def test_what_needs_neither_torch_nor_flower_imports_neither(tmp_path: Path) -> None:
    write_run(tmp_path / "FedAvg", "FedAvg", config={"rounds": 3})
    command, options = [sys.executable, "-c", WITHOUT_TORCH], {"cwd": tmp_path, "env": environment()}
    done = subprocess.run(command, input=EARLY, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.yaml").exists()


def test_changes_may_follow_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "quick", "rounds=7", "--size", "paper", "seed=3"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^rounds +7 +command line$", text, re.MULTILINE)
    assert re.search(r"^seed +3 +command line$", text, re.MULTILINE)
    assert cli.main(["explain", "quick", "rounds"]) == 2
    assert "not of the form key=value" in capsys.readouterr().err
    for words in (["explain", "quick", "--all", "--wrong"], ["new", "mine", "rounds=7"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["new", "mine", "--from", "demo", "--data", "t.csv"])
    assert "argument --data: not allowed with argument --from" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fedbn_flwr.extensions.ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        words = ["--engine", "ray", "engine.address=127.0.0.1:9", "rounds=2"]
        assert cli.main(["run", "demo", "only=[FixBN, FedTAN]", "--out", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("no Ray cluster answers at engine.address='127.0.0.1:9'") == 1
    assert not list(tmp_path.iterdir()), "a run that cannot begin leaves no folder"
    assert "ray start --head" in error
