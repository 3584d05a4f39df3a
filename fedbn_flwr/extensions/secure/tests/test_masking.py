"""Fixed point, masks that cancel, and secret shares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.errors import MessageError
from fedbn_flwr.extensions.secure.masking import (
    CHANNEL,
    KEY_BYTES,
    OWN,
    PAIR,
    SHARE_BYTES,
    TOTALS,
    FixedPoint,
    Kind,
    NotOpened,
    Place,
    Secrets,
    add_masks,
    from_vector,
    join,
    key_of,
    pair_key,
    private_key,
    public_key,
    seal,
    sealing_key,
    split,
    stream_key,
    to_vector,
    unseal,
)

FIXED = FixedPoint(clients=4, update_range=1024, statistics_range=65536, max_examples=2**20)
PRIME = 2**255 - 19


def clients(count: int) -> tuple[list[Secrets], list[bytes]]:
    """Their secrets, and their public mask keys."""
    them = [Secrets(bytes([number]) * KEY_BYTES) for number in range(count)]
    return them, [each.public_keys()[key_of(PAIR)] for each in them]


def masks_of(them: list[Secrets], keys: list[bytes], mine: int) -> list[tuple[bytes, int]]:
    return them[mine].mask_keys(mine, {i: key for i, key in enumerate(keys) if i != mine})


def test_the_masks_of_all_clients_cancel_but_for_their_own() -> None:
    them, keys = clients(5)
    values = [np.arange(300_000, dtype=np.uint64) * (7**i) for i in range(5)]
    expected = sum(values[1:], values[0].copy())
    for i, vector in enumerate(values):
        add_masks(vector, masks_of(them, keys, i))
    total = sum(values[1:], values[0].copy())
    assert (total != expected).mean() > 0.999
    add_masks(total, [(stream_key(each.secret(OWN)), -1) for each in them])
    assert (total == expected).all()


def test_masks_of_a_client_that_dropped_out_follow_from_its_secret() -> None:
    them, keys = clients(4)
    values = [np.full(10, i, np.uint64) for i in range(4)]
    for i, vector in enumerate(values):
        add_masks(vector, masks_of(them, keys, i))
    total = values[0] + values[1] + values[3]
    add_masks(total, [(stream_key(them[i].secret(OWN)), -1) for i in (0, 1, 3)])
    lost = private_key(them[2].secret(PAIR))
    add_masks(total, [(pair_key(lost, keys[i]), -1 if i < 2 else 1) for i in (0, 1, 3)])
    assert total.tolist() == [4] * 10


def test_no_two_masks_of_a_session_have_a_common_value() -> None:
    them, keys = clients(3)
    streams = []
    for key in dict.fromkeys(key for i in range(3) for key, _ in masks_of(them, keys, i)):
        stream = np.zeros(1000, np.uint64)
        add_masks(stream, [(key, 1)])
        streams.append(stream)
    assert len(streams) == 3 + 3  # three own masks and three pairs
    assert len(np.unique(np.concatenate(streams))) == 6_000
    bits = np.unpackbits(np.concatenate(streams).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.005  # eight standard deviations


@pytest.mark.parametrize(("threshold", "count"), [(2, 3), (3, 5), (6, 10)])
def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not(threshold: int, count: int) -> None:
    secret = Secrets(bytes(KEY_BYTES)).secret(OWN)
    shares = [int.from_bytes(each, "little") for each in Secrets(bytes(KEY_BYTES)).shares(OWN, threshold, count)]
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


def test_a_share_is_readable_by_its_sender_and_receiver_only() -> None:
    them, _ = clients(3)
    channel = [each.public_keys()[key_of(CHANNEL)] for each in them]
    share = bytes(range(SHARE_BYTES))
    sealed = seal(sealing_key(them[0].channel(channel[1]), b"share 0"), share)
    assert unseal(sealing_key(them[1].channel(channel[0]), b"share 0"), sealed) == share
    for reader, about in ((them[2], b"share 0"), (them[1], b"share 1")):
        assert unseal(sealing_key(reader.channel(channel[0]), about), sealed) is None
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    assert unseal(sealing_key(them[1].channel(channel[0]), b"share 0"), changed) is None


def test_each_secret_has_its_public_key() -> None:
    (client,), _ = clients(1)
    keys = client.public_keys()
    assert len(keys) == KEY_BYTES * 3
    assert all(keys[key_of(which)] == public_key(client.secret(which)) for which in (OWN, PAIR, CHANNEL))
    assert len({keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)}) == 3


WEIGHT = TOTALS, "num-examples"


def encoded(value: float, weight: int, kind: Kind) -> dict[Place, np.ndarray]:
    values = {("arrays", "w"): np.array([0.0, value]), WEIGHT: np.array(weight)}
    return FIXED.encode(values, {("arrays", "w"): kind, WEIGHT: "count"})


def mean(total: int, kind: Kind, weight: int, clients: int = 4) -> float:
    sums = {("arrays", "w"): np.array([total % 2**64], np.uint64), WEIGHT: np.array(weight, np.uint64)}
    return float(FIXED.means(sums, {("arrays", "w"): kind, WEIGHT: "count"}, clients)["arrays", "w"][0])


@given(
    st.lists(st.floats(-1024, 1024), min_size=4, max_size=4), st.lists(st.integers(0, 2**20), min_size=4, max_size=4)
)
def test_the_sum_is_exact_to_half_a_step_for_each_client(values: list[float], weights: list[int]) -> None:
    found = [encoded(x, p, "update") for x, p in zip(values, weights, strict=True)]
    total = sum(int(each["arrays", "w"][1]) for each in found)
    assert sum(int(each[WEIGHT]) for each in found) == sum(weights)
    expected, weight = sum(x * p for x, p in zip(values, weights, strict=True)), sum(weights) or 1
    error = (4 * 0.5 * 2.0 ** -FIXED.bits("update") + 1e-15 * abs(expected)) / weight
    assert abs(mean(total, "update", sum(weights)) - expected / weight) <= error


@pytest.mark.parametrize(("kind", "largest"), [("update", 1024.0), ("statistics", 65536.0)])
def test_the_largest_values_of_all_clients_fit(kind: Kind, largest: float) -> None:
    each = int(encoded(-largest, 2**20, kind)["arrays", "w"][1])
    assert mean(each * 4, kind, 2**22) == -largest


@pytest.mark.parametrize(("kind", "largest"), [("update", 1024.0), ("statistics", 65536.0), ("integer", 2.0**31)])
def test_a_sum_that_no_honest_clients_have_is_not_opened(kind: Kind, largest: float) -> None:
    """The sum of the largest values of weights 3 and 4, and 64 steps more, which rounding does not explain."""
    total = sum(int(encoded(largest, p, kind)["arrays", "w"][1]) for p in (3, 4))
    for sign in (1, -1):
        assert mean(sign * total, kind, 7) == sign * largest
        with pytest.raises(NotOpened, match="the sum of 'w' has the value"):
            mean(sign * (total + 64), kind, 7)


@pytest.mark.parametrize(
    ("key", "number", "fits"),
    [
        ("num-examples", 7, True),
        ("num-examples", 0, True),
        ("num-examples", -1, False),
        ("num-examples", 3 * 2**31 + 1, False),
    ],
)
def test_a_count_is_that_of_some_clients(key: str, number: int, fits: bool) -> None:
    fixed, place = FixedPoint(4, 1024, 65536, 2**20, key), (TOTALS, key)
    sums = {place: np.array(number % 2**64, np.uint64)}
    if fits:
        assert fixed.means(sums, {place: "count"}, 3)[place] == number / 3
    else:
        with pytest.raises(NotOpened, match=f"the sum of '{key}' has the value {number}"):
            fixed.means(sums, {place: "count"}, 3)


@pytest.mark.parametrize(
    ("value", "weight", "kind", "says"),
    [
        (
            1025.0,
            1,
            "update",
            r"'w' has a value of size 1025; the range is 1024; if the value is right, raise strategy.update_range",
        ),
        (-7e4, 1, "statistics", r"'w' has a value of size 70000; .*raise strategy.statistics_range"),
        (np.nan, 1, "update", "'w' has a value of size nan"),
        (np.inf, 1, "statistics", "'w' has a value of size inf"),
        (1.0, 2**20 + 1, "update", r"client's weight 'num-examples' is 1048577; .*strategy.max_examples"),
        (1.0, -1, "update", "client's weight 'num-examples' is -1"),
        (2.0**32, 1, "integer", "'w' has a value of size"),
    ],
)
def test_what_is_out_of_range_is_refused(value: float, weight: int, kind: Kind, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        encoded(value, weight, kind)


def test_the_kinds_of_a_reply() -> None:
    values = {
        **{("arrays", key): np.zeros(2) for key in ("0.weight", "1.running_mean", "1.running_var")},
        ("arrays", "1.num_batches_tracked"): np.array(1),
        ("control", "0.weight"): np.zeros(2),
        **{(TOTALS, key): np.array(1.0) for key in ("num-examples", "train-loss")},
    }
    kinds = [*FIXED.kinds(values).values()]
    assert kinds == ["update", "statistics", "statistics", "integer", "update", "count", "statistics"]
    by_loss = FixedPoint(4, 1024, 65536, 2**20, "train-loss").kinds(values)
    assert by_loss[TOTALS, "train-loss"] == "weight"


def test_a_reply_as_a_vector_and_back() -> None:
    values = {
        ("b", "w"): np.arange(6, dtype=np.uint64).reshape(2, 3),
        ("b", "a"): np.array(9, np.uint64),
        ("a", "x"): np.zeros((0, 2), np.uint64),
    }
    back = from_vector(to_vector(values), values)
    assert back.keys() == values.keys()
    for place, value in values.items():
        assert back[place].shape == value.shape
        assert (back[place] == value).all()


def test_secrets_do_not_appear_in_text() -> None:
    assert "root" not in repr(Secrets(b"s" * KEY_BYTES))
