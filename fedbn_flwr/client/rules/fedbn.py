"""The client rule of FedBN and SiloBN. A BNClient keeps the arrays that it does not receive without any rule."""

from __future__ import annotations

from fedbn_flwr.messages.protocol import roles_of
from fedbn_flwr.norms.roles import Role

from . import ClientRule, Key

RETURN = "fedbn.return"


class FedBN(ClientRule):
    """Sends back roles that it did not receive, for the server's global model."""

    keys = {RETURN: Key("roles, comma separated", "send these roles back too, in addition to those received")}

    def returned(self) -> frozenset[Role]:
        return roles_of(self.local.config, RETURN, frozenset(Role))
