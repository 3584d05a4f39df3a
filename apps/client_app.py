"""The ClientApp: makes a node's client for the experiment in the run config."""

from fedbn_flwr.commands.common import loading

with loading():  # a SuperNode starts a process for each message
    from fedbn_flwr import client_app
    from fedbn_flwr.experiment.node import make_client

app = client_app(make_client)
