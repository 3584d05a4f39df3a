"""FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithm 3).

In the first local step every batch norm meets the other clients: forward it averages its batch mean and variance
over them, backward the gradients with respect to both. The weighted mean of the clients' gradients is then that of
ordinary batch norm on the union of their batches. The other E - 1 local steps are ordinary ones.

The client's part is `fedbn_flwr.layerwise`; here is the server's: 2L exchanges with L batch norms (3L as in the
paper), and the model. A client that does not answer an exchange is out of the rest of the round, and the others are
weighted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import protocol
from fedbn_flwr.aggregate import Arrays, pooled_moments, weighted_mean
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.roles import Role, roles
from fedbn_flwr.state import pack, unpack

from .fedavg import FedAvg
from .fixbn import FixBN
from .wrapper import refused


class FedTAN(FedAvg):
    """FedAvg whose first local step has the gradient of the union of the clients' batches.

    Parameters
    ----------
    exchange : "fused" | "paper" (default: "fused")
        Mean and variance together, 2L + 1 communication rounds; or one after the other, 3L + 1 as in the paper.
        The gradient is the same.
    weights : "data" | "batch" (default: "data")
        p_i by the clients' data sets, as in the paper, or by their batches. With batches of unequal size only the
        second gives the gradient of the union.
    exchange_timeout : float (default: 600)
        Seconds that one exchange may take.

    The other arguments are FedAvg's.
    """

    backward = True  # gradients are exchanged too
    replaces_norm = True  # by batch norm over the clients' batches

    def __init__(
        self,
        *args: Any,
        exchange: Literal["fused", "paper"] = "fused",
        weights: Literal["data", "batch"] = "data",
        exchange_timeout: float = 600,
        **kwargs: Any,
    ) -> None:
        if exchange not in ("fused", "paper"):
            raise SettingsError(f"exchange is {exchange!r}; expected 'fused' or 'paper'")
        if weights not in ("data", "batch"):
            raise SettingsError(f"weights is {weights!r}; expected 'data' or 'batch'")
        if weights == "batch":
            kwargs.setdefault("weighted_by_key", protocol.BATCH_EXAMPLES)
        super().__init__(*args, **kwargs)
        self.exchange = exchange
        self.weights_by = weights
        self.exchange_timeout = exchange_timeout

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        if Role.STATISTICS not in roles(arrays).values():
            raise SettingsError(
                f"{type(self).__name__} exchanges statistics of batch norm, and the model has none (no key ends in "
                "running_mean); use FedAvg, or a model with model.norm=bn"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if not messages or _frozen(config):  # there are no batch statistics to exchange
            return messages
        shared = {key: config[key] for key in config}
        shared |= {protocol.COHORT: self.exchange, protocol.COHORT_BACKWARD: self.backward}
        record: ArrayRecord = next(iter(messages[0].content.array_records.values()))
        nodes, images, step, left = [message.metadata.dst_node_id for message in messages], 0, 0, 1
        while left:
            told = ConfigRecord(shared | {protocol.COHORT_STEP: step, protocol.COHORT_BATCH: images})
            content = RecordDict({"arrays": record, self.configrecord_key: told})
            questions = [Message(content, node, protocol.COHORT_QUERY) for node in nodes]
            answered = grid.send_and_receive(questions, timeout=self.exchange_timeout)
            replies = self._answers(server_round, step, len(nodes), [_with_cure(reply) for reply in answered])
            record, images, left = self._agree(replies)
            nodes = [reply.metadata.src_node_id for reply in replies]
            step += 1
        self._asked = len(nodes)
        told = ConfigRecord(shared | {protocol.COHORT_STEP: step, protocol.COHORT_BATCH: images})
        content = RecordDict({"arrays": record, self.configrecord_key: told})
        return [Message(content, node, MessageType.TRAIN) for node in nodes]

    def _answers(self, server_round: int, step: int, asked: int, replies: Iterable[Message]) -> list[Message]:
        """The usable replies to one exchange, in the order of partitions; those of one kind, shape and step."""
        what = f"round {server_round}, exchange {step + 1}"
        usable = self.screen(what, replies, asked, _exchange_problem)
        first = _form(usable[0].content)

        def differs(content: RecordDict) -> str | None:
            if (form := _form(content)) == first:
                return None
            return f"it sent {form}, others {first}; do all clients have the same model?"

        return self.screen(what, usable, len(usable), differs)

    def _agree(self, replies: Sequence[Message]) -> tuple[ArrayRecord, int, int]:
        """The cohort's tensors, the images in all batches, and the exchanges that follow."""
        contents = [reply.content for reply in replies]
        metrics = [next(iter(content.metric_records.values())) for content in contents]
        key = protocol.NUM_EXAMPLES if self.weights_by == "data" else protocol.BATCH_EXAMPLES
        weights = [_number(each[key]) for each in metrics]
        arrays = [unpack(content.array_records["arrays"]) for content in contents]
        if contents[0].config_records["config"]["what"] == "moments":
            mean, var = pooled_moments([a["mean"] for a in arrays], [a["var"] for a in arrays], weights)
            agreed: Arrays = {"mean": mean, "var": var}
        else:
            agreed = weighted_mean(arrays, weights)
        images = int(sum(_number(each[protocol.BATCH_EXAMPLES]) for each in metrics))
        return pack(agreed), images, int(_number(metrics[0][protocol.EXCHANGES_LEFT]))


class FedAvgGlobalStats(FedTAN):
    """FedTAN's forward exchange alone: the papers' "FedAvg + Algorithm 2", and their stand-in for FedDNA.

    Batches are normalised with the cohort's statistics; backward each client uses its own gradients with respect
    to them. The papers do not say what replaces the exchange there: taking the client's own in place of the mean
    over clients is Algorithm 3 without its communication, and exact for one client.
    """

    backward = False


class FedTANII(FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics frozen (FedTAN paper, Section 5).

    Parameters
    ----------
    fedtan_rounds : int | float (default: 0.1)
        M, a round as an int or a fraction of all rounds as a float.

    The other arguments are FedTAN's.
    """

    inner = FedTAN
    argument = "fedtan_rounds"

    def __init__(self, *args: Any, fedtan_rounds: int | float = 0.1, **kwargs: Any) -> None:
        super().__init__(self.inner(*args, **kwargs), freeze_round=fedtan_rounds)


def _with_cure(reply: Message) -> Message:
    if not (reply.has_error() and "No query function registered" in (reply.error.reason or "")):
        return reply
    return refused(
        reply, f"{reply.error.reason} (its ClientApp knows no layer-wise step; serve it by fedbn_flwr.client_app)"
    )


def _frozen(config: ConfigRecord) -> bool:
    return Role.STATISTICS in protocol.frozen_roles(config)


def _exchange_problem(content: RecordDict) -> str | None:
    """Why a reply to an exchange cannot be used, or None."""
    if set(content.array_records) != {"arrays"} or len(content.metric_records) != 1:
        return "the reply is not that of a layer-wise step; serve the client by fedbn_flwr.client_app"
    metrics = next(iter(content.metric_records.values()))
    for key in (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES, protocol.EXCHANGES_LEFT):
        value = metrics.get(key)
        if isinstance(value, list) or value is None or not np.isfinite(value) or value < 0:
            return f"the reply's metrics have {key!r} = {value!r}, expected a number, zero or more"
    for name, array in unpack(content.array_records["arrays"]).items():
        if not np.isfinite(array).all():
            return f"{name!r} has values that are not finite (the client diverged?)"
        if name == "var" and content.config_records["config"]["what"] != "gradients" and array.min() < 0:
            return "a variance is negative"
    return None


def _form(content: RecordDict) -> tuple[Any, ...]:
    """What must agree among the replies to one exchange."""
    metrics = next(iter(content.metric_records.values()))
    shapes = tuple((name, *array.shape) for name, array in content.array_records["arrays"].items())
    return (content.config_records["config"]["what"], metrics[protocol.EXCHANGES_LEFT], *shapes)


def _number(value: Any) -> float:
    return float(value)
