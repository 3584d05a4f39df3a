"""Random input for property tests."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from hypothesis import strategies as st

from fedbn_flwr.errors import FedbnError

CASES = 2000
TRIED = int(os.environ.get("FEDBN_EXAMPLES", 400))  # `nox -s fuzz` tries more


def cases(share: int) -> int:
    """The number of cases of one test, which has `share` of CASES where the largest test has TRIED."""
    return max(1, TRIED * share // CASES)


def check_refusal(error: FedbnError, named: str = "") -> None:
    assert 0 < len(str(error).encode(errors="replace")) < 2048
    assert named in str(error)


def damaged(text: bytes, seed: int) -> bytes:
    """The bytes with a few of them changed, or parts of them removed or repeated."""
    draw = random.Random(seed)
    data = bytearray(text or b" ")
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) or 1), draw.randint(1, 20)
        match draw.randrange(3):
            case 0 if data:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + length]
            case _:
                data[at:at] = data[at : at + length] * draw.randint(1, 50)
    return bytes(data)


VALUES: list[Any] = [
    None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 10**400, "", "x", "x" * 5000, "\ud800", "\0", "..", [],
    {}, [None], [[]], {"a": 1}, {"": {"": None}}, [1, "a"], "running", "2024-01-01",
]  # fmt: skip


def changed(content: Any, seed: int) -> Any:
    """JSON with one value of it replaced or removed."""
    draw = random.Random(seed)

    def walk(value: Any, depth: int) -> Any:
        if not isinstance(value, dict | list) or not value or draw.random() < 0.25 * (depth > 0):
            return draw.choice(VALUES)
        if isinstance(value, list):
            at = draw.randrange(len(value))
            return [walk(item, depth + 1) if i == at else item for i, item in enumerate(value)]
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        return {name: walk(item, depth + 1) if name == key else item for name, item in value.items()}

    return walk(content, 0)


def with_header(frame: bytes, seed: int) -> bytes:
    """A safetensors file whose header has another value somewhere, with a length that fits."""
    length = int.from_bytes(frame[:8], "little")
    header = changed(json.loads(frame[8 : 8 + length]), seed)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + frame[8 + length :]


def frames(known: list[bytes]) -> st.SearchStrategy[bytes]:
    seeds, sources = st.integers(0, 2**32), st.sampled_from(known)
    return st.binary(max_size=40) | st.builds(damaged, sources, seeds) | st.builds(with_header, sources, seeds)
