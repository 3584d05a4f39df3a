"""Objects between processes: large arrays arrive unchanged, and a closed connection is noticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from socket import SHUT_RDWR, socketpair
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedbn_flwr.engines.worker import Channel
from fedbn_flwr.messages.arrays import pack, unpack

LARGE = 1 << 20  # elements; a socket holds fewer bytes, so that writing and reading alternate


def passed_on(*values: Any) -> tuple[Any, ...]:
    here, there = map(Channel, socketpair())
    with closing(here), closing(there), ThreadPoolExecutor(1) as pool:
        pool.submit(here.send, values)
        received: tuple[Any, ...] = there.receive()
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
    end, there = socketpair()
    here, other = Channel(end), Channel(there.dup())
    with closing(here), closing(other), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(here.send, np.ones(8 * LARGE))
        assert len(there.recv(1000)) > 0
        there.shutdown(SHUT_RDWR)
        with pytest.raises(OSError):
            sent.result(10)
        there.close()
        with pytest.raises(EOFError):
            other.receive()


def test_an_end_is_noticed_although_a_process_that_was_forked_has_a_copy() -> None:
    end, there = socketpair()
    with end.dup(), closing(Channel(there)) as other:
        Channel(end).close()
        with pytest.raises(EOFError):
            other.receive()
