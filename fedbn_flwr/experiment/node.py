"""Makes the client of a node from the settings: its data, its model and its training."""

from __future__ import annotations

import difflib
import functools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from flwr.app import Context
from pydantic import ValidationError
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.batch import Value
from fedbn_flwr.client.client import BNClient, Update
from fedbn_flwr.client.rule import Loss, supports
from fedbn_flwr.data import Moments
from fedbn_flwr.data.batches import Normalise, TestBatches
from fedbn_flwr.data.dataset import DataSet, Schema, agreed_names
from fedbn_flwr.data.disclosed import answer, check_names
from fedbn_flwr.data.kinds import KINDS
from fedbn_flwr.data.partitions import hold_out
from fedbn_flwr.data.schema import refuse
from fedbn_flwr.errors import LOG, MessageError, SettingsError, did_you_mean, error_if, few, log_once
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.models.layout import suits_channels_last
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.results.folder.clients import OWN_TRAINING
from fedbn_flwr.results.naming import names_in
from fedbn_flwr.results.units import in_units
from fedbn_flwr.trees import Tree

from .data import (
    at_site,
    client_batches,
    label_problems,
    load_data,
    rows_by_domain,
    shape_without_data,
    shares_of,
    splits_of,
)
from .file.layers import from_run_config
from .parts import RunParts, learning_rate, loss_of, make_model, plain_loss
from .settings import ClientTrain, Experiment, Settings

# How this node trains, by the keys of `ClientTrain`.
TRAIN_KEYS = {key.replace("_", "-"): key for key in ClientTrain.model_fields if key != "client"}
NODE_KEYS = ("partition-id", "num-partitions", "data-path", "domain", "state", "min-batch", "survey", *TRAIN_KEYS)


def make_client(context: Context, config: Config) -> BNClient:
    """The client of a node, for the experiment in its run config."""
    return _clients(str(context.run_config["experiment"]), str(context.run_config.get("set", "")))(context, config)


@functools.lru_cache(maxsize=8)  # a client is made for each message
def _clients(experiment: str, changes: str) -> ClientMaker:
    return ClientMaker(from_run_config({"experiment": experiment, "set": changes}))


@dataclass(frozen=True)
class ClientMaker:
    """Makes the clients of an experiment: for the run that the message's config names, else the first one."""

    experiment: Experiment
    _parts: dict[Hashable, ClientParts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, context: Context, config: Config) -> BNClient:
        run = named_run(self.experiment, config)
        key = (run.label, run.seed, context.node_id, *context.node_config.items())
        knows_all = all(map(supports, config))
        if key not in self._parts or not knows_all:
            for name in sorted(names_in(run.strategy)):  # its module defines or imports the client's half
                try:
                    named.load("strategy.name", name)
                except SettingsError as error:
                    if not knows_all:
                        raise
                    log_once(f"without a client's half of the strategy: {error}")
        if key not in self._parts:
            self._parts[key] = ClientParts.of(run, context)
        return self._parts[key].client(context, config)


@dataclass(eq=False)
class ClientParts(RunParts):
    """What a node needs to make the client of a run for each message.

    If the site has data of its own, the settings of `run` describe that data. `data.py` keeps the data sets, which
    clients share.
    """

    number: int
    has_own_data: bool  # instead of a partition of the experiment's
    min_batch: int
    own: ClientTrain  # how it trains where it differs from the others
    takes_part: bool  # in surveys

    @classmethod
    def of(cls, run: Settings, context: Context) -> ClientParts:
        node = context.node_config
        listed = run.data.name
        least = min_batch_of(node)
        has_own = not node.keys().isdisjoint(("data-path", "domain"))
        if has_own:  # the client trains on all of the site's data
            data = at_site(run.source, str(node["data-path"])) if "data-path" in node else run.source
            domains = (str(node["domain"]),) if "domain" in node else ()
            data = data.model_copy(update={"domains": domains, "partition": KINDS["iid"]()})
            run = run.model_copy(update={"data": data})
        number = checked_client_number(context, run.clients)
        own = own_training(run, number, node)
        new = own.model_dump(include={"batch_size"}, exclude_none=True)
        new |= own.model_dump(include={"epochs", "steps"}) if own.epochs or own.steps else {}
        engine = run.engine.model_copy(update={"device": own.device or run.engine.device})
        model = run.model.model_copy(
            update={"weights": run.model.weights if run.rounds else None}
        )  # on the server's disk
        run = run.model_copy(update={"train": run.train.model_copy(update=new), "engine": engine, "model": model})
        return cls(run, number, has_own, least, own, node.get("survey", not has_own) is True, listed=listed)

    @property
    def dataset(self) -> DataSet:  # `data.py` keeps those that clients share
        return load_data(self.run.source, str(self.device))

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The indices of the training examples, and of the test examples that are the client's own."""
        task = self.dataset.task
        if not self.run.evaluate.server and task is not (expected := shape_without_data(self.run).task):
            raise SettingsError(
                f"{self.run.data.name!r} has labels for {task.name} ({task.targets}), but the experiment has "
                f"{expected.name}; correct the labels, or set data.task"
            )
        if self.has_own_data:
            refuse(label_problems(self.run, self.dataset))
            check_names(self.dataset, self.min_batch)
            return torch.arange(len(self.dataset.train)), torch.arange(len(self.dataset.test))
        train, test = shares_of(self.run.source, self.run.clients, self.run.seed, str(self.device))
        return train[self.number], test[self.number]

    @functools.cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """The indices of the training examples that the client trains on, and of those that it holds out."""
        if not self.has_own_data:
            return splits_of(self.run, str(self.device))[self.number]
        own = {self.number: self.rows[0]}
        return hold_out(self.dataset, own, self.run.evaluate.validation, self.run.seed)[self.number]

    @functools.cached_property
    def losses(self) -> tuple[Loss, Loss]:
        """Of training and of evaluation."""
        dataset = self.dataset
        return loss_of(self.run, dataset, self.split[0]), plain_loss(self.run, dataset.task)

    @property
    def sends_sums(self) -> bool:
        """Whether the sites agree on the moments before the first round."""
        return self.run.data.normalise == "moments" and (self.has_own_data or not self.run.evaluate.server)

    def _has_channels_last(self, model: nn.Module) -> bool:
        run, given = self.run, self.run.train.channels_last
        if given != "auto":
            return given
        own = names_in([run.model.name, run.model.norm, run.train.loss, *run.evaluate.metrics])
        return self.device.type == "cpu" and not own and suits_channels_last(model)

    def client(self, context: Context, config: Config) -> BNClient:
        run, train = self.run, self.run.train
        torch.set_num_threads(run.engine.threads)
        agreed = (
            (tuple(config[protocol.MEANS]), tuple(config[protocol.DEVIATIONS])) if protocol.MEANS in config else None
        )
        normalise: Normalise = _not_agreed if agreed is None and self.sends_sums else self.normalise(agreed)
        units, dataset = self.units(agreed), self.dataset
        for key, own in agreed_names(dataset.schema).items():
            changed = own and own != config.get(key, own)
            what = f"the {key.removeprefix(protocol.PREFIX)} of {run.data.name!r}"
            error_if(changed, f"{what} aren't those on which the sites agreed before the first round", f": {own}")
        kind = (run.model, run.seed, train.channels_last, dataset.shape, dataset.tokens, dataset.outputs)
        free = free_models(kind, str(self.device))
        try:
            tensors = free.pop()  # clients of a FedTAN round are made concurrently
        except IndexError:
            tensors = ModelTensors(make_model(run, dataset).to(self.device))
        made = ExperimentClient(
            self,
            units,
            tensors,
            client_batches(run, dataset, self.split[0], self.number, normalise, units),
            functools.partial(self.tests, normalise, only_own=protocol.OWN_TESTS in config),
            lr=lambda server_round: (self.own.lr_factor or 1) * learning_rate(run, server_round),
            epochs=train.epochs,
            steps=train.steps,
            optimizer=train.optimizer,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            keep_momentum=train.keep_momentum,
            clip=train.clip,
            loss=self.losses[0],
            task=dataset.task,
            eval_loss=self.losses[1],
            metrics=self.metrics,
            channels_last=self._has_channels_last(tensors.model),
            precision=torch.bfloat16 if train.precision == "bfloat16" else None,
            compile=train.compile,
            seed=run.seed,
            min_batch=self.min_batch,
            device=self.device,
            context=context,
        )
        if not any(map(named.is_name, (run.model.name, run.model.norm))):  # modules of the user may have other state
            weakref.finalize(made, free.append, tensors).atexit = False
        return made

    def tests(self, normalise: Normalise, *, only_own: bool = False) -> dict[str, TestBatches]:
        """The test sets: all test examples, the client's own, both by domain, and those that it holds out.

        With `only_own` the first one also has the client's own examples, if there are some.
        """
        dataset, own, held = self.dataset, self.rows[1], self.split[1]
        size = self.run.evaluate.batch_size
        test = functools.partial(TestBatches, dataset.test, normalise, size)
        everything = test(own if only_own and len(own) else None)
        is_own = only_own or len(own) == len(dataset.test)  # the same set, which is evaluated once
        tests = {"": everything} | ({protocol.OWN_TEST_SET: everything if is_own else test(own)} if len(own) else {})
        for domain, rows in rows_by_domain(dataset).items():
            if len(both := own[torch.isin(own, rows)]) >= self.min_batch:
                tests[f"{protocol.OWN_TEST_SET}@{domain}"] = test(both)
            if self.run.evaluate.domains and len(rows) >= self.min_batch:
                tests[f"@{domain}"] = test(rows)
        if len(held):
            tests[protocol.VALIDATION_SET] = TestBatches(dataset.train, normalise, size, held)
        return tests

    def told(self, *, survey: bool) -> Update:
        """What the site tells about its training examples: the sums of columns, in a survey also numbers of classes."""
        # Each site's own mean and deviation would hide how the sites differ.
        source = self.run.source.model_copy(update={"normalise": "moments"})
        data, least = load_data(source, str(self.device)), self.min_batch
        examples, names = data.train.select(self.rows[0]), data.input_names
        columns = {name: [f"{name}={value}" for value in values] for name, values in self.run.data.categories.items()}
        groups = [[*map(names.index, each)] for each in columns.values() if {*each} <= {*names}]
        found = answer(data, examples, least, groups, survey=survey, scaled=bool(self.run.data.targets))
        if self.has_own_data:
            LOG.info(
                "the server asks for %s of %d training examples; not told: %s; its settings of the data: %s",
                "a survey" if survey else "the sums",
                len(examples),
                few((name for name, count in zip(names, found["sums"][0], strict=False) if not count), 20) or "none",
                self.run.source.model_dump(mode="json", exclude_defaults=True),
            )
        return Update(found, {protocol.NUM_EXAMPLES: len(examples)}, {})


class ExperimentClient(BNClient):
    """A node's client in an experiment: it also sends the sums of its columns, and evaluates numbers in their units."""

    def __init__(self, parts: ClientParts, units: Moments | None, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts, self._units = parts, units

    @property
    def columns(self) -> Schema:
        return self._parts.dataset.schema

    def about_data(self, query: str) -> Update:
        survey = query == protocol.SURVEY_QUERY
        if survey and not self._parts.takes_part:
            raise MessageError("this site has not agreed to surveys; it does by survey=true in its node config")
        return self._parts.told(survey=survey)

    def train_round(self, arrays: Arrays, config: Config, *arguments: Any, **options: Any) -> Update:
        update = super().train_round(arrays, config, *arguments, **options)
        if any(key in declared("client_mods") for key in config):  # that mask replies, which then have equal keys
            return update
        own = self._parts.own.model_dump(include={*OWN_TRAINING}, exclude_none=True)
        return replace(update, metrics={**update.metrics, **own})

    def evaluate_round(self, arrays: Arrays, config: Config) -> Metrics:
        with in_units(self.model, self._units):
            return super().evaluate_round(arrays, config)


def min_batch_of(node: Tree) -> int:
    """Check a node's config and return its `min-batch`, which defaults to a limit for a site with its own data."""
    for name in node:
        if name not in NODE_KEYS and difflib.get_close_matches(name, NODE_KEYS):  # others may belong to other apps
            raise SettingsError(f"this node's config has the unknown key {name!r}; {did_you_mean(name, NODE_KEYS)}")
    least = node.get("min-batch", protocol.MIN_BATCH if "data-path" in node else 1)
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise SettingsError(f"this node's config has min-batch={least!r}; expected a number of examples, 1 or more")
    return least


def own_training(run: Settings, number: int, node: Tree) -> ClientTrain:
    """How this client trains, by the experiment and, before it, by the node's config."""
    listed = {own.client: own for own in run.train.of_clients}.get(number, ClientTrain())
    given = {TRAIN_KEYS[key]: value for key, value in node.items() if key in TRAIN_KEYS}
    known = {} if {"epochs", "steps"} & given.keys() else listed.model_dump(include={"epochs", "steps"})
    known |= listed.model_dump(include={"batch_size", "lr_factor", "device"})
    try:
        return ClientTrain.model_validate(known | given)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(str(part).replace("_", "-") + f"={first['input']!r}: " for part in first["loc"])
        raise SettingsError(f"this node's config: {key}{first['msg']}") from None


def _not_agreed(inputs: Value) -> NoReturn:
    raise MessageError(
        f"data.normalise is 'moments', and the message has no {protocol.MEANS!r}, on which the sites agree before the "
        "first round; install the same version of fedbn-flwr on server and clients"
    )


def named_run(experiment: Experiment, config: Config) -> Settings:
    runs = experiment.by_folder
    name = str(config.get(protocol.RUN, next(iter(runs))))
    if name not in runs:
        raise SettingsError(
            f"the server asks for the run {name!r}, but this client's experiment has the runs {list(runs)}"
        )
    return runs[name]


def checked_client_number(context: Context, clients: int) -> int:
    """The number of a node's client, from which its random draws are derived: its partition.

    A node with its own data needs no partition-id (the convention of Flower's hub); its number is then the node id.
    """
    node = context.node_config
    if "data-path" in node and "partition-id" not in node:
        return context.node_id
    client, partitions = node.get("partition-id"), node.get("num-partitions", clients)
    if type(client) is not int or partitions != clients or not 0 <= client < clients:
        given = f"partition-id={client!r} and num-partitions={partitions!r}"
        found = "no partition-id" if client is None else given
        own = "" if "data-path" in node else ", or \"data-path='...'\" for a site with its own data"
        raise SettingsError(
            f"this node has {found}, but the experiment has clients={clients}; set --node-config "
            f'"partition-id=N num-partitions={clients}" with N from 0 to {clients - 1}{own}'
        )
    return client


@functools.lru_cache(maxsize=1)  # the runs of a process follow one another, and each has its own model
def free_models(kind: Hashable, device: str) -> list[ModelTensors]:
    """Models that no client uses now: building one can take longer than a round of training."""
    return []
