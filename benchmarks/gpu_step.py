"""gpu_step.py STEPS [plain]: milliseconds of a step of ResNet-20, plain, recorded, and with the compiler's code."""

import fcntl
import functools
import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.client.training import backpropagate
from fedbn_flwr.extensions.compiled.graphs import recorded
from fedbn_flwr.extensions.compiled.passes import compiler
from fedbn_flwr.models.build import build_model

batch, steps = 20, int(sys.argv[1])
dev = torch.device("cuda")
torch.set_num_threads(1)
model = build_model("resnet20", 10, "bn").to(dev)
x = torch.randn(batch, 3, 32, 32, device=dev)
y = torch.randint(0, 10, (batch,), device=dev)


def timed(gradient, n, fused=False):
    how = {"fused": True} if fused else {"foreach": True}
    opt = SGD(model.parameters(), 0.001, 0.9, weight_decay=1e-4, **how)

    def run(k):
        for _ in range(k):
            opt.zero_grad()
            gradient(model, x, y, F.cross_entropy)
            opt.step()
        torch.cuda.synchronize()

    run(4)
    t = time.perf_counter()
    run(n)
    return round(1e3 * (time.perf_counter() - t) / n, 3)


def only(gradient, n):
    for _ in range(3):
        gradient(model, x, y, F.cross_entropy)
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        gradient._graph.replay()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - t) / n, 3)


out = {}
for name, how in {"float32": {}, "bf16": {"precision": torch.bfloat16}}.items():
    plain = functools.partial(backpropagate, **how)
    t = time.perf_counter()
    rec = recorded(plain, model, x, y, F.cross_entropy)
    torch.cuda.synchronize()
    out[name + " record_s"] = round(time.perf_counter() - t, 2)
    with Path("gpu.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        out[name] = {"plain": timed(plain, steps), "recorded": timed(rec, steps)}
        out[name] |= {"recorded, fused SGD": timed(rec, steps, True), "replay only": only(rec, steps)}
    print(json.dumps(out), flush=True)
    if len(sys.argv) > 2:
        continue
    t = time.perf_counter()
    both = recorded(functools.partial(plain, forward=compiler()[0]), model, x, y, F.cross_entropy)
    torch.cuda.synchronize()
    out[name + " compile_s"] = round(time.perf_counter() - t, 2)
    with Path("gpu.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        out[name] |= {"compiled and recorded": timed(both, steps), "compiled, replay only": only(both, steps)}
    print(json.dumps(out), flush=True)
