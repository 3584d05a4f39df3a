"""BNClient, a NumPyClient that trains any PyTorch model and applies the client rules that a strategy requests.

    def make_client(context):
        return BNClient(Net(), train_loader, test_loader, lr=0.1, context=context)

`fedbn_flwr.client_app(make_client)` creates a ClientApp that uses it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from torch import nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import ToPair, split_batch
from fedbn_flwr.declared import checked
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.step import Exchange, LayerwiseStep, no_exchange
from fedbn_flwr.extensions import declared, part
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.limits import negative_variance, values_problem
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.models.layout import is_known, lay_out, with_channels_last
from fedbn_flwr.models.tensors import ModelTensors, copied
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.tasks import Task, task_named

from .evaluation import Metric, check_metrics, evaluate
from .losses import default_loss
from .node_state import LOCAL_ARRAYS, NodeState, client_number, partition_metric, round_of, run_of
from .optimizers import OptimizerSpec, make_optimizer
from .rule import MODEL, Batch, ClientRule, KeepOptimizerState, LocalRound, Loss, in_order, rules_for
from .training import (
    TRAINER,
    Epochs,
    Trained,
    Training,
    backpropagate,
    count_examples,
    epoch_of,
    local_batches,
    reseed,
)

_A_LOSS = "a function of (outputs, targets), such as fedbn_flwr.client.losses.cross_entropy"

TestSets = Iterable[Batch] | Mapping[str, Iterable[Batch]]


@dataclass(eq=False)
class Update:
    """A client's result of a round: the arrays of the model, metrics, and additional records of arrays by name."""

    arrays: Arrays
    metrics: Metrics
    extras: dict[str, Arrays]


class BNClient(NumPyClient):
    """Trains `model` on `train_data` and evaluates it on `eval_data`.

    The server decides which arrays are sent: the client loads the arrays that it receives and sends the same ones back.
    It keeps all other arrays, for instance the counters of batch norm, in its state.

    Parameters
    ----------
    model
        Any module; its batch norms are found by type. Clients may share one, as long as nothing replaces its tensors:
        arrays that a client has neither received nor kept have the values that the model had when it was first used.
        ModelTensors(module) is the module too, and is found faster.
    train_data, eval_data
        Iterables of batches, such as a DataLoader. If the order of the examples depends on the round, give an object
        with `num_examples` and `epoch(server_round, epoch)`. A batch is a pair (inputs, targets), each a tensor or a
        dict of tensors, or a dict with common names such as "img" and "label"; see `batch`. `eval_data` may also be a
        dict of several sets by name, or a function that returns the data when the client is evaluated.
    batch
        How to read batches of another form: the keys of inputs and targets, such as ("photo", "species") or (0, 1), or
        a function that returns the inputs and targets of a batch.
    lr
        The learning rate, or a function of the round.
    epochs, steps
        The length of a round: passes over `train_data`, or optimiser steps. The default is one epoch.
    optimizer
        "sgd", "adam", "adamw" or the name of another class of torch.optim; with options a mapping, for instance
        {"name": "adamw", "betas": (0.9, 0.95)}; or a function of (parameters, lr=...) that makes a
        torch.optim.Optimizer. Its state is reset in each round.
    momentum, weight_decay
        Arguments of the optimiser. Without `weight_decay` it has the default of torch.optim, which is 0.01 for AdamW
        and zero for most others.
    keep_momentum
        Keep the optimiser's state (momentum, Adam's moments) from round to round, in the client's state.
    clip
        Scale the gradients of a step so that their norm over all parameters is at most this, after all other changes of
        the gradients (Scaffold's correction, FedProx's term, FedWon's clipping).
    task
        "classification", "segmentation", "binary", "multilabel" or "regression", which has a loss and the metrics that
        evaluation reports. By default classification or segmentation, if targets are whole numbers.
    loss
        A function (outputs, targets) that returns the mean loss over the examples of a batch; `outputs` are what the
        model returns. The default is the task's loss or, without a task, the cross entropy of `outputs` or of
        `outputs.logits`. For segmentation this is a mean over the pixels whose label is not 255, and masks may be
        [N, H, W] or [N, 1, H, W]. `fedbn_flwr.client.losses` has more, with label smoothing and class weights.
    eval_loss
        The loss that evaluation reports; by default `loss`.
    metrics
        What evaluation reports along with the loss and the task's metrics: names in `fedbn_flwr.tasks.METRICS`, or
        functions (outputs, targets) of all examples.
    channels_last
        Use this memory format in convolutions. A CPU then trains most networks faster, and the last bits of results
        change. With True the filters have it: the network's code and the losses must use `reshape` on images, not
        `view`. With "auto" only the inputs have it, on a CPU, if that is faster and all modules and losses are classes
        or functions of PyTorch, torchvision or this library. Messages always have contiguous arrays.
    precision
        With torch.bfloat16, training passes run under PyTorch's autocast. Weights, their gradients, statistics and SGD
        stay in float32, and so do evaluation and FedTAN's first step.
    compile
        Compile the computation of loss and gradients, for batches of `train_data.batch_size` examples or, if this is
        not known, as many as the first batch has. The start takes up to a minute, and the last bits of results change.
        On a GPU, kernels are recorded instead, and results stay the same. FedTAN's first step and evaluation are not
        compiled.
    seed
        The seed of the model's random numbers (dropout) and of a DataLoader that shuffles. Random numbers then depend
        on (seed, round, client) alone.
    min_batch
        The smallest number of examples whose statistics the client sends. The strategy (FedTAN) has a limit too; the
        larger one counts.
    device
        The device for training; by default the one where the model's parameters are.
    context
        The node's Flower context, which has the client's `partition-id` and state. `client_app` sets it, so pass it
        only if you call the client yourself.
    """

    @checked
    def __init__(
        self,
        model: nn.Module | ModelTensors,
        train_data: Epochs | Iterable[Batch],
        eval_data: TestSets | Callable[[], TestSets] | None = None,
        *,
        batch: ToPair | None = None,
        lr: Annotated[float, Ge(0)] | Annotated[Callable[[int], float], "a function of the round"] = 0.1,
        epochs: Annotated[int, Ge(1)] | None = None,
        steps: Annotated[int, Ge(1)] | None = None,
        optimizer: OptimizerSpec = "sgd",
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.0,
        weight_decay: Annotated[float, Ge(0)] | None = None,
        keep_momentum: bool = False,
        clip: Annotated[float, Gt(0)] | None = None,
        task: Task | str | None = None,
        loss: Annotated[Loss, _A_LOSS] | None = None,
        eval_loss: Annotated[Loss, _A_LOSS] | None = None,
        metrics: Sequence[Metric] = (),
        channels_last: bool | Literal["auto"] = "auto",
        precision: Annotated[torch.dtype, "a torch.dtype, such as torch.bfloat16"] | None = None,
        compile: bool = False,
        seed: int = 0,
        min_batch: Annotated[int, Ge(1)] = 1,
        device: torch.device | str | None = None,
        context: Context | None = None,
    ) -> None:
        if epochs is not None and steps is not None:
            raise SettingsError(f"give epochs ({epochs}) or steps ({steps}), not both")
        self.lr, self.keep_momentum, self.precision, self.compile = lr, keep_momentum, precision, compile
        epochs = 1 if epochs is None and steps is None else epochs
        self._batches = functools.partial(local_batches, epochs=epochs, steps=steps)
        self._optimizer = functools.partial(
            make_optimizer, optimizer, momentum=momentum, weight_decay=weight_decay, clip=clip
        )
        self.task = task_named(task) if isinstance(task, str) else task
        check_metrics(self.task, metrics)
        self.loss = default_loss(self.task) if loss is None else loss
        self.eval_loss, self.metrics = eval_loss or self.loss, metrics
        self._tensors = ModelTensors(model, device) if isinstance(model, nn.Module) else model
        self.model, self.roles = self._tensors.model, self._tensors.roles
        self._inputs_last = False
        if channels_last == "auto":
            known = is_known(self.loss) and is_known(self.eval_loss)
            self._inputs_last = known and self._tensors.takes_channels_last
        elif channels_last:
            lay_out(self.model)
        self.train_data, self.eval_data, self.batch = train_data, eval_data, batch
        self.seed, self.min_batch = seed, min_batch
        self._fitted: Arrays = {}  # the result of the last `fit`
        self.attach(context or Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}))

    def attach(self, context: Context) -> None:
        """Use the state and number of this node."""
        self.state, self.identity = NodeState(context.state), partition_metric(context)
        self._number = client_number(context)

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Names that the data of all clients must share, by what they are names of."""
        return {}

    @property
    def num_examples(self) -> int:
        return count_examples(self.train_data, self._pairs)

    def batch_examples(self) -> int:
        """The number of examples in the client's batches."""
        return min(getattr(self.train_data, "batch_size", None) or self.num_examples, self.num_examples)

    # --- answers to the messages of client_app, with arrays by name ---

    def train_round(
        self,
        arrays: Arrays,
        config: Config,
        extras: dict[str, Arrays] | None = None,
        exchange: Exchange = no_exchange,
    ) -> Update:
        """Load `arrays` and train a round with the client rules that `config` selects.

        `extras` are the message's other records of arrays, by name. `exchange` sends the tensors of a layer-wise step
        to the other clients and returns the result.
        """
        wanted = rules_for(config)
        if self.keep_momentum and not any(issubclass(rule, KeepOptimizerState) for rule in wanted):
            wanted = in_order([*wanted, KeepOptimizerState])
        local = self._load(arrays, config, extras)
        del arrays  # training needs the memory
        with local.resources:
            local.layerwise = functools.partial(
                LayerwiseStep,
                exchange=exchange,
                examples=self.num_examples,
                partition=self.identity.get(protocol.PARTITION),
                own_min_batch=self.min_batch,
            )
            rules = [rule(local) for rule in wanted]
            trained = TRAINER.get()(self._training(local, rules))
            return self._update(local, rules, trained)

    def evaluate_round(self, arrays: Arrays, config: Config) -> Metrics:
        """Evaluate the model, made of `arrays` and the client's own arrays, on the client's test data.

        With several test sets, metrics of the second and later ones have names that begin with the set's name.
        """
        rules = rules_for(config)
        local, model = self._load(arrays, config), self.model
        with local.resources:
            if config.get(protocol.REESTIMATE):
                model = copy.deepcopy(model)  # the next client may use the same model
                model.load_state_dict(self._statistics(rules, local, pooled=True)[0], strict=False)
            sets = self._test_sets(config)
            different = {id(batches): batches for batches in sets.values()}  # a set may have several names
            measured = {key: self._evaluate_on(model, batches, rules, local) for key, batches in different.items()}
        first = next(iter(sets), "")
        return {
            key if name == first else f"{name}-{key}": value
            for name, batches in sets.items()
            for key, value in measured[id(batches)].items()
        }

    def statistics_round(self, arrays: Arrays, config: Config) -> Update:
        """The mean batch statistics of the client's training data; `num-examples` is the number of batches."""
        rules = rules_for(config)
        local = self._load(arrays, config)
        with local.resources:
            statistics, batches = self._statistics(rules, local)
        return Update(copied(statistics), {protocol.NUM_EXAMPLES: batches}, {})

    def about_data(self, query: str) -> Update:
        """The answer to `query.sums` or `query.survey`; `num-examples` is the number of training examples."""
        raise MessageError(f"it cannot answer {query}; the client of an experiment can")

    # --- arrays by position, for Flower's NumPyClient ---

    def get_parameters(self, config: Config) -> list[np.ndarray]:
        """The arrays of this client's last `fit`, else the initial ones, in the model's order, without counters."""
        values = self._fitted
        if not values:  # another client may have used the model
            self._tensors.load_all({}, self.state.load(LOCAL_ARRAYS))
            values = self._tensors.values_of(self._sent_keys())
        return [values[key].copy() for key in self._sent_keys()]

    def fit(self, parameters: list[np.ndarray], config: Config) -> tuple[list[np.ndarray], int, Metrics]:
        """Train a round from these arrays, and return the trained ones, the number of examples and metrics."""
        if key := next((key for key in declared("client_mods") if key in config), None):
            raise MessageError(f"{key!r} needs a ClientApp made by fedbn_flwr.client_app")  # only this calls the mod
        update = self.train_round(self._by_key(parameters), config)
        self._fitted, metrics = update.arrays, update.metrics | self.identity
        return [value.copy() for value in update.arrays.values()], int(metrics.pop(protocol.NUM_EXAMPLES)), metrics

    def evaluate(self, parameters: list[np.ndarray], config: Config) -> tuple[float, int, Metrics]:
        """The loss of these arrays on the client's test data, the number of examples and metrics."""
        metrics = self.evaluate_round(self._by_key(parameters), config) | self.identity
        return metrics.pop("loss"), int(metrics.pop(protocol.NUM_EXAMPLES)), metrics

    def _by_key(self, parameters: list[np.ndarray]) -> Arrays:
        keys = list(self.roles) if len(parameters) == len(self.roles) else self._sent_keys()
        if len(parameters) != len(keys):
            raise MessageError(f"received {len(parameters)} arrays, the model has {len(keys)}: {keys[0]!r}, ...")
        return dict(zip(keys, parameters, strict=True))

    def _sent_keys(self) -> list[str]:
        return [key for key, role in self.roles.items() if role is not Role.COUNTER]

    # --- the parts of a round, in their order ---

    def _load(self, arrays: Arrays, config: Config, extras: dict[str, Arrays] | None = None) -> LocalRound:
        """Load the received arrays, and the client's own values for all others."""
        if negative := negative_variance(arrays):
            raise MessageError(
                f"the model from the server is unusable: {negative}. Neither a server optimiser (FedAdam, ...) nor "
                "noise may change statistics: wrap the optimiser as MeanStatistics(FedAdam(...)), and hide statistics "
                "from a mod that adds noise (docs/privacy.md)"
            )
        self.state = NodeState(self.state.content, run_of(config))
        stays = protocol.kept_keys(config, self.roles)
        if stays and (problem := self._tensors.kept_problem(stays, arrays)):
            raise MessageError(problem)
        # Other projects' strategies may keep batch norm on the clients without saying so.
        ours = not {protocol.RUN, protocol.KEPT}.isdisjoint(config)
        roles = {*Role} - {Role.COUNTER} if ours else {Role.WEIGHTS}
        needed = {key for key, role in self.roles.items() if role in roles and key not in stays}
        self._tensors.load_all(arrays, self.state.load(LOCAL_ARRAYS), needed)
        return LocalRound(
            config=config,
            received=frozenset(arrays),
            records={} if extras is None else extras,  # the dict itself: later messages of the round add to it
            state=self.state,
            model=self.model,
            epoch=lambda number: self._pairs(epoch_of(self.train_data, round_of(config), number)),
        )

    def _training(self, local: LocalRound, rules: Sequence[ClientRule]) -> Training:
        """What the round's training needs; the model is loaded."""
        config, number, seed = local.config, round_of(local.config), self._seed("model", local.config)

        def batches() -> Iterable[Batch]:
            reseed(self.train_data, seed)
            pairs: Iterable[Batch] = self._pairs(self._batches(self.train_data, number))
            for rule in rules:
                pairs = rule.batches(pairs)
            return self._formatted(pairs, rules)

        frozen = frozenset[Role]().union(*(rule.frozen for rule in rules))
        trained = {name: tensor for name, tensor in self._tensors.trained.items() if self.roles.get(name) not in frozen}
        self._tensors.train()
        # The server scales the rate after the round in which its strategy switched.
        factor = float(config.get(protocol.LR_FACTOR, 1.0))
        lr = self.lr(number) if callable(self.lr) else self.lr
        local.optimizer = self._optimizer(trained, lr * factor)
        gradient = functools.partial(backpropagate, precision=self.precision)
        if self.compile and not any(rule.trains_alone for rule in rules):
            gradient = part("passes", "compiled")(gradient, getattr(self.train_data, "batch_size", None))
        first_gradients = (rule.first_gradient() for rule in rules)
        first_step = next((gradient for gradient in first_gradients if gradient is not None), None)
        return Training(
            model=self.model,
            batches=batches,
            optimizer=local.optimizer,
            loss=self.loss,
            device=self._tensors.device,
            rules=rules,
            frozen=frozen,
            gradient=gradient,
            first_step=first_step,
            records=local.records,
            seed=seed,
        )

    def _update(self, local: LocalRound, rules: Sequence[ClientRule], trained: Trained) -> Update:
        """The result of a round. The client's state is saved only after everything that can fail."""
        config = local.config
        returned = protocol.kept_keys(config, self.roles) if config.get(protocol.RETURN) else set()
        taken = self._tensors.values_of([key for key in self.roles if key in local.received or key in returned])
        own = self._tensors.values_of([key for key in self.roles if key not in local.received])
        problem = values_problem(taken) or values_problem(own)
        if not math.isfinite(trained.loss):
            problem = f"its {protocol.TRAIN_LOSS} is {trained.loss} (the client diverged?)"
        if problem:
            raise MessageError(f"{problem}; the client keeps its state from before this round")
        metrics: Metrics = {protocol.NUM_EXAMPLES: self.num_examples, protocol.TRAIN_LOSS: trained.loss}
        if config.get(protocol.REPORT_BATCH):
            metrics[protocol.BATCH_EXAMPLES] = trained.first_batch
        records: dict[str, Arrays] = {MODEL: taken}
        if rules:
            with self._random_streams("finish", config, self.train_data):
                for rule, memo in zip(rules, trained.memos, strict=True):
                    rule.finish(memo, trained.steps, metrics, records)
        self.state.save(LOCAL_ARRAYS, own)  # a replay of a round that has failed must begin with the same state
        return Update(records.pop(MODEL), metrics, records)

    # --- the parts of an evaluation ---

    def _test_sets(self, config: Config) -> Mapping[str, Iterable[Batch]]:
        with self._random_streams("evaluate", config):
            data = self.eval_data() if callable(self.eval_data) else self.eval_data
        if data is None or data == {}:
            raise MessageError("this client has no data to evaluate on (eval_data was not given, or is empty)")
        return data if isinstance(data, Mapping) else {"": data}

    def _evaluate_on(
        self, model: nn.Module, batches: Iterable[Batch], rules: Iterable[type[ClientRule]], local: LocalRound
    ) -> Metrics:
        """The metrics on one test set."""
        with self._random_streams("evaluate", local.config, batches):
            pairs = self._formatted(self._pairs(batches), rules)
            return evaluate(model, pairs, self.eval_loss, self._tensors.device, self.metrics, task=self.task)

    # --- data and random numbers ---

    def _pairs(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return (split_batch(batch, self.batch) for batch in batches)

    def _formatted(self, pairs: Iterable[Batch], rules: Iterable[ClientRule | type[ClientRule]]) -> Iterable[Batch]:
        """The pairs in the memory format of the passes; the rules' losses see it too."""
        is_last = self._inputs_last and all(is_known(rule.loss) for rule in rules)
        return map(with_channels_last, pairs) if is_last else pairs

    def _statistics(
        self, rules: Iterable[type[ClientRule]], local: LocalRound, *, pooled: bool = False
    ) -> tuple[dict[str, torch.Tensor], int]:
        """The statistics of the client's training inputs under the loaded model, and the number of batches."""
        epoch = local_batches(self.train_data, round_of(local.config), epochs=1, steps=None)
        with self._random_streams("statistics", local.config, self.train_data):
            return reestimate(self.model, self._pairs(epoch), self._tensors.device, pooled=pooled)

    def _random_streams(self, purpose: str, config: Config, loader: object = None) -> AbstractContextManager[None]:
        """Make random numbers, including a DataLoader's, depend only on purpose, round and client."""
        seed = self._seed(purpose, config)
        reseed(loader, seed)
        return seeding.streams(seed, self._tensors.device)

    def _seed(self, purpose: str, config: Config) -> int:
        return seeding.seed_for(self.seed, purpose, round_of(config), self._number)
