"""The engine `ray`, whose actors on the machines of a Ray cluster serve the clients."""

PARTS = {"engines": {"ray": "start:cluster.pools_of"}, "pools": {"ray": "start:cluster.Cluster"}}
