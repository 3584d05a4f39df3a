"""Differential privacy of clients."""

PARTS = {
    "strategies": {"Private": "strategy:Private"},
    "client_keys": {
        "fedbn.private-clip": "client:Private",
        "fedbn.private-noise": "client:Private",
        "fedbn.private-statistics-clip": "client:Private",
        "fedbn.private-statistics-noise": "client:Private",
        "fedbn.private-noise-seed": "client:Private",
    },
}
