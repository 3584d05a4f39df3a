"""Federated averaging (McMahan et al. 2017, https://arxiv.org/abs/1602.05629), the base of the other strategies.

It takes the arguments of Flower's FedAvg, and differs where Flower's results are unreliable:

- The mean keeps dtypes: the mean of ten integers 16 is 16 (Flower returns 15.999999999999998).
- The mean does not depend on the order of the replies or on node ids, which are random in every run. Clients report
  their partition, and the sum runs in the order of partitions. If not all clients take part, the choice depends on
  partitions too.
- A reply is left out if its arrays have other keys, shapes or dtypes than the server's, or are not finite. The log
  names the client. If too few replies remain, the run ends with an error that lists the reasons.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Literal, Never

import numpy as np
from annotated_types import Ge, Le
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr import seeding
from fedbn_flwr.errors import LOG, SettingsError, did_you_mean, few
from fedbn_flwr.extensions import part
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, pooled_mean, weighted_mean
from fedbn_flwr.messages.arrays import configs_in, metrics_in, record_of
from fedbn_flwr.messages.limits import form_problem, negative_variance
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import Reply, mean_of_metrics, number_problem
from fedbn_flwr.norms.roles import Role, is_variance, mean_of, roles, selected, split
from fedbn_flwr.server.base import Base
from fedbn_flwr.server.round import Rule
from fedbn_flwr.server.traits import InfluenceBounds, Round, Traits, mean_is_enough, refuse_bounds
from fedbn_flwr.trees import Tree

MeanOfMetrics = Callable[[list[RecordDict], str], MetricRecord]
Share = Annotated[float, Ge(0), Le(1)]  # of the nodes
Count = Annotated[int, Ge(0), "a number of nodes"]
Names = Annotated[str | Sequence[str], "a name or a list of names, such as ['fc', 'layer4*', 'affine']"]


class FedAvg(Rule, Base, FlowerFedAvg):
    """The mean of the clients' models, weighted by their numbers of examples.

    It takes the arguments of Flower's FedAvg and the following ones.

    Parameters
    ----------
    seed : int (default: 0)
        The seed for the choice of clients, if not all take part.
    node_timeout : float (default: 600)
        Seconds to wait for enough nodes to connect.
    bounds : Bounds | dict | None (default: None)
        Bounds on the influence of one client, for instance `{"max_share": 0.2}` (docs/robustness.md).
    statistics : "mean" | "pooled" (default: "mean")
        How batch norm's running variances are combined: "pooled" adds the variance between the clients' running means
        to the mean of the variances, which gives the variance of all clients' data together.
    kept : sequence of str (default: [])
        What stays on the clients, which then have models of their own: roles ("affine", "statistics"), "last" for the
        last layer, and patterns of names of layers or arrays, such as "fc" or "layer4*".
    global_kept : "average" | "initial" (default: "average")
        The kept arrays of the global model, which no client uses: "average" is the mean over the round's clients, which
        send them for this purpose; "initial" keeps the initial values, and clients do not send them.
    """

    def __init__(
        self,
        fraction_train: Share = 1.0,
        fraction_evaluate: Share = 1.0,
        min_train_nodes: Count = 2,
        min_evaluate_nodes: Count = 2,
        min_available_nodes: Count = 2,
        weighted_by_key: str = protocol.NUM_EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MeanOfMetrics | None = None,
        evaluate_metrics_aggr_fn: MeanOfMetrics | None = None,
        *,
        seed: int = 0,
        node_timeout: float = 600,
        bounds: InfluenceBounds | Mapping[str, float] | None = None,
        statistics: Literal["mean", "pooled"] = "mean",
        kept: Names = (),
        global_kept: Literal["average", "initial"] = "average",
        **options: Never,
    ) -> None:
        if options:
            raise _unknown_argument(type(self), next(iter(options)))
        Base.__init__(self)
        FlowerFedAvg.__init__(
            self, fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes,
            weighted_by_key, arrayrecord_key, configrecord_key,
            train_metrics_aggr_fn or mean_of_metrics, evaluate_metrics_aggr_fn or mean_of_metrics,
        )  # fmt: skip
        self.seed, self.node_timeout = seed, node_timeout
        self.kept = [kept] if isinstance(kept, str) else sorted(kept)
        if wrong := [name for name in self.kept if not name.strip() or "," in name]:
            raise SettingsError(f"kept has {wrong[0]!r}; expected names without commas, one for each entry of the list")
        self._declared = self.traits | Traits(
            pooled=statistics == "pooled",
            local=frozenset({*self.kept, Role.COUNTER} if self.kept else ()),
            sent_back=global_kept == "average",
            client_memory=("their own arrays",) if self.kept else (),
        )
        self.traits = self._declared
        self.bounds = bounds if isinstance(bounds, InfluenceBounds | None) else part("bounds", "from_settings")(bounds)
        if self.bounds is not None:
            self.breaks = {**self.breaks, "mean": "compares the replies of single clients (bounds)"}
        refuse_bounds(str(self), self.traits, self.bounds)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if self.traits | self._declared != self.traits:
            raise SettingsError(f"{self}.__init__ replaces self.traits; extend them: self.traits |= Traits(...)")
        if self.kept:
            self._check_kept(roles(arrays), self.traits.local_keys(arrays))

    def _check_kept(self, role_of: Mapping[str, Role], stays: Collection[str]) -> None:
        """Raise SettingsError unless each name has arrays of the model, and something is left."""
        if missing := [name for name in self.kept if not selected(role_of, {name})]:
            layers = dict.fromkeys(key.rpartition(".")[0] or key for key in role_of)
            raise SettingsError(
                f"kept has {missing[0]!r}, and the model has no such arrays; its layers are {few(layers, 20)}. "
                f"Expected their names, patterns ('layer*'), 'last' for the last one, or roles ({', '.join(Role)})"
            )
        variances = [key for key, role in role_of.items() if role is Role.STATISTICS and is_variance(key)]
        if half := [key for key in variances if (key in stays) != (mean_of(key) in stays)]:
            found = f"one of {mean_of(half[0])!r} and {half[0]!r}"
            raise SettingsError(f"kept is {self.kept}, which has {found}; keep both or none")
        if len(stays) == len(role_of):
            raise SettingsError(f"kept is {self.kept}, which leaves nothing to average; use Standalone without it")

    # --- sending ---

    def train_messages(self, round: Round) -> list[Message]:
        nodes = self._choose(round, self.fraction_train, self.min_train_nodes, "train")
        more = {protocol.RETURN: True} if self.traits.local and self.traits.sent_back else {}
        return self.messages_to(nodes, MessageType.TRAIN, round, more)

    def evaluate_messages(self, round: Round) -> list[Message]:
        nodes = self._choose(round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate")
        return self.messages_to(nodes, MessageType.EVALUATE, round)

    def sent(self, arrays: ArrayRecord) -> ArrayRecord:
        """The arrays of the global model that clients receive: all except those that stay on the client."""
        return record_of(split(arrays, self.traits.local_keys(arrays))[1]) if self.traits.local else arrays

    def messages_to(
        self, nodes: Iterable[int], kind: str, round: Round, more: Config = MappingProxyType({})
    ) -> list[Message]:
        """A message of this kind to each node: the global model, and the config with `more` keys."""
        if kept := self.traits.local:  # a client must not return counters that the server lacks
            lacking = {Role.COUNTER} - {*roles(round.arrays).values()}
            more = {protocol.KEPT: protocol.join(kept - lacking), **more}
        # A new record, since Flower passes the same object in every round.
        config = ConfigRecord({**round.config, **more, protocol.ROUND: round.number})
        content = RecordDict({self.arrayrecord_key: self.sent(round.arrays), self.configrecord_key: config})
        return [Message(content, node, kind) for node in nodes]

    def _choose(self, round: Round, fraction: float, least: int, purpose: str) -> list[int]:
        """The nodes of this round; the choice depends only on the seed, the round and the partitions."""
        if fraction == 0.0:
            return []
        roster = self.roster
        nodes = self.connected(round.grid, least)
        count = _share(len(nodes), fraction, least)
        if count < len(nodes) or roster.absent(nodes):
            self.ask_for_partitions(round, nodes)
        for name in roster.absent(nodes):
            LOG.warning("round %d, %s: without %s, which is not connected", round.number, purpose, name)
        nodes = sorted(nodes, key=roster.position)
        if count >= len(nodes):
            return nodes
        random = np.random.default_rng(seeding.seed_for(self.seed, f"choose-{purpose}", round.number))
        return [nodes[i] for i in sorted(random.choice(len(nodes), size=count, replace=False))]

    def num_training(self, clients: int) -> int:
        return min(clients, _share(clients, self.fraction_train, self.min_train_nodes))

    # --- receiving ---

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        if self.traits.local and protocol.KEPT not in {*chain(*configs_in(reply.message.content).values())}:
            return (
                f"its ClientApp ignores the config key {protocol.KEPT!r}, so each round would begin with new arrays in "
                f"place of its own ({protocol.join(self.traits.local)}): serve it by fedbn_flwr.client_app with a "
                "BNClient"
            )
        expected = split(sent, self.traits.local_keys(sent))[1] if self.traits.never_sent else None
        return number_problem(reply.metrics, self.weighted_by_key) or form_problem(reply.arrays, sent, expected)

    def model_problem(self, model: Arrays, sent: Arrays) -> str | None:
        """Also another dtype, or a negative variance, which only strategies of Flower may make."""
        other = (key for key, value in model.items() if value.dtype != sent[key].dtype)
        dtypes = (f"{key!r} is {model[key].dtype}; the server sent {sent[key].dtype}" for key in other)
        return super().model_problem(model, sent) or next(dtypes, None) or negative_variance(model)

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        return self.train_metrics_aggr_fn([*map(_content_of, replies)], self.weighted_by_key)

    def mean_evaluation(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        return self.evaluate_metrics_aggr_fn([reply.message.content for reply in replies], key) if replies else None

    @mean_is_enough
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """sum_i p_i w_i"""
        mean = pooled_mean if self.traits.pooled else weighted_mean
        return mean([reply.arrays for reply in replies], weights)

    def notes(self) -> Tree:
        """The bounds on the influence of one client, and how arrays are combined, if they have no defaults."""
        notes: dict[str, object] = {} if self.bounds is None else {"bounds": dict(self.bounds.notes())}
        notes |= {"norm_statistics": "pooled"} if self.traits.pooled else {}
        return notes | ({"kept": self.kept} if self.kept else {})


def _content_of(reply: Reply) -> RecordDict:
    """The content of a reply, with the metrics that `accepted` may have replaced."""
    name = next(iter(metrics_in(reply.message.content)))
    return RecordDict({**reply.message.content, name: MetricRecord({**reply.metrics})})


def _share(nodes: int, fraction: float, least: int) -> int:
    return max(int(nodes * fraction + 1e-9), least, 1)  # 0.29 * 100 is 28.999999999999996


def _unknown_argument(strategy: type, key: str) -> TypeError:
    known = {name for kind in strategy.__mro__ if issubclass(kind, Rule) for name in inspect.signature(kind).parameters}
    return TypeError(f"{strategy.__name__} has no argument {key!r}; {did_you_mean(key, known - {'options'})}")
