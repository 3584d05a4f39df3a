"""The engine `ray`, whose actors on the machines of a Ray cluster serve the clients."""

PARTS = {"engines": {"ray": "experiment:ray_grids"}}
