"""FixBN's client rule: batch norm is frozen while the other layers train (Zhong, Chen, Chao)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.messages.protocol import roles_of
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role

FREEZE = "fedbn.freeze"
FREEZABLE = frozenset({Role.STATISTICS, Role.AFFINE})


class FixBN(ClientRule):
    """Freezes the statistics, or gamma and beta, at the received values."""

    keys = {FREEZE: Key("`statistics`, `affine`, or both with a comma", "freeze these roles at the received values")}

    def around(self) -> AbstractContextManager[None]:
        return frozen_norm(self.local.model, frozen_roles(self.local.config))


def frozen_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    return roles_of(config, FREEZE, FREEZABLE)
