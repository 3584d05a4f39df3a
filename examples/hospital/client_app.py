"""A hospital's half: MONAI's data loader and network, as in Flower's quickstart-monai."""

from monai.data import DataLoader, Dataset
from scans import SCANNERS, densenet, scans

from fedbn_flwr import BNClient, client_app


def load_data(hospital):
    def items(part):
        return [
            {"img": scan, "label": int(mask.any())} for scan, mask in zip(part["inputs"], part["labels"], strict=True)
        ]

    parts = scans(f"scans/{hospital}")
    train = DataLoader(Dataset(items(parts["train"])), batch_size=10, shuffle=True)
    return train, DataLoader(Dataset(items(parts["test"])), batch_size=30)


def make_client(context):
    train, test = load_data([*SCANNERS][context.node_config["partition-id"]])
    return BNClient(densenet(), train, test, lr=0.02, momentum=0.9, metrics=["auc"])


app = client_app(make_client)
