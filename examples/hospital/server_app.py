"""The server's half."""

import logging

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from scans import densenet

from fedbn_flwr.strategies import FedBN

logging.getLogger("flwr").setLevel(logging.WARNING)  # without Flower's 25 lines a round
app = ServerApp()


@app.main()
def main(grid, context):
    torch.manual_seed(0)
    strategy = FedBN(fraction_train=context.run_config["fraction-train"])
    result = strategy.start(
        grid, ArrayRecord(densenet().state_dict()), num_rounds=context.run_config["num-server-rounds"]
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.1%}, AUC {metrics['auc']:.1%}")
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
