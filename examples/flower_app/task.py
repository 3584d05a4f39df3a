"""The network and the images."""

from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class Net(nn.Module):
    """Two convolutions with batch norm, for grey images of any size."""

    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * 32, classes)

    def forward(self, images):
        return self.head(self.features(images))


def load_data(folder):
    """The images of one site, to train on and to test on."""
    transform = transforms.Compose([transforms.Grayscale(), transforms.ToTensor()])
    train, test = (ImageFolder(f"{folder}/{part}", transform) for part in ("train", "test"))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=128)
