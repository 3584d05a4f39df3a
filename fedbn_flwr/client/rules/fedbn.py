"""The client of rules that keep roles on the client (FedBN, SiloBN): it keeps by itself what it is not sent."""

from __future__ import annotations

from fedbn_flwr.messages.protocol import roles_of
from fedbn_flwr.norms.roles import Role

from . import ClientRule, Key

RETURN = "fedbn.return"


class FedBN(ClientRule):
    """Sends back roles that it was not sent, for the server's global model."""

    keys = {RETURN: Key("roles, comma separated", "send these back too, besides what came")}

    def returned(self) -> frozenset[Role]:
        return roles_of(self.local.config, RETURN, frozenset(Role))
