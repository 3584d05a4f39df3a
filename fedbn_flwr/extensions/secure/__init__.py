"""Secure aggregation: the server learns the sum of the clients' replies, but no single reply."""

PARTS = {
    "strategies": {"Secure": "strategy:Secure"},
    "client_mods": {
        "fedbn.secure": "client:masks",
        "fedbn.secure-stage": "client:masks",
        "fedbn.secure-peers": "client:masks",
        "fedbn.secure-ranges": "client:masks",
        "fedbn.secure-weight": "client:masks",
        "fedbn.secure-equal": "client:masks",
        "fedbn.secure-pooled": "client:masks",
    },
    "queries": {"secure": "client:answer"},
}
