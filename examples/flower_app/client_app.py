"""The client trains on the images of its site."""

import torch
from task import Net, load_data

from fedbn_flwr import BNClient, client_app

device = "cuda" if torch.cuda.is_available() else "cpu"


def make_client(context):
    config = context.run_config
    train, test = load_data(f"{config['images']}/site-{context.node_config['partition-id']}")
    return BNClient(Net().to(device), train, test, lr=config["learning-rate"], momentum=0.9)


app = client_app(make_client)
