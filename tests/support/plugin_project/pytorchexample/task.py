"""The model, the data, and plain PyTorch loops over them."""

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from flwr_datasets.partitioner import IidPartitioner
from PIL.Image import fromarray
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor


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


partitioner = None  # Cache of the data set
transforms = Compose([ToTensor(), Normalize((0.0,), (240 / 255,))])


def apply_transforms(batch):
    """Turn the images of a batch into tensors."""
    batch["img"] = [transforms(img) for img in batch["img"]]
    return batch


def all_digits():
    """The digits as a data set of the hub would have them: a column of images, a column of labels."""
    images, labels = load_digits(return_X_y=True)
    order = labels.argsort(kind="stable")  # by class: each client gets only a few classes
    images = [fromarray(image) for image in np.uint8(images[order] * 15).reshape(-1, 8, 8)]
    features = Features({"img": Image(), "label": ClassLabel(num_classes=10)})
    return Dataset.from_dict({"img": images, "label": labels[order]}, features=features)


def load_data(partition_id, num_partitions, batch_size):
    """One client's examples: four fifths to train on, the others to test."""
    global partitioner
    if partitioner is None:
        partitioner = IidPartitioner(num_partitions)
        partitioner.dataset = all_digits()
    partition = partitioner.load_partition(partition_id)
    partition = partition.train_test_split(test_size=0.2, seed=42).with_transform(apply_transforms)
    trainloader = DataLoader(partition["train"], batch_size=batch_size, shuffle=True)
    testloader = DataLoader(partition["test"], batch_size=batch_size)
    return trainloader, testloader


def load_test_data():
    """Every fifth image, for the server."""
    digits = all_digits()
    return DataLoader(digits.select(range(0, len(digits), 5)).with_transform(apply_transforms), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Train the model, and return the mean loss."""
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
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
        for batch in testloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
