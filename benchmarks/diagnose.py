"""Does `fedbn diagnose` predict what batch norm costs? Clients, networks and local steps, diagnosed and trained.

    nice -n 19 python benchmarks/diagnose.py OUT

Each cell is a file in OUT, and what is there is kept, so the script may be stopped at any time. Then
`python benchmarks/diagnose.py OUT --collect docs/results/diagnose/cells.json` gathers the cells.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from fedbn_flwr import diagnose, run_all
from fedbn_flwr.results.report import write

CLIENTS = 5
MLP: dict[str, Any] = {"name": "mlp", "options": {"hidden": 64}}
LABELS: dict[str, Any] = {
    "iid": {"kind": "iid"},
    "dirichlet 1": {"kind": "dirichlet", "alpha": 1.0},
    "dirichlet 0.3": {"kind": "dirichlet", "alpha": 0.3},
    "dirichlet 0.1": {"kind": "dirichlet", "alpha": 0.1},
    "5 classes": {"kind": "classes", "classes_per_client": 5},
    "3 shards": {"kind": "shards", "shards_per_client": 3},
    "2 shards": {"kind": "shards", "shards_per_client": 2},
}
NATURAL = {"kind": "natural"}
INPUTS = {  # of five clients: scale and shift, in units of the largest pixel, and whether the image is mirrored
    "dimmed": [(1, 0, 0), (0.9, 0, 0), (0.8, 0, 0), (0.7, 0, 0), (0.6, 0, 0)],
    "mirrored": [(1, 0, 0), (1, 0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 0)],
    "scaled and shifted": [(1, 0, 0), (0.5, 0.5, 0), (0.3, 0, 0), (1.5, -0.5, 0), (0.7, 0.3, 0)],
    "inverted": [(1, 0, 0), (-1, 1, 0), (1, 0, 1), (0.4, 0, 0), (0.5, 0.5, 0)],
}


def digits(changes: str) -> dict[str, Any]:
    """Digits of five domains, each with a random fifth of the images, changed as `INPUTS` says."""
    found, random = load_digits(), np.random.default_rng(0)
    order, domain = random.permutation(len(found.target)), random.integers(0, CLIENTS, len(found.target))
    images = found.images[:, None].astype(np.float32) / 16
    for place, (scale, shift, mirrored) in enumerate(INPUTS[changes]):
        own = images[domain == place]
        images[domain == place] = scale * (own[..., ::-1] if mirrored else own) + shift

    def part(rows: np.ndarray) -> dict[str, Any]:
        return {"inputs": images[rows], "labels": found.target[rows], "domains": [f"d{each}" for each in domain[rows]]}

    return {"train": part(order[360:]), "test": part(order[:360])}


def cells() -> Iterator[tuple[str, dict[str, Any]]]:
    """The cells by name, those that tell most first."""
    labels = {name: {"name": "digits", "partition": kind} for name, kind in LABELS.items()}
    inputs = {
        name: {"name": "diagnose:digits", "options": {"changes": name}, "partition": {"kind": "domain"}}
        for name in INPUTS
    }
    of_digits = labels | inputs

    def cell(where: str, data: Any, model: Any, steps: int, rounds: int, seed: int, **more: Any) -> Any:
        train = {"lr": 0.1, "steps": steps, "batch_size": 32}
        content = {"data": data, "model": model, "train": train, "rounds": rounds, "clients": CLIENTS, "seed": seed}
        return where, {**content, **more}

    heart = {"name": "heart", "task": "binary", "normalise": "moments", "partition": NATURAL}
    of_heart = {"clients": 4, "train": {"lr": 0.05, "steps": 5, "batch_size": 16}}
    some = ("2 shards", "scaled and shifted", "inverted", "dirichlet 0.1", "iid")

    def table(name: str, kind: str, model: Any) -> Any:
        data = {"name": name, "root": ROOT, "examples": 3000, "test_examples": 2000, "partition": LABELS[kind]}
        return cell(f"{name}, {kind}, {model if model == 'lenet' else 'mlp'}, 10 steps, seed 0", data, model, 10, 30, 0)

    for name, data in of_digits.items():
        yield cell(f"digits, {name}, mlp, 10 steps, seed 0", data, MLP, 10, 60, 0)
    yield cell("heart, natural, mlp, 5 steps, seed 0", heart, MLP, 5, 60, 0, **of_heart)
    for kind in ("iid", "2 shards", "dirichlet 0.3"):
        yield table("mnist", kind, MLP)
    for name in some:
        yield cell(f"digits, {name}, cnn, 10 steps, seed 0", of_digits[name], "cnn", 10, 20, 0)
    for name in some:
        yield cell(f"digits, {name}, mlp, 1 steps, seed 0", of_digits[name], MLP, 1, 150, 0)
        yield cell(f"digits, {name}, mlp, 50 steps, seed 0", of_digits[name], MLP, 50, 12, 0)
    yield table("mnist", "5 classes", MLP)
    for name, data in of_digits.items():
        yield cell(f"digits, {name}, mlp, 10 steps, seed 1", data, MLP, 10, 60, 1)
    for kind in ("iid", "2 shards", "5 classes"):
        yield table("fashion_mnist", kind, MLP)
    for kind in ("iid", "2 shards", "5 classes"):
        yield table("mnist", kind, "lenet")
    for kind in ("2 shards", "iid"):
        images = {"name": "cifar10", "root": ROOT, "examples": 3000, "test_examples": 1000, "size": 16}
        images |= {"augment": [], "partition": LABELS[kind]}
        yield cell(f"cifar10, {kind}, resnet20, 10 steps, seed 0", images, "resnet20", 10, 20, 0)
    watch = {"name": "watch", "label": "exercise", "group": "person", "series": "recording", "partition": NATURAL}
    watch |= {"window": {"length": 200, "overlap": 0.5}, "normalise": "moments"}
    of_watch = {"clients": 10, "train": {"lr": 0.1, "steps": 10, "batch_size": 16}}
    yield cell("watch, natural, cnn1d, 10 steps, seed 0", watch, "cnn1d", 10, 30, 0, **of_watch)
    five = {"name": "digits_five", "root": ROOT, "examples": 2500, "test_examples": 2500, "size": 28}
    five |= {"partition": {"kind": "domain"}, "domains": ["mnist", "mnist_m", "usps"]}
    yield cell("digits_five, domains, lenet, 10 steps, seed 0", five, "lenet", 10, 30, 0, clients=3)
    for seed in (1, 2):
        yield cell(f"heart, natural, mlp, 5 steps, seed {seed}", heart, MLP, 5, 60, seed, **of_heart)
    for name in [name for name in of_digits if name not in some]:
        yield cell(f"digits, {name}, cnn, 10 steps, seed 0", of_digits[name], "cnn", 10, 20, 0)


ROOT = ""
CENTRAL: dict[str, dict[str, float]] = {}
ENVIRONMENT = ("commit", "python", "platform", "processor", "cores", "versions", "threads", "instructions", "gpu")


def measure(name: str, content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The errors of a cell, and the accuracies of its trained networks."""
    shared = {**content, "engine": {"workers": 0, "device": "cpu"}}
    batch = content["train"]["batch_size"]
    found = diagnose(shared, out=folder / "diagnosis", progress=False)
    changes = {
        "clients": 1,
        "data": {**content["data"], "partition": {"kind": "iid"}},
        "train": {**content["train"], "batch_size": batch * content["clients"]},
    }
    evaluate = {"every": content["rounds"], "clients": False}
    together = {"engine": {**shared["engine"], "together": content["clients"] if content["model"] is MLP else 1}}

    def train(settings: Any, runs: Any, where: str) -> dict[str, float]:
        done = run_all({**settings, "evaluate": evaluate, "runs": runs}, out=folder / where, progress=False, jobs=1)
        return {each.label: each.summary.main for each in done}

    accuracy = train({**shared, **together}, {"bn": {}, "gn": {"model": {"norm": "gn"}}}, "trained")
    same = json.dumps({**shared, **changes})  # cells that differ only in who has which examples
    if same not in CENTRAL:
        CENTRAL[same] = train({**shared, **changes}, {"central": {}}, "central")
    accuracy |= CENTRAL[same]
    of = {kind: {place: each["error"] for place, each in getattr(found, kind).items()} for kind in ("clients", "dealt")}
    layers = {layer: each["error"] for layer, each in found.clients["0"]["layers"].items()}
    measures = {"cosine": found.clients["0"]["cosine"], "labels": found.labels, "inputs": found.inputs}
    where = json.loads(next((folder / "trained").rglob("environment.json")).read_text())
    measures |= {"environment": {key: where[key] for key in ENVIRONMENT}}
    return {"cell": name, "error": of["clients"], "dealt": of["dealt"], "layers": layers, **measures, **accuracy}


def main() -> None:
    global ROOT
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", default="shared/data", help="folder of local copies of MNIST and the others")
    parser.add_argument("--collect", type=Path, help="only gather the cells into this file")
    arguments = parser.parse_args()
    ROOT = str(Path(arguments.root).resolve())
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.collect:
        files = [arguments.out / f"{name}.json" for name, _ in cells()]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        arguments.collect.parent.mkdir(parents=True, exist_ok=True)
        of = {json.dumps(each.pop("environment"), indent=1) for each in found}
        arguments.collect.with_name("environment.json").write_text("[\n" + ",\n".join(sorted(of)) + "\n]\n")
        arguments.collect.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
        return
    for name, content in cells():
        file, folder = arguments.out / f"{name}.json", arguments.out / "work"
        if not file.exists():
            shutil.rmtree(folder, ignore_errors=True)
            file.write_text(json.dumps(measure(name, content, folder)))
            print(name, file.read_text(), flush=True)


if __name__ == "__main__":
    write._pictures = lambda rows, form: ({}, "")  # type: ignore[attr-defined,assignment]
    main()
