"""Seconds per FedTAN iteration over messages and over streams, and per round of others.

docs/results/performance.md#fedtan-over-a-network has them.

    python benchmarks/network.py nodes 2 5      real SuperLink and SuperNodes on this machine, with TLS
    python benchmarks/network.py latency 2 5 10 local processes, the real service, and a proxy that adds latency

Appends one line per run to docs/results/network/nodes.jsonl or latency.jsonl.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.frame import note  # noqa: E402
from tests.support.network import Deployment, make_keys  # noqa: E402


def experiment(clients: int, rounds: int, runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "clients": clients,
        "data": {"name": "digits", "partition": {"kind": "iid"}},
        "model": {"name": "resnet20", "norm": "bn"},
        "train": {"lr": 0.02, "momentum": 0.9, "batch_size": 32, "steps": 1},
        "evaluate": {"every": 1000},
        "engine": {"device": "cpu"},
        "runs": runs,
    }


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


# --- real nodes ---

NODE_RUNS = {
    "FedAvg": {"strategy": {"name": "FedAvg"}},
    "FixBN": {"strategy": {"name": "FixBN", "freeze_round": 1}},
    "FedTAN streams": {"strategy": {"name": "FedTAN"}},
    "FedTAN streams, cnn": {"strategy": {"name": "FedTAN"}, "model": {"name": "cnn"}},
    # Four exchanges instead of 38: the time of one hardly depends on its size.
    "FedTAN messages, cnn": {"strategy": {"name": "FedTAN", "direct": False}, "model": {"name": "cnn"}, "rounds": 2},
}


class Sites(Deployment):
    """The deployment with this number of sites."""

    def __init__(self, folder: Path, sites: int) -> None:
        super().__init__(folder, variables={"SITES": str(sites)})
        for kind in ("supernode-{}", "superexec-clientapp-{}"):
            for i in range(3, sites):
                text = json.dumps(self.services[kind.format(2)])
                for name in ("supernode-", "site-", "data-", "state-", "partition-id=", "exchange-"):
                    text = text.replace(f"{name}2", f"{name}{i}")
                self.services[kind.format(i)] = json.loads(text)
            for i in range(sites, 3):
                del self.services[kind.format(i)]


def nodes(sites: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Sites(Path(folder), sites) as deployment:
        for label, run in NODE_RUNS.items():
            settings = experiment(sites, 2 if sites > 2 else 3, {label: copy.deepcopy(run)})
            done = deployment.run_app({"experiment": json.dumps(settings)}, seconds=1800)
            rounds = history(done)
            note(
                "network/nodes.jsonl",
                nodes=sites,
                run=label,
                communication_rounds=rounds[-1]["communication_rounds"],
                seconds=[round(line["seconds"], 2) for line in rounds],
            )


# --- latency ---


@contextmanager
def delayed(port: int, milliseconds: float) -> Iterator[int]:
    """A port that forwards to another one with a delay."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        mine = probe.getsockname()[1]
    command = [sys.executable, __file__, "proxy", str(mine), str(port), str(milliseconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield mine
        finally:
            process.terminate()


async def proxy(mine: int, other: int, seconds: float) -> None:
    """Forwards data in both directions, each piece this many seconds after its arrival."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            while True:
                piece = await reader.read(65536)
                pieces.put_nowait((clock() + seconds, piece))
                if not piece:
                    return

        taking = asyncio.create_task(take())
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not piece:
                break
            writer.write(piece)
        await taking
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", other)
        for end in (writer, back):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", mine)
    print("ready", flush=True)
    await server.serve_forever()


def local(clients: int, strategy: dict[str, Any], environment: dict[str, str]) -> list[dict[str, Any]]:
    """The history of six rounds on the local engine, with a worker process per client."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latency.yaml"
        file.write_text(json.dumps(experiment(clients, 6, {"run": {"strategy": strategy}})))
        words = [sys.executable, "-m", "fedbn_flwr.commands.cli", "run", str(file), f"engine.workers={clients}"]
        subprocess.run(
            [*words, "--out", f"{folder}/out"],
            check=True,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            timeout=900,
        )
        (config,) = Path(folder).glob("out/**/config.yaml")
        return history(config.parent)


def latency(clients: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = make_keys(Path(folder) / "keys")
        assert made.returncode == 0, made.stderr
        keys = Path(folder) / "keys" / "exchange"
        for name, strategy in (("FedAvg", {"name": "FedAvg"}), ("FedTAN pipes", {"name": "FedTAN", "direct": False})):
            report(clients, name, 0, local(clients, strategy, {}))
        for milliseconds in (0, 10, 50, 100):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            with delayed(port, milliseconds) as mine:
                environment = {
                    "FEDBN_EXCHANGE_ADDRESS": f"127.0.0.1:{mine}",
                    "FEDBN_EXCHANGE_LISTEN": f"127.0.0.1:{port}",
                    "FEDBN_EXCHANGE_CERTIFICATE": str(keys / "server.pem"),
                    "FEDBN_EXCHANGE_KEY": str(keys / "server.key"),
                    "FEDBN_EXCHANGE_CA": str(keys / "ca.crt"),
                }
                report(clients, "FedTAN streams", milliseconds, local(clients, {"name": "FedTAN"}, environment))


def report(clients: int, name: str, milliseconds: float, rounds: list[dict[str, Any]]) -> None:
    seconds = [round(line["seconds"], 3) for line in rounds]
    note(
        "network/latency.jsonl",
        clients=clients,
        run=name,
        milliseconds=milliseconds,
        communication_rounds=rounds[-1]["communication_rounds"],
        median=statistics.median(seconds[1:]),
        seconds=seconds,
    )


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "proxy":
        asyncio.run(proxy(int(words[0]), int(words[1]), float(words[2]) / 1000))
    for count in map(int, words if kind in ("nodes", "latency") else []):
        {"nodes": nodes, "latency": latency}[kind](count)
