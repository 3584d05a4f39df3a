"""Fixed point, masks that cancel, and secret shares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.masking import (
    KEY_BYTES,
    FixedPoint,
    Secrets,
    add_masks,
    form_of,
    from_bytes,
    from_vector,
    join,
    mask_key,
    pair_key,
    split,
    stream_key,
    to_vector,
)

FIXED = FixedPoint(clients=4, update_range=1024, statistics_range=65536, max_examples=2**20)
PRIME = 2**255 - 19


def clients(count: int, parts: int = 2) -> tuple[list[Secrets], list[list[bytes]]]:
    """Their secrets, and for each part their public mask keys."""
    them = [Secrets(bytes([number]) * KEY_BYTES) for number in range(count)]
    public = [each.public_keys(parts) for each in them]
    return them, [[keys[KEY_BYTES * (1 + part) : KEY_BYTES * (2 + part)] for keys in public] for part in range(parts)]


def masks_of(them: list[Secrets], keys: list[bytes], part: int, mine: int) -> list[tuple[bytes, int]]:
    return them[mine].mask_keys(part, mine, {i: key for i, key in enumerate(keys) if i != mine})


def test_the_masks_of_all_clients_cancel_but_for_their_own() -> None:
    them, keys = clients(5)
    values = [np.arange(300_000, dtype=np.uint64) * (7**i) for i in range(5)]
    expected = sum(values[1:], values[0].copy())
    for i, vector in enumerate(values):
        add_masks(vector, masks_of(them, keys[1], 1, i))
    total = sum(values[1:], values[0].copy())
    assert (total != expected).mean() > 0.999
    add_masks(total, [(stream_key(each.self_secret(1)), -1) for each in them])
    assert (total == expected).all()


def test_masks_of_a_client_that_dropped_out_follow_from_its_secret() -> None:
    them, keys = clients(4)
    values = [np.full(10, i, np.uint64) for i in range(4)]
    for i, vector in enumerate(values):
        add_masks(vector, masks_of(them, keys[0], 0, i))
    total = values[0] + values[1] + values[3]
    add_masks(total, [(stream_key(them[i].self_secret(0)), -1) for i in (0, 1, 3)])
    lost = mask_key(them[2].pair_secret(0))
    add_masks(total, [(pair_key(lost, keys[0][i]), -1 if i < 2 else 1) for i in (0, 1, 3)])
    assert total.tolist() == [4] * 10


def test_no_two_masks_of_a_session_have_a_common_value() -> None:
    them, keys = clients(3)
    streams = []
    for part in range(2):
        for key in dict.fromkeys(key for i in range(3) for key, _ in masks_of(them, keys[part], part, i)):
            stream = np.zeros(1000, np.uint64)
            add_masks(stream, [(key, 1)])
            streams.append(stream)
    assert len(streams) == 2 * (3 + 3)  # three own masks and three pairs in each part
    assert len(np.unique(np.concatenate(streams))) == 12_000
    bits = np.unpackbits(np.concatenate(streams).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.005  # eight standard deviations


@pytest.mark.parametrize(("threshold", "count"), [(2, 3), (3, 5), (6, 10)])
def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not(threshold: int, count: int) -> None:
    secret = Secrets(bytes(KEY_BYTES)).self_secret(0)
    shares = [from_bytes(each[:KEY_BYTES]) for each in Secrets(bytes(KEY_BYTES)).shares(0, threshold, count)]
    numbered = list(enumerate(shares, start=1))
    for some in itertools.islice(itertools.combinations(numbered, threshold), 20):
        assert join(dict(some)) == secret
    assert join(dict(numbered)) == secret
    for some in itertools.islice(itertools.combinations(numbered, threshold - 1), 20):
        assert join(dict(some)) != secret


def test_shares_by_hand() -> None:
    """7 + 3 x + 2 x^2 at 1, 2, 3 and 4; any secret is possible for two of them."""
    assert split([7, 3, 2], 4) == [12, 21, 34, 51]
    assert join({1: 12, 3: 34, 4: 51}) == 7
    for secret in (0, 1, 123456):
        # A polynomial through both shares that has this secret.
        a, b = 12 - secret, 21 - secret
        second = (b - 2 * a) * pow(2, -1, PRIME) % PRIME
        assert split([secret, (a - second) % PRIME, second], 2) == [12, 21]


def test_a_share_is_readable_by_its_receiver_only() -> None:
    them, _ = clients(3)
    channel = [each.public_keys(1)[:KEY_BYTES] for each in them]
    sealed = them[0].seal(b"share", channel[1], b"part 0")
    assert them[1].unseal(sealed, channel[0], b"part 0") == b"share"
    for reader, about in ((them[2], b"part 0"), (them[1], b"part 1")):
        with pytest.raises(MessageError, match="not what its sender encrypted"):
            reader.unseal(sealed, channel[0], about)


@given(
    st.lists(st.floats(-1024, 1024), min_size=4, max_size=4), st.lists(st.integers(0, 2**20), min_size=4, max_size=4)
)
def test_the_sum_is_exact_to_half_a_step_for_each_client(values: list[float], weights: list[int]) -> None:
    encoded = [
        FIXED.encode("w", np.array([x]), p, "update").sum(dtype=np.uint64) for x, p in zip(values, weights, strict=True)
    ]
    total = FIXED.decode(np.array([sum(map(int, encoded)) % 2**64], np.uint64), "update")
    expected = sum(x * p for x, p in zip(values, weights, strict=True))
    assert abs(total[0] - expected) <= 4 * 0.5 * 2.0 ** -FIXED.bits("update") + 1e-15 * abs(expected)


def test_the_largest_values_of_all_clients_fit() -> None:
    for kind, largest in (("update", 1024.0), ("statistics", 65536.0)):
        each = FIXED.encode("w", np.array([-largest]), 2**20, kind)  # type: ignore[arg-type]
        assert FIXED.decode(each * np.uint64(4), kind)[0] == -largest * 2**22  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "weight", "kind", "says"),
    [
        (1025.0, 1, "update", r"'w' has a value of size 1025, the range is 1024; raise strategy.update_range"),
        (-7e4, 1, "statistics", r"'w' has a value of size 70000, .*raise strategy.statistics_range"),
        (np.nan, 1, "update", "'w' has a value of size nan"),
        (np.inf, 1, "statistics", "'w' has a value of size inf"),
        (1.0, 2**20 + 1, "update", r"weight of this client is .*; raise strategy.max_examples"),
        (1.0, -1, "update", "weight of this client is -1"),
        (2.0**32, 1, "count", "'w' has a value of size"),
    ],
)
def test_what_is_out_of_range_is_refused(value: float, weight: float, kind: str, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        FIXED.encode("w", np.array([0.0, value]), weight, kind)  # type: ignore[arg-type]


def test_a_reply_as_a_vector_and_back() -> None:
    records = {
        "b": {"w": np.arange(6, dtype=np.uint64).reshape(2, 3), "a": np.array(9, np.uint64)},
        "a": {"x": np.zeros((0, 2), np.uint64)},
    }
    back = from_vector(to_vector(records), form_of(records))
    assert {(name, key) for name, each in back.items() for key in each} == {("b", "w"), ("b", "a"), ("a", "x")}
    for name, key, shape in form_of(records):
        assert back[name][key].shape == shape
        assert (back[name][key] == records[name][key]).all()


def test_secrets_do_not_appear_in_text() -> None:
    assert "root" not in repr(Secrets(b"s" * KEY_BYTES))
