"""SCAFFOLD (Karimireddy et al. 2020, "Stochastic Controlled Averaging", https://arxiv.org/abs/1910.06378, Algorithm 1).

Each client i keeps a control variate c_i, an estimate of its gradient, and the server keeps their mean c. Local steps
use g_i(y) + c - c_i, which corrects the drift of the clients. Clients send back the change of c_i with the model.

A reply may be lost or left out without the client's knowledge. So a client keeps two control variates, the one from
before the round and the new one. The next message tells it which of them the server has added, by its round.

Choices that the paper leaves open:

- c_i becomes the mean of the round's gradients. Without momentum and weight decay this equals the paper's option II,
  c_i - c + (x - y_i) / (K lr); with them it is still a gradient.
- x is averaged by number of examples, as in FedAvg; the paper has equal weights and a server step size of 1.
- Only parameters have control variates. Statistics of batch norm have no gradient and are averaged like the rest of x.
  Parameters that stay on a client have none either, because they are not averaged.
- The server also keeps every c_i, on its disk, and takes one out of c if the client has lost it. Under secure
  aggregation it has only means: if they report that some of the clients have lost theirs, every c_i begins at zero
  again. The same happens if a file is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedbn_flwr.client.rule import ClientRule, Key, Memo, Tensors, add_, elementwise
from fedbn_flwr.errors import LOG, StorageError, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, cast
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply, with_config
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.models.tensors import copied, tensor_like
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough
from fedbn_flwr.storage import Rounds

from .fedavg import FedAvg

CONTROL = "fedbn.scaffold"
CONTROL_ROUND = "fedbn.scaffold-round"
CONTROL_RECORD = "control"  # contains c from the server, and c_i+ - c_i from a client
CONTROL_LOST = "control-lost"  # a metric, 1 if the client has lost the c_i that the server has added


class Scaffold(FedAvg):
    """FedAvg whose clients correct their gradients with control variates.

    The arguments are FedAvg's.
    """

    traits = Traits(client_memory=("their control variates",), records={CONTROL_RECORD: "equal"})

    @dataclass
    class Memory(FedAvg.Memory):
        total: Arrays = field(default_factory=dict)  # N c = sum_i c_i, in float64
        added: dict[int, int] = field(default_factory=dict)  # by client, the round that its c_i in the sum is from

    memory: Memory

    def config(self, round: Round) -> Config:
        return {CONTROL: True}

    def records(self, round: Round) -> dict[str, Arrays]:
        connected, number = list(round.grid.get_node_ids()), self.roster.numbers
        known = {number[node] for node in connected if node in number}
        # N: clients may join, be away, or have another node id since a restart.
        number_of_clients = max(len(connected), len(known.union(self.memory.added)), 1)
        sent = unpack(round.arrays)
        return {
            CONTROL_RECORD: {
                key: cast(control / number_of_clients, sent[key].dtype) for key, control in self.memory.total.items()
            }
        }

    def outgoing(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        added = self.memory.added
        if added:  # a client may be back under another node id
            self.ask_for_partitions(round, self.training.asked)
        return [
            with_config(message, {CONTROL_ROUND: added.get(self.roster.client(message.metadata.dst_node_id), 0)})
            for message in messages
        ]

    @mean_is_enough
    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """c_i <- c_i+, and so line 17: N c <- N c + sum_i (c_i+ - c_i)"""
        memory = self.memory
        checkpoint: Any = round.config.get(protocol.CHECKPOINT_ROUND, round.number - 1)
        for reply in replies:
            node, change = reply.message.metadata.src_node_id, reply.records[CONTROL_RECORD]
            client = self.roster.client(node)
            stored = Rounds(self.folder / f"client-{client}")
            own = self._own(client, stored)
            if reply.metrics.get(CONTROL_LOST):
                if own is None:
                    memory.total, memory.added = {}, {}
                    words = (
                        "round %d: all control variates begin at zero again, since a client reports that it lost one"
                    )
                    LOG.warning(words, round.number)
                    return
                if own:
                    log_once(f"{self.roster.name(node)} has lost its control variate, which begins at zero again")
                memory.total, own = added(memory.total, own, sign=-1), {}
            memory.total, memory.added[client] = added(memory.total, change), round.number
            if own is not None:
                new = {key: own.get(key, 0) + value for key, value in change.items()}
                stored.write(round.number, dump({**own, **new}), checkpoint, durable=False)

    def _own(self, client: int, stored: Rounds) -> Arrays | None:
        """c_i as it is in the sum; None if this is not known."""
        if not self.has_single_replies:
            return None
        try:
            number = self.memory.added.get(client)
            return {} if number is None else parse(stored.read(number), dict)
        except (StorageError, ValueError):
            return None


def added(total: Arrays, control: Arrays, sign: int = 1) -> Arrays:
    """In float64, so that what was added can be taken out."""
    return {**total, **{key: total.get(key, 0) + sign * value.astype(np.float64) for key, value in control.items()}}


class ScaffoldClient(ClientRule):
    """Lines 7 to 14: steps along g_i(y) + c - c_i; then c_i+ is the mean of the g_i."""

    keys = {
        CONTROL: Key("true", "correct gradients by control variates, received and sent in the record `control`"),
        CONTROL_ROUND: Key("int", "use the client's control variate of this round; 0: use zero"),
    }
    order = -1  # before the other rules: g_i is the unchanged gradient

    def begin(self, w: Tensors) -> Memo:
        self.known = int(self.local.config.get(CONTROL_ROUND, 0))  # the server has added the c_i of this round
        self.own = self.local.state.load(f"{CONTROL}.{self.known}")
        c = self.local.records.get(CONTROL_RECORD, {})
        corrections = {name: tensor_like(c.get(name), p) - tensor_like(self.own.get(name), p) for name, p in w.items()}
        return {"corrections": corrections, "sums": {name: torch.zeros_like(p) for name, p in w.items()}}

    @elementwise
    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        add_(memo["sums"], g)
        add_(g, memo["corrections"])

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        before, state = self.own, self.local.state
        new = copied({name: total / max(steps, 1) for name, total in memo["sums"].items()})
        metrics[CONTROL_LOST] = int(bool(self.known) and not before)  # always: masked replies have equal keys
        state.forget(CONTROL)
        state.save(f"{CONTROL}.{self.known}", before)
        # Parameters that are frozen now keep their c_i.
        state.save(f"{CONTROL}.{self.local.config.get(protocol.ROUND, 1)}", {**before, **new})
        records[CONTROL_RECORD] = {
            name: value - before[name] if name in before else value for name, value in new.items()
        }
