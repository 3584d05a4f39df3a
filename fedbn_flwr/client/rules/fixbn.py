"""FixBN's client: batch norm stands still while all else trains (Zhong, Chen, Chao)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from fedbn_flwr.messages.protocol import roles_of
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role

from . import ClientRule, Key

FREEZE = "fedbn.freeze"
FREEZABLE = frozenset({Role.STATISTICS, Role.AFFINE})


class FixBN(ClientRule):
    """Leaves statistics, or gamma and beta, as they were received."""

    keys = {FREEZE: Key("`statistics`, `affine`, or both with a comma", "leave these of batch norm as they came")}

    def around(self) -> AbstractContextManager[None]:
        return frozen_norm(self.local.model, frozen_roles(self.local.config))


def frozen_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    return roles_of(config, FREEZE, FREEZABLE)
