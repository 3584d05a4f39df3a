"""`fedbn check`: whether a site can take part, before a run waits for it."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from fedbn_flwr.commands.common import Commands, add_command, loading, parse_pairs
from fedbn_flwr.errors import install

_NEXT = "\n" + " " * 28  # below what was found


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "check",
        check,
        summary="at a site: key, certificates, server, data and GPU",
        description=(
            "Check whether a site can take part in a federation, before a run waits for it. Give it the options of "
            "flower-supernode; only these are checked. The exit code is 1 if a check fails."
        ),
        epilog=(
            "Example: fedbn check --superlink fl.example.org:8443 --root-certificates keys/ca.crt "
            "--auth-supernode-private-key keys/node.key --node-config \"data-path='/srv/data'\" mine.yaml"
        ),
    )
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="check the data for this experiment")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the experiment, such as clients=10"
    )
    parser.add_argument("--superlink", metavar="HOST:PORT", help="address of the SuperLink")
    tls = parser.add_mutually_exclusive_group()
    tls.add_argument("--root-certificates", type=Path, metavar="FILE", help="ca.crt (the system's certificates)")
    parser.add_argument("--auth-supernode-private-key", type=Path, metavar="FILE", help="the site's key, node.key")
    parser.add_argument("--exchange", metavar="HOST:PORT", help="address of FedTAN's exchange service")
    parser.add_argument("--node-config", metavar="TEXT", help="as for flower-supernode: data-path, domain, state, ...")
    tls.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")


def check(arguments: argparse.Namespace) -> int:
    from fedbn_flwr.experiment.file.layers import load_experiment

    experiment = load_experiment(arguments.experiment, arguments.overrides) if arguments.experiment else None
    with loading():
        from . import needs

    node = parse_pairs([arguments.node_config or ""], "--node-config")
    key, ca, address = arguments.auth_supernode_private_key, arguments.root_certificates, arguments.superlink
    folder = Path(str(node.get("state", ""))).expanduser()
    answers = itertools.chain(
        needs.asked("versions", needs.check_versions(), install()),
        needs.asked(
            "key",
            needs.check_key(key, insecure=arguments.insecure) if key else (),
            "copy the site's folder from deploy/keys, for this user",
        ),
        needs.asked(
            "root certificate",
            needs.check_authority(ca) if ca else (),
            "copy ca.crt from the server's deploy/keys",
        ),
        needs.asked(
            "server",
            needs.check_server(address, ca, insecure=arguments.insecure)
            if address and (ca is None or ca.is_file())
            else (),
            "correct the root certificate first",
        ),
        needs.asked(
            "exchange service",
            needs.check_exchange_service(arguments.exchange) if arguments.exchange else (),
            "correct --exchange",
        ),
        needs.asked("node config", needs.check_node_config(node), "correct --node-config"),
        needs.asked(
            "state folder",
            needs.check_state(folder) if "state" in node else (),
            "create it, for the user who runs the ClientApp (uid 49999 in the containers)",
        ),
        needs.asked(
            "data",
            needs.check_data(experiment, node),
            "correct the data, the node config or the experiment",
        ),
        needs.asked("GPU", needs.check_gpu(experiment, node), "install PyTorch for CUDA, or set engine.device to auto"),
    )
    counts = {"ok": 0, "warning": 0, "FAILED": 0}
    told: set[str] = set()  # most runs have the same data
    for found in answers:
        if found.found in told:  # the data too can't be read with a wrong node config
            continue
        told.add(found.found)
        counts[found.status] += 1
        lines = found.found.splitlines() + ([f"-> {found.cure}"] if found.status != "ok" else [])
        print(f"{found.status.ljust(7)}  {found.name.ljust(18)} {_NEXT.join(lines)}", flush=True)
    print(f"\n{counts['ok']} ok, {counts['warning']} warnings, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0
