"""Milliseconds of the replayed passes of ResNet-20, by cudnn.benchmark, memory format and TF32."""

import functools
import time

import torch
from torch.nn import functional as F

from fedbn_flwr.client.training import backpropagate
from fedbn_flwr.extensions.compiled.graphs import Recording
from fedbn_flwr.models.build import build_model

dev = torch.device("cuda")
torch.set_num_threads(1)
for bench in (False, True):
    for nhwc in (False, True):
        for tf32 in (True, False):
            torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = bench, tf32
            f = torch.channels_last if nhwc else torch.contiguous_format
            model = build_model("resnet20", 10, "bn").to(dev).to(memory_format=f)
            x = torch.randn(20, 3, 32, 32, device=dev).contiguous(memory_format=f)
            y = torch.randint(0, 10, (20,), device=dev)
            t = time.perf_counter()
            r = Recording(functools.partial(backpropagate), model, x, y, F.cross_entropy)
            torch.cuda.synchronize()
            took = time.perf_counter() - t
            out = []
            for _ in range(2):
                t = time.perf_counter()
                for _ in range(150):
                    r._graph.replay()
                torch.cuda.synchronize()
                out.append(round(1e3 * (time.perf_counter() - t) / 150, 3))
            print(f"benchmark {bench} nhwc {nhwc} tf32 {tf32}: {out} ms, recording {took:.2f} s", flush=True)
