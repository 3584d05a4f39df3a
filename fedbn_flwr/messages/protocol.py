"""What our strategies say to clients beyond Flower's own keys, one key in a message's `config` each.

Every key of ours begins with `fedbn.`; a client that meets one it does not know refuses the message, since
ignoring it would train the wrong thing. Keys are absent where the rule asks for nothing.

| key | value | asks the client to |
|---|---|---|
| `fedbn.run` | text | keep its memory apart from that of other runs |
| `fedbn.ready` | true | (with `query.partition`) also make its model and open its data, and so find what is wrong |
| `fedbn.run-token` | 32 hexadecimal digits | do so by this too: drawn for a run, and the same when it is resumed |
| `fedbn.kept-round` | int | where it has a folder for its memory, keep there what it remembered after that round |
| `fedbn.freeze` | roles, comma separated: `statistics`, `affine` | leave these of batch norm as they came |
| `fedbn.return` | roles, comma separated | send these back too, besides what came |
| `fedbn.clip` | float | clip gradients adaptively, by this factor; the last linear layer is exempt |
| `fedbn.control` | true | correct gradients by control variates, in a record `control` both ways (SCAFFOLD) |
| `fedbn.momentum` | true | begin with the momentum in a record `momentum`, and send it back |
| `fedbn.cohort` | `fused` or `paper` | meet the other clients at each batch norm of the first step (FedTAN) |
| `fedbn.cohort-backward` | bool | exchange gradients too |
| `fedbn.cohort-step` | int | which message of such a round this is: 0 begins it, k carries the answer to exchange k |
| `fedbn.cohort-batch` | int | images in the batches of all clients, with each answer |
| `fedbn.direct` | `HOST:PORT` | hold the exchanges of this one `train` message on a stream to there |
| `fedbn.direct-token` | text | show it there: one node's, good for one stream of one round |
| `fedbn.direct-ca` | PEM | trust certificates of this authority there; without it, of the client's own |
| `fedbn.direct-insecure` | true | speak to it without TLS |
| `fedbn.direct-timeout` | float | give up when an exchange takes so many seconds |
| `proximal-mu` | float | add mu/2 times the squared distance to the received parameters (Flower's key) |

Replies carry `arrays` with the keys that came, and `metrics` with `num-examples`, `train-loss` and, where the
client knows it, `partition-id`, by which the server orders replies and labels errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedbn_flwr.errors import MessageError, did_you_mean
from fedbn_flwr.norms.roles import Role

PREFIX = "fedbn."
RUN = "fedbn.run"
READY = "fedbn.ready"
TOKEN = "fedbn.run-token"
KEPT_ROUND = "fedbn.kept-round"
OF_RUN = frozenset({RUN, TOKEN, KEPT_ROUND})  # which run it is; they change nothing in how a round is trained
FREEZE = "fedbn.freeze"
RETURN = "fedbn.return"
CLIP = "fedbn.clip"
CONTROL = "fedbn.control"
MOMENTUM = "fedbn.momentum"
COHORT = "fedbn.cohort"
COHORT_BACKWARD = "fedbn.cohort-backward"
COHORT_STEP = "fedbn.cohort-step"
COHORT_BATCH = "fedbn.cohort-batch"
DIRECT = "fedbn.direct"
DIRECT_TOKEN = "fedbn.direct-token"
DIRECT_CA = "fedbn.direct-ca"
DIRECT_INSECURE = "fedbn.direct-insecure"
DIRECT_TIMEOUT = "fedbn.direct-timeout"
KNOWN = (
    OF_RUN
    | {READY, FREEZE, RETURN, CLIP, CONTROL, MOMENTUM, COHORT, COHORT_BACKWARD, COHORT_STEP, COHORT_BATCH}
    | {DIRECT, DIRECT_TOKEN, DIRECT_CA, DIRECT_INSECURE, DIRECT_TIMEOUT}
)

PROXIMAL_MU = "proximal-mu"
ROUND = "server-round"

# Metrics of replies
PARTITION = "partition-id"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
STATE_ROUND = "state-round"  # of the memory in a node's folder, see fedbn_flwr.statefolder
BATCH_EXAMPLES = "batch-examples"  # images in the round's first batch
EXCHANGES_LEFT = "exchanges-left"  # of a layer-wise step, after the one that the reply carries

# Records of arrays beside `arrays`
CONTROL_RECORD = "control"
MOMENTUM_RECORD = "momentum"

# Reply metrics: partition-id, and state-round where the node has a folder for its memory.
PARTITION_QUERY = "query.partition"
COHORT_QUERY = "query.cohort"  # one exchange of a layer-wise step
STATISTICS_QUERY = "query.statistics"  # reply arrays: statistics of the client's data under the model sent

FREEZABLE = frozenset({Role.STATISTICS, Role.AFFINE})


def check_known(config: Mapping[str, Any], known: frozenset[str] = KNOWN) -> None:
    """Refuse a message that asks for something this client has never heard of."""
    for key in config:
        if key.startswith(PREFIX) and key not in known:
            raise MessageError(
                f"the server's message asks for {key!r} (= {config[key]!r}), which this client does not know; "
                f"{did_you_mean(key, known)}. Install the same version of fedbn-flwr on server and clients"
            )


def run_of(config: Mapping[str, Any]) -> str | None:
    """The training run that a message belongs to; None where the server does not name any."""
    words = [str(config[key]) for key in (RUN, TOKEN) if key in config]
    return " ".join(words) or None


def run_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say which run it is, and so which model clients build."""
    return {key: config[key] for key in OF_RUN if key in config}


def frozen_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    """The roles named by `fedbn.freeze`."""
    return _roles(config, FREEZE, FREEZABLE)


def returned_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    """The roles named by `fedbn.return`."""
    return _roles(config, RETURN, frozenset(Role))


def join(roles: Iterable[Role]) -> str:
    """Roles as the value of a key."""
    return ",".join(sorted(roles))


def _roles(config: Mapping[str, Any], key: str, allowed: frozenset[Role]) -> frozenset[Role]:
    names = [name.strip() for name in str(config.get(key, "")).split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise MessageError(f"{key} names {name!r}; {did_you_mean(name, allowed)}")
    return frozenset(Role(name) for name in names)
