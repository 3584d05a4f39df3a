"""The model, the data, and plain PyTorch loops over them."""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN with batch norm, for images of 8x8 pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.after_conv = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = self.features(x)
        x = torch.relu(self.after_conv(self.conv(x)))
        x = nn.functional.max_pool2d(x, 2)
        return self.head(self.drop(x.flatten(1)))


@lru_cache(maxsize=1)
def all_digits():
    images, labels = load_digits(return_X_y=True)
    order = labels.argsort(kind="stable")  # by class: each client gets only a few classes
    images = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return TensorDataset(images, torch.tensor(labels[order], dtype=torch.long))


def load_data(partition_id, num_partitions, batch_size):
    """One client's images: four fifths to train on, the others to test."""
    digits = all_digits()
    mine = range(len(digits) * partition_id // num_partitions, len(digits) * (partition_id + 1) // num_partitions)
    test = [i for i in mine if i % 5 == 0]
    train = [i for i in mine if i % 5 != 0]
    trainloader = DataLoader(torch.utils.data.Subset(digits, train), batch_size=batch_size, shuffle=True)
    testloader = DataLoader(torch.utils.data.Subset(digits, test), batch_size=batch_size)
    return trainloader, testloader


def load_test_data():
    """Every fifth image, for the server."""
    digits = all_digits()
    return DataLoader(torch.utils.data.Subset(digits, range(0, len(digits), 5)), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Train the model, and return the mean loss."""
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Mean loss and accuracy."""
    net.to(device)
    net.eval()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (outputs.argmax(1).cpu() == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
