"""The arithmetic of secure aggregation: fixed point, masks that cancel in the sum, and secret shares.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", for a server that follows
the protocol and reads all that it receives. In the paper's symbols client u sends, modulo 2^64,

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)

This does not use the parts of Flower's legacy API: they seed NumPy's Mersenne Twister with 32 bits, which an attacker
can try one by one, and clip values silently. Here PRG is AES-256 in counter mode, and a value out of range raises an
error on the client.

The server can check what clients reveal. Each secret has a public key. Each share travels through the server encrypted
with its own key, which is derived from the channel's key. A receiver reveals a share by revealing this key: no other
key opens it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
from fedbn_flwr.messages.aggregate import Array
from fedbn_flwr.norms.roles import Role, roles

Fixed = NDArray[np.uint64]  # integers modulo 2^64
Place = tuple[str, str]  # (record, key) for an array, or (TOTALS, name) for a metric
Kind = Literal["update", "statistics", "integer", "count", "weight"]

TOTALS = "totals"  # the record with the metrics of a masked reply

KEY_BYTES = 32
SHARE_BYTES = 32
SEALED_BYTES = SHARE_BYTES + 16  # a share, and the tag of AES-GCM

# A client's secrets: for b_u, for s_u^SK, and for its channels. The last one is never shared.
OWN, PAIR, CHANNEL = 0, 1, 2


class NotOpened(RunFailed):
    """A sum cannot be opened, or cannot come from honest replies."""


# --- fixed point -------------------------------------------------------------


@dataclass(frozen=True)
class FixedPoint:
    """Values as integers, so that 64 bits hold the weighted sum over `clients` if all values are in their range.

    A value x of a client with weight p becomes the integer nearest to p * x * 2^bits. Each kind of value has a range:

    - "update": the change of a parameter
    - "statistics": the change of a running mean or variance, or a metric
    - "integer": an integer of the model

    Metrics of the kinds "count" and "weight" are added unweighted. In `equal` records all clients have the weight 1.
    """

    clients: int
    update_range: float
    statistics_range: float
    max_examples: float  # the largest weight
    weight_key: str = protocol.NUM_EXAMPLES  # the metric by which values are weighted
    equal: Collection[str] = ()

    def kinds(self, values: Mapping[Place, Array]) -> dict[Place, Kind]:
        role_of = {record: roles({key: None for name, key in values if name == record}) for record, _ in values}

        def kind(record: str, key: str, value: Array) -> Kind:
            if record == TOTALS:
                return "count" if key.endswith(_COUNTS) else "weight" if key == self.weight_key else "statistics"
            if value.dtype.kind != "f":
                return "integer"
            return "statistics" if role_of[record][key] is Role.STATISTICS else "update"

        return {place: kind(*place, value) for place, value in values.items()}

    def bits(self, kind: Kind) -> int:
        """The bits behind the point; the sum has a sign, and one more bit for rounding errors."""
        if kind in ("integer", "count"):
            return 0
        largest = self._range(kind) * (1 if kind == "weight" else self.max_examples)
        return 62 - math.ceil(math.log2(self.clients * largest))

    def encode(self, values: Mapping[Place, Array], kinds: Mapping[Place, Kind]) -> dict[Place, Fixed]:
        """The values times their weight; MessageError names a key that is out of range."""
        weight = values.get((TOTALS, self.weight_key))
        if weight is None or not 0 <= weight <= self.max_examples:
            raise MessageError(
                f"this client's weight {self.weight_key!r} is {weight}; expected a number from 0 to "
                f"{self.max_examples:g} (strategy.max_examples)"
            )
        fixed = {}
        for place, kind in kinds.items():
            value = values[place].astype(np.float64, casting="same_kind")  # TypeError for complex numbers
            peak = float(np.abs(value).max(initial=0.0))
            if not peak <= self._range(kind):
                cure = (
                    f"; if the value is right, raise strategy.{kind}_range" if kind in ("update", "statistics") else ""
                )
                raise MessageError(
                    f"{place[1]!r} has a value of size {peak:g}; the range is {self._range(kind):g}{cure}"
                )
            scaled = np.ldexp(value * self._weight(place, kind, float(weight), 1), self.bits(kind))
            fixed[place] = np.rint(scaled).astype(np.int64).view(np.uint64)
        return fixed

    def means(
        self, sums: Mapping[Place, Fixed], kinds: Mapping[Place, Kind], clients: int
    ) -> dict[Place, NDArray[np.float64]]:
        """The means over these clients; NotOpened if values in range have no such sum."""
        place = TOTALS, self.weight_key
        weight = float(self._sum(place, sums[place], kinds[place], clients))
        by = {place: self._weight(place, kind, weight, clients) for place, kind in kinds.items()}
        return {
            place: self._sum(place, sums[place], kind, by[place]) / (by[place] or 1.0) for place, kind in kinds.items()
        }

    def resolution(self, kind: Kind) -> float:
        """The most by which rounding changes a sum."""
        return float(np.ldexp(self.clients, -self.bits(kind)))

    def _sum(self, place: Place, total: Fixed, kind: Kind, weight: float) -> NDArray[np.float64]:
        values, largest = (
            np.ldexp(total.view(np.int64).astype(np.float64), -self.bits(kind)),
            weight * self._range(kind),
        )
        least = 0.0
        if kind not in _ADDED:
            largest = (largest + self.resolution(kind)) * (1 + 1e-12)  # float64 rounds the sum
            least = -largest
        odd = values[~((values >= least) & (values <= largest))]
        if odd.size:
            raise NotOpened(
                f"the sum of {place[1]!r} has the value {odd[0]:.10g}; those of honest clients are {least:.10g} to "
                f"{largest:.10g}"
            )
        return values

    def _weight(self, place: Place, kind: Kind, weight: float, equal: float) -> float:
        return equal if kind in _ADDED or place[0] in self.equal else weight

    def _range(self, kind: Kind) -> float:
        ranges = {"update": self.update_range, "statistics": self.statistics_range, "weight": self.max_examples}
        return ranges.get(kind, 2.0**31)


_ADDED = ("count", "weight")
_COUNTS = (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES)


# --- secret shares (Shamir 1979) ---------------------------------------------

_PRIME = 2**255 - 19


def split(polynomial: Sequence[int], count: int) -> list[int]:
    """Shares 1 to `count` of the number polynomial[0].

    As many shares as there are coefficients reveal the number, and fewer reveal nothing. The other coefficients must be
    uniform below the prime.
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

    def public_keys(self) -> bytes:
        """The public keys of the secrets, in the layout that `key_of` reads."""
        return b"".join(public_key(self.secret(which)) for which in (OWN, PAIR, CHANNEL))

    def secret(self, which: int, power: int = 0) -> int:
        """A secret, or another coefficient of the polynomial with which it is shared."""
        # 64 bytes: reduced to 255 bits they are uniform but for 2^-257.
        return int.from_bytes(_derive(self.root, f"{which} {power}".encode(), 64), "little") % _PRIME

    def shares(self, which: int, threshold: int, count: int) -> list[bytes]:
        """The share of a secret for each client, in the order of positions."""
        polynomial = [self.secret(which, power) for power in range(threshold)]
        return [share.to_bytes(SHARE_BYTES, "little") for share in split(polynomial, count)]

    def channel(self, public: bytes) -> bytes:
        """The secret of the channel to the client with this public key; `sealing_key` derives keys from it."""
        return pair_key(private_key(self.secret(CHANNEL)), public)

    def mask_keys(self, mine: int, others: Mapping[int, bytes]) -> list[tuple[bytes, int]]:
        """The keys of all masks of client `mine`, with their signs; `others` are public mask keys by position."""
        key = private_key(self.secret(PAIR))
        pairs = [(pair_key(key, public), 1 if other > mine else -1) for other, public in others.items()]
        return [(stream_key(self.secret(OWN)), 1), *pairs]


def key_of(which: int) -> slice:
    """Where the public key of a secret is among a client's public keys."""
    return slice(KEY_BYTES * which, KEY_BYTES * (which + 1))


def private_key(secret: int) -> X25519PrivateKey:
    """The private key of a secret: s_u^SK for the masks between pairs."""
    return X25519PrivateKey.from_private_bytes(_derive(_bytes(secret), b"private key", KEY_BYTES))


def public_key(secret: int) -> bytes:
    return private_key(secret).public_key().public_bytes_raw()


def sealing_key(channel: bytes, about: bytes) -> bytes:
    """The key of one share; `about` names session, secret, sender and receiver."""
    return _derive(channel, b"channel " + about, KEY_BYTES)


def seal(key: bytes, share: bytes) -> bytes:
    return AESGCM(key).encrypt(bytes(12), share, None)  # the key has no other message, so a constant nonce is safe


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Open a sealed share; None if it was sealed with another key."""
    try:
        return AESGCM(key).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        return None


def pair_key(mine: X25519PrivateKey, public: bytes) -> bytes:
    """s_uv, the same for both clients"""
    return _derive(mine.exchange(X25519PublicKey.from_public_bytes(public)), b"pair mask", KEY_BYTES)


def is_usable(public: bytes) -> bool:
    """Whether this public key gives a shared secret. A few keys of small order, such as zeros, do not."""
    try:
        pair_key(X25519PrivateKey.generate(), public)
    except ValueError:
        return False
    return True


def stream_key(secret: int) -> bytes:
    return _derive(_bytes(secret), b"self mask", KEY_BYTES)


def _bytes(secret: int) -> bytes:
    return secret.to_bytes(SHARE_BYTES, "little")


def _derive(secret: bytes, name: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, salt=None, info=b"fedbn secure aggregation: " + name).derive(secret)


# --- masks -------------------------------------------------------------------

_PIECE = 1 << 17  # elements: the buffers stay in the processor's cache
_ZEROS = bytes(8 * _PIECE)


def add_masks(values: Fixed, keys: Iterable[tuple[bytes, int]]) -> None:
    """Add the stream of each key to `values` or, with the sign -1, subtract it. A key must have only one stream."""
    buffer = bytearray(8 * _PIECE + 15)  # the library asks for 15 bytes more
    for key, sign in keys:
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        change = np.add if sign > 0 else np.subtract
        for start in range(0, values.size, _PIECE):
            piece = values[start : start + _PIECE]
            stream.update_into(memoryview(_ZEROS)[: 8 * piece.size], buffer)
            change(piece, np.frombuffer(buffer, "<u8", piece.size), out=piece)


def to_vector(values: Mapping[Place, Fixed]) -> Fixed:
    """All values, in the order of their places."""
    return np.concatenate([values[place].reshape(-1) for place in sorted(values)])


def from_vector(vector: Fixed, like: Mapping[Place, Fixed]) -> dict[Place, Fixed]:
    """The inverse of `to_vector`, for values of the same places and shapes."""
    places = sorted(like)
    pieces = np.split(vector, np.cumsum([like[place].size for place in places])[:-1])
    return {place: piece.reshape(like[place].shape) for place, piece in zip(places, pieces, strict=True)}
