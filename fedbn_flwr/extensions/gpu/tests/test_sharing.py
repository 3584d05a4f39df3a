"""Workers on GPUs share the examples: these tests need a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedbn_flwr import BNClient, LocalGrid, client_app, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_workers_share_the_images_and_train_what_one_process_trains(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    models = []
    for number, engine in enumerate(({"workers": 0}, {"workers": 2}, {"workers": 2 * gpus, "gpus": gpus})):
        result = run(
            {"rounds": 2, "clients": 4, "train": {"steps": 4}, "strategy": {"name": "FedBN"}},
            engine={"device": "cuda", **engine},
            out=tmp_path / str(number),
            progress=False,
        )
        models.append({key: value.double().cpu() for key, value in result.model(client=0).state_dict().items()})
    for other in models[1:]:
        for key, value in models[0].items():
            apart = (other[key] - value).norm() / value.norm().clamp(min=1e-3)
            assert apart <= 1e-3, f"{key}: {float(apart):g} apart"


def test_workers_read_the_images_in_place(capfd: pytest.CaptureFixture[str]) -> None:
    pixels = torch.zeros(100, dtype=torch.uint8, device="cuda")
    app = client_app(functools.partial(look, pixels))
    with LocalGrid(app, 2, workers=2, gpus=1) as grid:
        grid.start()
        pixels.fill_(7)
        torch.cuda.synchronize()
        replies = list(grid.send_and_receive([Message(RecordDict(), node, "query.keys") for node in (1, 2)]))
    assert [reply.error.reason.rpartition(" ")[2] for reply in replies] == ["7"] * 2, "what was written after the start"
    assert "each has a copy" not in capfd.readouterr().err


def look(pixels: torch.Tensor, context: Context) -> BNClient:
    raise ValueError(f"the last pixel is {int(pixels[-1])}")
