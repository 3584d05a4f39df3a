"""Trains several clients with small networks at once in one process."""

PARTS = {
    "pools": {
        "together": "parked:TogetherPool",
        "clients_at_once": "choice:clients_at_once",
        "hint": "choice:hint_of",
        "in_words": "choice:in_words",
    }
}
