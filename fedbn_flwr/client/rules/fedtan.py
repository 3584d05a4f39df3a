"""FedTAN's client rule: in the first step, batch norm normalises over the batches of all clients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.client.training import SGD, Gradient, Loss
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.messages import protocol


class FedTAN(ClientRule):
    """The layer-wise step of `fedbn_flwr.exchange`; `fedbn_flwr.client.layerwise` transmits its exchanges."""

    keys = {
        protocol.COHORT: Key("`fused` or `paper`", "exchange statistics at each batch norm of the first step (FedTAN)"),
        protocol.COHORT_BACKWARD: Key("bool", "exchange gradients too"),
        protocol.COHORT_MIN_BATCH: Key(
            "int", "refuse to exchange the statistics of a batch of fewer images; if it is absent, of fewer than 32"
        ),
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
        step = LayerwiseStep(
            exchange,
            fused=config[protocol.COHORT] == "fused",
            backward=backward,
            examples=self.local.num_examples,
            partition=self.local.partition,
        )

        def checked(model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Loss) -> Tensor:
            allowed = int(config.get(protocol.COHORT_MIN_BATCH, protocol.MIN_BATCH))
            check_batch(len(inputs), allowed=allowed, own=self.local.min_batch)  # before anything is sent
            return step(model, inputs, targets, loss_fn)

        return checked


def check_batch(images: int, *, allowed: int, own: int) -> None:
    """Refuse a batch of fewer images than the strategy (`allowed`) or the client (`own`) allows to exchange."""
    if images >= max(allowed, own):
        return
    cures = []
    if images < own:
        cures.append(f"min-batch={images} in this node's config (or BNClient(min_batch={images}))")
    if images < allowed:
        cures.append(f"min_batch: {images} of the strategy")
    raise MessageError(
        f"the batch of this client has {images} image{'s' if images != 1 else ''}, and it refuses to exchange the "
        f"statistics of fewer than {max(allowed, own)}, because these reveal the images; use larger batches, or allow "
        f"it by {' and '.join(cures)}"
    )
