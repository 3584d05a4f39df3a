"""The ClientApp: one client of the experiment that the run config names."""

from fedbn_flwr import client_app
from fedbn_flwr.experiment.node import make_client

app = client_app(make_client)
