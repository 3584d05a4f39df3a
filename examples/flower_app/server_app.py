"""The server: a strategy, the first model, and what it prints and saves."""

import logging

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from task import Net

from fedbn_flwr.strategies import FedAvg, FedBN, FixBN

logging.getLogger("flwr").setLevel(logging.WARNING)  # without Flower's 25 lines a round
app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    torch.manual_seed(0)
    strategies = {
        "FedAvg": FedAvg(),
        "FedBN": FedBN(),  # batch norm stays at the sites
        "FixBN": FixBN(FedAvg(), freeze_round=0.5, lr_factor=0.1),  # freezes statistics after half of the rounds
    }
    result = strategies[config["strategy"]].start(
        grid,
        ArrayRecord(Net().state_dict()),  # the whole state dict
        num_rounds=config["num-server-rounds"],
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.1%}")
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
