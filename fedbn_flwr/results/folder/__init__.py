"""The folder of a run. It is updated after every round, so that an interrupted run can be read and resumed.

config.yaml         the resolved settings
environment.json    token, commit, versions, hardware, command, modules of the user, for each session
history.jsonl       one line per round: metrics, messages and bytes in each direction, seconds
partition.json      the examples of each client by class, unless nodes have data of their own
clients.jsonl       one line per round: the values of each client
norms.jsonl         one line per evaluated round: the dynamics of batch norm, if they are recorded
summary.json        the metrics of the whole run so far, and its status
model.safetensors   the global model; model-best.safetensors has the model of the best round
model.json          how to build the network and to normalise its examples
promises            what the rounds so far have spent, if a strategy must never lose count, for instance of privacy
checkpoint          everything needed to resume the run, see checkpoint.py
.lock               locked while a process writes the folder
"""
