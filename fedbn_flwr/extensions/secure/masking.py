"""The arithmetic of secure aggregation: fixed point, masks that cancel in the sum, and secret shares.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", for a server that follows
the protocol and reads all that it receives. In the paper's symbols client u sends, modulo 2^64,

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)

Flower's parts for its legacy API are not used: they seed NumPy's Mersenne Twister with 32 bits, which can be tried one
by one, and clip values without a word. Here PRG is AES-256 in counter mode, and a client refuses to send a value that
is out of range.

A session has several parts: part 0 is the reply to the train message, part k is exchange k of FedTAN. Each part has
secrets of its own, so that those of one part, once revealed, reveal nothing of another part.

The server can check what clients reveal. A public key belongs to each secret, and each share travels through the server
under a key of its own, derived from the channel's. A receiver reveals a share by that key: no other key opens what the
sender sealed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.norms.roles import Role, roles

Fixed = NDArray[np.uint64]  # integers modulo 2^64
Kind = Literal["update", "statistics", "weight", "count"]

KEY_BYTES = 32
SHARE_BYTES = 32
SEALED_BYTES = SHARE_BYTES + 16  # a share, and the tag of AES-GCM

OWN, PAIR = 0, 1  # a client's two secrets of a part: b_u, and that of s_u^SK


class NotOpened(RunFailed):
    """A sum that cannot be opened, or that is no sum of honest replies."""


# --- fixed point -------------------------------------------------------------

_LARGEST_COUNT = 2.0**31


@dataclass(frozen=True)
class FixedPoint:
    """Values as integers, so that 64 bits hold the weighted sum over `clients` if all values are in their range.

    A value x of a client with weight p becomes the integer nearest to p * x * 2^bits. Each kind of value has its range:
    "update" is the change of a parameter or an entry of a gradient, "statistics" the change of a running mean or
    variance, a statistic of a batch, or a metric; a "count" is an integer. Counts and a "weight" are added as they are.
    """

    clients: int
    update_range: float
    statistics_range: float
    max_examples: float  # the largest weight

    def bits(self, kind: Kind) -> int:
        """The bits behind the point; the sum has a sign, and one more bit for rounding errors."""
        if kind == "count":
            return 0
        largest = self._range(kind) * (1 if kind == "weight" else self.max_examples)
        return 62 - math.ceil(math.log2(self.clients * largest))

    def encode(self, key: str, value: NDArray[Any], weight: float, kind: Kind) -> Fixed:
        """The value times `weight`; MessageError names the key if it is out of range."""
        if not 0 <= weight <= self.max_examples:
            raise MessageError(
                f"the weight of this client is {weight:g}, and the largest one is {self.max_examples:g}; raise "
                "strategy.max_examples"
            )
        values = np.asarray(value, dtype=np.float64)
        peak = float(np.abs(values).max(initial=0.0))
        if not peak <= self._range(kind):
            setting = f"; raise strategy.{kind}_range, if it is no error" if kind in ("update", "statistics") else ""
            raise MessageError(f"{key!r} has a value of size {peak:g}, the range is {self._range(kind):g}{setting}")
        return np.rint(np.ldexp(values * weight, self.bits(kind))).astype(np.int64).view(np.uint64)

    def decode(self, total: Fixed, kind: Kind) -> NDArray[np.float64]:
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.bits(kind))

    def mean(self, key: str, total: Fixed, kind: Kind, weight: float) -> NDArray[np.float64]:
        """The mean of values whose weights have the sum `weight`; NotOpened if values in range have no such sum."""
        values = self.decode(total, kind)
        largest = (weight * self._range(kind) + self.resolution(kind)) * (1 + 1e-12)  # float64 rounds the sum
        peak = float(np.abs(values).max(initial=0.0))
        if peak > largest:
            raise NotOpened(
                f"the sum of {key!r} has the size {peak:.2g}; those of honest clients are {largest:.2g} at most"
            )
        return values / (weight or 1.0)

    def added(self, key: str, total: Fixed, clients: int, least: int = 0, kind: Kind = "count") -> float:
        """The sum of counts or weights of clients, each at least `least`; NotOpened if it cannot be one."""
        number, most = float(self.decode(total, kind)), clients * self._range(kind)
        if not clients * least <= number <= most:
            raise NotOpened(
                f"the sum of {key!r} is {number:.10g}; those of honest clients are {clients * least} to {most:.10g}"
            )
        return number

    def resolution(self, kind: Kind) -> float:
        """The most by which rounding changes a sum."""
        return float(np.ldexp(self.clients, -self.bits(kind)))

    def _range(self, kind: Kind) -> float:
        ranges = {"update": self.update_range, "statistics": self.statistics_range, "weight": self.max_examples}
        return ranges.get(kind, _LARGEST_COUNT)


TOTALS = "totals"  # the record with the metrics of a masked reply


def kinds_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Kind]:
    """The kinds of a model's arrays."""
    if odd := next((key for key, value in arrays.items() if value.dtype.kind not in "iubf"), None):
        raise MessageError(f"{odd!r} is {arrays[odd].dtype}; expected floats, integers or booleans under Secure")
    of: dict[str, Kind] = {key: "statistics" if r is Role.STATISTICS else "update" for key, r in roles(arrays).items()}
    return {key: of[key] if value.dtype.kind == "f" else "count" for key, value in arrays.items()}


def kind_of_metric(key: str, weight_key: str) -> Kind:
    """Counts and weights are added; the mean of other metrics is weighted."""
    if key.endswith((protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES)):
        return "count"
    return "weight" if key == weight_key else "statistics"


def kind_of_exchange(exchange: str) -> Kind:
    return "update" if exchange == "gradients" else "statistics"


# --- secret shares (Shamir 1979) ---------------------------------------------

_PRIME = 2**255 - 19


def split(polynomial: Sequence[int], count: int) -> list[int]:
    """Shares 1 to `count` of the number polynomial[0]: as many as coefficients give it, fewer reveal nothing.

    The other coefficients must be uniform below the prime.
    """
    falling = polynomial[::-1]
    return [functools.reduce(lambda value, c: (value * x + c) % _PRIME, falling, 0) for x in range(1, count + 1)]


def join(shares: Mapping[int, int]) -> int:
    """The secret from enough shares, by position: the polynomial's value at 0."""
    total = 0
    for x, value in shares.items():
        others = [other for other in shares if other != x]
        total += value * math.prod(others) * pow(math.prod(other - x for other in others), -1, _PRIME)
    return total % _PRIME


# --- keys --------------------------------------------------------------------


@dataclass(frozen=True)
class Secrets:
    """A client's secrets of one session, all derived from 32 random bytes."""

    root: bytes = field(repr=False)

    def public_keys(self, parts: int) -> bytes:
        """The public key of the channel, and those of each part's secrets, in the order of `key_of`."""
        secrets = [self.secret(part, which) for part in range(parts) for which in (OWN, PAIR)]
        return self._channel().public_key().public_bytes_raw() + b"".join(map(public_key, secrets))

    def secret(self, part: int, which: int) -> int:
        return self._number(f"{which} {part} 0")

    def shares(self, part: int, which: int, threshold: int, count: int) -> list[bytes]:
        """The share of a secret for each client, in the order of positions."""
        polynomial = [self._number(f"{which} {part} {power}") for power in range(threshold)]
        return [share.to_bytes(SHARE_BYTES, "little") for share in split(polynomial, count)]

    def channel(self, public: bytes) -> bytes:
        """The secret of the channel to the client with this public key, from which `sealing_key` follows."""
        return self._channel().exchange(X25519PublicKey.from_public_bytes(public))

    def mask_keys(self, part: int, mine: int, others: Mapping[int, bytes]) -> list[tuple[bytes, int]]:
        """The keys of all masks of client `mine`, with their signs; `others` are public mask keys by position."""
        key = private_key(self.secret(part, PAIR))
        pairs = [(pair_key(key, public), 1 if other > mine else -1) for other, public in others.items()]
        return [(stream_key(self.secret(part, OWN)), 1), *pairs]

    def _channel(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(_derive(self.root, b"channel", KEY_BYTES))

    def _number(self, name: str) -> int:
        # 64 bytes: reduced to 255 bits they are uniform but for 2^-257.
        return int.from_bytes(_derive(self.root, name.encode(), 64), "little") % _PRIME


def key_of(part: int, which: int) -> slice:
    """Where the public key of a secret is among a client's public keys."""
    start = KEY_BYTES * (1 + 2 * part + which)
    return slice(start, start + KEY_BYTES)


def private_key(secret: int) -> X25519PrivateKey:
    """s_u^SK, if the secret is that of the masks between pairs."""
    return X25519PrivateKey.from_private_bytes(
        _derive(secret.to_bytes(SHARE_BYTES, "little"), b"private key", KEY_BYTES)
    )


def public_key(secret: int) -> bytes:
    return private_key(secret).public_key().public_bytes_raw()


def sealing_key(channel: bytes, about: bytes) -> bytes:
    """The key of one share; `about` names session, part, secret, sender and receiver."""
    return _derive(channel, b"channel " + about, KEY_BYTES)


def seal(key: bytes, share: bytes) -> bytes:
    return AESGCM(key).encrypt(bytes(12), share, None)  # the key has no other message, so a constant nonce is safe


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """The share; None if it was not sealed with this key."""
    try:
        return AESGCM(key).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        return None


def pair_key(mine: X25519PrivateKey, public: bytes) -> bytes:
    """s_uv, the same for both clients"""
    return _derive(mine.exchange(X25519PublicKey.from_public_bytes(public)), b"pair mask", KEY_BYTES)


def is_usable(public: bytes) -> bool:
    """Whether this public key gives a shared secret; the few of small order, such as zeros, do not."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def stream_key(secret: int) -> bytes:
    return _derive(secret.to_bytes(SHARE_BYTES, "little"), b"self mask", KEY_BYTES)


def _derive(secret: bytes, name: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, salt=None, info=b"fedbn secure aggregation: " + name).derive(secret)


# --- masks -------------------------------------------------------------------

_PIECE = 1 << 17  # elements: the buffers stay in the processor's cache
_ZEROS = bytes(8 * _PIECE)


def add_masks(values: Fixed, keys: Iterable[tuple[bytes, int]]) -> None:
    """Add to `values`, or with the sign -1 subtract, the stream of each key. A key must have only one stream."""
    buffer = bytearray(8 * _PIECE + 15)  # the library asks for 15 bytes more
    for key, sign in keys:
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        for start in range(0, values.size, _PIECE):
            piece = values[start : start + _PIECE]
            stream.update_into(memoryview(_ZEROS)[: 8 * piece.size], buffer)
            mask = np.frombuffer(buffer, "<u8", piece.size)
            if sign > 0:
                piece += mask
            else:
                piece -= mask


# --- the arrays of a reply as one vector -------------------------------------

Records = Mapping[str, Mapping[str, Fixed]]  # arrays by record and key
Form = tuple[tuple[str, str, tuple[int, ...]], ...]  # record, key and shape, sorted


def form_of(records: Mapping[str, Mapping[str, NDArray[Any]]]) -> Form:
    return tuple(sorted((name, key, value.shape) for name, each in records.items() for key, value in each.items()))


def to_vector(records: Records) -> Fixed:
    parts = [records[name][key].reshape(-1) for name, key, _ in form_of(records)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def from_vector(vector: Fixed, form: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, dict[str, Fixed]]:
    records: dict[str, dict[str, Fixed]] = {}
    end = 0
    for name, key, shape in form:
        start, end = end, end + math.prod(shape)
        records.setdefault(name, {})[key] = vector[start:end].reshape(shape)
    return records
