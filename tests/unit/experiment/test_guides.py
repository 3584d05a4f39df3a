"""The experiments and commands of the guides, and the experiments of results; other tests carry out single pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from fedbn_flwr.commands import cli
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.experiment.settings import Settings, name_in
from fedbn_flwr.models.build import build_model
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.several import Results
from fedbn_flwr.trees import Draft, flat_settings
from tests.support.command import ROOT
from tests.support.pages import BLOCK, Page

GUIDES = ("experiments", "sweeps", "clients", "watching", "report", "run-folder", "data")
BLOCKS = [
    (guide, kind, text)
    for guide in GUIDES
    for kind, text in BLOCK.findall((ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8"))
]


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize(("guide", "text"), [(guide, text) for guide, kind, text in BLOCKS if kind == "yaml"])
def test_the_experiments_of_a_guide_are_valid(guide: str, text: str) -> None:
    first, *others = load_experiment(text).runs
    assert {name_in(each) for run in (first, *others) for each in run.track} <= {"tensorboard", "trackers:WandB"}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/**/*.yaml")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_an_experiment_kept_beside_its_results_is_accepted(file: Path) -> None:
    assert load_experiment(str(file)).runs


@pytest.mark.parametrize(
    ("guide", "line"),
    [
        (guide, line)
        for guide, kind, text in BLOCKS
        if kind == "bash"
        for line in text.splitlines()
        if line.startswith("fedbn ")
    ],
)
def test_the_commands_of_a_guide_are_understood(guide: str, line: str) -> None:
    """Those that name an experiment also with their changes; a file is the page's first block of YAML."""
    arguments = cli.parser().parse_args(shlex.split(line, comments=True)[1:])
    assert callable(arguments.command)
    experiment = getattr(arguments, "experiment", None)
    if str(experiment).endswith(".yaml"):
        experiment = next(text for page, kind, text in BLOCKS if (page, kind) == (guide, "yaml"))
    if experiment is None or "model.nrm" in line:  # the page shows its error, see below
        return
    assert experiment in shipped_experiments() or "\n" in experiment
    assert load_experiment(experiment, arguments.overrides).runs


def test_data_shows_what_becomes_of_the_columns_of_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{40 + n},{120.5 + n},{'fm'[n % 2]},{'abcd'[n % 4]},{('no', 'yes')[n % 3 % 2]}" for n in range(60)]
    Path("patients.csv").write_text("\n".join(["age,bp,sex,site,diagnosis", *rows]) + "\n")
    page = Page(ROOT / "docs" / "data.md")
    ((text, shown),) = [(text, shown) for kind, text, shown in page.blocks() if kind == "yaml" and shown]
    Path("patients.yaml").write_text(text)
    page.command("fedbn explain patients.yaml", shown)


@pytest.mark.slow
def test_a_lower_rate_after_the_freeze_costs_fixbn_two_points_on_the_page_of_experiments(tmp_path: Path) -> None:
    text = next(text for guide, kind, text in BLOCKS if (guide, kind) == ("experiments", "yaml"))
    (change,) = (line.split()[4] for _, _, line in BLOCKS if "schedule.switch" in line)
    for name, changes in (("kept", []), ("lower", [change])):
        carry_out(load_experiment(text, ["only=FixBN", "engine.device=cpu", *changes]), tmp_path / name, resume=False)
    kept, lower = (Results.read(tmp_path / name)[0].summary.accuracy or 0 for name in ("kept", "lower"))
    assert 0.01 < kept - lower < 0.04


def test_watching_shows_the_figures_that_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / "docs" / "watching.md").text
    (line,) = re.findall(r"^fedbn (run .*dynamics.*)$", page, re.MULTILINE)
    assert cli.main([*shlex.split(line), "engine.workers=0"]) == 0
    (folder,) = re.findall(r"^tail -n 1 (.*)/norms.jsonl$", page, re.MULTILINE)
    found = RunFolder(Path(folder)).lines("norms.jsonl")[-1]
    (shown,) = (json.loads(text) for guide, kind, text in BLOCKS if (guide, kind) == ("watching", "json"))
    assert shown.keys() == found.keys()
    pairs = [(each["layers"]["bn1"], each["clients"]["0"]["bn1"]) for each in (found, shown)]
    for now, then in zip(*pairs, strict=True):
        assert now == pytest.approx(then, rel=0.3)
        assert all(f"| `{figure}` |" in page for figure in then)


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "count"), [("experiments", 2), ("sweeps", 1)])
def test_a_guide_prints_what_it_shows(guide: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says under which name its first experiment is saved."""
    monkeypatch.chdir(tmp_path)
    page, ran = Page(ROOT / "docs" / f"{guide}.md"), 0
    (name,) = re.findall(r"Save this (?:one )?as `(\w+\.yaml)`", " ".join(page.text.split()))
    for kind, text, shown in page.blocks():
        if kind == "yaml" and not Path(name).exists():
            Path(name).write_text(text)
        elif kind == "bash" and shown:
            ran += page.command(text, shown)
    assert ran == count


# --- The set-ups in the experiment files are those of the papers, which docs/published.yaml lists.


PAPERS = yaml.safe_load((ROOT / "docs" / "published.yaml").read_text(encoding="utf-8"))
SETUPS = {name: setup for tables in PAPERS.values() for name, setup in tables.get("setup", {}).items() if "/" in name}


def settings_of(run: Settings) -> Draft:
    """Its settings by key, with the fraction of clients of the innermost strategy, and passes over all examples."""
    train, strategy = run.train, run.strategy
    while "base" in strategy:
        strategy = strategy["base"]
    share = float(strategy.get("fraction_train", 1))
    local = train.epochs or run.clients * (train.steps or 0) * train.batch_size / (
        CATALOGUE[run.data.name].examples or 1
    )
    about = {"strategy.fraction_train": share, "passes": run.rounds * share * local, "seeds": run.seed}
    return {**flat_settings(run.model_dump(mode="json")), **about}


@pytest.mark.parametrize("name", SETUPS)
def test_an_experiment_has_the_set_up_of_its_paper(name: str) -> None:
    every = [settings_of(run) for run in load_experiment(name).runs]
    for key, expected in SETUPS[name].items():
        values = [found[key] for found in every if found.get(key) is not None]
        different = [value for place, value in enumerate(values) if value not in values[:place]]
        if key == "seeds":
            assert len(different) == expected
        elif key == "passes":  # to a round of 2,500 steps
            wanted = expected if isinstance(expected, list) else [expected] * len(different)
            assert sorted(different) == pytest.approx(wanted, rel=0.02)
        else:
            assert expected in (different[0] if len(different) == 1 else sorted(different), different), key


def weights_of_new_statistics(network: nn.Module) -> set[float | None]:
    return {each.momentum for each in network.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}


def test_the_networks_are_those_of_the_papers() -> None:
    """As many parameters and statistics, layers and channels, and the weight of a batch's statistics."""
    counts: dict[str, Any] = PAPERS["FedTAN"]["setup"]["MNIST"]
    mlp, resnet = build_model("mlp", 10, "bn", input_shape=(1, 28, 28)), build_model("resnet20", 10)
    assert sum(each.numel() for each in mlp.parameters()) == counts["parameters"]
    assert sum(each.numel() for each in mlp.buffers() if each.dim() > 0) == counts["statistics"]
    digits = build_model("digits_cnn", 10, "bn", input_shape=(3, 32, 32))
    assert sum(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in digits.modules()) == 5
    layers = {
        "fedbs_mnist": ((1, 28, 28), [16, 32], [1568]),
        "fedbs_cifar": ((3, 32, 32), [100, 150, 250, 500], [4500, 270, 150]),
    }
    for name, (image, channels, inputs) in layers.items():
        network = build_model(name, 10, input_shape=image)
        assert [each.out_channels for each in network.modules() if isinstance(each, nn.Conv2d)] == channels
        assert [each.in_features for each in network.modules() if isinstance(each, nn.Linear)] == inputs
        assert weights_of_new_statistics(network) == {0.1}
    assert weights_of_new_statistics(resnet) == {0.1}


@pytest.mark.parametrize(("table", "data", "unit", "bits"), [
    ("Table 4", "CIFAR-10", "GiB", 8), ("Table 5 and Figure 14", "MNIST", "Gibit", 1)])  # fmt: skip
def test_the_costs_of_fedtan_ii_are_arithmetic(table: str, data: str, unit: str, bits: int) -> None:
    setup = PAPERS["FedTAN"]["setup"][data]
    # Table 4 counts the running statistics, Table 5 does not. An exchange adds two values for each statistic.
    model = setup["parameters with GN"] + setup["statistics"] if table == "Table 4" else setup["parameters"]
    copies = 4 * (1 + setup["clients"])  # to all clients once, and from each of them
    iterations = setup["iterations"]
    for label, figures in PAPERS["FedTAN"][table].items():
        kind, _, exact = label.partition("=")
        part = 1.0 if not exact else float(exact) if kind.endswith("fedtan_rounds") else int(exact) / iterations
        plain, mib = (each * copies / 2**20 for each in (model, model + 2 * setup["statistics"] * part))
        if table == "Table 4":  # of the MiB of an iteration as printed, with four decimals
            plain, mib = round(plain, 4), round(mib, 4)
        assert mib * iterations * 8 / bits / 1024 == pytest.approx(figures[unit], abs=5.1e-5), label
        assert 100 * (mib - plain) / mib == pytest.approx(figures["more bits"], abs=5.1e-5), label
        more = 3 * setup["batch norms"] * part
        assert 100 * more / (1 + more) == pytest.approx(figures["more rounds"], abs=0.0051), label


def test_the_figures_of_fedwon_fit_the_test_sets_of_fedbn() -> None:
    """As means of three runs, printed with one decimal; docs/results/domains.md#fedwon quotes the counts."""

    def fit(sizes: tuple[int, ...]) -> int:
        table = PAPERS["FedWon"]["Table 1, Office-Caltech-10"].values()
        return sum(
            any(abs(100 * right / (3 * size) - figure) <= 0.0501 for right in range(3 * size + 1))
            for row in table
            for figure, size in zip(row.values(), sizes, strict=False)
        )

    assert (fit((192, 225, 32, 59)), fit((180, 220, 27, 56))) == (31, 9)
