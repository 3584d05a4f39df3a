"""The ServerApp: carries out an experiment on the grid that Flower provides."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.experiment.run.launch import OneLine, serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    log = logging.getLogger("flwr")
    # In every round Flower logs metrics that the progress lines and the run folders contain.
    log.setLevel(logging.WARNING)
    log.addFilter(OneLine())
    serve(grid, context.run_config).announce()
