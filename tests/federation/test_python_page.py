"""The code of docs/python.md and the rehearsal of docs/deployment.md, run in order, and what it prints."""

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
from tests.support.command import ROOT
from tests.support.images import write_parquet
from tests.support.pages import Page, printed

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
