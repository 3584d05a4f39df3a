"""`client_app(make_client)`: a ClientApp that answers strategies with BNClients."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from logging import ERROR
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.errors import IN_LOG, FedbnError, MessageError, described, did_you_mean, log_once
from fedbn_flwr.exchange.codec import Contribution, contribution_to_records
from fedbn_flwr.exchange.step import check_batch
from fedbn_flwr.extensions import declared, part
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import config_of, pack, unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import OwnContent, other_arrays, sent_model
from fedbn_flwr.named import as_path, path_of

from .client import BNClient, Update
from .layerwise import LAYERWISE, end_parked_rounds, parked_rounds, train_by_messages
from .node_state import partition_metric, return_to_round, stored_state
from .training import ONE_VALUE

if TYPE_CHECKING:
    from fedbn_flwr.internals import Mod

    Mods = Sequence[Mod] | Mapping[str, Sequence[Mod]]

MakeClient = Callable[[Context], BNClient] | Callable[[Context, Config], BNClient]

_ONLY_LOGGED = (
    ". The server receives an error reply; Flower's strategies only log it and continue, even if no client succeeds"
)


# Names of columns, such as x1 or '12 months', may have digits, and so may the line of a function of the user's.
_NUMBER = re.compile(r"(?<![\w'])(?<!line )-?\d[\w.,:+-]*(?<![.,:])")


class ClientFailed(FedbnError, RuntimeError):
    """The error of a client that could not handle a message; Flower sends it to the server as an error reply."""


def client_app(
    make_client: MakeClient,
    *,
    mods: Mods = (),
) -> ClientApp:
    """A ClientApp that handles the messages of Flower's and this project's strategies.

    `make_client(context)` is called for each message and returns a BNClient. If the function has a second parameter, it
    receives the config of the message. An exception becomes Flower's error reply, which names the partition and the
    task that failed.

    `mods` are Flower's mods, functions (message, context, call_next) that wrap the handling of each message; the first
    one is the outermost. To wrap only some messages, give a dict such as {"train": [fixedclipping_mod]}; the kinds of
    messages are "train", "evaluate" and "query".
    """
    return _App(make_client, mods)


class _App(ClientApp):
    def __init__(self, make_client: MakeClient, mods: Mods) -> None:
        super().__init__()
        self._given = make_client, mods
        parameters = inspect.signature(make_client).parameters.values()
        positional = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        # The context and, if there is a parameter for it, the config.
        wanted = sum(parameter.default is parameter.empty or parameter.name == "config" for parameter in positional)
        self._make: Callable[..., BNClient] = lambda *given: make_client(*given[:wanted])
        kinds = ("train", "evaluate", "query")
        around = mods if isinstance(mods, Mapping) else dict.fromkeys(kinds, mods)
        if unknown := sorted(around.keys() - {*kinds}):
            raise ValueError(f"mods has the key {unknown[0]!r}; {did_you_mean(unknown[0], kinds)}")
        of_extensions = {f"query.{action}": (f"answer query.{action}", _extension) for action in declared("queries")}
        for kind, (task, handle) in (_HANDLERS | of_extensions).items():
            category, _, action = kind.partition(".")
            own = functools.partial(self._handle, task, handle, [*around.get(category, ())])
            getattr(self, category)(action or "default")(own)
        self.query_mods = bool(around.get("query"))  # they must see each exchange

    def __reduce__(self) -> tuple[Callable[..., ClientApp], tuple[object, ...]]:
        return _App, self._given  # its handlers cannot be pickled

    def _handle(self, task: str, handle: Handler, mods: Sequence[Mod], message: Message, context: Context) -> Message:
        """Restore the node's state, answer the message and save the state; an error names the client and the task.

        After an error, also of a mod, the node has the state from before the message.
        """
        request = Request(self._make, message, context, dict(config_of(message.content)))
        call: Callable[[Message, Context], Message] = functools.partial(request.answer, handle)
        is_ours = handle is _extension  # it uses only volatile records, which are spent even if it fails
        keys = () if is_ours else [key for key in request.config if key in declared("client_mods")]
        for mod in (*dict.fromkeys(part("client_mods", key) for key in keys), *reversed(mods)):
            call = functools.partial(_call_mod, mod, call)
        before = {name: record for name, record in context.state.items() if not name.startswith(protocol.VOLATILE)}
        try:
            with nullcontext() if is_ours else stored_state(message, request.config, context):
                return call(message, context)
        except (Exception, SystemExit) as error:  # sys.exit() in a handler would end Flower's process
            volatile = {name: context.state[name] for name in context.state if name.startswith(protocol.VOLATILE)}
            context.state.clear()
            context.state.update(before | volatile)
            # In an experiment the server reports the error, so the log here need not.
            raise _client_error(
                context, task, error, "" if protocol.TOKEN in request.config else _ONLY_LOGGED
            ) from error


def _call_mod(mod: Mod, call: Callable[[Message, Context], Message], message: Message, context: Context) -> Message:
    return mod(message, context, call)


def _client_error(context: Context, task: str, error: BaseException, note: str = "") -> ClientFailed:
    """The error that the server receives. If it leaves something out, or has a note, the client logs it in full.

    From a site with its own data it has the reason without numbers, which may be values, rows, or how many there are.
    """
    node, whole, own_data = context.node_config, described(error), _has_own_data(context)
    sent = described(error, to_server=True, own_data=own_data)
    if "data-path" in node:
        given = str(node["data-path"])
        for text in (given, as_path(given), str(path_of(given))):
            sent = sent.replace(repr(text), "data-path")
    if own_data and (bare := _NUMBER.sub("...", sent)) != sent:
        sent = bare if IN_LOG in bare else f"{bare} ({IN_LOG})"
    if note or sent != whole:
        log_once(f"a client could not {task}: {whole}{note}", ERROR)
    if ONE_VALUE in sent:
        sent += (
            "; batch norm needs two: give this client more examples or larger batches, leave out a last batch of one "
            "(drop_last=True of a DataLoader), or use another norm (model.norm: gn, or convert_norm(model, 'gn') on "
            "server and clients)"
        )
    return ClientFailed(f"client {node.get('partition-id', f'node {context.node_id}')} could not {task}: {sent}")


def _has_own_data(context: Context) -> bool:
    return not {"data-path", "domain"}.isdisjoint(context.node_config)


# --- one handler per kind of message -----------------------------------------


class Request(NamedTuple):
    """A message to a node, and what its answer needs."""

    make_client: Callable[..., BNClient]
    message: Message
    context: Context
    config: Config

    def answer(self, handle: Handler, message: Message, context: Context) -> Message:
        """The reply to this message, or to another that a mod has made of it."""
        config = self.config if message is self.message else dict(config_of(message.content))
        return Message(handle(Request(self.make_client, message, context, config)), reply_to=message)

    def client(self) -> BNClient:
        client = self.make_client(self.context, self.config)
        if not isinstance(client, BNClient):
            raise MessageError(
                f"make_client() returned {'None' if client is None else f'a {type(client).__name__}'}; expected a "
                "BNClient, without .to_client(). Other clients need a ClientApp of their own (docs/client-protocol.md)"
            )
        for name, called in (("fit", "train_round"), ("evaluate", "evaluate_round")):
            if getattr(type(client), name) is not getattr(BNClient, name):
                raise MessageError(
                    f"{type(client).__name__} overrides {name}(), which client_app does not call; override "
                    f"{called}() instead"
                )
        client.attach(self.context)
        return client

    def reply(self, update: Update) -> RecordDict:
        extras = {name: pack(arrays) for name, arrays in update.extras.items()}
        return RecordDict(
            {"arrays": pack(update.arrays), "metrics": _numbers(update.metrics), **self.claim(), **extras}
        )

    def claim(self) -> dict[str, ConfigRecord]:
        """The partition and what stays here, in a record of its own because Flower's strategies average all metrics."""
        kept = {protocol.KEPT: self.config[protocol.KEPT]} if protocol.KEPT in self.config else {}
        claim = partition_metric(self.context) | kept
        return {"client": ConfigRecord(claim)} if claim else {}


Handler = Callable[[Request], RecordDict]


def _train(request: Request) -> RecordDict:
    if protocol.EXCHANGE_STEP in request.config:
        return _train_by_messages(request)
    client = request.client()
    if parked_rounds or LAYERWISE in request.context.state:
        end_parked_rounds(client, request.config, request.context)
    extras = other_arrays(request.message.content)
    return request.reply(client.train_round(_take_model(request.message.content), request.config, extras))


def _take_model(content: RecordDict) -> Arrays:
    """The arrays of the model. If only this client has the content, they leave it, and training has the memory."""
    record = sent_model(content)
    if isinstance(content, OwnContent):
        del content[next(name for name, other in content.items() if other is record)]
    return unpack(record)


def _evaluate(request: Request) -> RecordDict:
    metrics = request.client().evaluate_round(unpack(sent_model(request.message.content)), request.config)
    return RecordDict({"metrics": _numbers(metrics), **request.claim()})


def _partition(request: Request) -> RecordDict:
    context = request.context
    own = {protocol.OWN_DATA: "data-path" in context.node_config} if _has_own_data(context) else {}
    columns: dict[str, ConfigRecord] = {}
    if request.config.get(protocol.READY):
        client = request.client()  # an error in the site's data or model appears before any training
        if own and client.columns:
            columns[protocol.COLUMNS] = ConfigRecord({name: list(texts) for name, texts in client.columns.items()})
        if own and (min_batch := request.config.get(protocol.EXCHANGE_MIN_BATCH)):
            check_batch(client.batch_examples(), min_batch=int(min_batch), own_min_batch=client.min_batch)
    metrics = _numbers(partition_metric(context) | own | return_to_round(request.config, context))
    return RecordDict({"metrics": metrics, **columns})


def _statistics(request: Request) -> RecordDict:
    return request.reply(request.client().statistics_round(unpack(sent_model(request.message.content)), request.config))


def _about_data(request: Request) -> RecordDict:
    return request.reply(request.client().about_data(request.message.metadata.message_type))


def _extension(request: Request) -> RecordDict:
    action = request.message.metadata.message_type.split(".")[1]
    return RecordDict({**part("queries", action)(request.message.content, request.context), **request.claim()})


def _train_by_messages(request: Request) -> RecordDict:
    outcome = train_by_messages(request.client, request.message.content, request.config, request.context)
    return contribution_to_records(outcome) if isinstance(outcome, Contribution) else request.reply(outcome)


_HANDLERS: dict[str, tuple[str, Handler]] = {
    "train": ("train", _train),
    "evaluate": ("evaluate", _evaluate),
    protocol.EXCHANGE_QUERY: ("take part in a layer-wise step", _train_by_messages),
    protocol.STATISTICS_QUERY: ("report its statistics", _statistics),
    protocol.PARTITION_QUERY: ("report its partition", _partition),
    protocol.SUMS_QUERY: ("send the sums of its columns", _about_data),
    protocol.SURVEY_QUERY: ("take part in a survey", _about_data),
}


# --- records -----------------------------------------------------------------


def _numbers(metrics: Metrics) -> MetricRecord:
    """Convert numbers and lists of numbers to Python's types, which a MetricRecord needs.

    Metrics of other types are left out, with a warning.
    """
    numbers = {}
    for key, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):  # not numbers
            array = np.asarray(value.tolist() if hasattr(value, "tolist") else value)
            if array.dtype.kind in "biuf" and array.ndim < 2:
                numbers[key] = (array * 1).tolist()  # a MetricRecord takes no booleans
        if key not in numbers:
            log_once(
                f"the metric {key!r} is a {type(value).__name__} and isn't sent; expected a number or a list of them"
            )
    return MetricRecord(numbers)
