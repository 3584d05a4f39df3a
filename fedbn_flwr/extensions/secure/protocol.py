"""The config keys of secure aggregation, which strategy.py sends and client.py honours."""

from fedbn_flwr.messages.protocol import VOLATILE, Key

SESSION = "fedbn.secure"
STAGE = "fedbn.secure-stage"
PARTS = "fedbn.secure-parts"
THRESHOLD = "fedbn.secure-threshold"
PART = "fedbn.secure-part"
PEERS = "fedbn.secure-peers"
RANGES = "fedbn.secure-ranges"
WEIGHT = "fedbn.secure-weight"
EQUAL = "fedbn.secure-equal"
ALL = {
    SESSION: Key("32 hexadecimal digits", "send everything under the masks of this session of secure aggregation"),
    STAGE: Key("`keys`, `shares` or `unmask`", "(with `query.secure`) send public keys, or shares of secrets"),
    PARTS: Key("int", "(stage `keys`) how many replies of the session are masked"),
    THRESHOLD: Key("int", "(stage `shares`) how many clients can reveal a secret together"),
    PART: Key("int", "which of these replies this is: 0 that to the train message, k exchange k of FedTAN"),
    PEERS: Key("bytes", "the node ids of the clients whose masks must cancel, 8 bytes each"),
    RANGES: Key("three floats", "the largest change of a parameter, value of a statistic, and weight"),
    WEIGHT: Key("name of a metric", "the metric by which values are weighted"),
    EQUAL: Key("names, comma separated", "records in which all clients count equally"),
}
QUERY = "query.secure"  # the stages that STAGE names
SECRET = f"{VOLATILE}secure"  # the record in a client's state with the secrets of a session
