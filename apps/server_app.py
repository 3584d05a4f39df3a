"""The ServerApp: carries out an experiment on whatever grid Flower provides."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.experiment.run import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    # Flower's log repeats every round what the progress lines and the run folders say.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    serve(grid, context.run_config).announce()
