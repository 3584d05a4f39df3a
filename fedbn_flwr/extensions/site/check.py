"""`fedbn check`: whether a site can take part, before a run waits for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.commands.common import Commands, add_command, parse_pairs

if TYPE_CHECKING:
    from .needs import Check


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "check",
        check,
        summary="at a site: key, certificates, server, data and GPU",
        description=(
            "Check whether a site can take part in a federation, before a run waits for it. The options are those of "
            "flower-supernode; what is not given is not checked. The exit code is 1 if a check failed."
        ),
        epilog=(
            "Example: fedbn check --superlink fl.example.org:8000 --root-certificates keys/ca.crt "
            "--auth-supernode-private-key keys/node.key --node-config \"data-path='/srv/data'\" mine.yaml"
        ),
    )
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="check the data for this experiment")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it, such as clients=10")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="address of the SuperLink")
    tls = parser.add_mutually_exclusive_group()
    tls.add_argument("--root-certificates", type=Path, metavar="FILE", help="ca.crt (the system's certificates)")
    parser.add_argument("--auth-supernode-private-key", type=Path, metavar="FILE", help="the site's key, node.key")
    parser.add_argument("--node-config", metavar="TEXT", help="as for flower-supernode: data-path, domain, state, ...")
    tls.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")


def check(arguments: argparse.Namespace) -> int:
    counts = {"ok": 0, "warning": 0, "FAILED": 0}
    for found in _checks(arguments):
        counts[found.status] += 1
        cure = f"\n         {'':16}   -> {found.cure}" if found.cure else ""
        print(f"{found.status.ljust(7)}  {found.name.ljust(18)} {found.found}{cure}", flush=True)
    print(f"\n{counts['ok']} ok, {counts['warning']} warnings, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


def _checks(arguments: argparse.Namespace) -> Iterator[Check]:
    from fedbn_flwr.experiment.file.layers import load_experiment

    from .needs import (
        asked,
        check_authority,
        check_data,
        check_gpu,
        check_key,
        check_node_config,
        check_server,
        check_state,
        check_versions,
    )

    experiment = load_experiment(arguments.experiment, arguments.overrides) if arguments.experiment else None
    node = parse_pairs([arguments.node_config or ""], "--node-config")
    key, ca, address = arguments.auth_supernode_private_key, arguments.root_certificates, arguments.superlink
    folder = Path(str(node.get("state", ""))).expanduser()
    checks: list[tuple[str, Iterable[Check], str]] = [  # name, answers, cure
        ("versions", check_versions(), "pip install fedbn-flwr"),
        (
            "key",
            check_key(key, insecure=arguments.insecure) if key else (),
            "copy the site's folder from deploy/keys, for this user",
        ),
        ("root certificate", check_authority(ca) if ca else (), "copy ca.crt from the server's deploy/keys"),
        (
            "server",
            check_server(address, ca, insecure=arguments.insecure) if address else (),
            "correct the root certificate first",
        ),
        ("node config", check_node_config(node), "correct --node-config"),
        (
            "state folder",
            check_state(folder) if "state" in node else (),
            "create it, for the user who runs the ClientApp (uid 49999 in the containers)",
        ),
        (
            "data",
            check_data(experiment, node) if experiment is not None or "data-path" in node else (),
            "correct the data, the node config or the experiment",
        ),
        ("GPU", check_gpu(experiment), "install PyTorch for CUDA, or set engine.device to auto"),
    ]
    for name, answers, cure in checks:
        yield from asked(name, answers, cure)
