"""Networks by name; PyTorch is imported when one is built."""

from __future__ import annotations

from collections.abc import Collection

from fedbn_flwr.errors import SettingsError, did_you_mean

# The functions and classes of the networks. Each takes num_classes, and in_channels, image_size and stem if it uses
# them. One with input_shape takes inputs of any shape; all others take images. They draw the weights from torch's
# global generator.
MODELS = {
    "cnn": "networks:cnn",
    "lenet": "networks:lenet",
    "mlp": "networks:mlp",
    "linear": "networks:linear",
    "cnn1d": "networks:CNN1d",
    "digits_cnn": "networks:digits_cnn",
    "fedbs_mnist": "networks:fedbs_mnist",
    "fedbs_cifar": "networks:fedbs_cifar",
    "resnet20": "networks:ResNet20",
    "resnet18": "vision:resnet18",
    "resnet50": "vision:resnet50",
    "mobilenet_v2": "vision:mobilenet_v2",
    "densenet121": "vision:densenet121",
    "alexnet": "vision:alexnet",
    "alexnet_bn": "networks:alexnet_bn",
    "deeplabv3plus_mobilenet_v2": "vision:deeplabv3plus_mobilenet_v2",
    "deeplabv3plus_resnet50": "vision:deeplabv3plus_resnet50",
}


_OF_DATA = ("num_classes", "num_outputs", "in_channels", "image_size", "input_shape", "num_tokens", "stem")


def check_options(name: str, options: Collection[str], arguments: Collection[str]) -> None:
    """Raise SettingsError for an option that the network does not have."""
    known = [key for key in arguments if key not in _OF_DATA]
    for key in options:
        if key not in arguments:
            hint = did_you_mean(key, known) if known else "it has no arguments but those that follow from the data"
            raise SettingsError(f"model.options.{key} is not an argument of the network {name!r}; {hint}")
