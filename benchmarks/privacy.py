"""Measures accuracy against epsilon for the three treatments of batch norm's statistics, and for group norm.

    python benchmarks/privacy.py noise keep freeze 'group norm' > docs/results/private/digits.jsonl
    python benchmarks/privacy.py re-estimated > docs/results/private/reestimated.jsonl

Sixty clients with about 24 of the embedded handwritten digits each, a perceptron, 15 rounds of four steps. The runs
of a row have the same epsilon for delta 1e-5 (changes left out); with `noise` a fifth of mu^2 is for the statistics.
The noise is drawn from the seed too, so the figures can be repeated. The accuracy is that of the global model on the
test images, of each seed, with mean and standard deviation; with `keep` its statistics are those of the test images
(`evaluate.statistics: reestimated`); `re-estimated` is `noise` evaluated in the same way.
"""

import json
import math
import shlex
import statistics
import sys
import tempfile

from fedbn_flwr import run
from fedbn_flwr.extensions.private.noise import epsilon_of
from fedbn_flwr.results.folder.environment import environment

ROUNDS, DELTA, SEEDS = 15, 1e-5, (0, 1, 2)
BASE = f"""
rounds: {ROUNDS}
clients: 60
data: {{name: digits, partition: {{kind: iid}}}}
model: {{name: mlp, norm: bn}}
train: {{lr: 0.3, batch_size: 16, steps: 4}}
evaluate: {{every: {ROUNDS}, clients: false}}
engine: {{device: cpu, workers: 0}}
strategy: {{name: Private, base: {{name: FedAvg}}}}
"""
WAYS = {
    "noise": {},
    "keep": {"evaluate": {"statistics": "reestimated"}},
    "freeze": {},
    "group norm": {"model": {"norm": "gn"}},
    "re-estimated": {"evaluate": {"statistics": "reestimated"}},
}


def mu_of(epsilon: float) -> float:
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, DELTA) < epsilon else (low, middle)
    return low


def settings(way: str, epsilon: float) -> dict[str, object]:
    chosen: dict[str, object] = {"clip": 1.0, "statistics_clip": 1.0, "noise_seed": 0}
    if way == "keep":
        chosen["base"] = {"name": "SiloBN", "global_norm": "initial"}
    if way == "freeze":
        chosen["base"] = {"name": "FixBN", "freeze_round": 0}
    if math.isinf(epsilon):
        return chosen | {"noise": 0}
    each = mu_of(epsilon) ** 2 / ROUNDS  # of mu^2, per round
    if way not in ("noise", "re-estimated"):
        return chosen | {"noise": each**-0.5}
    return chosen | {"noise": (0.8 * each) ** -0.5, "statistics_noise": (0.2 * each) ** -0.5}


made = environment()
chosen = sys.argv[1:] or [*WAYS]
machine = f"{made['processor']}, {made['cores']} cores; torch {made['versions']['torch']}"
command = f"{shlex.join(['python', 'benchmarks/privacy.py', *sys.argv[1:]])}; commit {made['commit']}; {machine}"
print(json.dumps({"note": f"{command}\n{ROUNDS} rounds, 60 clients, delta {DELTA:g}, seeds {list(SEEDS)}"}), flush=True)
for epsilon in (math.inf, 30.0, 10.0, 3.0):
    for way in chosen:
        found = []
        for seed in SEEDS:
            strategy = settings(way, epsilon) | {"noise_seed": seed}
            with tempfile.TemporaryDirectory() as out:
                result = run(BASE, progress=False, out=out, seed=seed, strategy=strategy, **WAYS[way])
            report = result.summary.notes["privacy"]
            assert math.isinf(epsilon) or abs(report["epsilon"] - epsilon) < 1e-3 * epsilon, report
            found.append(100 * result.summary.accuracy)
        line = {"way": way, "epsilon": None if math.isinf(epsilon) else epsilon, "accuracies": found}
        print(json.dumps(line | {"mean": statistics.mean(found), "deviation": statistics.stdev(found)}), flush=True)
