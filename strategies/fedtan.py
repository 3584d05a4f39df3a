"""FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithm 3).

In the first local step every batch norm averages over the clients: the batch mean and variance in the forward pass, and
the gradients with respect to both in the backward pass. The weighted mean of the clients' gradients then equals the
gradient of ordinary batch norm on the union of the clients' batches. The other E - 1 local steps are ordinary ones.

`fedbn_flwr.exchange.step` has the client's computation, `fedbn_flwr.exchange.round` the server's loop. A model with L
batch norms needs 2L exchanges (3L as in the paper) and the messages with the model. A client that does not answer an
exchange is left out of the rest of the round, and the weights of the others are normalised again.

Exchanges use Flower's messages, or streams if the deployment has an exchange service (`fedbn_flwr.exchange.config`).
An engine with worker processes passes exchanges on to these without messages. All give the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any, Literal, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.client.training import SGD, Gradient, Loss
from fedbn_flwr.engines.base import Capabilities, capabilities
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.codec import Contribution
from fedbn_flwr.exchange.config import ExchangeConfig
from fedbn_flwr.exchange.direct_round import DirectRound
from fedbn_flwr.exchange.message_round import MessageRound, RoundMessages
from fedbn_flwr.exchange.round import Carrier, ExchangesDone, run_exchanges
from fedbn_flwr.exchange.step import LayerwiseStep, check_batch
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, configs_in
from fedbn_flwr.norms.roles import Role

from ._freezing import LastFree
from ._rule import Round, Traits
from .fedavg import FedAvg, FedAvgOptions
from .fixbn import FixBN, frozen_roles


class FedTAN(FedAvg):
    """FedAvg whose first local step uses the gradient of the union of the clients' batches.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    exchange : "fused" | "paper" (default: "fused")
        "fused" exchanges mean and variance together, in 2L + 1 communication rounds; "paper" exchanges one after the
        other, in 3L + 1. The gradient is the same.
    weights : "data" | "batch" (default: "data")
        p_i is proportional to the size of the client's data set ("data", as in the paper) or of its batch ("batch").
        With batches of unequal size only "batch" gives the gradient of the union.
    min_batch : int (default: 32)
        Clients refuse to exchange the statistics of a batch of fewer images, because these reveal the images.
        `docs/privacy.md` has measurements. A client may have a higher limit of its own.
    exchange_timeout : float (default: 600)
        The time limit of one exchange in seconds.
    direct : ExchangeConfig | bool (default: True)
        How exchanges are sent: True uses streams if the environment has an exchange service
        (`FEDBN_EXCHANGE_ADDRESS`), else the engine's processes if they have the parked rounds (local, ray), else
        messages; False always uses messages.
    """

    backward = True  # the backward pass exchanges gradients
    traits = Traits(
        replaces_norm=True,  # clients normalise over the batches of all clients
        linear_steps=True,
        traffic="two exchanges per batch norm in a round; three with exchange: paper",
    )

    def __init__(
        self,
        *,
        exchange: Literal["fused", "paper"] = "fused",
        weights: Literal["data", "batch"] = "data",
        min_batch: int = protocol.MIN_BATCH,
        exchange_timeout: float = 600,
        direct: ExchangeConfig | bool = True,
        **options: Unpack[FedAvgOptions],
    ) -> None:
        if exchange not in ("fused", "paper"):
            raise SettingsError(f"exchange is {exchange!r}; expected 'fused' or 'paper'")
        if weights not in ("data", "batch"):
            raise SettingsError(f"weights is {weights!r}; expected 'data' or 'batch'")
        if not isinstance(min_batch, int) or isinstance(min_batch, bool) or min_batch < 1:
            raise SettingsError(f"min_batch is {min_batch!r}; expected a number of images, 1 or more")
        if not isinstance(direct, ExchangeConfig | bool):
            raise SettingsError(
                f"direct is {direct!r}; expected true or false (the environment variable FEDBN_EXCHANGE_ADDRESS of the "
                "ServerApp has the address), or a fedbn_flwr.exchange.config.ExchangeConfig"
            )
        if not exchange_timeout > 0:
            raise SettingsError(f"exchange_timeout is {exchange_timeout!r}; expected a number of seconds above zero")
        if weights == "batch":
            options.setdefault("weighted_by_key", protocol.BATCH_EXAMPLES)
        super().__init__(**options)
        self.traits = replace(self.traits, min_batch=min_batch)
        self.exchange = exchange
        self.weights_by = weights
        self.exchange_timeout = exchange_timeout
        self.direct = direct
        self._direct_round: DirectRound | None = None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if (service := self._service()) is not None:  # report a wrong setting before the first round
            service.check()
            if service.open_to_others:
                log(
                    WARNING,
                    "the exchange service at %s has no TLS: third parties can read and change exchanges",
                    service.address,
                )
        self.require_norm({Role.STATISTICS}, arrays, "exchanges statistics of batch norm")

    def instructions(self, round: Round) -> dict[str, Any]:
        asked = {protocol.REPORT_BATCH: True} if self.weights_by == "batch" else {}
        if _frozen(round.config):  # frozen batch norms compute no batch statistics
            return asked
        return {
            protocol.COHORT: self.exchange,
            protocol.COHORT_BACKWARD: self.backward,
            protocol.COHORT_MIN_BATCH: self.traits.min_batch,
            **asked,
        }

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if not messages or _frozen(config):
            return messages
        shared = dict(configs_in(messages[0].content)[self.configrecord_key])
        model = arrays_in(messages[0].content)[self.arrayrecord_key]
        nodes = [message.metadata.dst_node_id for message in messages]

        engine = capabilities(grid)

        def exchanges(carrier: Carrier) -> ExchangesDone:
            report = functools.partial(self._report, engine)
            what = f"round {server_round}"
            return run_exchanges(carrier, nodes, what, self._weigh, self.admit, report, self.bounds)

        about = RoundMessages(model, shared, self.configrecord_key)
        if (service := self._service()) is None:
            carrier = MessageRound(grid, about, self.exchange_timeout, engine.exchange if self.direct else None)
            done = exchanges(carrier)
            self.asked = len(done.nodes)
            return carrier.last_messages(done)
        if (served := engine.start()) is not None and served < (count := len(list(grid.get_node_ids()))):
            raise SettingsError(
                f"the direct exchange needs all {count} clients alive at once, and this engine serves {served} "
                "at a time; set engine.workers to the number of clients, or strategy.direct to false"
            )
        self._direct_round = DirectRound(
            service, about, nodes, exchanges, count=engine.count_exchange, exchange_seconds=self.exchange_timeout
        )
        engine.observe(self._direct_round)
        return self._direct_round.messages()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        direct, self._direct_round = self._direct_round, None
        if direct is not None:
            replies = list(replies)
            left = direct.finish(replies)
            # Clients that dropped out were already reported; ignore their final reply.
            replies = [reply for reply in replies if reply.metadata.src_node_id not in direct.nodes - left]
            self.asked = len(left)
        return super().aggregate_train(server_round, replies)

    def _report(self, engine: Capabilities, done: int, total: int) -> None:
        """Show the progress of the exchanges in layers, first of the forward pass, then of the backward pass."""
        each = 1 if self.exchange == "fused" else 2  # exchanges of a layer in the forward pass
        layers = total // (each + self.backward)
        if done <= each * layers:
            engine.report("forward pass, layers", -(-done // each), layers)
        else:
            engine.report("backward pass, layers", done - each * layers, layers)

    def _weigh(self, contribution: Contribution) -> float:
        """p_i, up to scale."""
        return contribution.examples if self.weights_by == "data" else contribution.images

    def _service(self) -> ExchangeConfig | None:
        if isinstance(self.direct, ExchangeConfig):
            return self.direct
        return ExchangeConfig.from_environment() if self.direct else None


class FedTANClient(ClientRule):
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


class FedAvgGlobalStats(FedTAN):
    """FedAvg whose clients use the statistics of the union of their batches in the first step, forward pass only.

    This is FedTAN's forward exchange: the papers' "FedAvg + Algorithm 2", and their substitute for FedDNA.
    Clients normalise batches with the cohort's statistics; in the backward pass each client uses its own gradients with
    respect to them. The papers do not specify the backward pass. Using the client's own gradients instead of their mean
    over the clients is Algorithm 3 without its communication, and exact for one client.
    """

    backward = False
    traits = Traits(replaces_norm=True, traffic="one exchange per batch norm in a round; two with exchange: paper")


class FedTANII(FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics frozen (FedTAN paper, Section 5).

    Accepts FedTAN's arguments too.

    Parameters
    ----------
    fedtan_rounds : int | float (default: 0.1)
        M, a number of rounds as an int or a fraction of all rounds as a float.
    """

    inner = FedTAN
    argument = "fedtan_rounds"

    def __init__(self, *, fedtan_rounds: LastFree = 0.1, **options: Any) -> None:
        super().__init__(self.inner(**options), freeze_round=fedtan_rounds)


def _frozen(config: Mapping[str, Any]) -> bool:
    return Role.STATISTICS in frozen_roles(config)
