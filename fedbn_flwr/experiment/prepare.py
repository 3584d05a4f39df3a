"""Makes data, model and strategy of the server from the settings, and checks them before training starts."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import Outputs, Value, map_tensors
from fedbn_flwr.client.evaluation import Measurement, Metric, check_metrics, name_of
from fedbn_flwr.client.optimizers import OptimizerSpec, make_optimizer
from fedbn_flwr.client.training import ONE_VALUE
from fedbn_flwr.cores import cores
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import main_input
from fedbn_flwr.data.schema import Problem, refuse
from fedbn_flwr.engines.worker import NAME
from fedbn_flwr.errors import SettingsError, few, locate_errors
from fedbn_flwr.exchange.step import exchanged_layers
from fedbn_flwr.experiment.registry import FLOWER, build_strategy
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.models.build import read_weights
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.norms.roles import norm_layers
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.results.folder.summary import is_taken
from fedbn_flwr.strategies import Rule, as_rule, broken_guarantees
from fedbn_flwr.tasks import Task
from fedbn_flwr.trees import Tree

from .data import Shape, label_problems, try_data
from .parts import Parts, choose_device, has_own_loss, learning_rate, plain_loss
from .settings import Experiment, Settings, name_in, options_in, strategy_name, tracker_of


def prepare(experiment: Experiment, places: Sequence[int] | None = None, *, own_data: bool = False) -> list[Parts]:
    """Prepare and check all runs, or those at these places of the experiment.

    With `own_data`, nodes may have data of their own, so that the sizes of the partitions do not matter. Runs of one
    label differ only in their seeds, so the network and its training are tried for the first of them.
    """
    by_place = [(run, name) for name, run in experiment.by_folder.items()]
    chosen = by_place if places is None else [by_place[place] for place in places]
    several = len({run.label for run, _ in chosen}) > 1
    prepared: list[Parts] = []
    for run, name in chosen:
        is_tried = run.label in {other.run.label for other in prepared}
        with locate_errors(f"run {run.label!r}") if several else nullcontext():
            prepared.append(prepare_run(run, name, make_rule(run), is_tried=is_tried))
            if len(chosen) > 1:
                prepared[-1].release()  # a sweep has many models
            prepared[-1].own_data = own_data
            if prepared[-1].dataset is not None and not own_data:
                check_partition(prepared[-1])
    return prepared


def prepare_run(run: Settings, name: str, rule: Rule, *, is_tried: bool = False) -> Parts:
    """Make the parts of a run, and check that they suit each other.

    With `is_tried`, the network and its training were tried for another seed of the run.
    """
    for tracker in map(tracker_of, run.track):
        named.load("track", named.check_name("track", tracker, ["tensorboard"], "a tracker"))
    parts = Parts(run, name, rule)
    refuse(label_problems(run, parts.shape))
    if parts.dataset is not None:
        try_data(run, parts.dataset, parts.partition[0])
    # Made now, so that their errors are reported before training.
    if parts.dataset is not None or run.data.normalise != "moments":
        parts.normalise(None)
    if parts.dataset is not None and run.evaluate.validation:
        parts.held_out  # noqa: B018
    if not is_tried:
        parts.model.train()  # a user's may return nothing
        refuse(norm_problems(run, parts.model, rule))
        try_model(run, parts.model, parts.shape, parts.device)
        check_training(parts)
    if not run.rounds and run.model.weights is not None:
        _check_weights(run.model.weights, parts.model)
    rule.begin(run.rounds, pack(initial_arrays(parts.model)))  # raises an error for a model that does not suit it
    stays = rule.traits.local_keys(parts.model.state_dict())
    if stays and (problem := ModelTensors(parts.model).kept_problem(stays)):
        raise SettingsError(f"strategy {strategy_name(run.strategy)}: {problem}")
    return parts


def make_rule(run: Settings) -> Rule:
    # By default all clients train, and `evaluate.clients` decides whether they evaluate. A run begins with all clients
    # (run.federation.check_nodes) and continues without those that fail.
    least = min(run.training_clients, 2)
    _check_demands(run.strategy, run.training_clients)
    strategy = build_strategy(
        run.strategy,
        seed=run.seed,
        min_train_nodes=least,
        min_evaluate_nodes=least,
        min_available_nodes=least,
        node_timeout=run.engine.node_timeout,
        client_learning_rate=run.train.lr,  # of QFedAvg
    )
    rule = as_rule(strategy)
    _check_strategy(run, rule)
    if not run.evaluate.server and run.data.normalise == "moments":
        check_moments(run, rule)
    return rule


def _check_strategy(run: Settings, rule: Rule) -> None:
    """Raise an error for settings that contradict what the strategy computes, or assumes of its clients' training."""
    train, options, traits, hides = run.train, run.evaluate, rule.traits, broken_guarantees(rule).get("inside")
    optimizer, is_personal = name_in(train.optimizer), not traits.has_global_model
    by_sgd, clip, least = optimizer.lower() == "sgd", train.clip, traits.min_batch
    batch = min([train.batch_size, *(own.batch_size for own in train.of_clients if own.batch_size is not None)])
    of_optimizer, more = f"train.optimizer is {train.optimizer!r}", options_in(train.optimizer)
    contradictions: Sequence[tuple[object, str, str]] = (
        (
            is_personal and options.clients is False,
            "evaluate.clients is false",
            "trains no global model, and only clients can be evaluated; leave evaluate.clients out",
        ),
        (
            is_personal and options.unseen.clients,
            f"evaluate.unseen.clients is {list(options.unseen.clients)}",
            "trains no global model, so it has none for a newcomer; leave it out",
        ),
        (
            options.unseen.clients and traits.never_sent and {*options.unseen.statistics} != {"own"},
            f"evaluate.unseen.statistics is {list(options.unseen.statistics)}",
            f"has no mean for a newcomer: clients never send their {' and '.join(sorted(traits.never_sent))}; "
            "expected [own]",
        ),
        (
            options.dynamics and hides is not None,
            "evaluate.dynamics is true and reads the statistics of single clients",
            f"{hides}; leave evaluate.dynamics out",
        ),
        (
            "linear" in traits.steps and not by_sgd,
            of_optimizer,
            "needs sgd: the mean of its clients' first steps is the step on the union of their batches, which holds "
            "only for a step that is linear in the gradient",
        ),
        (
            "linear" in traits.steps and clip is not None,
            f"train.clip is {clip}",
            "needs whole gradients: in its first step each client has a part of the gradient of all, and clipping the "
            "parts changes their mean; leave train.clip out",
        ),
        (
            "sgd" in traits.steps
            and (not by_sgd or train.keep_momentum or more.get("nesterov") or more.get("dampening")),
            "train.keep_momentum is true" if by_sgd and train.keep_momentum else of_optimizer,
            "divides changes by numbers of steps that are known for sgd whose momentum begins at zero in each round; "
            "expected train.optimizer sgd without nesterov, dampening and train.keep_momentum",
        ),
        (
            "sgd" in traits.steps and train.momentum and getattr(rule.base, "proximal_mu", 0),
            f"train.momentum is {train.momentum}",
            "knows the numbers of steps for either momentum or proximal_mu; leave one of them out",
        ),
        (
            batch < least,
            f"train.batch_size is {batch}" if batch == train.batch_size else f"train.of_clients has batch_size {batch}",
            f"doesn't exchange the statistics of batches of fewer than {least} examples, which would reveal the "
            f"examples; use larger batches, or allow it with strategy.min_batch: {batch}",
        ),
        (
            "momentum" in traits.steps and not (by_sgd and train.momentum > 0),
            f"train.momentum is {train.momentum}" if by_sgd else of_optimizer,
            "averages the momentum of SGD; expected train.optimizer sgd and a train.momentum above zero",
        ),
    )
    name = strategy_name(run.strategy)
    refuse((is_so, f"{found}, but strategy {name} {why}") for is_so, found, why in contradictions)


def check_moments(run: Settings, rule: Rule) -> None:
    """Raise an error if sites would be asked for sums of columns that the strategy hides or must limit."""
    name, hides = strategy_name(run.strategy), broken_guarantees(rule).get("inside")
    asks = "data.normalise is 'moments', for which each site sends the sums of its columns to the server,"
    instead = (
        "for images use unit or official; for other data own with partition: {kind: natural}; data.missing may be drop"
    )
    limits = "strategy.bounds limits the influence of one client, and sums have no limit"
    why = limits if hides is None else f"{name} {hides}"
    if hides is not None or rule.base.bounds is not None:
        raise SettingsError(f"{asks} but {why}; {instead}")


def _check_demands(spec: Tree, clients: int) -> None:
    """Raise an error if a minimum number of nodes exceeds the clients: rounds would wait until their timeout."""
    for key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if isinstance(needed := spec.get(key), int) and needed > clients:
            raise SettingsError(f"strategy.{key} of {spec.get('name')} is {needed}, but there are {clients} clients")
    about, bad = FLOWER.get(str(spec.get("name"))), spec.get("num_malicious_nodes", 0)
    if about is not None and about.needs is not None and isinstance(bad, int) and about.needs(bad) > clients:
        raise SettingsError(
            f"strategy {spec['name']} with num_malicious_nodes={bad} needs {about.needs(bad)} clients; clients is "
            f"{clients}"
        )
    if isinstance(base := spec.get("base"), Mapping):
        _check_demands(base, clients)


def norm_problems(run: Settings, model: nn.Module, rule: Rule) -> Iterator[Problem]:
    """What the settings, or the strategy, ask of batch norm that the model's other norms don't have."""
    norms, unseen = [*norm_layers(model).values()], run.evaluate.unseen
    other = next((type(layer).__name__ for layer in norms if not isinstance(layer, _BatchNorm)), None)
    asked = {
        "evaluate.statistics is 'reestimated'": run.evaluate.statistics == "reestimated",
        "evaluate.unseen.statistics has 'batch'": unseen.clients and "batch" in unseen.statistics,
    }
    for words, is_asked in asked.items():
        yield (
            is_asked and other,
            f"{words}, which measures inputs of batch norms, but {run.model.name!r} with norm {run.model.norm!r} has "
            f"{other}, whose statistics may be others; leave it out",
        )
    yield (
        rule.traits.min_batch and not exchanged_layers(model) and other,  # it raises for other kinds of batch norm
        f"strategy {strategy_name(run.strategy)} computes batch norm over the clients' batches, but the layers of "
        f"{run.model.name!r} that track statistics are {other}, which normalises otherwise; use another strategy, or a "
        "model with batch norm",
    )


def _check_weights(file: str, model: nn.Module) -> None:
    """Raise an error for weights of other shapes, with which training could begin."""
    state, own = read_weights(file), model.state_dict()
    for key in sorted(state.keys() & own.keys()):
        if state[key].shape != own[key].shape:
            found, expected = list(state[key].shape), list(own[key].shape)
            raise SettingsError(
                f"{file!r} does not fit the experiment's network: {key!r} has shape {found}, expected {expected}"
            )


def workers_of(run: Settings) -> int:
    """The number of worker processes on this machine."""
    # A worker trains with one thread, and the process of one of several runs cannot have workers of its own.
    if run.engine.threads > 1 or multiprocessing.current_process().name == NAME:
        return 0
    on_gpu = choose_device(run.engine.device).type == "cuda"
    if run.engine.workers == "auto":
        return cores() if cores() > 1 and not on_gpu else 0
    if on_gpu and run.engine.workers:
        raise SettingsError(
            f"engine.workers is {run.engine.workers}, but processes of the local engine cannot use a GPU; give 0, or "
            "engine.name ray with gpus_per_client, for instance 0.25"
        )
    return run.engine.workers


# --- checks ------------------------------------------------------------------


def check_partition(parts: Parts) -> None:
    """Raise an error if clients have too few examples to exchange statistics of batches, or to train at all."""
    run, least = parts.run, parts.rule.traits.min_batch
    sizes = [len(parts.split(client)[0]) for client in range(len(parts.partition))]
    is_frozen = any(rule.memory.switch_round == 1 for rule in parts.rule.chain)  # FixBN with freeze_round 0
    if min(run.train.batch_size, max(sizes)) == 1 and not least and not is_frozen:
        try_model(run, parts.model, parts.shape, parts.device, examples=1)
    if small := [f"{client} ({size})" for client, size in enumerate(sizes) if size < least]:
        raise SettingsError(
            f"{len(small)} of {len(sizes)} clients have fewer than {least} training examples with seed {run.seed}: "
            f"{few(small, 5)}; with strategy "
            f"{strategy_name(run.strategy)} they don't exchange the statistics of batches this small, which would "
            "reveal the examples; change clients or data.partition, or allow it with strategy.min_batch: "
            f"{min(sizes)}"
        )


def check_rounds(parts: Parts, folder: RunReader) -> None:
    """Raise SettingsError if the rounds in the folder would have been others in a run of as many rounds as this one."""
    run, was, where = parts.run, folder.config().get("rounds", parts.run.rounds), str(folder.path)
    done = 0 if (summary := folder.readable_summary()) is None else summary.rounds
    if run.rounds < done:
        raise SettingsError(f"{where!r} cannot end after round {run.rounds}: it has {done} rounds")
    if was == run.rounds or not done:
        return
    before, found = run.model_copy(update={"rounds": was}), list[str]()
    if any(learning_rate(before, number) != learning_rate(run, number) for number in range(1, done + 1)):
        found.append(f"train.schedule ({run.train.schedule.kind})")
    arrays, states = pack(initial_arrays(parts.model)), list[list[bytes]]()
    for rounds in (was, run.rounds):
        parts.rule.begin(rounds, arrays)
        states.append([dump([vars(link.memory)]) for link in parts.rule.chain])
    for link, *two in zip(parts.rule.chain, *states, strict=True):
        if two[0] != two[1]:
            found.append(f"strategy.{getattr(link, 'argument', 'name')} of {link}")
    if found:
        raise SettingsError(
            f"{where!r} cannot be resumed with {run.rounds} rounds instead of {was}: {' and '.join(found)} "
            f"depends on the number of rounds, so that the {done} rounds there would have been others; where it is a "
            "fraction give it as a round, or start a new run with another --out"
        )


def check_optimizer(
    spec: OptimizerSpec,
    parameters: Mapping[str, nn.Parameter],
    *,
    momentum: float = 0.0,
    weight_decay: float | None = None,
    clip: float | None = None,
) -> None:
    """Raise SettingsError if the optimiser cannot be made for these parameters, or cannot take a step."""
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(spec, copies, 0.1, momentum=momentum, weight_decay=weight_decay, clip=clip)
    try:
        optimizer.step()
    except (Exception, SystemExit) as error:
        raise SettingsError(f"optimizer {spec!r} cannot take a step: {type(error).__name__}: {error}") from error


def check_training(parts: Parts) -> None:
    """Raise an error for settings with which training cannot begin, or differs from what the strategy assumes."""
    run, shape = parts.run, parts.shape
    train = run.train
    for server_round in (1, run.rounds) if run.rounds else ():
        learning_rate(run, server_round)
    if train.optimizer != "sgd":
        try:
            check_optimizer(
                train.optimizer,
                {name: parameter for name, parameter in parts.model.named_parameters() if parameter.requires_grad},
                momentum=train.momentum,
                weight_decay=train.weight_decay,
            )
        except SettingsError as error:
            raise SettingsError(f"train.{error}") from None
    _check_names(parts.task, parts.metrics, parts.rule.notes())
    if parts.task.form:  # of several targets only the user knows the outputs
        # Each class has two examples.
        targets = targets_like(parts.task, shape.classes, 2 * shape.classes, (2, 2) if shape.dense else ())
        size = targets.shape[1:] if shape.dense else ()
        outputs = torch.randn(len(targets), shape.outputs, *size, generator=torch.Generator().manual_seed(0))
        measurement = Measurement(parts.task, parts.metrics)
        measurement.add(outputs, targets)
        try:
            measurement.values(strict=True)
        except (Exception, SystemExit) as error:
            raise SettingsError(
                f"evaluate.metrics: a metric of {', '.join(map(name_of, parts.metrics))} failed for outputs "
                f"{list(outputs.shape)} and targets {list(targets.shape)}: {type(error).__name__}: {error}"
            ) from error


def _check_names(task: Task, metrics: Sequence[Metric], notes: Collection[str]) -> None:
    if other := sorted(name for name in notes if is_taken(name, task)):
        raise SettingsError(
            f"the strategy's notes() have {other[0]!r}, a name that the run itself uses; rename the note"
        )
    with locate_errors("evaluate.metrics"):
        check_metrics(task, metrics, lambda name: name in notes or is_taken(name, task))
    names = [name_of(metric) for metric in metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"evaluate.metrics has the name {twice[0]!r} twice")


def try_model(
    run: Settings, model: nn.Module, dataset: DataSet | Shape, device: torch.device, examples: int = 2
) -> None:
    """Run examples through the model, so that a wrong size is reported before training.

    The model is tried in eval mode, and a copy of it in training mode: some networks then return something else, for
    which the user must give a loss.
    """
    check_loss(run, dataset)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError(f"model.name={run.model.name!r} has no parameter with requires_grad; expected one to train")
    # Two by default, because static batch norm cannot compute the variance of one value.
    tried: list[Value] = [map_tensors(lambda part: part.to(device), dataset.blank(examples))]
    if run.data.crop is not None:
        tried.insert(0, main_input(tried[0]).new_zeros(examples, dataset.channels, run.data.crop, run.data.crop))
    model.eval()
    for inputs in tried:
        _try_examples(run, model, dataset, inputs, examples)
    try:
        copied = copy.deepcopy(model)
        copied.train()
    except Exception:  # a module of the user; clients try it
        return
    with seeding.streams(0, device):  # dropout draws
        _try_examples(run, copied, dataset, tried[0], examples)


def _try_examples(run: Settings, model: nn.Module, dataset: DataSet | Shape, inputs: Value, examples: int) -> None:
    mode = " in training mode" if model.training else ""
    try:
        with torch.set_grad_enabled(model.training):
            outputs = model(inputs)
    except (Exception, SystemExit) as error:  # the network may be the user's
        if examples == 1 and ONE_VALUE in str(error):
            size = run.train.batch_size
            found = f"train.batch_size is {size}" if size == 1 else "each client has one training example"
            raise SettingsError(
                f"{found}, and batch norm of {run.model.name!r} cannot compute a variance of one example; use batches "
                "of two or more, or another norm, for instance model.norm: gn"
            ) from None
        raise SettingsError(
            f"model.name={run.model.name!r} does not take the {_described(inputs)} examples of "
            f"{run.data.name!r}{mode}: {named.in_a_line(error)}"
        ) from None
    expected = [examples, dataset.outputs, *(main_input(inputs).shape[2:] if dataset.dense else ())]
    # A model with one output may leave out its dimension.
    forms = [expected, expected[:1]] if expected[1:] == [1] else [expected]
    found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    is_right = isinstance(outputs, Tensor) and list(outputs.shape) in forms
    if not is_right and not (model.training and has_own_loss(run)):
        advice = ", or a train.loss of your own that takes what the model returns" if model.training else ""
        raise SettingsError(
            f"model.name={run.model.name!r} returns {found}{mode} for a batch of {examples} examples; expected shape "
            f"{expected}, as {run.data.name!r} has {dataset.classes} {_COUNTED[dataset.task.form]} per "
            f"{'pixel' if dataset.dense else 'example'}{advice}"
        )
    if model.training:
        targets = targets_like(dataset.task, dataset.classes, examples, expected[2:]).to(main_input(inputs).device)
        given = f"what model.name={run.model.name!r} returns{mode} ({found}) and targets {list(targets.shape)}"
        _try_loss(run, dataset.task, outputs, targets, given)


def _try_loss(run: Settings, task: Task, outputs: Outputs, targets: Tensor, given: str) -> None:
    asked = f"train.loss={name_in(run.train.loss or task.losses[0])!r}, given {given},"
    try:
        value: Any = plain_loss(run, task)(outputs, targets)
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{asked} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad):
        other = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SettingsError(
            f"{asked} returned {other}; expected a differentiable scalar tensor, the mean over the examples"
        )


_COUNTED = {
    "classes": "classes and one label",
    "labels": "labels",
    "numbers": "regression targets",
    "": "targets",
}


def _described(inputs: Value) -> str:
    if isinstance(inputs, Mapping):
        return ", ".join(f"{key}: {_described(part)}" for key, part in inputs.items())
    return "x".join(map(str, inputs.shape[1:]))


def targets_like(task: Task, count: int, number: int, size: Sequence[int] = ()) -> Tensor:
    """Targets of `number` examples, to try a loss: `count` classes in turn, or `count` labels or numbers each."""
    labels = torch.arange(number) % count
    if task.form == "classes":
        return labels.reshape(-1, *(1 for _ in size)).expand(-1, *size)
    targets = torch.randn(number, count, generator=torch.Generator().manual_seed(1))
    targets = (targets > 0).float() if task.form == "labels" else targets
    return targets[:, 0] if count == 1 else targets


def check_loss(run: Settings, shape: DataSet | Shape) -> None:
    """Raise an error for a loss, or an option of it, that does not suit the targets."""
    train, task, weights = run.train, shape.task, run.train.class_weights
    found = f"{run.data.name!r} has {task.targets} ({task.name})"
    name = name_in(train.loss) if train.loss is not None else task.losses[0] if task.losses else "missing"
    suited = f"{' or '.join(task.losses)}, or " if task.losses else ""
    problems: Sequence[Problem] = (
        (
            task.name == "binary" and shape.classes != 2,
            f"data.task is 'binary', but {run.data.name!r} has {shape.classes} classes; expected two, or task: "
            "classification",
        ),
        (
            name not in task.losses and not has_own_loss(run),
            f"train.loss is {name}, but {found}; expected {suited}module:callable, a loss of your own",
        ),
        *(
            (value and key not in task.options, f"train.{key} is {value}, but {found}; leave it out")
            for key, value in (("label_smoothing", train.label_smoothing), ("class_weights", weights))
        ),
        (
            weights == "balanced" and shape.dense,
            "train.class_weights is 'balanced', but segmentation data have masks of labels, which are not counted "
            "before training; give a list of weights",
        ),
        (
            isinstance(weights, tuple) and len(weights) != shape.classes,
            f"train.class_weights has {len(weights or ())} weights, but the data have {shape.classes} classes",
        ),
    )
    refuse(problems)
