"""FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithm 3).

In the first local step every batch norm meets the other clients: forward it averages its batch mean and variance
over them, backward the gradients with respect to both. The weighted mean of the clients' gradients is then that of
ordinary batch norm on the union of their batches. The other E - 1 local steps are ordinary ones.

The client's part is `fedbn_flwr.exchange`; here is the server's: 2L exchanges with L batch norms (3L as in the
paper), and the model. A client that does not answer an exchange is out of the rest of the round, and the others are
weighted anew.

Exchanges travel as Flower's messages, or on streams where the deployment has an exchange service
(`fedbn_flwr.exchange.config`, `meeting.py`); the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import capabilities
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.config import Direct, is_loopback, split
from fedbn_flwr.exchange.direct_round import Ask, Meeting, Outgoing
from fedbn_flwr.exchange.frames import HEADER_LIMIT
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, pooled_moments, weighted_mean
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, metrics_of, pack, unpack
from fedbn_flwr.messages.screening import refused
from fedbn_flwr.norms.roles import Role, roles

from ._rule import Round, Traits
from .fedavg import FedAvg, FedAvgOptions
from .fixbn import FixBN

# What travels in each kind of exchange.
_TENSORS = {"moments": {"mean", "var"}, "mean": {"mean"}, "variance": {"var"}, "gradients": {"mean", "var"}}
_MOST_EXCHANGES = 100_000  # in a round
_ROUND_SECONDS = 6 * 3600.0  # for all exchanges of a round; the round's own timeout is shorter, as a rule


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
    direct : Direct | bool (default: True)
        The exchange service for streams between clients and server; True: what the environment says
        (`FEDBN_EXCHANGE_ADDRESS`, ...; messages where it names none), False: messages.

    The other arguments are FedAvg's.
    """

    backward = True  # gradients are exchanged too
    traits = Traits(replaces_norm=True)  # by batch norm over the clients' batches

    def __init__(
        self,
        *,
        exchange: Literal["fused", "paper"] = "fused",
        weights: Literal["data", "batch"] = "data",
        exchange_timeout: float = 600,
        direct: Direct | bool = True,
        **options: Unpack[FedAvgOptions],
    ) -> None:
        if exchange not in ("fused", "paper"):
            raise SettingsError(f"exchange is {exchange!r}; expected 'fused' or 'paper'")
        if weights not in ("data", "batch"):
            raise SettingsError(f"weights is {weights!r}; expected 'data' or 'batch'")
        if not isinstance(direct, Direct | bool):
            raise SettingsError(
                f"direct is {direct!r}; expected true or false (the address is the deployment's: "
                "FEDBN_EXCHANGE_ADDRESS in the ServerApp's environment), or a fedbn_flwr.exchange.config.Direct"
            )
        if not exchange_timeout > 0:
            raise SettingsError(f"exchange_timeout is {exchange_timeout!r}; expected seconds above zero")
        if weights == "batch":
            options.setdefault("weighted_by_key", protocol.BATCH_EXAMPLES)
        super().__init__(**options)
        self.exchange = exchange
        self.weights_by = weights
        self.exchange_timeout = exchange_timeout
        self.direct = direct
        self._meeting: Meeting | None = None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if (direct := self._service()) is not None:  # a wrong setting is told before the first round
            direct.check()
            if not (direct.encrypted or is_loopback(split(direct.address)[0])):
                log(
                    WARNING,
                    "the exchange service at %s has no TLS: others can read and change exchanges",
                    direct.address,
                )
        if Role.STATISTICS not in roles(arrays).values():
            raise SettingsError(
                f"{type(self).__name__} exchanges statistics of batch norm, and the model has none (no key ends in "
                "running_mean); use FedAvg, or a model with model.norm=bn"
            )

    def instructions(self, round: Round) -> dict[str, Any]:
        if _frozen(round.config):  # there are no batch statistics to exchange
            return {}
        return {protocol.COHORT: self.exchange, protocol.COHORT_BACKWARD: self.backward}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if not messages or _frozen(config):
            return messages
        shared = dict(configs_in(messages[0].content)[self.configrecord_key])
        record = arrays_in(messages[0].content)[self.arrayrecord_key]
        nodes = [message.metadata.dst_node_id for message in messages]
        if (direct := self._service()) is not None:
            return self._meet_directly(direct, server_round, record, shared, nodes, grid)

        def ask(kind: str, nodes: Sequence[int], step: int, agreed: ArrayRecord, images: int) -> list[Message]:
            told = ConfigRecord(shared | {protocol.COHORT_STEP: step, protocol.COHORT_BATCH: images})
            content = RecordDict({"arrays": agreed, self.configrecord_key: told})
            return [Message(content, node, kind) for node in nodes]

        def query(nodes: Sequence[int], step: int, agreed: ArrayRecord, images: int) -> list[Message]:
            questions = ask(protocol.COHORT_QUERY, nodes, step, agreed, images)
            return [_with_cure(reply) for reply in grid.send_and_receive(questions, timeout=self.exchange_timeout)]

        met = self._meet(server_round, nodes, record, query)
        self.asked = len(met[0])
        return ask(MessageType.TRAIN, *met)

    def _meet(self, server_round: int, nodes: Sequence[int], model: ArrayRecord, ask: Ask) -> Outgoing:
        """All exchanges of a round, whoever carries them: the nodes that are left, and what to tell them."""
        agreed, images, step, left = model, 0, 0, None
        while left != 0:
            replies = self._answers(server_round, step, len(nodes), ask(nodes, step, agreed, images), left)
            agreed, images, left = self._agree(replies)
            nodes = [reply.metadata.src_node_id for reply in replies]
            step += 1
        return nodes, step, agreed, images

    # --- the direct way ---

    def _service(self) -> Direct | None:
        if isinstance(self.direct, Direct):
            return self.direct
        return Direct.from_environment() if self.direct else None

    def _meet_directly(
        self,
        direct: Direct,
        server_round: int,
        model: ArrayRecord,
        shared: Mapping[str, Any],
        nodes: Sequence[int],
        grid: Grid,
    ) -> list[Message]:
        """Open the exchange service and let the exchanges run beside; the round's one message to each client."""
        engine = capabilities(grid)
        if (served := engine.start()) is not None and served < (count := len(list(grid.get_node_ids()))):
            raise SettingsError(
                f"the direct exchange needs all {count} clients alive at once, and this engine serves {served} "
                "at a time; set engine.workers to the number of clients, or strategy.direct to false"
            )

        meeting = Meeting(
            direct,
            nodes,
            lambda ask: self._meet(server_round, nodes, model, ask),
            count=engine.count_exchange,
            frame_limit=_frame_limit(model),
            exchange_seconds=self.exchange_timeout,
            seconds=_ROUND_SECONDS,
        )
        self._meeting = meeting
        engine.observe(meeting)
        messages = []
        for node in nodes:
            content = RecordDict(
                {"arrays": model, self.configrecord_key: ConfigRecord({**shared, **meeting.told(node, direct)})}
            )
            messages.append(Message(content, node, MessageType.TRAIN))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            replies = list(replies)
            left = meeting.finish(replies)
            # Who dropped out on the way was told of, whatever it answers in the end.
            replies = [reply for reply in replies if reply.metadata.src_node_id not in meeting.nodes - left]
            self.asked = len(left)
        return super().aggregate_train(server_round, replies)

    # --- what an exchange means ---

    def _answers(
        self, server_round: int, step: int, asked: int, replies: Iterable[Message], left: int | None
    ) -> list[Message]:
        """The usable replies to one exchange, in the order of partitions: of the kind, shape and step that most have.

        `left` is how many exchanges there were still to come, this one included; None before the first.
        """
        what = f"round {server_round}, exchange {step + 1}"

        def problem(reply: Message) -> str | None:
            return _exchange_problem(reply.content, left)

        usable = self.screen(what, replies, asked, problem)
        forms = [_form(reply.content) for reply in usable]
        most = max(forms, key=forms.count)  # the first of them, where as many have another

        def differs(reply: Message) -> str | None:
            if (form := _form(reply.content)) == most:
                return None
            return f"it sent {form}, others {most}; do all clients have the same model?"

        return self.screen(what, usable, len(usable), differs)

    def _agree(self, replies: Sequence[Message]) -> tuple[ArrayRecord, int, int]:
        """The cohort's tensors, the images in all batches, and the exchanges that follow."""
        contents = [reply.content for reply in replies]
        metrics = [metrics_of(content) for content in contents]
        key = protocol.NUM_EXAMPLES if self.weights_by == "data" else protocol.BATCH_EXAMPLES
        weights = [_number(each[key]) for each in metrics]
        arrays = [unpack(arrays_in(content)["arrays"]) for content in contents]
        if configs_in(contents[0])["config"]["what"] == "moments":
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

    def __init__(self, *, fedtan_rounds: int | float = 0.1, **options: Any) -> None:
        super().__init__(self.inner(**options), freeze_round=fedtan_rounds)


def _with_cure(reply: Message) -> Message:
    if not (reply.has_error() and "No query function registered" in (reply.error.reason or "")):
        return reply
    return refused(
        reply, f"{reply.error.reason} (its ClientApp knows no layer-wise step; serve it by fedbn_flwr.client_app)"
    )


def _frozen(config: Mapping[str, Any]) -> bool:
    return Role.STATISTICS in protocol.frozen_roles(config)


def _exchange_problem(content: RecordDict, left: int | None) -> str | None:
    """Why a reply to an exchange cannot be used, or None; `left` as in `_answers`."""
    if set(arrays_in(content)) != {"arrays"} or len(metrics_in(content)) != 1 or "config" not in content:
        return "the reply is not that of a layer-wise step; serve the client by fedbn_flwr.client_app"
    metrics = metrics_of(content)
    for key in (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES, protocol.EXCHANGES_LEFT):
        value = metrics.get(key)
        if isinstance(value, list) or value is None or not np.isfinite(value) or value < 0:
            return f"the reply's metrics have {key!r} = {value!r}, expected a number, zero or more"
    follow = _number(metrics[protocol.EXCHANGES_LEFT])
    if not follow.is_integer() or follow > _MOST_EXCHANGES or (left is not None and follow != left - 1):
        expected = f"a whole number up to {_MOST_EXCHANGES}" if left is None else left - 1
        return f"it says that {follow:g} exchanges follow, expected {expected}"
    what = configs_in(content)["config"].get("what")
    if what not in _TENSORS:
        return f"it sent {what!r}, expected one of {', '.join(_TENSORS)}"
    try:
        arrays = unpack(arrays_in(content)["arrays"])
    except Exception as error:  # what a client sends may be anything
        return f"the reply's arrays cannot be read: {error}"
    if set(arrays) != _TENSORS[what]:
        return f"{what} has {sorted(arrays)}, expected {sorted(_TENSORS[what])}"
    for name, array in arrays.items():
        if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
            return f"{name!r} is {array.dtype} of shape {array.shape}, expected floats, one per channel"
        if not np.isfinite(array).all():
            return f"{name!r} has values that are not finite (the client diverged?)"
        if name == "var" and what != "gradients" and array.min() < 0:
            return "a variance is negative"
    return None


def _frame_limit(model: ArrayRecord) -> int:
    """What one client may send at once: both tensors of the widest batch norm, in float64, and a header."""
    widest = max(math.prod(model[key].shape) for key, role in roles(model).items() if role is Role.STATISTICS)
    return 2 * 8 * widest + 2 * HEADER_LIMIT


def _form(content: RecordDict) -> tuple[Any, ...]:
    """What must agree among the replies to one exchange."""
    arrays = unpack(arrays_in(content)["arrays"])  # the record's own entries would be made for this alone
    shapes = tuple((name, str(array.dtype), *array.shape) for name, array in arrays.items())
    return (configs_in(content)["config"]["what"], metrics_of(content)[protocol.EXCHANGES_LEFT], *shapes)


def _number(value: Any) -> float:
    return float(value)
