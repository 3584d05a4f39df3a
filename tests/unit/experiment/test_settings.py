"""Every fault in an experiment is found before training, named, and reported together with the others."""

from __future__ import annotations

import pytest

from fedbn_flwr.experiment.file.layers import parse_overrides, parse_yaml, read_experiment, settings_of
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.trees import flat_settings
from tests.support.experiments import fault, read


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("lr: 0.1", "unknown key 'lr' (= 0.1); did you mean train.lr?"),
        ("data: {partition: {kind: iid, alpha: 1}}", "unknown key 'data.partition.alpha' (= 1); known: kind"),
    ],
)
def test_an_unknown_key_is_answered_by_its_section_alone(text: str, end: str) -> None:
    assert fault(text).endswith(end)


# --- unknown keys, wrong types and values --------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rouns: 3", ["unknown key 'rouns' (= 3); did you mean 'rounds'?"]),
        (
            "train: {learning_rat: 1}",
            [
                "unknown key 'train.learning_rat' (= 1)",
                "known: batch_size, channels_last, class_weights, clip, compile, epochs,",
            ],
        ),
        ("train: {momentun: 0.9}", ["did you mean 'momentum'?"]),
        (
            "train: {schedule: {gama: 0.5}}",
            ["unknown key 'train.schedule.gama' (= 0.5); did you mean 'gamma'?"],
        ),
        (
            "data: {partition: {kind: classes, class_per_client: 2}}",
            ["unknown key 'data.partition.class_per_client' (= 2); did you mean 'classes_per_client'?"],
        ),
        ("batch_size: 8", ["did you mean train.batch_size or evaluate.batch_size?"]),
        ("engine: {lr: 0.1}", ["unknown key 'engine.lr' (= 0.1); known: address"]),
        ("strategy: FedBn", ["did you mean 'FedBN'?"]),
        ("model: ResNet18", ["did you mean 'resnet18'?"]),
        ("sedes: [1, 2]", ["did you mean 'seeds'?"]),
        ("runs: {first: {rounds: 1}, second: {rounds: none}}", ["run 'second'"]),
        (  # all faults at once
            "{rouns: 3, clients: many, train: {lr: -1, stpes: 2}, data: {partition: {kind: classes}}}",
            [
                *("'rouns'", "clients is 'many'", "train.lr is -1", "'train.stpes'"),
                "'data.partition.classes_per_client' is missing",
            ],
        ),
        (
            "{rounds: -1, train: {lr: abc}, model: {name: resnet99, norm: gm}, data: {partition: {alpha: -1}}, "
            "strategy: {name: FixBN, base: FedXN}}",
            [
                *("train.lr is 'abc'", "rounds is -1", "data.partition has alpha without kind; known: dirichlet"),
                "model.name='resnet99' is not a model; did you mean 'resnet",
                "model.norm='gm' is not a kind of normalisation",
                "strategy.base.name='FedXN' is not a strategy; did you mean 'Fed",
            ],
        ),
        (
            "evaluate: {domains: true, clients: false}",
            ["evaluate: domains is true, which is for clients that evaluate, but clients is false"],
        ),
        *(
            (
                f"{{clients: 2, train: {{of_clients: [{', '.join(f'{{client: {n}, steps: 2}}' for n in numbers)}]}}}}",
                [f"of_clients has client {numbers[0]}, but clients is 2; expected each of the numbers 0 to 1 at most"],
            )
            for numbers in ((2,), (1, 1))
        ),
        ("evaluate: {clients: some}", ["evaluate.clients: found 'some'; expected true, false or 'own'"]),
        ("track: [3]", ["track.0: found 3; expected a name, or a mapping with a name and options"]),
        ("track: [{x: 1}]", ["track.0: found {'x': 1}; expected a name, or a mapping with a name and options"]),
        ("track: 3", ["track.0: found 3; expected a name"]),
        ("rounds: '3'", ["rounds is '3': expected a whole number"]),
        ("rounds: 3.0", ["rounds is 3.0: expected a whole number"]),
        ("rounds: true", ["rounds is True: expected a whole number"]),
        ("rounds: -1", ["rounds is -1: expected at least 0"]),
        ("seed: -1", ["seed is -1"]),
        ("train: {lr: fast}", ["train.lr is 'fast': expected a number"]),
        ("train: {optimizer: adan}", ["train.optimizer='adan' is not an optimiser; did you mean 'adam'"]),
        (
            "model: {name: mlp, options: {hiden: 3}}",
            ["model.options.hiden is not an argument", "did you mean 'hidden'"],
        ),
        ("train: {lr: 0}", ["train.lr is 0: expected a number above 0"]),
        ("train: {momentum: 1.0}", ["train.momentum is 1.0: expected a number below 1"]),
        ("train: 3", ["train is 3"]),
        ("engine: {workers: x}", ["engine.workers: found 'x'; expected 0, a number of processes, or 'auto'"]),
        ("data: {augment: [flop]}", ["data.augment", "'flop'", "'flip'"]),
        (
            "data: {partition: {kind: sharks}}",
            ["data.partition.kind='sharks' is not a partition; did you mean 'shards'"],
        ),
        (
            "data: {partition: {alpha: 1}}",
            ["data.partition has alpha without kind; known: dirichlet, or module:callable"],
        ),
        ("data: {partition: {kind: classes}}", ["'data.partition.classes_per_client' is missing"]),
        ("data: {partition: {kind: dirichlet, alpha: 0}}", ["data.partition.alpha is 0: expected a number above 0"]),
        ("data: {test: {share: 0.2, folds: 5}}", ["data.test: expected either share, such as 0.2, or folds"]),
        ("data: {test: {by: patient}}", ["data.test: expected either share"]),
        ("data: {test: {share: 0.2, by: p, time: date}}", ["data.test: time is 'date', ", "; leave by='p' out"]),
        ("data: {test: {share: 2}}", ["data.test.share is 2: expected a number below 1"]),
        (
            "data: {test: {share: 0.2, group: patient}}",
            ["unknown key 'data.test.group'", "known: by, folds, share, split, time"],
        ),
        ("data: {test: {share: 0.2, split: seeds}}", ["data.test.split: found 'seeds'; expected a number, or seed"]),
        ("data: {test: [0.2]}", ["data.test: found [0.2]; expected the name of a split, a share ", "or {share: 0.2"]),
        ("data: {class_names: [a, a]}", ["class_names is ['a', 'a']; expected different texts"]),
        ("data: {class_names: [0, 1]}", ["data.class_names.0 is 0: expected a valid string"]),
        ("data: {class_names: [a, b], classes: 3}", ["classes is 3, but class_names has 2"]),
        ("data: {window: {length: 5}}", ["window is ", ", which cuts series; give data.series"]),
        (
            "data: {series: s, window: {length: 5, overlap: 1.0}}",
            ["data.window.overlap is 1.0: expected a number below"],
        ),
        ("data: {time: minute}", ["time is 'minute', which orders the rows of a series; give data.series"]),
        ("data: {memory: 0}", ["data.memory is 0: expected a number above 0"]),
        ("data: {size: [32]}", ["data.size: found [32]; expected pixels per side, or [height, width]"]),
        ("data: {fit: middle}", ["data.fit is 'middle': expected 'stretch' or 'crop'"]),
        ("engine: {workers: -1}", ["engine.workers: found -1; expected 0, a number of processes, or 'auto'"]),
        ("engine: {name: dask}", ["engine.name is 'dask'", "'local' or 'ray'"]),
        ("engine: {name: ray, workers: 0}", ["workers is 0, but on Ray clients run in actors; give a number of them"]),
        ("engine: {address: 'a:1'}", ["address is 'a:1', which is for name ray, but name is 'local'"]),
        ("engine: {name: ray, device: cuda, gpus_per_client: 0}", ["device is 'cuda', but gpus_per_client is 0"]),
        ("engine: {name: ray, device: cpu, gpus_per_client: 0.5}", ["device is 'cpu', but gpus_per_client is 0.5"]),
        ("strategy: {name: FixBN, base: {lr: 1}}", ["strategy.base.name='' is not a strategy"]),
        ("train: {epochs: 1, steps: 2}", ["train: epochs (1) and steps (2) exclude each other"]),
        ("train: {keep_momentum: true}", ["train: keep_momentum has no effect while momentum is 0"]),
        ("train: {optimizer: 3}", ["train.optimizer: found 3; expected a name, or a mapping with a name and options"]),
        ("train: {optimizer: {nesterov: true}}", ["train.optimizer: found {'nesterov': True}; expected a name"]),
        ("data: {options: 5}", ["data.options is 5: expected a mapping"]),
        (
            "train: {loss: focal}",
            ["train: loss is 'focal'; known: bce, cross_entropy, huber, mae, mse, or module:function"],
        ),
        (
            "train: {loss: 'a:b', label_smoothing: 0.1}",
            ["label_smoothing (0.1) is an option of cross_entropy", "'a:b'"],
        ),
        ("train: {loss: 'a:b', class_weights: [1, 2]}", ["class_weights ((1.0, 2.0)) is an option of cross_entropy"]),
        ("train: {loss: {name: cross_entropy, weight: 1}}", ["loss cross_entropy has no option weight"]),
        ("train: {loss: {name: huber, beta: 1}}", ["loss huber has no option beta"]),
        ("train: {loss: mse, label_smoothing: 0.1}", ["label_smoothing (0.1) is an option of cross_entropy and bce"]),
        ("train: {class_weights: [1, -2]}", ["train.class_weights: found [1, -2]; expected balanced, or a list"]),
        ("train: {class_weights: even}", ["train.class_weights: found 'even'; expected balanced, or a list"]),
        ("train: {schedule: cosinus}", ["train.schedule: kind is 'cosinus'; did you mean 'cosine'?"]),
        ("train: {schedule: exponential}", ["train.schedule: kind is 'exponential'; known: con"]),
        ("train: {clip: 0}", ["train.clip is 0: expected a number above 0"]),
        ("evaluate: {validation: 0.6}", ["evaluate.validation is 0.6: expected at most 0.5"]),
        ("evaluate: {metrics: [f1]}", ["evaluate: metrics has 'f1'; did you mean 'macro_f1'?"]),
        ("evaluate: {metrics: [macro-f1]}", ["evaluate: metrics has 'macro-f1'; did you mean 'macro_f1'?"]),
        ("sizes: 3", ["sizes must map a size to changes"]),
        ("data: {partition: {kind: {}}}", ["data.partition.kind={} is not a partition"]),
        ("data: {partition: {alpha: 0.1}}", ["data.partition has alpha without kind; known: dirichlet, or module"]),
        ("data: {partition: {kind: [1]}}", ["data.partition.kind=[1] is not a partition"]),
        ("data: {partition: {kind: {x: 1}}}", ["data.partition.kind={'x': 1} is not a partition"]),
        ("cell: {row: 1, sweep: 2, tune: 3}", ["cell.row is 1: expected a valid string; cell.sweep is 2"]),
        ("train: {1: 2}", ["unknown key 'train.1'"]),
        ("strategy: &a {name: FedAvg, base: *a}", ["found an alias; expected the value itself in line 1"]),
        ("train: " + "[" * 60 + "]" * 60, ["nested more than 50 levels"]),
        ("train: " + "[" * 20_000, ["nested more than 50 levels"]),
        ("train: {lr: .inf}", ["train.lr is inf; expected a finite number"]),
        ("engine: {timeout: 1e300}", ["engine.timeout is 1e+300: expected at most 1000000"]),
        (
            "strategy: {name: FedAvg, x: !!binary aGk=}",
            ["could not determine a constructor for the tag 'tag:yaml.org,2002:binary' in line 1"],
        ),
        ("seed: " + "1" * 30, [f"seed is {'1' * 30}: expected a number below 9.2"]),
        ("rounds: !!int abc", ["not readable as YAML: invalid literal"]),
        ('name: "a\\0b"', ["name is 'a\\x00b'; expected text without the character '\\x00'"]),
        ("data: {pad: 100000}", ["data.pad is 100000: expected at most 1000"]),
        ("rounds: 1000000000000", ["rounds is 1000000000000: expected at most 1000000"]),
        (
            "data: {size: [8, 100000]}",
            ["data.size: found [8, 100000]; expected pixels per side, or [height, width], at"],
        ),
        ("label: 'a\n\n  b'", ["label is 'a\\nb': expected one line"]),
        ('label: "a\\e[31m"', ["label is 'a\\x1b[31m': expected one line without control characters"]),
        (
            "train: {schedule: {kind: step, milestones: [-1]}}",
            ["train.schedule: milestones has -1; expected a fraction"],
        ),
        ("train: {schedule: {kind: step, milestones: [1.5]}}", ["train.schedule: milestones has 1.5; expected a frac"]),
        ("train: {schedule: {kind: cosine, gamma: 0.5}}", ["train.schedule: gamma (0.5) is for kind step, but"]),
        (
            "train: {schedule: {milestones: [0.1]}}",
            ["train.schedule: milestones ([0.1]) are for kind step, but kind is"],
        ),
        ("train: {schedule: {kind: step, gamma: 2.0}}", ["train.schedule.gamma is 2.0: expected at most"]),
        (("{}", "train.lr=["), ["train.lr: not readable as YAML"]),
        (("{}", "strategy={a: .nan}"), ["strategy: a is nan; expected a finite number"]),
        ("sweep: [1]", ["sweep is [1]; expected lists of values by key"]),
        ("sweep: {train.lr: 0.1}", ["sweep.train.lr is 0.1; expected a list of values"]),
        ("sweep: {train.lr: []}", ["sweep.train.lr is []; expected a list of values"]),
        ("sweep: {rounds: [3, 3]}", ["sweep.rounds has 3 twice"]),
        ("sweep: {seed: [0, 1]}", ["give seeds: [0, 1, 2] next to sweep"]),
        ("sweep: {label: [a]}", ["sweep has label, which isn't a setting of a run"]),
        ("sweep: {train.lr: [0.1]}\ntune: {train.lr: [0.1]}", ["train.lr is in sweep and in tune"]),
        ("sweep: {data.partition: [{kind: iid}], data.partition.alpha: [1.0]}", ["unknown key 'data.partition.alpha'"]),
        ("sweep: {trian.lr: [0.1]}", ["unknown key 'trian'"]),
        ("tune: {train.lr: [0.1]}\nevaluate:", ["evaluate is None: expected a mapping"]),
        ("tune: {train.lr: [0.1]}\nevaluate: 3", ["evaluate is 3: expected a mapping"]),
        ("runs: {1: {}, '1': {rounds: 3}}", ["the key '1' is given twice in line 1"]),
        (
            "runs: {A: {}}\nsweep: {train.lr: "
            f"{[n / 1000 for n in range(1, 900)]}, rounds: {list(range(1, 900))}, train.steps: {list(range(1, 900))}}}",
            ["more than 1,000 runs"],
        ),
        ("sweep: {train.lr: [0.1, fast]}", ["run 'lr=fast': train.lr is 'fast'"]),
        (
            f"sweep: {{train.lr: {[n / 100 for n in range(1, 50)]}, rounds: {list(range(1, 50))}}}",
            ["more than 1,000 runs; shorten the lists"],
        ),
        (("sizes: {small: {rounds: 3}}", "size=smal"), ["no size 'smal'; did you mean 'small'"]),
        ("sizes: [small]", ["sizes must map a size to changes"]),
        ("sizes: {paper: {rounds: 3}}", ["sizes has paper, which is the file as written"]),
        (("sizes: {small: {runs: {}}}", "size=small"), ["sizes.small has runs, which a size cannot change"]),
        (("{}", "sizes.small.rounds=3"), ["an override cannot change sizes"]),
        ("[1, 2]", ["expected a mapping of keys, found list"]),
        ("runs: [a, b]", ["runs must map a label to changes"]),
        *((f"seeds: {seeds}", ["expected a list of numbers"]) for seeds in ("3", "[]", "[a]", "[true]", "[1.5]")),
        (
            ("runs: {BN: {}, GN: {model: {norm: gn}}, FixBN: {strategy: FixBN}}", "runs=x"),
            ["an override cannot change runs (= 'x'); only=LABEL"],
        ),
        (("rounds: 1", "runs={a: {}}"), ["an override cannot change runs"]),
        (("rounds: 1", "only=FixBN"), ["is not a label of experiment; it has no runs to select from"]),
        (
            ("runs: {BN: {}, GN: {model: {norm: gn}}, FixBN: {strategy: FixBN}}", "only=GNN"),
            ["only='GNN' is not a label of experiment; did you mean 'GN'"],
        ),
        (
            ("runs: {BN: {}, GN: {model: {norm: gn}}, FixBN: {strategy: FixBN}}", "only=[]"),
            ["only='' is not a label of experiment; known: BN, FixBN, GN"],
        ),
        (
            ("runs: {BN: {}, GN: {model: {norm: gn}}, FixBN: {strategy: FixBN}}", "model.norm=ln"),
            ["the runs 'BN, model.norm=ln' and 'GN, model.norm=ln' equal"],
        ),
    ],
)
def test_an_unknown_key_or_a_wrong_value_is_named_with_what_is_expected(
    given: str | tuple[str, str], words: list[str]
) -> None:
    found = fault(*([given] if isinstance(given, str) else given))
    for word in words:
        assert word in found


def test_arguments_without_a_name_are_those_of_the_default_strategy() -> None:
    assert read("{}", "strategy.fraction_train=0.5").strategy == {"name": "FedAvg", "fraction_train": 0.5}
    runs = read_experiment(
        parse_yaml("runs: {A: {}, B: {strategy: FedProx}}"), parse_overrides(["strategy.fraction_train=0.5"])
    ).runs
    assert [run.strategy for run in runs] == [{"name": name, "fraction_train": 0.5} for name in ("FedAvg", "FedProx")]


def test_ten_problems_of_a_run_are_reported() -> None:
    sections = {
        "train": ("lr", "momentum", "clip", "epochs", "steps", "batch_size"),
        "evaluate": ("every", "validation"),
    }
    words = [f"{section}.{key}=x" for section, keys in sections.items() for key in keys]
    found = fault("{}", *words, "rounds=x", "clients=x", "seed=x", "engine.threads=x")
    assert found.count("'x'") == 10
    assert found.endswith(" and 2 more")


def test_settings_are_frozen() -> None:
    run = read("rounds: 3")
    with pytest.raises(ValueError, match="frozen"):
        run.rounds = 4  # type: ignore[misc]


# --- short forms -------------------------------------------------------------


def test_a_name_stands_for_a_section_with_only_a_name() -> None:
    text = "{train: {schedule: cosine, optimizer: adamw}}"
    assert read(text).train.schedule.kind == "cosine"
    run = read(text, "train.schedule.switch=0.5", "train.optimizer.eps=0.1")
    assert (run.train.schedule.kind, run.train.schedule.switch) == ("cosine", 0.5)
    assert run.train.optimizer == {"name": "adamw", "eps": 0.1}


def names_of(run: Settings) -> tuple[str, ...]:
    base = run.strategy.get("base")
    return (
        run.data.name, run.data.partition.kind, run.model.name, run.strategy["name"], run.engine.name,
        base["name"] if base else "",
    )  # fmt: skip


NAMES = {"data": "mnist", "model": "resnet18", "strategy": "FedTAN", "engine": "local"}
SHORT = "data: mnist\nmodel: resnet18\nstrategy: FedTAN\nengine: local"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (SHORT, []),
        ("{}", SHORT.replace(": ", "=").split("\n")),
        (f"runs: {{A: {{{SHORT.replace(chr(10), ', ')}}}}}", []),
        (f"sizes: {{small: {{{SHORT.replace(chr(10), ', ')}}}}}", ["size=small"]),
        (f"sweep: {{{', '.join(f'{key}: [{name}]' for key, name in NAMES.items())}}}", []),
    ],
    ids=["file", "command line", "runs", "sizes", "sweep"],
)
def test_a_section_can_be_its_name_wherever_it_is_given(text: str, overrides: list[str]) -> None:
    assert names_of(read(text, *overrides)) == ("mnist", "iid", "resnet18", "FedTAN", "local", "")


def test_a_name_keeps_the_keys_that_do_not_depend_on_it() -> None:
    text = (
        "data: {name: digits, partition: domain, examples: 7}\nstrategy: {name: FixBN, freeze_round: 1, base: FedProx}"
    )
    run = read(text, "model=resnet18", "model.norm=gn", "data=mnist", "strategy.base=Scaffold")
    assert names_of(run) == ("mnist", "domain", "resnet18", "FixBN", "local", "Scaffold")
    assert (run.data.examples, run.model.norm, run.strategy["freeze_round"]) == (7, "gn", 1)
    assert read(text, "strategy=FedTAN", "strategy.min_batch=2").strategy == {"name": "FedTAN", "min_batch": 2}


def test_a_listed_strategy_is_selected_by_its_name_and_keeps_its_place() -> None:
    text = "sweep: {strategy: [FedAvg, {name: FixBN, freeze_round: 1}]}"
    whole = read_experiment(parse_yaml(text))
    (run,) = read_experiment(parse_yaml(text), parse_overrides(["strategy=FedAvg"])).runs
    assert run.label == "FedAvg, strategy=FedAvg"
    (again,) = read_experiment(run.model_dump(mode="json")).runs
    assert again.cell == run.cell
    assert {each.origin for each in settings_of(whole, run) if each.key == "strategy.name"} == {"sweep"}


def test_another_optimizer_does_not_inherit_the_options_of_the_first() -> None:
    text = "{train: {optimizer: {name: adamw, betas: [0.9, 0.95]}}}"
    assert read(text, "train.lr=1.0").train.optimizer == {"name": "adamw", "betas": [0.9, 0.95]}
    assert read(text, "train.optimizer={name: sgd}").train.optimizer == "sgd"
    assert read(text, "train.optimizer=adam").train.optimizer == "adam"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("evaluate.metrics", "auc", ("auc",)),
        ("data.domains", "north", ("north",)),
        ("data.inputs", "age", ("age",)),
        ("data.class_names", "cat", ("cat",)),
        ("data.augment", "flip", ("flip",)),
        ("data.augment", "null", ("crop", "flip")),
        ("data.augment", "[]", ()),
        ("data.categories.sex", "f", ("f",)),
        ("data.shape", "30", (30,)),
        ("evaluate.unseen.clients", "3", (3,)),
        ("evaluate.unseen.statistics", "own", ("own",)),
        ("train.schedule", "{kind: step, milestones: 0.5}", (0.5,)),
        ("track", "tensorboard", ("tensorboard",)),
        ("track", "null", ()),
    ],
)
def test_one_value_needs_no_list(key: str, value: str, found: object) -> None:
    run = read("data: cifar10", f"{key}={value}")
    settings = {**flat_settings(run.model_dump()), "data.categories.sex": run.data.categories.get("sex")}
    settings |= {"train.schedule": run.train.schedule.milestones, "data.inputs": run.data.inputs}
    assert settings[key] == found
