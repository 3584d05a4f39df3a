"""FedTAN's exchanges over gRPC: an exchange is a call of each client, which takes one network round trip.

Where the environment of the ServerApp has the address of an exchange service (`config.py` lists the variables), FedTAN
uses it; the train message then names the service to the client.
"""

PARTS = {
    "carriers": {"streams": "config:service"},
    "client_keys": {"fedbn.direct": "client:Streams"},
}
