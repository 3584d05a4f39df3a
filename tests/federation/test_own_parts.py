"""docs/own-parts.md: the page's own file of parts, and each of its experiments on the local engine."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from fedbn_flwr import run_all
from fedbn_flwr.commands.cli import main
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.command import ROOT
from tests.support.sessions import carried_out, outcome

PAGE = (ROOT / "docs" / "own-parts.md").read_text()
SHORT = {"rounds": 2, "train": {"lr": 0.05, "steps": 3, "batch_size": 16}, "engine": {"device": "cpu"}}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


EXPERIMENTS = {" ".join(text.split())[:60]: SHORT | yaml.safe_load(text) for text in blocks("yaml")}
EXPERIMENTS["a class as the strategy"] = SHORT | {
    "strategy": {"name": "my_parts:WithoutOutliers", "share": 0.4},
    "clients": 3,
}
EXPERIMENTS["a function as the strategy"] = SHORT | {
    "strategy": {"name": "my_parts:slow_adam", "eta": 0.02},
    "clients": 2,
}


MORE = """
from flwr.serverapp.strategy import FedAdam

from fedbn_flwr.errors import RoundSkipped
from fedbn_flwr.strategies import FedAvg, MeanStatistics


class NeverReady(FedAvg):
    def incoming(self, round, messages):
        raise RoundSkipped("it is too early")


def slow_adam(eta=0.01):
    return MeanStatistics(FedAdam(eta=eta))


class WithoutOutliers(FedAvg):
    def __init__(self, share=0.2, **options):
        super().__init__(**options)
        self.share = share

    def weights(self, round, replies):
        losses = [reply.metrics["train-loss"] for reply in replies]
        limit = np.quantile(losses, 1 - self.share)
        examples = super().weights(round, replies)
        return [count if loss <= limit else 0.0 for count, loss in zip(examples, losses, strict=True)]


class Tracking(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, inputs):
        return inputs - self.running_mean[:, None, None]
"""


@pytest.fixture(autouse=True)
def my_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_parts.py").write_text("\n".join([*blocks("python"), MORE]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_parts", None)


def session(settings: dict[str, Any], folder: Path, *, stop: int = 0, workers: int = 0) -> Any:
    """The result of a session that begins or resumes a run; `stop` ends it after this round, as Ctrl-C does."""
    carried_out(load_experiment(yaml.safe_dump(settings)), folder, stop, workers=workers)
    return outcome(folder)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_of_the_page_runs(name: str, tmp_path: Path) -> None:
    session(EXPERIMENTS[name], tmp_path / "run")
    assert [line["round"] for line in RunFolder(tmp_path / "run").history()] == [1, 2]


@pytest.mark.slow
def test_the_command_of_the_page_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (command,), (shown,) = blocks("bash"), [text for text in blocks("text") if "accuracy" in text]
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr()
    (accuracy,), (found,) = (
        re.findall(r"FixBN: 10 rounds in .* accuracy ([\d.]+)", text) for text in (shown, printed.out + printed.err)
    )
    assert float(found) == pytest.approx(float(accuracy), abs=0.05)


def test_a_run_whose_strategy_skips_every_round_fails(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no client trained in any of the 2 rounds"):
        session({**SHORT, "strategy": {"name": "my_parts:NeverReady"}, "clients": 2}, tmp_path / "run")


def test_options_of_a_network_are_swept_and_rebuilt(tmp_path: Path) -> None:
    results = run_all(
        {**SHORT, "model": {"name": "my_parts:Net"}, "sweep": {"model.options.width": [4, 6]}},
        out=tmp_path / "out",
        progress=False,
    )
    widths = {result.label: result.model().features[1].num_features for result in results}
    assert widths == {"FedAvg, width=4": 4, "FedAvg, width=6": 6}


EVERYTHING = SHORT | {
    "clients": 2,
    "model": {"name": "my_parts:Net", "norm": "my_parts:RMSNorm"},
    "data": {
        "name": "my_parts:shapes",
        "options": {"count": 60},
        "partition": {"kind": "my_parts:most_of_one_class", "share": 0.5},
        "augment": ["flip", "torchvision.transforms.v2:RandomInvert", {"name": "my_parts:blank_pixels", "share": 0.1}],
    },
}


def test_processes_and_a_resumed_run_use_the_same_draws(tmp_path: Path) -> None:
    whole = session(EVERYTHING, tmp_path / "whole")
    assert session(EVERYTHING, tmp_path / "processes", workers=2) == whole
    session(EVERYTHING, tmp_path / "stopped", stop=1)
    assert session(EVERYTHING, tmp_path / "stopped") == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.name=my_parts:shape", "data.name='my_parts:shape': 'my_parts' has no 'shape'; did you mean 'shapes'?"),
        (
            "data.options.size=3",
            "data.name='my_parts:shapes' failed: TypeError: shapes() got an unexpected keyword argument 'size'",
        ),
        ("data.partition.shares=1", "got an unexpected keyword argument 'shares'"),
        ("data.partition.kind=my_parts:shapes", "data.partition.kind='my_parts:shapes' failed: TypeError"),
        ("data.augment=['my_parts:blank_pixels']", "data.augment: 'my_parts:blank_pixels' failed: TypeError"),
        ("data.augment=[{name: 'my_parts:Net', num_classes: 1, in_channels: 1}]", "failed: RuntimeError: Input type"),
        ("model.norm=my_parts:shapes", "model.norm='my_parts:shapes' returned a dict; expected a torch.nn.Module"),
        ("data={name: digits, options: {count: 3}}", "options.count is an argument of a data set module:callable"),
        ("data.augment=[blur]", "'blur' is not an augmentation; known: crop, flip, resized_crop, rotate, or module"),
        ("data.normalise=moment", "data.normalise is 'moment': expected 'moments', 'own', 'unit' or 'official'"),
    ],
)
def test_a_wrong_part_is_one_message_before_a_folder_is_made(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(EVERYTHING))
    assert main(["run", "all.yaml", change, "--out", "out"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_statistics_of_a_normaliser_of_one_s_own_are_not_those_of_batch_norm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "quick", "model.norm=my_parts:Tracking", "evaluate.statistics=reestimated", "--out", "out"]
    assert main(words) == 2
    assert "has Tracking, whose statistics may be others; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sentences_do_not_depend_on_the_length_to_which_they_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network to which the page refers."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    net = importlib.import_module("text").Sentences(3).train()
    mask = torch.arange(9) < torch.tensor([4, 9])[:, None]
    tokens = torch.arange(18).view(2, 9)
    short = net({"inputs": tokens, "mask": mask})
    longer = net({"inputs": F.pad(tokens, (0, 5), value=7), "mask": F.pad(mask, (0, 5))})
    torch.testing.assert_close(longer, short)
    assert net.norm.running_mean.any()


def test_partition_shows_a_partition_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(EVERYTHING))
    assert main(["partition", "all.yaml"]) == 0
    assert "my_parts:shapes: my_parts:most_of_one_class, share=0.5, clients=2, seed=0" in capsys.readouterr().out
