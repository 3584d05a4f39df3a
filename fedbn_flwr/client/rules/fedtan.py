"""FedTAN's client: the first step takes its gradient from batch norm over the batches of all clients."""

from __future__ import annotations

from fedbn_flwr.client.training import Gradient
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.messages import protocol

from . import ClientRule, Key


class FedTAN(ClientRule):
    """The layer-wise step of `fedbn_flwr.exchange`; `fedbn_flwr.client.app` carries its exchanges."""

    keys = {
        protocol.COHORT: Key("`fused` or `paper`", "exchange statistics at each batch norm of the first step (FedTAN)"),
        protocol.COHORT_BACKWARD: Key("bool", "exchange gradients too"),
        protocol.COHORT_STEP: Key(
            "int", "which message of such a round this is: 0 begins it, k carries the answer to exchange k"
        ),
        protocol.COHORT_BATCH: Key("int", "images in the batches of all clients, with each answer"),
        protocol.DIRECT: Key("`HOST:PORT`", "hold the exchanges of this one `train` message on a stream to there"),
        protocol.DIRECT_TOKEN: Key("text", "show it there: one node's, good for one stream of one round"),
        protocol.DIRECT_CA: Key("PEM", "trust certificates of this authority there; without it, the client's own"),
        protocol.DIRECT_INSECURE: Key("true", "connect without TLS"),
        protocol.DIRECT_TIMEOUT: Key("float", "give up when an exchange takes so many seconds"),
    }

    def first_gradient(self) -> Gradient | None:
        config, exchange = self.local.config, self.local.exchange
        if protocol.COHORT not in config:
            return None
        if exchange is None:
            raise MessageError(f"{protocol.COHORT!r} needs a ClientApp made by fedbn_flwr.client_app")
        return LayerwiseStep(
            exchange,
            fused=config[protocol.COHORT] == "fused",
            backward=bool(config.get(protocol.COHORT_BACKWARD, True)),
            examples=self.local.num_examples,
            partition=self.local.partition,
        )
