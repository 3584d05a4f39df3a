"""Resuming a run: from its checkpoint to the strategy and the clients."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.results.checkpoint import Snapshot
from fedbn_flwr.results.folder import RunFolder

from .prepare import Prepared, strategy_name


def read_snapshot(folder: RunFolder) -> Snapshot:
    snapshot = folder.checkpoint.read()
    if snapshot.strategy is None:
        raise SettingsError(f"{str(folder.path)!r} cannot be resumed: {snapshot.unsaved}")
    return snapshot


def restore_clients(
    prepared: Prepared, grid: GridAround, folder: RunFolder, trained: Mapping[int, int], folders: Mapping[int, int]
) -> None:
    """Give the clients the states of the checkpoint, or check that they have them on their own disks.

    `trained` is the last round that each partition trained in, `folders` the round that its node's folder has.
    """
    saved, states = folder.checkpoint.clients(), grid.node_states()
    if saved is not None and states is not None:
        for node, records in saved:
            states.write_state(node, records)
        return
    if (needed := _needed_of_clients(prepared)) is None:
        return
    lost = [f"client {who} has none" for who in trained if who not in folders]
    lost += [
        f"client {who} has that of round {folders[who]}, and trained in round {last}"
        for who, last in trained.items()
        if who in folders and folders[who] < last
    ]
    if lost:
        more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
        raise SettingsError(
            f"{str(folder.path)!r} cannot be resumed here: {strategy_name(prepared.run.strategy)} needs what its "
            f"clients keep of their own ({needed}), and {'; '.join(sorted(lost)[:3])}{more}. Resume it on the local "
            "engine if it began there, or give each node a folder before a run begins: --node-config "
            "\"state='/srv/fedbn-state'\""
        )


def _needed_of_clients(prepared: Prepared) -> str | None:
    """What training needs clients to keep from round to round, in words."""
    if prepared.run.train.keep_momentum:
        return "their momentum"
    norms = [module for module in prepared.model.modules() if isinstance(module, _BatchNorm)]
    if any(isinstance(norm, BatchRenorm) or norm.momentum is None for norm in norms):
        return "their counters of batches"
    return prepared.rule.traits.client_memory
