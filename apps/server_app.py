"""The ServerApp: carries out an experiment on the grid that Flower provides."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.experiment.run import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    # In every round Flower logs figures that the progress lines and the run folders contain.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    serve(grid, context.run_config).announce()
