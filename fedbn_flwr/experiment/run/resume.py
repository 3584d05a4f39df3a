"""Restores the strategy and the clients of a run from its folder."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.strategies import Rule

from ..parts import Parts
from ..settings import strategy_name


def restore_clients(
    prepared: Parts, grid: GridAround, folder: RunFolder, trained: Mapping[int, int], folders: Mapping[int, int]
) -> None:
    """Restore the clients' states from the checkpoint, or check that the nodes have them in their state folders.

    `trained` is the last round that each partition trained in, `folders` the round of the state in its node's folder.
    """
    restored = False
    if (states := grid.node_states()) is not None:
        for node, records in folder.checkpoint.clients():
            states.write_state(node, records)
            restored = True
    if restored:
        return
    if (needed := _needed_client_state(prepared)) is None:
        return
    lost = [f"client {client} has none" for client in trained if client not in folders]
    lost += [
        f"client {client} has that of round {folders[client]}, but last trained in round {last}"
        for client, last in trained.items()
        if client in folders and folders[client] < last
    ]
    if lost:
        more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
        raise SettingsError(
            f"{str(folder.path)!r} cannot be resumed here: {strategy_name(prepared.run.strategy)} needs its "
            f"clients' state ({needed}), but {'; '.join(sorted(lost)[:3])}{more}. Resume it on the local "
            "engine if it began there, or give each node a folder before a run begins: --node-config "
            "\"state='/srv/fedbn-state'\""
        )


def promises_of(rule: Rule) -> dict[str, float]:
    """The numbers of the rule, and of those inside it, that are on the disk before a round's messages are sent."""
    return {name: getattr(each.memory, name) for each in rule.chain for name in each.promised}


def keep_promises(rule: Rule, folder: RunFolder, done: int) -> None:
    """Count the rounds that stopped sessions began after the checkpoint of round `done`."""
    kept = folder.promises()
    for each in rule.chain:
        for name in each.promised:
            if done and name not in kept:
                raise SettingsError(
                    f"{str(folder.path)!r} cannot be resumed: its file 'promises' does not have {name!r} of the rounds "
                    "that were begun; restore the folder from a copy, or start again with another --out"
                )
            setattr(each.memory, name, max(getattr(each.memory, name), kept.get(name, 0)))


def _needed_client_state(prepared: Parts) -> str | None:
    """A description of the client state that training needs, or None."""
    if prepared.run.train.keep_momentum:
        return "their optimisers' state"
    norms = [module for module in prepared.model.modules() if isinstance(module, _BatchNorm)]
    if any(isinstance(norm, BatchRenorm) or norm.momentum is None for norm in norms):
        return "their batch counters"
    return prepared.rule.traits.client_memory
