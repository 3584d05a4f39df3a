"""Values of exchanges, for tests of what transmits them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

described = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(["float16", "float32", "float64"]), st.lists(st.integers(0, 3), max_size=3), st.binary()),
    max_size=3,
)
counts = st.integers(0, 2**31)


def arrays_of(described: dict[str, Any]) -> dict[str, np.ndarray]:
    made = {}
    for name, (dtype, shape, content) in described.items():
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        made[name] = np.frombuffer((content * (size + 1) or b"\0" * size)[:size], dtype).reshape(shape)
    return made


def assert_same(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()
