"""Objects between processes: large arrays arrive unchanged, and a closed connection is noticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedbn_flwr.engines.transport import receive, send
from fedbn_flwr.messages.arrays import pack, unpack

LARGE = 1 << 20  # elements; a pipe holds fewer bytes, so that writing and reading alternate


def passed_on(*values: Any) -> tuple[Any, ...]:
    here, there = Pipe()
    with here, there, ThreadPoolExecutor(1) as pool:
        pool.submit(send, here, values)
        received: tuple[Any, ...] = receive(there)
        return received


def test_records_arrive_with_small_and_large_arrays() -> None:
    large = np.arange(LARGE, dtype=np.float32)
    content = RecordDict(
        {
            "model": pack({"a": large.reshape(4, -1), "b": large[:7]}),
            "mixed": pack({"large": large, "counter": np.array(3), "columns": large.reshape(2, -1).T}),
            "config": ConfigRecord({"lr": 0.1, "bytes": b"x" * LARGE}),
        }
    )
    records, nothing, number = passed_on(content, None, 3)
    assert (nothing, number) == (None, 3)
    assert dict(records["config"]) == dict(content["config"])
    for name in ("model", "mixed"):
        sent, found = unpack(content[name]), unpack(records[name])
        assert list(sent) == list(found)
        for key in sent:
            assert sent[key].dtype == found[key].dtype
            np.testing.assert_array_equal(sent[key], found[key])
    with pytest.raises(ValueError, match="read-only"):
        unpack(records["model"])["a"][0, 0] = 1


def test_an_array_that_is_sent_twice_in_one_object_stays_one() -> None:
    large = np.ones(LARGE)
    (found,) = passed_on([large, large])
    assert found[0] is found[1]


def test_both_ends_notice_that_the_other_has_ended_within_an_object() -> None:
    here, there = Pipe()
    copy, other = Pipe()
    with here, other, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, here, np.ones(8 * LARGE))
        copy.send_bytes(there.recv_bytes())  # the pickled bytes, without the array that follows
        there.close()
        with pytest.raises(OSError):
            sent.result(10)
        copy.close()
        with pytest.raises(EOFError):
            receive(other)
