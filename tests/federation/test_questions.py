"""One of four sites answers the questions outside of training with something else: it is named, and nobody else is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import group
from fedbn_flwr.results.report.tables import judged_table
from fedbn_flwr.results.result import Result
from tests.support.records import put

BAD = 2
EXPERIMENT: dict[str, Any] = {
    "rounds": 0,
    "clients": 4,
    "data": {"name": "digits", "examples": 200, "test_examples": 120, "partition": {"kind": "dirichlet", "alpha": 3.0}},
    "model": {"name": "mlp"},
    "engine": {"workers": 0, "device": "cpu", "timeout": 30, "node_timeout": 1},
}
NAMED = rf"3 of 4 clients sent a usable reply, 4 are needed:\s+- client {BAD} \(node {BAD + 1}\): "
Spoil = Callable[[RecordDict], RecordDict]


class Lying(ClientApp):
    """One site's answers to the questions of this kind are spoiled."""

    def __init__(self, kind: str, spoil: Spoil) -> None:
        super().__init__()
        self.inner, self.kind, self.spoil = client_app(make_client), kind, spoil

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.inner(message, context)
        if context.node_config["partition-id"] == BAD and message.metadata.message_type == self.kind:
            return Message(self.spoil(reply.content), reply_to=message)
        return reply


def metrics(**changes: Any) -> Spoil:
    def spoil(content: RecordDict) -> RecordDict:
        changed = {**content.metric_records["metrics"], **{key.replace("_", "-"): new for key, new in changes.items()}}
        left = {key: value for key, value in changed.items() if value is not None}
        return RecordDict({**content, "metrics": MetricRecord(left)})

    return spoil


def array(name: str, change: Callable[[np.ndarray], object]) -> Spoil:
    def spoil(content: RecordDict) -> RecordDict:
        arrays = {key: value.copy() for key, value in unpack(content.array_records["arrays"]).items()}
        arrays[name] = np.asarray(change(arrays[name]), arrays[name].dtype)
        return RecordDict({**content, "arrays": pack(arrays)})

    return spoil


def claims(number: int) -> Spoil:
    return lambda content: RecordDict({**content, "client": ConfigRecord({protocol.PARTITION: number})})


def ask(app: ClientApp, evaluate: dict[str, Any], out: Path) -> None:
    config = {"experiment": json.dumps({**EXPERIMENT, "evaluate": evaluate}), "out": str(out)}
    with LocalGrid(app, 4, run_config=config) as grid:
        serve(grid, config)


ANSWERS: dict[str, tuple[str, Spoil, str]] = {
    "no accuracy": ("evaluate", metrics(own_accuracy=None), "expected accuracy too"),
    "a list": ("evaluate", metrics(own_accuracy=[0.5, 0.5]), r"is \[0.5, 0.5\], expected a finite number"),
    "half an example": ("evaluate", metrics(own_num_examples=0.5), "it has 0.5 test examples"),
    "700 %": ("evaluate", metrics(own_accuracy=7.0), "its metric 'own-accuracy' is 7.0, expected a number from 0 to 1"),
    "a percentage": ("evaluate", metrics(accuracy=70.0), "its accuracy is 70; expected 0 to 1"),
    "below zero": (
        "evaluate",
        metrics(own_accuracy=-0.1),
        "'own-accuracy' is -0.1, expected a number from 0 to 1",
    ),
    "all examples of the world": ("evaluate", metrics(own_num_examples=2**31), "is 2147483648; the median of the"),
    "nothing": ("evaluate", lambda content: RecordDict(), "the reply has 0 MetricRecords; expected one"),
    "another site's number": ("evaluate", claims(1), "its partition-id is 1, and it reported 2 before"),
    "a new number": ("evaluate", claims(77), "its partition-id is 77, and it reported 2 before"),
    "no site of its own": (protocol.PARTITION_QUERY, metrics(own_data=7), "its 'own-data' is 7; expected 0 or 1"),
    "no site's number": (protocol.PARTITION_QUERY, metrics(partition_id=77), "its partition-id is 77; expected 0"),
    "two sites' number": (protocol.PARTITION_QUERY, metrics(partition_id=1), "node 2 has this partition-id too"),
    "survey of nobody": (protocol.SURVEY_QUERY, metrics(num_examples=0), "it has 0 examples"),
    "no number": (protocol.SURVEY_QUERY, metrics(num_examples=None), "the reply's metrics lack 'num-examples'"),
    "an absurd number": (protocol.SURVEY_QUERY, metrics(num_examples=2**31), "it has 2147483648 examples"),
    "a negative class": (protocol.SURVEY_QUERY, array("counts", put(3, value=-7)), "its numbers of examples by"),
    "a class above all": (protocol.SURVEY_QUERY, array("counts", put(3, value=2**62)), "its numbers of examples by"),
    "no class": (protocol.SURVEY_QUERY, array("counts", lambda c: c * 0), "its numbers of examples by"),
    "classes above all": (
        protocol.SURVEY_QUERY,
        array("counts", lambda c: c * 0 + 30),
        "its numbers of examples by",
    ),
    "a mean of 1e65": (protocol.SURVEY_QUERY, array("sums", put(1, 0, value=1e65)), "cannot be sums of any values"),
    "squares of 1e150": (protocol.SURVEY_QUERY, array("sums", put(4, 0, value=1e150)), "cannot be sums of any"),
    "more columns": (protocol.SURVEY_QUERY, array("sums", lambda s: np.concatenate([s, s], 1)), "'sums' has shape"),
    "floats": (protocol.SURVEY_QUERY, lambda content: RecordDict({**content, "arrays": ArrayRecord()}), "lacks"),
    "survey of another": (protocol.SURVEY_QUERY, claims(1), "its partition-id is 1, and it reported 2 before"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_site_that_answers_something_else_is_named(answer: str, tmp_path: Path) -> None:
    kind, spoil, says = ANSWERS[answer]
    evaluate = {"survey": kind == protocol.SURVEY_QUERY}
    named = r"the run cannot begin:(.|\n)*client \d+ " if kind == protocol.PARTITION_QUERY else NAMED
    with pytest.raises(RunFailed, match=named + ".*" + says):
        ask(Lying(kind, spoil), evaluate, tmp_path)


def test_a_site_without_test_examples_of_its_own_is_named(tmp_path: Path, flower_log: pytest.LogCaptureFixture) -> None:
    ask(Lying("evaluate", metrics(own_num_examples=None)), {"clients": "own"}, tmp_path / "count")
    assert len(judged_table(group(find_runs([tmp_path / "count"])))[1]) == 5
    spoiled = metrics(own_num_examples=None, own_accuracy=None, own_loss=None)
    ask(Lying("evaluate", spoiled), {"clients": "own"}, tmp_path / "all")
    assert [*Result.read(tmp_path / "all").clients["own_accuracy"]] == ["0", "1", "3"]
    assert re.search(rf"client {BAD} .*reports no own-accuracy: the mean is over the other clients", flower_log.text)
