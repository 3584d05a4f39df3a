"""What our strategies say to clients beyond Flower's own keys, one key in a message's `config` each.

Every key of ours begins with `fedbn.`; a client that does not know one refuses the message, since ignoring it would
train the wrong thing. Keys are absent where the rule asks for nothing. Here are the keys of the run and of exchanges;
each other key is declared by the client half of its rule, in `fedbn_flwr/client/rules`.

Replies carry `arrays` with the keys that were sent, and `metrics` with `num-examples`, `train-loss` and, where the
client knows it, `partition-id`, by which the server orders replies and labels errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.errors import MessageError, did_you_mean
from fedbn_flwr.norms.roles import Role


@dataclass(frozen=True)
class Key:
    """A config key as the documentation shows it: the type of its value, and what it asks the client to do."""

    value: str
    asks: str


PREFIX = "fedbn."
RUN = "fedbn.run"
READY = "fedbn.ready"
TOKEN = "fedbn.run-token"
KEPT_ROUND = "fedbn.kept-round"
OF_RUN = frozenset({RUN, TOKEN, KEPT_ROUND})  # which run it is; they change nothing in how a round is trained
RUN_KEYS = {
    RUN: Key("text", "keep its memory apart from that of other runs"),
    TOKEN: Key("32 hexadecimal digits", "distinguish runs of one name: drawn for a run, the same when it is resumed"),
    KEPT_ROUND: Key("int", "where it has a folder for its memory, keep there what it remembered after that round"),
    READY: Key("true", "(with `query.partition`) also make its model and open its data, and so find what is wrong"),
}

# Of a layer-wise round (FedTAN); declared in fedbn_flwr.client.rules.fedtan.
COHORT = "fedbn.cohort"
COHORT_BACKWARD = "fedbn.cohort-backward"
COHORT_STEP = "fedbn.cohort-step"
COHORT_BATCH = "fedbn.cohort-batch"
DIRECT = "fedbn.direct"
DIRECT_TOKEN = "fedbn.direct-token"
DIRECT_CA = "fedbn.direct-ca"
DIRECT_INSECURE = "fedbn.direct-insecure"
DIRECT_TIMEOUT = "fedbn.direct-timeout"

ROUND = "server-round"

# Metrics of replies
PARTITION = "partition-id"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
STATE_ROUND = "state-round"  # of the memory in a node's folder, see fedbn_flwr.statefolder
BATCH_EXAMPLES = "batch-examples"  # images in the round's first batch
EXCHANGES_LEFT = "exchanges-left"  # of a layer-wise step, after the one that the reply carries

# Reply metrics: partition-id, and state-round where the node has a folder for its memory.
PARTITION_QUERY = "query.partition"
COHORT_QUERY = "query.cohort"  # one exchange of a layer-wise step
STATISTICS_QUERY = "query.statistics"  # reply arrays: statistics of the client's data under the model sent


def check_known(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a message with a key of ours that is not among `known`."""
    for key in config:
        if key.startswith(PREFIX) and key not in known:
            raise MessageError(
                f"the server's message asks for {key!r} (= {config[key]!r}), which this client does not know; "
                f"{did_you_mean(key, known)}. Install the same version of fedbn-flwr on server and clients"
            )


def run_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say which run it is, and so which model clients build."""
    return {key: config[key] for key in OF_RUN if key in config}


def join(roles: Iterable[Role]) -> str:
    """Roles as the value of a key."""
    return ",".join(sorted(roles))


def roles_of(config: Mapping[str, Any], key: str, allowed: frozenset[Role]) -> frozenset[Role]:
    """The roles that a key names; none where it is absent."""
    names = [name.strip() for name in str(config.get(key, "")).split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise MessageError(f"{key} names {name!r}; {did_you_mean(name, allowed)}")
    return frozenset(Role(name) for name in names)
