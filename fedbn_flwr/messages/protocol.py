"""The keys with which strategies tell clients what to do, in the `config` of a message.

All keys of this project begin with `fedbn.`, and a message contains only those that its strategy needs. A client raises
an error for a `fedbn.` key that it does not know, since ignoring it would train the wrong model. It ignores other
unknown keys. This module defines the keys of runs and exchanges; client rules declare all others
(`fedbn_flwr.client.rule`).

A reply contains `arrays` with the keys that were sent, and `metrics` with `num-examples` and `train-loss`. If the
client has a `partition-id`, the ConfigRecord `client` contains it. The server sorts replies and names clients by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.errors import MessageError, did_you_mean, nearest
from fedbn_flwr.norms.roles import Role, selected

Config = Mapping[str, Any]  # the config of a message: numbers, texts, bytes, and lists of them
Metrics = dict[str, Any]  # the metrics of a reply: numbers, and lists of them


@dataclass(frozen=True)
class Key:
    """The documentation of a config key: the type of its value, which is not checked, and what clients do for it."""

    value: str
    meaning: str


PREFIX = "fedbn."
RUN = "fedbn.run"
READY = "fedbn.ready"
TOKEN = "fedbn.run-token"  # noqa: S105 (the name of a key)
CHECKPOINT_ROUND = "fedbn.checkpoint-round"
LR_FACTOR = "fedbn.lr-factor"
KEPT = "fedbn.kept"
RETURN = "fedbn.return"
MEANS = "fedbn.means"
DEVIATIONS = "fedbn.deviations"
INPUTS = "fedbn.inputs"
CLASSES = "fedbn.classes"
REESTIMATE = "fedbn.reestimate"
OWN_TESTS = "fedbn.own-tests"
REPORT_BATCH = "fedbn.report-batch"
IDENTIFYING = frozenset({RUN, TOKEN, CHECKPOINT_ROUND})  # they identify the run, and do not change how a round trains
RUN_KEYS = {
    RUN: Key("text", "keep the client's state separate from other runs'"),
    TOKEN: Key("32 hexadecimal digits", "distinguish runs of one name; a resumed run has the same token"),
    CHECKPOINT_ROUND: Key(
        "int", "(with a state folder) also keep the state after this round, from which the server would resume"
    ),
    LR_FACTOR: Key(
        "float",
        "multiply the round's learning rate by this factor, after a freeze or switch",
    ),
    KEPT: Key("names, comma separated", "keep its own arrays of these roles, layers or patterns, which are not sent"),
    RETURN: Key("true", f"send the arrays of `{KEPT}` back in addition to the received ones"),
    MEANS: Key("floats", f"normalise inputs with these means of all clients' columns, along with `{DEVIATIONS}`"),
    DEVIATIONS: Key("floats", f"the standard deviations for `{MEANS}`"),
    INPUTS: Key("names", "refuse unless the inputs of the client's own data have these names, in this order"),
    CLASSES: Key("names", "refuse unless its classes have these names"),
    REESTIMATE: Key("true", "evaluate with batch norm's statistics of the client's training inputs"),
    OWN_TESTS: Key("true", "evaluate on the client's own test examples only, if there are some (only in experiments)"),
    REPORT_BATCH: Key("true", "also report the metric `batch-examples`, the examples in the first batch"),
    READY: Key("true", "(with `query.partition`) also build the model and open the data, to report errors early"),
}

# The keys of a layer-wise round (FedTAN).
EXCHANGE = "fedbn.exchange"
EXCHANGE_BACKWARD = "fedbn.exchange-backward"
EXCHANGE_STEP = "fedbn.exchange-step"
EXCHANGE_VALUES = "fedbn.exchange-values"
EXCHANGE_MIN_BATCH = "fedbn.exchange-min-batch"
EXCHANGE_KEYS = {
    EXCHANGE: Key("`fused` or `paper`", "exchange statistics at each batch norm of the first step (FedTAN)"),
    EXCHANGE_BACKWARD: Key("bool", "exchange gradients too"),
    EXCHANGE_MIN_BATCH: Key(
        "int", "exchange no statistics of a batch with fewer examples; if the key is absent, with fewer than 32"
    ),
    EXCHANGE_STEP: Key(
        "int", "the number of this message in a layer-wise round: 0 begins it, k carries the result of exchange k"
    ),
    EXCHANGE_VALUES: Key(
        "two floats", "with an exchange's result: values per channel in all clients' batches, and in one example"
    ),
}

# The statistics of a smaller batch are not exchanged unless strategy and client allow it, because they reveal its
# examples (docs/privacy.md).
MIN_BATCH = 32

ROUND = "server-round"

VOLATILE = "fedbn.volatile/"  # records of a client's state with this prefix are never written to disk

# Metrics of replies.
COLUMNS = "columns"  # a record of a reply: the names of the columns and classes of a site's own data
PARTITION = "partition-id"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
OWN_DATA = "own-data"  # the node has its own data instead of a partition of the server's data
STATE_ROUND = "state-round"  # the round of the latest state in the state folder, see fedbn_flwr.client.node_state
BATCH_EXAMPLES = "batch-examples"  # examples in the first batch of the round
BATCH_VALUES = "batch-values"  # values per channel in a batch norm's input, in an exchange
VALIDATION_SET = "validation"  # the name of a test set: a share of the client's training data
OWN_TEST_SET = "own"  # the name of a test set: the client's own share of all test examples

# Message types. The reply to PARTITION_QUERY has the metrics partition-id, own-data (if it is true) and state-round (if
# there is a state folder), and the record COLUMNS (if the site has data of its own).
PARTITION_QUERY = "query.partition"
EXCHANGE_QUERY = "query.exchange"  # one exchange of a layer-wise step
SUMS_QUERY = "query.sums"  # reply: sums of the columns of the client's data, see fedbn_flwr.data.moments
SURVEY_QUERY = "query.survey"  # reply: those sums, and the numbers of examples in all and of each class
STATISTICS_QUERY = "query.statistics"  # reply: statistics of the client's data under the model in the message

QUERIES = frozenset({PARTITION_QUERY, SUMS_QUERY, SURVEY_QUERY, STATISTICS_QUERY})  # outside of training


def check_known(config: Config, known: Collection[str]) -> None:
    """Raise MessageError for a key that begins with `fedbn.` and is not `known`."""
    for key in config:
        if key.startswith(PREFIX) and key not in known:
            near = nearest(key, known)
            hint = f"; did you mean {near!r}?" if near else "."
            raise MessageError(
                f"the server's message asks for {key!r} (= {config[key]!r}), which this client does not know{hint} "
                "Import the module of its client rule in the ClientApp, and install the same version of fedbn-flwr on "
                "server and clients"
            )


def run_keys(config: Config) -> Metrics:
    """The keys of a config that decide which model clients build and how they read their data."""
    return {key: config[key] for key in (*IDENTIFYING, MEANS, DEVIATIONS) if key in config}


_NOTHING = "none"


def join(names: Iterable[str]) -> str:
    """The value of a key that lists names; never empty, since Flower's message_size_mod fails on empty ones."""
    return ",".join(sorted(names)) or _NOTHING


def _names_in(config: Config, key: str) -> list[str]:
    return [name.strip() for name in str(config.get(key, "")).split(",") if name.strip() not in ("", _NOTHING)]


def kept_keys(config: Config, role_of: Mapping[str, Role]) -> set[str]:
    """The keys of a model, with these roles, that stay on the client, according to the message's config."""
    return selected(role_of, _names_in(config, KEPT)) if KEPT in config else set()


def roles_of(config: Config, key: str, allowed: frozenset[Role]) -> frozenset[Role]:
    """The roles in the value of a key; empty if the key is absent."""
    names = _names_in(config, key)
    for name in names:
        if name not in allowed:
            raise MessageError(f"{key} names {name!r}; {did_you_mean(name, allowed)}")
    return frozenset(Role(name) for name in names)
