"""The client: a network with batch norm, the digits of one node, and the ClientApp that trains on them."""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedbn_flwr import BNClient, client_app


class Net(nn.Sequential):
    """A perceptron with batch norm, for images of 8x8 pixels."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10))


@lru_cache
def load_data():
    """The images to train on and those to test on, every fifth; both sorted by class."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    by_class, is_test = labels.argsort(stable=True), torch.arange(len(data)) % 5 == 0
    return Subset(data, by_class[~is_test]), Subset(data, by_class[is_test])


def make_client(context):
    """Each node has its share of the sorted images: of five nodes each has two classes."""
    node, nodes = context.node_config["partition-id"], context.node_config["num-partitions"]
    train, test = (Subset(of, range(len(of) * node // nodes, len(of) * (node + 1) // nodes)) for of in load_data())
    return BNClient(
        Net(),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=128),
        lr=context.run_config["learning-rate"],
        steps=context.run_config["local-steps"],
    )


app = client_app(make_client)
