"""FedTAN's exchanges over gRPC: in an exchange each client makes one call, which takes one network round trip.

FedTAN uses the exchange service if the ServerApp's environment contains its address (`config.py` lists the variables).
The train message then tells the client the address.
"""

PARTS = {
    "carriers": {"streams": "config:service"},
    "client_keys": {"fedbn.direct": "client:Streams"},
}
