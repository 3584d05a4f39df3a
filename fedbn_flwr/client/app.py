"""`client_app(make_client)`: a ClientApp that serves message-based strategies by BNClients or other NumPyClients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from logging import ERROR
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.errors import FedbnError, MessageError, described, did_you_mean
from fedbn_flwr.exchange.codec import Agreement, Contribution, contribution_to_records
from fedbn_flwr.exchange.step import check_batch
from fedbn_flwr.extensions import declared, part
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import sent_model
from fedbn_flwr.norms.roles import Role

from .client import BNClient, Config
from .layerwise import (
    abandon_parked,
    continue_parked,
    parked_rounds,
    train_by_messages,
)
from .node_state import NodeState, return_to_round, run_of, stored_state
from .rule import Update, known_keys

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod  # elsewhere in older versions of Flower

MakeClient = Callable[[Context], NumPyClient] | Callable[[Context, Config], NumPyClient]
Make = Callable[[], NumPyClient]


class ClientFailed(FedbnError, RuntimeError):
    """The error of a client that could not handle a message; Flower sends it to the server as an error reply."""


class _MadeApp(ClientApp):
    """Is pickled as the call that made it, because its handlers cannot be pickled."""

    # Continues the parked round of a node without a message. Absent if there are mods of queries, which must see all.
    exchange: Callable[[Context, Agreement], Contribution]

    def __init__(self, make: Callable[[], ClientApp]) -> None:
        super().__init__()
        self._make = make

    def __call__(self, message: Message, context: Context) -> Message:
        content = message.content if message.has_content() else ()
        if message.metadata.message_type.startswith("get_") or any(name.endswith("ins.parameters") for name in content):
            problem = (
                "the server has a strategy of Flower's old API, flwr.server.strategy, and this client serves those of "
                'flwr.serverapp.strategy (docs/plugin.md, "From Flower\'s old API")'
            )
            _log_once("answer", problem)
            raise ClientFailed(f"this client could not answer: {problem}")
        return super().__call__(message, context)

    def __reduce__(self) -> tuple[Callable[[], ClientApp], tuple[()]]:
        return self._make, ()


def client_app(
    make_client: MakeClient,
    *,
    mods: Sequence[Mod] | Mapping[str, Sequence[Mod]] = (),
    metric_names: Mapping[str, str] = MappingProxyType({}),
) -> ClientApp:
    """A ClientApp that handles the messages of Flower's and this project's strategies.

    `make_client(context)` is called for each message and returns a BNClient or any other NumPyClient. If the function
    has a second parameter, it receives the config of the message. An exception becomes Flower's error reply, which
    names the partition and the task that failed.

    `mods` are Flower's mods: functions of (message, context, call_next) around the handling of each message, the first
    one outermost. A dict has them by kind of message, for instance {"train": [fixedclipping_mod]}; the kinds are
    "train", "evaluate" and "query".

    `metric_names` renames metrics in replies, for instance {"train-loss": "train_loss"} for a server that expects this
    name.
    """
    app = _MadeApp(functools.partial(client_app, make_client, mods=mods, metric_names=dict(metric_names)))
    around = _mods_by_kind(mods)
    takes_config = len(inspect.signature(make_client).parameters) > 1

    def answer(task: str, handle: Handler, message: Message, context: Context) -> Message:
        def make() -> NumPyClient:
            given = (context, _config(message)) if takes_config else (context,)
            client = make_client(*given)
            if isinstance(client, BNClient) and not client.has_context:
                client.attach(context)
            return client

        def handled(message: Message, context: Context) -> Message:
            content = handle(make, message, context)
            if metric_names:
                _rename_metrics(content, metric_names)
            return Message(content, reply_to=message)

        try:
            on_disk = "state" in context.node_config
            with stored_state(message, _config(message), context) if on_disk else nullcontext():
                call: Handled = handled
                for mod in _mods_of(message) if handle is not _extension else ():
                    call = functools.partial(mod, call_next=call)
                return call(message, context)
        except (Exception, SystemExit) as error:  # sys.exit() in a handler would end Flower's process
            if protocol.RUN not in _config(message):  # in experiments the server reports it
                _log_once(task, described(error))
            raise _failed(context, task, error) from error

    @app.train(mods=around["train"])
    def train(message: Message, context: Context) -> Message:
        config = _config(message)
        if protocol.COHORT_STEP in config:
            return answer("train", _train_by_messages, message, context)
        if parked_rounds:
            abandon_parked(config, context)  # this message starts another round, so the server has ended the parked one
        return answer("train", _train, message, context)

    @app.evaluate(mods=around["evaluate"])
    def evaluate(message: Message, context: Context) -> Message:
        return answer("evaluate", _evaluate, message, context)

    @app.query(protocol.COHORT_QUERY.split(".")[1], mods=around["query"])
    def cohort(message: Message, context: Context) -> Message:
        return answer(_LAYERWISE, _train_by_messages, message, context)

    @app.query(protocol.STATISTICS_QUERY.split(".")[1], mods=around["query"])
    def statistics(message: Message, context: Context) -> Message:
        return answer("report its statistics", _statistics, message, context)

    @app.query(protocol.PERSONAL_QUERY.split(".")[1], mods=around["query"])
    def personal(message: Message, context: Context) -> Message:
        return answer("send its personal model", _personal, message, context)

    @app.query(protocol.PARTITION_QUERY.split(".")[1], mods=around["query"])
    def partition(message: Message, context: Context) -> Message:
        return answer("report its partition", _partition, message, context)

    @app.query(protocol.KEYS_QUERY.split(".")[1], mods=around["query"])
    def keys(message: Message, context: Context) -> Message:
        return answer("report the config keys that it honours", _keys, message, context)

    for action in declared("queries"):
        app.query(action, mods=around["query"])(functools.partial(answer, f"answer query.{action}", _extension))

    if not around["query"]:
        app.exchange = _exchange
    return app


_KINDS = ("train", "evaluate", "query")
Handled = Callable[[Message, Context], Message]


def _mods_of(message: Message) -> list[Callable[..., Message]]:
    """The mods of extensions that the keys of a message select."""
    where = declared("client_mods")
    return list(dict.fromkeys(part("client_mods", key) for key in _config(message) if key in where))


def _mods_by_kind(mods: Sequence[Mod] | Mapping[str, Sequence[Mod]]) -> dict[str, list[Mod]]:
    by_kind = mods if isinstance(mods, Mapping) else dict.fromkeys(_KINDS, mods)
    for kind, some in by_kind.items():
        if kind not in _KINDS:
            raise ValueError(f"mods has the key {kind!r}; {did_you_mean(str(kind), _KINDS)}")
        for mod in some:
            if not callable(mod) or isinstance(mod, type):
                raise TypeError(
                    f"mods has {mod!r}; expected functions of (message, context, call_next), or instances such as "
                    "flwr.clientapp.mod.LocalDpMod(...)"
                )
    return {kind: list(by_kind.get(kind, ())) for kind in _KINDS}


def _failed(context: Context, task: str, error: BaseException) -> ClientFailed:
    who = context.node_config.get("partition-id", f"node {context.node_id}")
    return ClientFailed(f"client {who} could not {task}: {described(error)}")


@functools.lru_cache(maxsize=64)
def _log_once(task: str, problem: str) -> None:
    log(
        ERROR,
        "a client could not %s: %s. The server receives an error reply; Flower's strategies only log it and continue, "
        "even if no client succeeds",
        task, problem,
    )  # fmt: skip


# --- one handler per kind of message -----------------------------------------

Handler = Callable[[Make, Message, Context], RecordDict]


def _train(make: Make, message: Message, context: Context) -> RecordDict:
    client, record, config = make(), sent_model(message.content), _config(message)
    if isinstance(client, BNClient):
        return _reply(client.train_round(unpack(record), config, _extras(message, record)))
    # A NumPyClient identifies arrays by position, not by name: the reply uses the names of the message.
    _check_known(client, config, protocol.OF_RUN)
    values, num_examples, extra = client.fit([a.numpy() for a in record.values()], _plain(config))
    if len(values) != len(record):
        raise MessageError(f"fit() received {len(record)} arrays and returned {len(values)}; expected the same number")
    arrays = dict(zip(record, values, strict=True))
    return _reply(Update(arrays, {protocol.NUM_EXAMPLES: num_examples, **extra} | _place(context), {}))


def _check_known(client: NumPyClient, config: ConfigRecord, known: Collection[str]) -> None:
    """A NumPyClient honours none of the keys by which strategies change training."""
    if key := next((key for key in config if key.startswith(protocol.PREFIX) and key not in known), None):
        raise MessageError(
            f"the server's message asks for {key!r} (= {config[key]!r}), which a {type(client).__name__} does not "
            "honour; a BNClient of the server's version of fedbn-flwr does"
        )


def _evaluate(make: Make, message: Message, context: Context) -> RecordDict:
    client, record, config = make(), sent_model(message.content), _config(message)
    if isinstance(client, BNClient):
        metrics = client.evaluate_round(unpack(record), config)
    else:
        _check_known(client, config, protocol.OF_RUN)
        loss, num_examples, extra = client.evaluate([a.numpy() for a in record.values()], _plain(config))
        metrics = {"loss": loss, protocol.NUM_EXAMPLES: num_examples, **extra}
    return RecordDict({**_records(metrics)})


def _partition(make: Make, message: Message, context: Context) -> RecordDict:
    config = _config(message)
    own = {protocol.OWN_DATA: True} if {"data-path", "domain"} & {*context.node_config} else {}
    if config.get(protocol.READY):
        client = make()  # raises errors in the site's data or model before any training
        allowed = config.get(protocol.COHORT_MIN_BATCH)
        if own and isinstance(allowed, int) and isinstance(client, BNClient):
            size = getattr(client.train_data, "batch_size", None) or client.num_examples
            images = min(size, client.num_examples)
            check_batch(images, allowed=allowed, own=client.min_batch)
    return RecordDict({"metrics": _numbers(_place(context) | own | return_to_round(config, context))})


def _place(context: Context) -> dict[str, Any]:
    """The node's partition if it has one; the server sorts replies by it, since node ids are random."""
    partition = context.node_config.get("partition-id")
    return {} if partition is None else {protocol.PARTITION: int(partition)}


def _claim(context: Context) -> dict[str, ConfigRecord]:
    """The partition for answers that do not depend on it, so that no other node can claim it first."""
    place = _place(context)
    return {"client": ConfigRecord(place)} if place else {}


def _keys(make: Make, message: Message, context: Context) -> RecordDict:
    try:
        client = make()
    except Exception:  # the rounds report it, and other clients may suffice
        return RecordDict({**_claim(context)})
    honoured = known_keys() if isinstance(client, BNClient) else protocol.OF_RUN
    return RecordDict({"metrics": MetricRecord(dict.fromkeys(sorted(honoured), 1)), **_claim(context)})


def _statistics(make: Make, message: Message, context: Context) -> RecordDict:
    client = make()
    if not isinstance(client, BNClient):
        raise MessageError(f"{type(client).__name__} cannot report statistics of its data; a BNClient can")
    return _reply(client.statistics_round(unpack(sent_model(message.content)), _config(message)))


def _personal(make: Make, message: Message, context: Context) -> RecordDict:
    client = make()
    if not isinstance(client, BNClient) or not client.share_personal:
        raise MessageError(
            "the server asks for the arrays that stay on this client, and it does not send them; expected a BNClient "
            "with share_personal=True (in an experiment, evaluate.matrix: true)"
        )
    own = NodeState(client.records, run_of(_config(message))).load("local")
    sent = {key: value for key, value in own.items() if client.roles.get(key) is not Role.COUNTER}
    return _reply(Update(sent, client.identity, {}))


def _extension(make: Make, message: Message, context: Context) -> RecordDict:
    action = message.metadata.message_type.split(".")[1]
    return RecordDict({**part("queries", action)(message.content, context), **_claim(context)})


# --- layer-wise rounds -------------------------------------------------------

_LAYERWISE = "take part in a layer-wise step"


def _exchange(context: Context, agreement: Agreement) -> Contribution:
    try:
        return continue_parked(context, agreement)
    except (Exception, SystemExit) as error:
        raise _failed(context, _LAYERWISE, error) from error


def _train_by_messages(make: Make, message: Message, context: Context) -> RecordDict:
    record, config = sent_model(message.content), _plain(_config(message))
    outcome = train_by_messages(_bn_client(make), message.content, config, _extras(message, record), context)
    return contribution_to_records(outcome) if isinstance(outcome, Contribution) else _reply(outcome)


def _bn_client(make: Make) -> Callable[[], BNClient]:
    def make_bn_client() -> BNClient:
        client = make()
        if not isinstance(client, BNClient):
            raise MessageError(f"{type(client).__name__} cannot take part in a layer-wise step; a BNClient can")
        return client

    return make_bn_client


# --- records -----------------------------------------------------------------


def _config(message: Message) -> ConfigRecord:
    return next(iter(configs_in(message.content).values()), ConfigRecord())


def _extras(message: Message, record: ArrayRecord) -> dict[str, Arrays]:
    return {name: unpack(other) for name, other in arrays_in(message.content).items() if other is not record}


def _reply(update: Update) -> RecordDict:
    extras = {name: pack(arrays) for name, arrays in update.extras.items()}
    return RecordDict({"arrays": pack(update.arrays), **_records(update.metrics), **extras})


def _plain(config: ConfigRecord) -> dict[str, Any]:
    return {key: config[key] for key in config}


def _rename_metrics(content: RecordDict, names: Mapping[str, str]) -> None:
    for name, metrics in metrics_in(content).items():
        content[name] = MetricRecord({names.get(key, key): value for key, value in metrics.items()})


def _records(metrics: Mapping[str, Any]) -> dict[str, MetricRecord | ConfigRecord]:
    """The metrics, and the partition in a record of its own: Flower's strategies average all metrics."""
    numbers = _numbers(metrics)
    partition = numbers.pop(protocol.PARTITION, None)
    if not isinstance(partition, int):
        return {"metrics": numbers}
    return {"metrics": numbers, "client": ConfigRecord({protocol.PARTITION: partition})}


def _numbers(metrics: Mapping[str, Any]) -> MetricRecord:
    """The numbers among the metrics as Python's types: a MetricRecord accepts neither booleans nor NumPy scalars."""
    plain = MetricRecord()
    for key, value in metrics.items():
        if isinstance(value, bool | np.bool_ | int | np.integer):
            plain[key] = int(value)
        elif isinstance(value, float | np.floating):
            plain[key] = float(value)
    return plain
