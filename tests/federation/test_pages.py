"""Pages carried out in order, each in one folder, print what they show: the tutorial, docs/python.md and others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torchvision.models import resnet18

from fedbn_flwr import run
from fedbn_flwr.results.several import Results
from tests.support.command import ROOT
from tests.support.images import write_parquet
from tests.support.pages import REWRITE, Page, differences, excerpt, printed

TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [Page(ROOT / "docs" / f"{name}.md") for name in ("python", "deployment")]


@pytest.mark.slow
def test_the_page_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    script = ModuleType("script_of_the_page")  # the reader's own script, whose classes are found by name
    monkeypatch.setitem(sys.modules, script.__name__, script)
    page: dict[str, Any] = vars(script)
    images, labels = load_digits(return_X_y=True)
    for site, brightness in {"north": 10, "south": 15}.items():  # the folders of the page's two sites
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = tmp_path / site / ("train" if number % 5 else "test") / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * brightness).astype("uint8").reshape(8, 8)).save(folder / f"{number}.png")
    compared = 0
    for each in PAGES:
        for kind, code, shown in each.blocks():
            if kind == "python":
                each.compare(shown, printed(lambda code=code: exec(code, page)))
                compared += bool(shown)
    assert compared == 2
    assert page["mine"].config["model"]["name"] == "script_of_the_page:Net"
    right = (page["predicted"] == page["torch"].tensor(page["labels"])).float().mean()
    assert right == pytest.approx(page["result"].summary.accuracy, abs=0.05)
    assert len(page["results"]) == 4
    assert page["best"].summary.accuracy == page["results"].summaries["accuracy"].max()
    assert page["rehearsal"].summary.status == "finished"
    assert "FedAvg" not in page["results"].table()


@pytest.mark.slow
def test_torchvision_loads_a_model_as_the_page_says(tmp_path: Path) -> None:
    for split in ("train", "test"):
        labels: dict[str, list[int] | list[str]] = {"label": list(range(10)) * 2}
        names = {"label": [str(number) for number in range(10)]}
        write_parquet(tmp_path / "data" / f"{split}.parquet", (8, 8, 3), labels, names, "image")
    result = run(
        {"clients": 2, "rounds": 1, "train": {"steps": 1}, "engine": {"workers": 0, "device": "cpu"}},
        data=str(tmp_path / "data"),
        model={"name": "resnet18", "stem": "large"},
        out=tmp_path / "out",
        progress=False,
    )
    model = resnet18(num_classes=10)
    model.load_state_dict(load_file(result.folder / "model.safetensors"))
    assert torch.equal(model.fc.weight, result.model().get_parameter("fc.weight"))


# --- the tutorial ---


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_the_tutorial_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    page, ran = Page(TUTORIAL), 0
    for kind, text, shown in page.blocks():
        if kind == "yaml":
            (tmp_path / "compare.yaml").write_text(text)
        elif kind == "python":
            code = compile(text, "tutorial.md", "exec")
            page.compare(shown, printed(lambda code=code: exec(code, {"__name__": "tutorial"})))
        else:
            ran += page.command(text, shown)
    assert ran == 9
    results = Results.read("runs/compare")
    assert len(results) == 6
    picture = TUTORIAL.parent / "images" / "tutorial.png"
    if REWRITE:
        figure = results.plot("accuracy", "round")
        figure.set_size_inches(6, 3.4)
        figure.savefig(picture, dpi=120, bbox_inches="tight", metadata={"Software": None})
    assert picture.read_bytes().startswith(b"\x89PNG")


SHOWN = """\
run    accuracy  seconds
-----  --------  -------
FixBN    92.48%      1.2
"""


@pytest.mark.parametrize(
    ("printed_now", "same"),
    [
        (SHOWN.replace("1.2", "17.9"), True),
        (SHOWN.replace("92.48", "9.01"), True),
        (SHOWN.replace("FixBN", "FixNB"), False),
        (SHOWN.replace("FixBN", "2 FixBN"), False),
    ],
)
def test_a_page_is_compared_but_for_times_and_processors(printed_now: str, same: bool) -> None:
    assert (differences(SHOWN, printed_now) == []) is same


def test_an_excerpt_leaves_out_lines() -> None:
    output = "begins\na 1\nb 2\nc 3\nd 4\n"
    assert excerpt("a 1\n...\nc 3\nd 4\n", output) == "a 1\n...\nc 3\nd 4\n"
    assert excerpt("a 1\nb 2\n...\n", output) == "a 1\nb 2\n...\n", "also those at its end"
    with pytest.raises(AssertionError, match="'e 5' is not printed any more"):
        excerpt("e 5\n", output)
