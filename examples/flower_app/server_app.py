"""The server: FixBN around FedAvg, and the accuracy of each round's model on all classes."""

import torch
from client_app import Net, load_data
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from torch.utils.data import DataLoader

from fedbn_flwr.strategies import FedAvg, FixBN

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for the number of rounds of the run config."""
    config = context.run_config
    torch.manual_seed(0)
    base, freeze, factor = FedAvg(fraction_evaluate=0.0), config["freeze-round"], config["lr-factor"]
    strategy = FixBN(base, freeze_round=freeze, lr_factor=factor)
    arrays = ArrayRecord(Net().state_dict())
    strategy.start(grid, arrays, num_rounds=config["num-server-rounds"], evaluate_fn=evaluate)


def evaluate(server_round, arrays):
    """Test the global model."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    net.eval()  # without it, batch norm would use the statistics of the test batch
    _, test = load_data()
    images, labels = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        accuracy = float((net(images).argmax(1) == labels).float().mean())
    print(f"round {server_round}: accuracy {accuracy:.1%}")
    return MetricRecord({"accuracy": accuracy})
