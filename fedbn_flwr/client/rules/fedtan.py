"""FedTAN's client rule: in the first step, batch norm normalises over the batches of all clients."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.training import SGD, Gradient
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.messages import protocol

from . import ClientRule, Key


class FedTAN(ClientRule):
    """The layer-wise step of `fedbn_flwr.exchange`; `fedbn_flwr.client.layerwise` transmits its exchanges."""

    keys = {
        protocol.COHORT: Key("`fused` or `paper`", "exchange statistics at each batch norm of the first step (FedTAN)"),
        protocol.COHORT_BACKWARD: Key("bool", "exchange gradients too"),
        protocol.COHORT_STEP: Key(
            "int", "the number of this message in a layer-wise round: 0 begins it, k has the result of exchange k"
        ),
        protocol.COHORT_BATCH: Key("int", "images in the batches of all clients, sent with the result of an exchange"),
        protocol.REPORT_BATCH: Key("true", "also report the metric `batch-examples`, the images in the first batch"),
        protocol.DIRECT: Key("`HOST:PORT`", "run the exchanges of this `train` message on a stream to this address"),
        protocol.DIRECT_TOKEN: Key("text", "authenticate by this token, valid for one stream of one node in one round"),
        protocol.DIRECT_CA: Key("PEM", "trust this certificate authority; without it, the client's default ones"),
        protocol.DIRECT_INSECURE: Key("true", "connect without TLS"),
        protocol.DIRECT_TIMEOUT: Key("float", "fail if an exchange takes more than this number of seconds"),
    }

    def first_gradient(self) -> Gradient | None:
        config, exchange = self.local.config, self.local.exchange
        if protocol.COHORT not in config:
            return None
        if exchange is None:
            raise MessageError(f"{protocol.COHORT!r} needs a ClientApp made by fedbn_flwr.client_app")
        if not any(isinstance(module, _BatchNorm) for module in self.local.model.modules()):
            raise MessageError(
                f"{protocol.COHORT!r} asks for exchanges of batch norm's statistics, and this client's model has no "
                "batch norm (instance norm has no statistics of a batch); use FedAvg, or a model with batch norm"
            )
        backward = bool(config.get(protocol.COHORT_BACKWARD, True))
        if backward and not (isinstance(self.local.optimizer, SGD) and self.local.clip is None):
            raise MessageError(
                f"{protocol.COHORT_BACKWARD!r} makes the mean of the clients' first steps the step on the union of "
                "their batches, which holds only for SGD without clipping; expected optimizer sgd and no clip"
            )
        return LayerwiseStep(
            exchange,
            fused=config[protocol.COHORT] == "fused",
            backward=backward,
            examples=self.local.num_examples,
            partition=self.local.partition,
        )
